"""Estimates from published figures: rooflines, fronts, and where figures are from."""

import functools
import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from mucudnn.ir.conv import Direction
from mucudnn.ir.devices import ASSUMED, DEVICES, Figure, get_device
from mucudnn.ir.optimizers import OPTIMIZERS
from mucudnn.models import get_model
from mucudnn.passes.estimate import conv_table, estimate
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.updates import with_updates
from mucudnn.passes.microbatch import pareto_plans
from tests.conv_problems import conv_problem
from tests.examples import examples

P100 = get_device("p100")


@st.composite
def problems(draw):
    channels, filters = draw(st.integers(1, 64)), draw(st.integers(1, 64))
    side, kernel = draw(st.integers(5, 40)), draw(st.sampled_from([1, 3, 5]))
    return conv_problem(
        (draw(st.integers(1, 64)), channels, side, side),
        (filters, channels, kernel, kernel),
        draw(st.sampled_from(Direction)),
        stride=draw(st.integers(1, 2)),
        padding=kernel // 2,
    )


def twice_as_fast(device):
    def doubled(figure):
        return Figure(2 * figure.value, figure.source)

    return replace(
        device, flops=doubled(device.flops), bandwidth=doubled(device.bandwidth)
    )


@functools.cache
def step(name="alexnet", batch=4, optimizer="momentum"):
    return with_updates(training_graph(get_model(name)(batch)), OPTIMIZERS[optimizer])


@given(problems())
def test_less_workspace_is_always_there_and_nothing_beats_the_roofline(problem):
    table = conv_table(problem, P100)
    assert all(0 < p.time_ms < math.inf and p.workspace >= 0 for p in table.perfs)
    front = pareto_plans(table, 1 << 62)
    assert front[0].workspace == 0
    for small, large in itertools.pairwise(front):
        assert small.workspace < large.workspace
        assert small.time_ms > large.time_ms
    # Winograd with 2 x 2 outputs saves a factor of 2.25, and nothing saves more.
    least_ms = 1e3 * max(
        problem.flops / 2.25 / (P100.flops.value * ASSUMED.matmul),
        sum(t.nbytes for t in problem.operands()) / P100.bandwidth.value,
    )
    whole = [p for p in table.perfs if p.batch == problem.batch]
    assert min(p.time_ms for p in whole) >= least_ms * (1 - 1e-9)
    fast = conv_table(problem, twice_as_fast(P100))
    for slow_perf, fast_perf in zip(table.perfs, fast.perfs, strict=True):
        slow = slow_perf.time_ms - ASSUMED.launch_ms
        assert fast_perf.time_ms - ASSUMED.launch_ms == pytest.approx(slow / 2)


def test_a_convolution_without_workspace_by_hand():
    problem = conv_problem((32, 256, 28, 28), (256, 256, 5, 5), padding=2)
    flops = 2 * 32 * 256 * 28 * 28 * 256 * 25
    row = conv_table(problem, P100).fastest(32, workspace_limit=0)
    expected = flops / (10.6e12 * ASSUMED.direct) * 1e3 + ASSUMED.launch_ms
    assert row.time_ms == pytest.approx(expected)
    patches = conv_table(problem, P100).fastest(32)
    assert patches.algo == "GEMM"
    assert patches.workspace == 32 * 28 * 28 * 256 * 25 * 4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_node_has_a_time_and_every_convolution_a_front(device, optimizer):
    graph = step(optimizer=optimizer)
    found = estimate(graph, device)
    assert set(found.node_ms) == {node.name for node in graph.nodes}
    convolutions = {node.name for node in graph.nodes if node.op == "conv"}
    assert set(found.fronts) == convolutions
    for node in graph.nodes:
        ms = found.node_ms[node.name]
        assert (ms == 0) == node.traits.view
        assert ms == 0 or ms >= ASSUMED.launch_ms
    assert found.out_bytes_per_ms == DEVICES[device].d2h.value / 1e3


def test_products_count_two_operations_and_measured_fronts_replace_estimates():
    graph = step()
    node = next(node for node in graph.nodes if node.op == "matmul")
    a, b, out = (graph.tensors[name].shape for name in node.tensors)
    m, n = out
    k = math.prod(a) // m
    assert math.prod(b) == k * n
    slow_memory = replace(P100, bandwidth=Figure(1e18, "none"))
    ms = estimate(graph, slow_memory).node_ms[node.name] - ASSUMED.launch_ms
    flops = 2 * m * n * k
    assert ms == pytest.approx(1e3 * flops / (P100.flops.value * ASSUMED.matmul))
    node = next(node for node in graph.nodes if node.op == "conv")
    known = {
        "fronts": {node.attrs["problem"]: estimate(graph, "k40c").fronts[node.name]},
        "workspaces": {graph.nodes[0].name: 4096},
    }
    found = estimate(graph, "h200", **known)
    (measured,) = known["fronts"].values()
    assert found.fronts[node.name] == measured
    assert found.node_ms[node.name] == min(plan.time_ms for plan in measured)
    assert found.workspaces == known["workspaces"]


@examples(5)
@given(st.sampled_from(sorted(DEVICES)))
def test_every_figure_says_where_it_is_from(name):
    device = DEVICES[name]
    figures = (device.flops, device.bandwidth, device.memory, device.d2h, device.h2d)
    assert all(figure.value > 0 and figure.source for figure in figures)
    assert "assumed" in device.sources()["shares of peaks"]


@pytest.mark.parametrize("name", [n for n, d in DEVICES.items() if d.tensor_cores])
def test_each_type_has_its_peak(name):
    device = get_device(name.upper())
    tf32, half = device.peak("float32", tf32=True), device.peak("bfloat16")
    assert device.flops.value == device.peak("float32") <= tf32 < half
    assert half == device.peak("float16") == pytest.approx(2 * tf32, rel=0.01)
    assert "on tensor cores, dense" in device.sources()["arithmetic"]


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_a_convolution_takes_the_peak_of_its_type(layout):
    def ms(dtype, **options):
        problem = conv_problem(
            (64, 256, 28, 28), (256, 256, 3, 3), dtype=dtype, layout=layout
        )
        table = conv_table(problem, get_device("h200"), "undivided", **options)
        return table.fastest(64, workspace_limit=0).time_ms

    single, tf32 = ms("float32"), ms("float32", tf32=True)
    half = ms("bfloat16")
    assert half < tf32 < single / 4
    if layout == "NHWC":  # nothing is transposed, and products bind
        assert tf32 / half == pytest.approx(2, rel=0.05)
        assert single / tf32 == pytest.approx(494.5 / 67, rel=0.05)


def test_what_is_not_known_is_refused_and_the_h200_has_two_deprecated_names():
    with pytest.raises(ValueError, match=r"unknown device 'abacus'.*h200"):
        get_device("abacus")
    problem = conv_problem((1, 1, 4, 4), (1, 1, 3, 3), dtype="float64")
    with pytest.raises(ValueError, match=r"float64.*float32"):
        conv_table(problem, P100)
    device = get_device("h200")
    assert device.title == "NVIDIA H200 SXM"
    assert (device.flops.value, device.bandwidth.value) == (67e12, 4800e9)
    for ending in ("_half", "_tf32"):
        with pytest.warns(DeprecationWarning, match="by its types"):
            assert get_device(f"h200{ending}") is device
