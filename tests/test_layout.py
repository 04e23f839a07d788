"""Images with channels last: the same numbers, the cheapest layouts, and trainers."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mucudnn.backends import get_backend
from mucudnn.backends.cpu.kernels import bind as bind_cpu
from mucudnn.backends.cpu.threads import Workers
from mucudnn.backends.cuda.kernels import bind
from mucudnn.ir.builder import GraphBuilder
from mucudnn.ir.channels_last import operands_of
from mucudnn.ir.conv import AlgoPerf, ConvPlan
from mucudnn.ir.graph import Graph
from mucudnn.ir.operations import OPERATIONS, make_node
from mucudnn.ir.optimizers import Momentum
from mucudnn.ir.tensor import Role, TensorSpec
from mucudnn.passes.estimate import estimate
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.fusion import fuse_elementwise
from mucudnn.passes.graph.layouts import (
    SINK,
    SOURCE,
    FlowNetwork,
    LayoutCosts,
    channels_last_graph,
    channels_last_nodes,
    cheapest_layouts,
    convolutions_last,
    image_edges,
    layout_trials,
    transposed_bytes,
    with_channels_last,
)
from mucudnn.passes.graph.training_step import StepChoices, StepRecipe, build_step
from mucudnn.passes.graph.updates import with_computed_gradients
from mucudnn.passes.planning.plan_step import unbounded
from mucudnn.runtime.training.budget import MemoryBudget
from mucudnn.runtime.training.measured_choices import Layouts
from mucudnn.runtime.tuning.tuner import Tuner
from mucudnn.studies.memory import study_memory
from mucudnn.studies.memory_results import CostedStep, StepSpec, with_layouts
from tests.cuda_emulator import COMPILER, Emulator
from tests.doubles import QUICK
from tests.kernel_cases import close, stale
from tests.mirror_cases import cases
from tests.numpy_runner import execute
from tests.random_graphs import feeds
from tests.training_cases import examples, network, trainer

CPU = get_backend("cpu")

TURNED = {name for name, known in OPERATIONS.items() if known.channels_last}


def last(array):
    return np.ascontiguousarray(np.moveaxis(array, 1, -1))


def first(array):
    return np.moveaxis(array, -1, 1)


# Kernels.


def graph_of(case):
    """A graph of one node, and what is fed to it."""
    specs = [
        TensorSpec(f"x{i}", a.shape, a.dtype.name) for i, a in enumerate(case.inputs)
    ]
    specs += [
        TensorSpec(f"y{i}", shape, np.dtype(dtype).name)
        for i, (shape, dtype) in enumerate(case.outputs)
    ]
    tensors = {spec.name: spec for spec in specs}
    count = len(case.inputs)
    names = tuple(tensors)
    node = make_node(
        tensors, "node", case.op, names[:count], names[count:], dict(case.attrs)
    )
    return Graph(tensors, (node,), ()), dict(zip(names, case.inputs, strict=False))


def computed(kernels, graph, values):
    """All tensors of a graph of one node."""
    (node,) = graph.nodes
    values = {name: array.copy() for name, array in values.items()}
    values |= {
        t: stale(graph.tensors[t].shape, graph.tensors[t].dtype) for t in node.outputs
    }
    reads, writes, attrs = operands_of(graph, node)
    kernel = kernels[node.op]
    nbytes = kernel.workspace(reads, writes, attrs)
    seen = [values[s.name].reshape(s.shape) for s in (*reads, *writes)]
    scratch = np.full(nbytes, 0xFF, np.uint8) if nbytes else None
    kernel.run(seen[: len(reads)], seen[len(reads) :], attrs, scratch)
    return values


def agree_in_both_layouts(kernels):
    """Every case of every operation that can have channels last; returns those."""
    ones, seen = bind_cpu(Workers(1)), set()
    for case in cases("f8"):
        graph, values = graph_of(case)
        if not channels_last_nodes(graph):
            continue
        seen.add(case.op)
        turned = channels_last_graph(graph, graph.nodes[0])
        is_last = {t for t, s in turned.tensors.items() if s.layout == "NHWC"}
        fed = {t: last(a) if t in is_last else a for t, a in values.items()}
        expected = computed(ones, graph, values)
        for name, found in computed(kernels, turned, fed).items():
            close(first(found) if name in is_last else found, expected[name], 1e-9)
    return seen


def test_every_operation_is_the_same_with_channels_last():
    seen = agree_in_both_layouts(bind_cpu(Workers(2)))
    # There is a byte's index of a maximum in its gradient: that is not turned.
    assert seen >= TURNED - {"conv", "max_pool_grad"}


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler: g++")
def test_every_operation_is_the_same_with_channels_last_on_a_gpu():
    seen = agree_in_both_layouts(bind(Emulator()))
    assert seen >= TURNED - {"conv", "max_pool_grad"}


def test_groups_of_channels_are_not_turned():
    g = GraphBuilder()
    x = g.conv(g.input("image", (2, 4, 6, 6)), 8, 3, padding=1, bias=False)
    x = g.relu(g.group_norm(x, 4))
    x = g.conv(x, 8, 3, padding=1, bias=False)
    label = g.input("label", (2,), "int64")
    graph = g.build(g.softmax_cross_entropy(g.linear(g.flatten(x), 3), label))
    turned = training_graph(with_channels_last(graph, convolutions_last(graph)))
    step = with_computed_gradients(turned)
    filters = [s.shape for s in graph.with_role(Role.PARAMETER)]
    images = [
        node.name
        for node in step.nodes
        if "channels" in node.op and step.tensors[node.inputs[0]].shape not in filters
    ]
    assert len(images) == 3  # what is fed, what is flattened, and its gradient


def test_an_element_s_own_scale_keeps_channels_first():
    g = GraphBuilder()
    x = g.layer_norm(g.input("image", (2, 3, 4, 4)))
    assert channels_last_nodes(g.build(x)) == frozenset()


# Networks.


def depth(g, x):
    return g.shape(x)[1]


LAYERS = {
    "conv": lambda g, x: g.conv(x, 3, 3, padding=1),
    "strided": lambda g, x: g.conv(x, 4, 3, stride=2, padding=1, bias=False),
    "point": lambda g, x: g.conv(x, 5, 1),
    "depthwise": lambda g, x: g.conv(x, depth(g, x), 3, padding=1, groups=depth(g, x)),
    "up": lambda g, x: g.conv_transpose(x, 3, 2, stride=2),
    "norm": lambda g, x: g.relu(g.batch_norm(x)),
    "residual": lambda g, x: g.relu(g.add(g.batch_norm(x), x)),
    "group": lambda g, x: g.group_norm(x, 1),
    "lrn": lambda g, x: g.lrn(x),
    "gelu": lambda g, x: g.gelu(x),
    "twice": lambda g, x: g.multiply(x, x),
    "max": lambda g, x: g.max_pool(x, 3, 2, 1, ceil_mode=True),
    "mean": lambda g, x: g.avg_pool(x, 2, 1, 1, count_include_pad=False),
    "nearest": lambda g, x: g.upsample_nearest(x, 2),
    "bilinear": lambda g, x: g.upsample_bilinear(x, (2, 1)),
    "dropout": lambda g, x: g.dropout(x, 0.4),
    "concat": lambda g, x: g.concat([x, g.relu(x), x]),
    "slice": lambda g, x: g.slice(x, (0, depth(g, x) - 1, 0, 0), g.shape(x)),
    "pad": lambda g, x: g.pad(x, (0, 1, 0, 2), (0, 0, 1, 0)),
    "view": lambda g, x: g.reshape(g.flatten(x), g.shape(x)),
    "pixel": lambda g, x: g.conv(g.global_avg_pool(x), 3, 1),
}


@st.composite
def networks(draw):
    """A forward graph whose loss is of a vector, or of pixels."""
    g = GraphBuilder(dtype="float64", seed=1)
    x = g.input("image", (2, draw(st.integers(1, 3)), 5, 4))
    x = g.conv(x, 3, 3, padding=1)
    for name in draw(st.lists(st.sampled_from(sorted(LAYERS)), max_size=6)):
        if max(g.shape(x)[1:]) < 24:
            x = LAYERS[name](g, x)
    if draw(st.booleans()):
        logits, shape = g.linear(g.flatten(x), 3), (2,)
    else:
        logits = g.conv(x, 3, 1)
        shape = (2, *g.shape(logits)[2:])
    label = g.input("label", shape, "int64")
    loss = g.softmax_cross_entropy(logits, label)
    images = [n.outputs[0] for n in g.nodes if len(g.shape(n.outputs[0])) > 2]
    return g.build(loss, g.accuracy(logits, label), draw(st.sampled_from(images)))


def the_same(one, other):
    """Both steps compute the same losses, gradients and statistics."""
    fed = feeds(one)
    found = []
    for graph in (one, other):
        values = {name: array.copy() for name, array in fed.items()}
        found.append(execute(CPU, graph, values))
    for name in (*one.outputs, *one.inputs):
        close(found[1][name], found[0][name], 1e-8)
    assert one.gradients.keys() == other.gradients.keys()
    for name, gradient in one.gradients.items():
        close(found[1][other.gradients[name]], found[0][gradient], 1e-8)


@settings(max_examples=25)
@given(networks(), st.data())
def test_a_network_computes_the_same_in_any_layout(graph, data):
    nodes = sorted(channels_last_nodes(graph))
    chosen = data.draw(st.sets(st.sampled_from(nodes)))
    turned = with_channels_last(graph, chosen)
    for name in graph.outputs:
        one, other = turned.tensors[name], graph.tensors[name]
        assert (one.shape, one.layout) == (other.shape, "NCHW")
    for fuse in (fuse_elementwise, lambda graph: graph):
        the_same(training_graph(fuse(graph)), training_graph(fuse(turned)))


@given(networks())
def test_channels_are_last_at_every_convolution(graph):
    turned = with_channels_last(graph, convolutions_last(graph))
    problems = [n.attrs["problem"] for n in turned.nodes if n.op == "conv"]
    assert {p.layout for p in problems} == {"NHWC"}


def test_what_has_one_pixel_or_one_channel_is_turned_for_nothing():
    g = GraphBuilder()
    x = g.conv(g.input("image", (2, 1, 4, 4)), 3, 1, bias=False)
    x = g.global_avg_pool(x)
    graph = g.build(g.conv(x, 2, 1, bias=False))
    turned = with_channels_last(graph, channels_last_nodes(graph))
    assert [node.op for node in turned.nodes if node.name.endswith("turn")] == [
        *["reshape"] * 4
    ]
    assert set(transposed_bytes(graph).values()) == {0, 2 * 4 * 2 * 3 * 16}


# The choice.


@given(st.data())
def test_a_cheapest_cut_is_found(data):
    points = [SOURCE, *"abcd", SINK]
    pairs = itertools.permutations(points, 2)
    pairs = [p for p in pairs if p[1] != SOURCE and p[0] != SINK]
    sizes = data.draw(
        st.dictionaries(st.sampled_from(pairs), st.integers(1, 9), max_size=14)
    )
    network = FlowNetwork()
    for (start, end), size in sizes.items():
        network.add(start, end, size)

    def cost(behind):
        return sum(n for (a, b), n in sizes.items() if a not in behind and b in behind)

    ways = [
        {SINK, *some} for k in range(5) for some in itertools.combinations("abcd", k)
    ]
    least = min(map(cost, ways))
    fewest = min(len(way) for way in ways if cost(way) == least)
    found = network.sink_side() | {SINK}
    assert cost(found) == least
    assert len(found) == fewest


def cost_of(costs, graph, chosen):
    nodes = sum(
        costs.last[name] if name in chosen else cost
        for name, cost in costs.first.items()
    )
    return nodes + sum(
        costs.transposed[name]
        for name, tied in image_edges(graph, costs.first).items()
        if len({member in chosen for member in tied}) > 1
    )


@settings(max_examples=60, deadline=None)
@given(networks(), st.data())
def test_no_choice_of_layouts_is_cheaper(graph, data):
    nodes = sorted(channels_last_nodes(graph))[:7]
    prices = st.integers(0, 9).map(float)
    costs = LayoutCosts(
        {name: data.draw(prices) for name in nodes},
        {name: data.draw(st.one_of(prices, st.just(np.inf))) for name in nodes},
        {name: data.draw(prices) for name in graph.tensors},
    )
    every = (
        frozenset(some)
        for k in range(len(nodes) + 1)
        for some in itertools.combinations(nodes, k)
    )
    least = min(cost_of(costs, graph, some) for some in every)
    assert cost_of(costs, graph, cheapest_layouts(graph, costs)) == least


def test_what_layouts_cost_is_what_the_steps_take():
    """A choice's price is by how much its step differs from the one without it."""
    g = GraphBuilder()
    x = g.conv(g.input("image", (4, 3, 8, 8)), 8, 3, padding=1, bias=False)
    x = g.max_pool(g.relu(g.batch_norm(x)), 2)
    x = g.add(g.conv(x, 8, 3, padding=1, bias=False), x)
    label = g.input("label", (4,), "int64")
    graph = g.build(g.softmax_cross_entropy(g.linear(g.flatten(x), 3), label))
    trials = layout_trials(graph, channels_last_nodes(graph), trains=True)
    costs = trials.costs(estimate(trials.graph, "h200").node_ms)

    def step_ms(chosen):
        step = training_graph(with_channels_last(graph, chosen))
        step = with_computed_gradients(step)
        return sum(estimate(step, "h200").node_ms.values())

    nodes = channels_last_nodes(graph)
    none = frozenset()
    for chosen in (none, nodes, *(frozenset({name}) for name in sorted(nodes))):
        price = cost_of(costs, graph, chosen) - cost_of(costs, graph, none)
        assert price == pytest.approx(step_ms(chosen) - step_ms(none))
    assert cheapest_layouts(graph, costs) == none


