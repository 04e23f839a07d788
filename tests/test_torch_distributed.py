"""Ranks over gloo: losses are one device's, shares the planner's, faults one line."""

import functools
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx

from mucudnn.errors import UnsupportedError
from mucudnn.ir.fleet import Rank
from mucudnn.ir.graph import Phase
from mucudnn.passes.load_balancing import share_times
from mucudnn.torch.costs.measure import measured
from mucudnn.torch.distributed import collectives
from mucudnn.torch.distributed.sharding import WAIT
from mucudnn.torch.lowering.lower import lower
from tests.fleet_ranks import BATCH, SAMPLES, a_table, ranks, started

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("needs PyTorch with gloo", allow_module_level=True)

pytestmark = pytest.mark.torch

CLOSE = 1e-11
"""In double precision, after two epochs: the order of sums, no more."""


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return ranks("everything", 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", ["residual", "unet", "sum", "passes"])
def test_losses_are_those_of_one_device(two, name):
    first, second = (result[name] for result in two)
    # Two passes of the slow rank cost it a share.
    shares = (9, 3) if name != "passes" else (10, 2)
    assert first["plan"] == second["plan"] == list(shares)
    assert [r["seen"][:2] for r in (first, second)] == [[n] * 2 for n in shares]
    assert [a + b for a, b in zip(first["seen"], second["seen"], strict=True)] == [
        *(BATCH, BATCH, SAMPLES % BATCH),
        *(BATCH, BATCH, SAMPLES % BATCH),
    ]
    for found in (first, second):
        assert found["losses"] < CLOSE
        assert found["state"] < CLOSE


@pytest.mark.parametrize("name", ["residual", "unet"])
def test_the_fast_rank_hardly_waits(two, name):
    """By counted work: each rank's own table, at the samples that it really had."""
    work = [
        [share_times(Rank("", a_table(rank)), BATCH).times_ms[n] for n in seen]
        for rank, seen in enumerate(result[name]["seen"] for result in two)
    ]
    waited = sum(max(0.0, slow - fast) for fast, slow in zip(*work, strict=True))
    equal = [share_times(Rank("", a_table(rank)), BATCH).times_ms for rank in range(2)]
    sizes = [a + b for a, b in zip(*(r[name]["seen"] for r in two), strict=True)]
    before = sum(equal[1][n // 2] - equal[0][n - n // 2] for n in sizes)
    assert waited <= 0.2 * before


def test_a_sum_is_over_when_whoever_did_it_has_let_go_of_the_tensor():
    """Else a thread of gloo frees it, perhaps while the interpreter ends."""
    array = torch.zeros(3)
    holders = array._use_count()
    held = [array.view(-1)]
    assert array._use_count() > holders
    work = SimpleNamespace(wait=threading.Timer(0.2, held.clear).start)
    begun = collectives._Work(work, array, holders)
    begun.wait()
    begun.wait()
    assert not held
    assert array._use_count() == holders


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [("torch_distribute", "shares ("), ("torch_sharded", "a rank within ")],
)
def test_the_example_runs_under_torchrun(name, said, tmp_path):
    example = Path(__file__).parent.parent / "examples" / f"{name}.py"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", str(example)),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
    assert "loss " in done.stdout


def test_a_share_that_does_not_fit_runs_in_passes(two):
    assert two[0]["passes"]["passes"] == [1, 2]
    assert two[0]["residual"]["passes"] == [1, 1]


def test_each_rank_measures_itself_and_leaves_the_model_as_it_was(two):
    first, second = (result["measured"] for result in two)
    assert first["plan"] == second["plan"]
    assert sum(first["plan"]) == BATCH
    assert min(first["plan"]) >= 1
    assert first["most"] == [BATCH - 1] * 2
    for found in (first, second):
        assert found["changed"] == found["gradients"] == []
        assert found["training"]


def test_what_cannot_be_is_refused_on_every_rank(two):
    for result in two:
        differ, few, word, nothing, _, last = result["refused"]
        assert "but batch is 12 on rank 0, 13 on rank 1; start all" in differ
        assert "fewer than 1 samples for each of 2 ranks" in few
        assert "choose one of: synchronised, per_rank" in word
        assert "a loss function and an example batch" in nothing
        assert "the last batch of an epoch has 1 samples" in last


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("reduction", "but reduction is mean on rank 0, sum on rank 1"),
        ("count", "but count is samples_of on rank 0, len on rank 1"),
        ("wrap", "{'gradient_as_bucket_view': True}) on rank 1"),
        ("at_least", "but at_least is 1 on rank 0, 2 on rank 1"),
        ("shape", "parameter 0.weight is torch.float32 (3, 4), trained on rank 0, "),
        ("module", "but module 1 is Dropout(p=0.25, inplace=False), training on rank"),
        ("mode", "Dropout(p=0.25, inplace=False), evaluating on rank 1"),
        ("frozen", "(3, 4), trained on rank 0, torch.float32 (3, 4), fixed on rank 1"),
        ("lr", "but lr of group 0 is 0.1 on rank 0, 0.2 on rank 1"),
        ("momentum", "but momentum of group 0 is 0.9 on rank 0, 0.5 on rank 1"),
        ("sampler", "but the first batch is 12 from"),
    ],
)
def test_ranks_that_differ_in_one_thing_are_refused_together(two, what, said):
    first, second = (result["refused"][4][what] for result in two)
    assert first == second
    assert first.startswith("RanksDifferError: all ranks of a training need the same")
    assert said in first


