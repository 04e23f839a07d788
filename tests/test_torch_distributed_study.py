"""Steps on several devices, studied without any: bytes, times, refusals."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import mucudnn.torch as mt
from mucudnn.cli.app import main
from mucudnn.errors import UnsupportedError
from mucudnn.ir.profile import Profile
from mucudnn.notebook import html_of
from mucudnn.passes.graph.sharding import DataParallel, data_parallel_step
from mucudnn.passes.planning.plan_step import minimum_budget, plan_step
from mucudnn.passes.planning.request import StepRequest, schedule_residency
from mucudnn.passes.scheduling.collectives import under_way
from mucudnn.passes.scheduling.step_plan import memory_intervals
from mucudnn.report.memory_charts import lanes_chart
from mucudnn.report.trace import trace_json
from mucudnn.torch.capture.fake_tensors import DatalessStep
from mucudnn.torch.capture.step import capture_step
from mucudnn.torch.capture.step_tensors import StepParts, StepSettings
from mucudnn.torch.distributed.sharding import Part, Sharding, Unit, is_collective
from mucudnn.torch.plan_program import LoweredStep

pytestmark = pytest.mark.torch

NET = """
import torch
from torch import nn

def step(batch):
    with torch.device("meta"):
        hidden = [nn.Linear(256, 256) for _ in range(3)]
        model = nn.Sequential(nn.Linear(64, 256), *hidden, nn.Linear(256, 64))
    x = torch.zeros(batch, 64, device="meta")
    optimizer = torch.optim.AdamW(model.parameters())
    return model, nn.functional.mse_loss, (x, x), optimizer