# Trainers.


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"fuse": False},
        {"split": 2},
        {"parts": 2},
        {"budget": 0.7},
        {"budget": 0.7, "split": "auto"},
        {"options": {"dropout": 0.3}},
    ],
)
def test_a_trainer_finds_the_same_losses(more):
    images, labels = examples(24)

    def losses(layout):
        settings = dict(more)
        if "budget" in more:
            settings["budget"] = int(trainer(layout=layout).peak_bytes * more["budget"])
        made = trainer(layout=layout, **settings)
        rows = [slice(8 * i, 8 * i + 8) for i in range(3)]
        found = [float(made.step(images[r], labels[r]).loss) for r in rows]
        return np.array(found), made.predict(images[:5]), made

    expected, answers, one = losses("NCHW")
    found, same, other = losses("NHWC")
    close(found, expected, 1e-6)
    close(same, answers, 1e-5)
    kinds = {n.attrs["problem"].layout for n in other.graph.nodes if n.op == "conv"}
    assert kinds == {"NHWC"}
    for name, value in one.state.save().items():
        assert other.state.save()[name].shape == value.shape


def test_a_trainer_measures_layouts():
    told = []
    made = trainer(layout="auto", progress=lambda name, *_: told.append(name))
    assert any("to_channels" not in name and ":" in name for name in told)
    layouts = {n.attrs["problem"].layout for n in made.graph.nodes if n.op == "conv"}
    assert layouts <= {"NCHW", "NHWC"}