def test_an_argument_of_one_rank_alone_ends_the_others(two):
    first, second = (result["refused"][4]["argument"] for result in two)
    assert second.startswith("ValueError: batch")
    wanted = f"RankLostError: rank 1 of the training failed: {second}"
    assert first == wanted


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_what_users_of_ddp_do_besides_changes_nothing(size, tmp_path):
    for result in ranks("conventions", size, tmp_path):
        for name, found in result.items():
            assert sum(found["plan"]) == BATCH
            assert found["losses"] < CLOSE, name
            assert found["state"] < CLOSE, name


def test_compiled_models_of_several_buckets_or_sharded_train_as_eager_ones(tmp_path):
    for result in ranks("compiled", 2, tmp_path):
        found = result["found"]
        assert found["around"] == found["inside"] == found["eager"]
        assert found["sharded, compiled"] == found["sharded"]
        assert len(result["peaks"]) == 3
        peak, budget, parts = result["kept"]
        assert parts == 3
        assert peak <= budget < sum(result["peaks"])
        bucket, sharded = result["told"]
        assert "bucket 2 of 3 is one of 2 graphs that share" in bucket
        assert "optimize_ddp = False" in bucket
        assert "study the original model, with mesh=(8,)" in sharded
        assert ["gradients of a planned step stay" in w for w in result["warned"]] == [
            True
        ]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_sharded_layers_share_one_budget_and_keep_it(size, tmp_path):
    for found in ranks("layers", size, tmp_path):
        (*eager, most, _), (*planned, real, peak) = found["eager"], found["planned"]
        assert planned == eager  # losses and parameters, bit for bit
        assert real <= peak <= found["budget"] < most
        assert found["forecast"] == pytest.approx(most, rel=0.03)


@pytest.mark.slow
def test_three_ranks_make_the_losses_of_one(tmp_path):
    for found in ranks("residual", 3, tmp_path):
        assert sum(found["plan"]) == BATCH
        assert found["plan"][1] < found["plan"][0]
        assert found["losses"] < CLOSE
        assert found["state"] < CLOSE


@pytest.mark.slow
@pytest.mark.parametrize(("scenario", "size"), [("slowed", 4), ("slowed-resnet18", 2)])
def test_tables_that_ranks_measure_share_out_batches(scenario, size, tmp_path):
    """The last rank works three times as long as the others on every sample."""
    for found in zip(*ranks(scenario, size, tmp_path), strict=True):
        for each in found:
            *quick, tardy = each["plan"]
            assert sum(each["plan"]) == BATCH
            assert 1 <= tardy < min(quick)
            before, after = each["idle_equal_ms"], each["idle_ms"]
            assert sum(after[:-1]) <= 0.2 * sum(before[:-1])
            assert each["losses"] < CLOSE
            assert each["state"] < 1e-8  # of small statistics of many layers


def test_shares_follow_a_rank_that_gets_slower_and_recovers(tmp_path):
    first, second = ranks("drifting", 2, tmp_path)
    assert first == second
    equal, _, _, slowed, _, recovered = (plan[1] for plan in first)
    assert equal == BATCH // 2
    assert slowed <= BATCH // 3
    assert recovered > slowed


@pytest.mark.parametrize(
    ("where", "others"),
    [("killed", 1), pytest.param("killed-inside", 3, marks=pytest.mark.slow)],
)
def test_a_dead_rank_ends_the_others_and_the_run_goes_on_with_another_number(
    where, others, tmp_path
):
    """It dies between two steps, or in the middle of a backward pass."""
    with started(where, 2, tmp_path) as processes:
        for process in processes:
            process.join(300)  # PyTorch's own patience is half an hour
        assert [p.exitcode for p in processes] == [1, -signal.SIGKILL]
    *_, line = (tmp_path / "0.err").read_text().strip().splitlines()
    assert (
        "mucudnn.errors.RankLostError: another rank failed or does not respond" in line
    )
    for found in ranks("resumed", others, tmp_path):
        assert found["steps"] == 6
        assert found["losses"] < CLOSE
        assert found["state"] < CLOSE


if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("needs PyTorch with gloo", allow_module_level=True)


MODULE = "tests.sharded_steps"

GROUPS = (
    (2, ("fsdp", "wide", "tight", "tied", "partly")),
    (2, ("normalized", "skipping", "bfloat16", "float16", "inner only", "clipped")),
    (2, ("ddp", "ddp clipped", "ddp normalized", "ddp unused")),
    (4, ("tight", "ddp", "ddp unused")),
)
"""Numbers of ranks, and cases that they try one after another: starting takes long."""

FEATURES = ("apart", "between", "accumulated", "scaled", "compiled")
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
    """Other ranks; evaluation, checkpoints, rates; parts; scaled losses; Inductor."""
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
        ("state", "offload_state=True is not supported for a model of several ranks"),
        ("verify", "verify=1 is not supported for a model of several ranks"),
        ("offload", "fully_shard with CPUOffloadPolicy"),
        ("gathered", "fully_shard with set_reshard_after_backward(False)"),
        ("gathering", "fully_shard with collectives of your own"),
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