"""


def made(batch=16):
    namespace = {}
    exec(NET, namespace)  # what the command reads
    return namespace["step"](batch)


@pytest.fixture(scope="module")
def study():
    return mt.memory(*made(), device="h100")


def test_shards_are_divided_and_buckets_are_not(study):
    weights = sum(p.numel() * p.element_size() for p in made()[0].parameters())
    small = 16 << 10  # of rounding, and of step counts
    alone = study.plan().resident_bytes
    assert study.on((1,)).plan().resident_bytes == alone
    for ranks in (2, 8, 64):
        sharded = study.on((ranks,)).plan().resident_bytes
        assert sharded == pytest.approx(3 * weights / ranks, abs=2 * small)
        spread = study.on((ranks,), "ddp").plan().resident_bytes
        assert spread == pytest.approx(alone + weights, abs=small)
    assert study.on((8,)).least_budget < study.least_budget


@pytest.mark.parametrize("kept", [(), (0, 1, 2)])
@pytest.mark.parametrize("sharded", [True, False])
def test_collectives_run_beside_computation_and_one_at_a_time(study, sharded, kept):
    step = study.described().request(16)
    lists = [n for n in step.graph.inputs if step.graph.tensors[n].nbytes > 60_000]
    read = {t for n in step.graph.nodes for t in n.inputs if n.phase.value == "forward"}
    units = [(name,) for name in lists if name in read]
    assert len(units) == 5

    def planned(gather_ms):
        parallel = DataParallel(
            *(4, units, sharded, kept), lambda nbytes: gather_ms, 1e9
        )
        graph, profile = data_parallel_step(step.graph, step.profile, parallel)
        found = plan_step(StepRequest(graph, profile, hosted=frozenset()))
        return found.prediction, profile

    free, _ = planned(0.0)
    assert free.stalls_ms.get("network", 0.0) == 0.0
    slow, profile = planned(1e3)
    on_network = [x for x in slow.lanes if x.engine == "network"]
    assert {x.name for x in on_network} == set(profile.network_ms)
    names = [x.name.split(".")[0] for x in on_network]
    # The backward pass does not read the first layer's weights.
    gathered = 5 + len({1, 2, 3, 4}.difference(kept))
    assert names.count("gather") == (gathered if sharded else 0)
    for before, after in itertools.pairwise(on_network):
        assert before.stop_ms <= after.start_ms
    total = sum(profile.network_ms.values())
    assert max(total, free.step_ms) <= slow.step_ms <= total + free.step_ms + 1e-6
    assert slow.stalls_ms["network"] > 0


def test_searches_and_timelines_count_waits_for_collectives(study):
    sharded = study.on((8,))
    request = sharded.described().request(16)
    slow = dict.fromkeys(request.profile.network_ms, 1.0)
    request = replace(request, profile=replace(request.profile, network_ms=slow))
    least, most = minimum_budget(request), plan_step(request).peak_bytes
    for budget in (math.inf, (least + most) // 2, least):
        within = request.within(budget)
        residency = plan_step(within).residency
        unsimulated = schedule_residency(within, residency)
        plan = unsimulated.plan()
        assert unsimulated.step_ms() == plan.prediction.step_ms
        starts = {
            lane.name: lane.start_ms
            for lane in plan.prediction.lanes
            if lane.engine == "compute"
        }
        producers = plan.schedule.graph.producers
        made = [i for i in memory_intervals(plan) if i.name in producers]
        first = {i.name: i.start_ms for i in reversed(made)}
        for name, start_ms in first.items():
            # Allocated when the node before it is done, or computation has waited.
            assert start_ms <= starts[producers[name].name]
        last = plan.schedule.graph.nodes[-1]
        assert starts[last.name] == pytest.approx(max(i.stop_ms for i in made), abs=1.0)


def overlaps(plan):
    """Names of the collectives of a trace beside which computation runs."""
    events = json.loads(trace_json(plan))["traceEvents"]
    lanes = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    spans = {
        lane: [
            (e["ts"], e["ts"] + e["dur"], e["name"])
            for e in events
            if e["ph"] == "X" and e["tid"] == lanes[lane]
        ]
        for lane in ("compute", "collectives")
    }
    assert len(spans["collectives"]) == len(plan.prediction.profile.network_ms)
    return {
        name
        for start, stop, name in spans["collectives"]
        if any(min(stop, b) - max(start, a) > 0.0 for a, b, _ in spans["compute"])
    }


def test_a_trace_shows_collectives_beside_computation_within_the_budget(study):
    sharded = study.on((8,))
    request = sharded.described().request(16)
    least = minimum_budget(request)
    tight, roomy = (plan_step(request.within(b)) for b in (least, math.inf))
    assert tight.peak_bytes <= least < roomy.peak_bytes
    assert roomy.prediction.step_ms < tight.prediction.step_ms
    assert overlaps(tight) < overlaps(roomy)
    assert any(name.startswith("gather") for name in overlaps(roomy))
    assert any(name.startswith("reduce") for name in overlaps(roomy))
    assert ">collectives<" in lanes_chart(roomy)
    assert lanes_chart(roomy).count('"box collective"') > 1
    assert '"key collective"' in html_of(roomy)
    alone = plan_step(study.described().request(16))
    assert '"key collective"' not in html_of(alone)


def test_the_fastest_way_that_fits_is_named(study):
    rows = study.scaling("1GiB", (1, 8))
    assert [row.gpus for row in rows] == [1, 8]
    assert rows[0].way == "one"
    assert rows[1].way in ("ddp", "fsdp2")
    sharded = study.on((1024,)).unlimited_bytes
    (planned,) = study.scaling(sharded - 1024, (1024,))
    assert planned.way in ("fsdp2 + plan", "none fits")
    (nothing,) = study.scaling(4096, (8,))
    assert (nothing.way, nothing.samples_per_s) == ("none fits", 0.0)
    assert nothing.peak_bytes == study.on((8,)).least_budget


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mesh": (2, 4)}, "2 dimensions; only one is supported"),
        ({"mesh": (2,), "device": "cpu"}, "published link rates"),
        ({"mesh": (2,), "split": "auto"}, "cannot be combined"),
        ({"mesh": (0,)}, "mesh must be at least 1"),
        ({"mesh": (2,), "shard": "zero"}, "fsdp2, ddp"),
    ],
)
def test_what_cannot_be_studied_is_refused(given, said):
    with pytest.raises(ValueError, match=said):
        mt.memory(*made(), **{"device": "h100", **given})


def test_updates_that_mix_elements_are_refused():
    model, loss_fn, example, _ = made()
    weights = [p for p in model.parameters() if p.dim() == 2]
    muon = torch.optim.Muon(weights)
    with pytest.raises(UnsupportedError, match="such as SGD, Adam or AdamW"):
        mt.memory(model, loss_fn, example, muon, mesh=(2,)).plan()


def test_the_command_compares_numbers_of_gpus(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NET)

    def ran(*arguments):
        return CliRunner().invoke(main, ["memory", *arguments])

    done = ran(
        *("net.py:step", "--gpus", "8", "--batch", "16", "--device", "h100"),
        *("--policy", "keep_all", "--budget", "1GiB", "--json", "found.json"),
    )
    assert done.exit_code == 0, done.stderr
    assert "e+" not in done.stdout  # of samples per second
    found = json.loads(Path("found.json").read_text())
    assert [row["gpus"] for row in found["scaling"]] == [2**n for n in range(11)]
    speeds = [row["samples_per_s"] for row in found["scaling"]]
    assert speeds == sorted(speeds)
    assert math.isclose(speeds[0] * found["scaling"][0]["step_ms"], 16e3)
    assert "to its peers" in found["figures"]
    assert "add --gpus" in ran("net.py:step", "--shard", "ddp").stderr
    assert "is for PyTorch models" in ran("lenet", "--gpus", "8").stderr


RANKS, WIDTH, LAYERS = 4, 512, 6


@pytest.fixture(scope="module")
def graph():
    """A step of some layers, each of them a unit."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, False) for _ in range(LAYERS)))
        x = torch.empty(8, WIDTH)
        units, parts = [], {}
        for number, layer in enumerate(model):
            name = f"model.{number}.weight"
            units.append(Unit((name,)))
            parts[name] = Part((WIDTH, WIDTH), WIDTH // RANKS, torch.float32)
            layer.weight = nn.Parameter(torch.empty(WIDTH // RANKS, WIDTH))
    step = DatalessStep.of(
        *(model, lambda y: y.square().mean(), (x,)),
        torch.optim.SGD(model.parameters(), 0.1),
    )
    sharding = Sharding("fsdp", "0", RANKS, tuple(units), parts)
    captured = capture_step(
        *(step.model, step.loss_fn, step.optimizer, step.example), sharding=sharding
    )
    parts_of_step = StepParts.of(
        step.model, step.optimizer, step.loss_fn, StepSettings()
    )
    return LoweredStep.of_captured(captured, parts_of_step).lowered.graph


def test_parameters_are_gathered_layer_by_layer(graph):
    kinds = [
        "gather" if is_collective(node.op) else "product"
        for node in graph.nodes
        if node.phase.value == "forward"
        and (is_collective(node.op) or node.traits.expensive)
    ]
    assert kinds == ["gather", "product"] * LAYERS


def test_collectives_start_early_and_are_awaited_late_where_the_budget_has_room(graph):
    names = [node.name for node in graph.nodes]
    collectives = [node.name for node in graph.nodes if node.traits.collective]
    assert len(collectives) == 2 * LAYERS
    profile = Profile(
        node_ms=dict.fromkeys(names, 1.0),
        workspaces={},
        fronts={},
        out_bytes_per_ms=1e6,
        in_bytes_per_ms=1e6,
        network_ms=dict.fromkeys(collectives, 3.0),
    )
    request = StepRequest(graph, profile, hosted=frozenset())
    least, most = minimum_budget(request), plan_step(request).peak_bytes
    early, times = [], []
    for budget in (least, (least + most) // 2, most):
        plan = plan_step(request.within(budget))
        assert plan.peak_bytes <= budget
        planned = plan.schedule.graph
        made = {*planned.inputs}
        for node in planned.nodes:
            assert made.issuperset(node.inputs)
            made.update(node.outputs)
        order = [n.name for n in planned.nodes if n.traits.collective]
        assert [name for name in order if "~" not in name] == collectives
        spans = {pair for pairs in under_way(planned).values() for pair in pairs}
        assert len(spans) == len(order)
        early.append(
            sum(
                any(node.traits.expensive for node in planned.nodes[start:wait])
                for start, wait in spans
            )
        )
        times.append(plan.prediction.step_ms)
        assert plan.prediction.stalls_ms["network"] > 0
    # All but the first gathering and the last sum run beside products.
    assert early[-1] == 2 * LAYERS - 2
    assert early == sorted(early)
    assert times == sorted(times, reverse=True)