def test_what_cannot_be_measured_keeps_its_channels_first(caplog):
    graph = network(8)
    tuner = Tuner(rule=QUICK, batch_policy="undivided")
    small = MemoryBudget(nbytes=2000)
    assert Layouts("auto", tuner, small, None)(graph, True) is graph
    assert "layouts are not compared" in caplog.text
    turned = Layouts("NHWC", tuner, small, None)(graph, True)
    assert {s.layout for s in turned.tensors.values()} == {"NCHW", "NHWC"}
    for layout, expected in (("NHWC", "NHWC"), ("auto", "NCHW")):  # virtual devices
        made = trainer(backend="null", layout=layout)
        kinds = {n.attrs["problem"].layout for n in made.graph.nodes if n.op == "conv"}
        assert kinds == {expected}
    with pytest.raises(ValueError, match="unknown layout 'CHWN'; choose one of: NCHW"):
        trainer(layout="CHWN")


def test_weights_go_from_one_layout_to_another(tmp_path):
    images, labels = examples(8)
    one, other = trainer(), trainer(layout="NHWC", seed=7)
    one.step(images, labels)
    one.save_weights(tmp_path / "weights.safetensors")
    other.load_weights(tmp_path / "weights.safetensors")
    close(other.predict(images), one.predict(images), 1e-5)


