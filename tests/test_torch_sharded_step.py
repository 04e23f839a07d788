"""`train_step` under `fully_shard` and DistributedDataParallel, over gloo."""

import functools
import json

import pytest
import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx

from mucudnn.errors import UnsupportedError
from mucudnn.ir.graph import Phase
from mucudnn.torch.costs.measure import measured
from mucudnn.torch.distributed.sharding import WAIT
from mucudnn.torch.lowering.lower import lower
from tests.fleet_ranks import ranks, started

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("needs PyTorch with gloo", allow_module_level=True)

pytestmark = pytest.mark.torch

MODULE = "tests.sharded_steps"

GROUPS = (
    (2, ("fsdp", "wide", "tight", "tied", "partly")),
    (2, ("normalized", "bfloat16", "float16", "inner only", "clipped")),
    (2, ("ddp", "ddp clipped", "ddp normalized", "ddp unused")),
    (4, ("tight", "ddp", "ddp unused")),
)
"""Numbers of ranks, and cases that they try one after another: starting takes long."""

FEATURES = ("apart", "between", "accumulated", "scaled")
AROUND = (*FEATURES, "refused")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    @functools.cache
    def of(size, cases):
        folder = tmp_path_factory.mktemp("ranks")
        return ranks(",".join(cases), size, folder, MODULE)

    return of


@pytest.mark.parametrize(
    ("size", "cases", "case"),
    [(size, cases, case) for size, cases in GROUPS for case in cases],
)
def test_steps_have_the_bits_of_pytorchs_own_within_the_planned_bytes(
    size, cases, case, results
):
    found = [rank[case] for rank in results(size, cases)]
    assert not any("error" in rank for rank in found), found
    assert len({rank["peak"] for rank in found}) == 1
    for rank in found:
        assert not any(rank["differs"]), rank["differs"]
        assert rank["real"] <= rank["planned"]
        if rank["budget"] is not None:
            assert rank["peak"] <= rank["budget"]
        elif "ddp" not in case:  # these small models have one bucket
            assert rank["beside"] > 0


@pytest.mark.parametrize("feature", FEATURES)
def test_what_goes_on_around_steps_is_seen(feature, results):
    """Other ranks; evaluation, checkpoints, rates; parts of batches; scaled losses."""
    for rank in results(2, AROUND):
        assert not any(rank[feature]), rank[feature]


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
def test_an_error_is_that_of_all_ranks(results, what, words):
    for rank in results(2, AROUND):
        assert words in rank["refused"][what]
        assert rank["refused"]["after"] == ""


def test_no_rank_measures_a_collective_alone():
    """It would wait for the others for ever."""

    def summed(x):
        pending = torch.ops._c10d_functional.all_reduce.default(x, "sum", "0")
        return [WAIT(pending) + 1]

    module = make_fx(summed, tracing_mode="fake")(torch.zeros(4))
    lowered = lower(module, lambda _: Phase.FORWARD)
    assert [node.traits.view for node in lowered.graph.nodes] == [False, True, False]
    with pytest.raises(UnsupportedError, match="exchanges data with other ranks"):
        measured(lowered)


def test_a_killed_rank_ends_the_others_with_one_error(tmp_path):
    with started("killed", 2, tmp_path, MODULE) as processes:
        for process in processes:
            process.join(240)
    found = json.loads((tmp_path / "0.json").read_text())
    assert found["message"].startswith("RankLostError: another rank failed")
    assert found["seconds"] < 60
