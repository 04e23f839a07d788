"""`train_step` under `fully_shard` and DistributedDataParallel, over gloo."""

import json
from pathlib import Path

import pytest

from tests.fleet_ranks import ranks, start

torch = pytest.importorskip("torch", reason="needs PyTorch")
import torch.distributed as dist  # noqa: E402

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("needs PyTorch with gloo", allow_module_level=True)

pytestmark = pytest.mark.torch

FILE = Path(__file__).with_name("sharded_steps.py")

TWO = (
    *("fsdp", "wide", "tight", "tied", "partly", "normalized", "bfloat16", "float16"),
    *("inner only", "clipped", "ddp", "ddp clipped", "ddp normalized", "ddp unused"),
)
FOUR = ("tight", "tied", "ddp", "ddp unused")


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    cases = ",".join((*TWO, "between", "accumulated", "scaled", "refused"))
    return ranks(cases, 2, tmp_path_factory.mktemp("two"), FILE)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return ranks(",".join(FOUR), 4, tmp_path_factory.mktemp("four"), FILE)


@pytest.mark.parametrize(
    ("size", "case"),
    [*((2, case) for case in TWO), *((4, case) for case in FOUR)],
)
def test_steps_have_the_bits_of_pytorchs_own_within_the_planned_bytes(
    size, case, request
):
    results = request.getfixturevalue({2: "two", 4: "four"}[size])
    assert len({rank[case]["peak"] for rank in results}) == 1
    for rank in results:
        found = rank[case]
        assert not any(found["differs"]), found["differs"]
        assert found["real"] <= found["planned"]
        if found["budget"] is not None:
            assert found["peak"] <= found["budget"]


def test_evaluation_checkpoints_and_rates_between_steps_are_seen(two):
    for rank in two:
        assert not any(rank["between"]), rank["between"]


def test_gradients_that_are_not_finite_on_one_rank_skip_the_step_of_all(two):
    for rank in two:
        assert not any(rank["scaled"]), rank["scaled"]


def test_gradients_of_parts_of_a_batch_are_summed(two):
    assert [rank["accumulated"] for rank in two] == ["", ""]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("budget", "PlanningError: the step does not fit into 20.0 KiB"),
        ("settings", "clip_norm is 1.0 on rank 0, 2.0 on rank 1"),
        ("batch", "[64, 6], float32 [64, 3] on rank 0, a batch of float32 [65, 6]"),
        ("optimizer", "Adafactor may need whole parameters"),
        ("split", "split='auto' is not supported for a model of several ranks"),
        ("verify", "verify=1 is not supported for a model of several ranks"),
        ("offload", "fully_shard with CPUOffloadPolicy"),
        ("hook", "DistributedDataParallel with a communication hook"),
        ("one rank", "ArithmeticError: only here"),
    ],
)
def test_an_error_is_that_of_all_ranks(two, what, words):
    for rank in two:
        assert words in rank["refused"][what]
        assert rank["refused"]["after"] == ""


def test_a_killed_rank_ends_the_others_with_one_error(tmp_path):
    processes = start("killed", 2, tmp_path, FILE)
    try:
        for process in processes:
            process.wait(240)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    found = json.loads((tmp_path / "0.json").read_text())
    assert found["message"].startswith("RankLostError: another rank failed")
    assert found["seconds"] < 60