@pytest.mark.parametrize("when", ["early", "late"])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_gradient_that_is_a_view_is_there_before_it_is_used(when, parts):
    """Of a filter with one tap, which is turned for nothing."""
    g = GraphBuilder()
    x = g.conv(g.input("image", (2, 3, 4, 4)), 3, 1, bias=False)
    label = g.input("label", (2,), "int64")
    graph = g.build(g.softmax_cross_entropy(g.linear(g.flatten(x), 3), label))
    turned = with_channels_last(graph, channels_last_nodes(graph))
    recipe = StepRecipe(
        optimizer=Momentum(), update_when=when, micro_batches=parts, fuse=False
    )
    choices = StepChoices(keep_copies=lambda step: False)
    for step in build_step(turned, recipe, choices).steps:
        assert any(node.op == "reshape" for node in step.nodes)


# Studies.


def studied(layout, **more):
    spec = StepSpec(model="lenet", batch=4, device="null", layout=layout)
    return study_memory(spec, policies=["keep_all"], budget="1GiB", **more)


def test_a_study_says_what_is_turned():
    first, found, auto = map(studied, ("NCHW", "NHWC", "auto"))
    assert "layout" not in first.figures
    words = found.figures["layout"]
    assert words.startswith("channels last in 5 of 5 convolutions; ")
    assert found.to_json()["figures"]["layout"] == words
    assert found.parameters == first.parameters
    assert found.unbounded_ms > first.unbounded_ms  # estimates do not prefer a layout
    assert auto.figures["layout"].startswith("channels last in 0 of 5 convolutions")
    assert auto.unbounded_ms == first.unbounded_ms
    for made in (studied, trainer):
        with pytest.raises(ValueError, match="use the layout NCHW"):
            made(layout="NHWC", split="height:2")


def on_tensor_cores(layout, precision=None, model="resnet18", **more):
    more = {"batch": 32, "device": "h200"} | more
    return StepSpec(model=model, layout=layout, precision=precision, **more)


def kept(spec):
    """What a study knows of the step without a budget, and that step."""
    costed = CostedStep(with_layouts(spec))
    whole, *_ = costed.forms(np.inf)
    plan = unbounded(whole.graph, whole.profile)
    return costed, plan.prediction.step_ms, plan.peak_bytes


@pytest.mark.parametrize("precision", [None, "float16"])
def test_channels_last_pay_on_tensor_cores(precision):
    (_, first_ms, _), (_, last_ms, _), (auto, auto_ms, _) = (
        kept(on_tensor_cores(layout, precision)) for layout in ("NCHW", "NHWC", "auto")
    )
    assert auto_ms <= last_ms < first_ms
    assert auto_ms < 0.95 * first_ms
    assert "channels last in 0 of" not in auto.figures["layout"]


def test_half_precision_takes_less_memory_and_time():
    (wide, wide_ms, wide_bytes), (half, half_ms, half_bytes) = (
        kept(on_tensor_cores("NHWC", kind, batch=512)) for kind in (None, "float16")
    )
    assert half.parameters == wide.parameters
    assert 0.4 < half_ms / wide_ms < 0.6
    assert 0.5 < half_bytes / wide_bytes < 0.55
    assert half.figures["precision"].startswith("float16 ")
    assert "precision" not in wide.figures
    answering = on_tensor_cores("NCHW", "float16", inference=True).graph()
    kinds = {n.attrs["problem"].dtype for n in answering.nodes if n.op == "conv"}
    assert kinds == {"float16"}


def test_a_study_in_half_precision_needs_figures_of_it():
    spec = on_tensor_cores("NCHW", "float16", "lenet", device="p100")
    with pytest.raises(
        ValueError, match=r"float16, for .* devices that have them: h200, a100, h100"
    ):
        study_memory(spec)
    with pytest.raises(ValueError, match="unknown narrow type 'int8'"):
        on_tensor_cores("NCHW", "int8", "lenet").graph()


def test_a_study_of_the_cpu_cannot_choose_layouts():
    spec = StepSpec(model="lenet", batch=4, device="cpu", layout="auto")
    with pytest.raises(ValueError, match="Trainer"):
        study_memory(spec)
    with pytest.raises(ValueError, match="choose NCHW or NHWC"):
        spec.graph()


def test_times_of_both_layouts_decide():
    """Convolutions that are faster with channels last have them so."""
    spec = StepSpec(model="lenet", batch=4, device="h200")
    forward = spec.network()
    graphs = (
        training_graph(forward),
        training_graph(with_channels_last(forward, channels_last_nodes(forward))),
    )
    rows = {
        problem: 0.5 if problem.layout == "NHWC" else 50.0
        for graph in graphs
        for problem in (n.attrs["problem"] for n in graph.nodes if n.op == "conv")
    }
    perfs = {
        problem: AlgoPerf(algo="A", batch=4, time_ms=ms, workspace=0)
        for problem, ms in rows.items()
    }
    fronts = {problem: (ConvPlan(problem, (p,)),) for problem, p in perfs.items()}
    trials = layout_trials(forward, channels_last_nodes(forward), trains=True)
    times = estimate(trials.graph, "h200", fronts=fronts).node_ms
    chosen = cheapest_layouts(forward, trials.costs(times))
    turned = with_channels_last(forward, chosen)
    kinds = {n.attrs["problem"].layout for n in turned.nodes if n.op == "conv"}
    assert kinds == {"NHWC"}


def test_only_images_that_several_touch_are_timed_in_both_layouts():
    """Places of a pool's largest are bytes, which no GPU's kernel turns."""
    g = GraphBuilder()
    x = g.max_pool(g.conv(g.input("image", (2, 3, 8, 8)), 4, 3), 2)
    x = g.conv(x, 3, 1)
    labels = g.input("label", (2, *g.shape(x)[2:]), "int64")
    graph = g.build(g.softmax_cross_entropy(x, labels))
    trials = layout_trials(graph, channels_last_nodes(graph), trains=True)
    turned = {
        trials.graph.tensors[n].dtype
        for t in trials.graph.nodes
        if t.op.startswith("to_channels")
        for n in t.tensors
    }
    assert turned == {"float32"}
    assert "image" in trials.transposed
    assert "label" not in trials.transposed
