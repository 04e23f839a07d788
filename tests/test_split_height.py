"""A step cut into strips of its images computes what the whole one does."""

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st

from mucudnn.ir.builder import GraphBuilder
from mucudnn.ir.conv import ConvProblem
from mucudnn.ir.graph import PERSISTENT
from mucudnn.ir.initializers import Constant
from mucudnn.ir.tensor import Role
from mucudnn.models import get_model, unet2d, unet3d
from mucudnn.models.unet import narrow_unet2d, narrow_unet3d
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.split import split_along
from mucudnn.passes.graph.split_axis import along_height, cuttable, interleave_slices
from mucudnn.passes.graph.training_step import up_to_answers
from mucudnn.passes.planning.cutting import Cutting, couples_batch
from tests.examples import examples
from tests.graphs import split_batch
from tests.model_cases import furthest, narrow_model, random_feeds
from tests.plain_schedule import peak_bytes
from tests.race_detector import RaceDetector
from tests.random_graphs import feeds, training_graphs
from tests.swapping import Bench, same
from tests.test_split import computed

MODELS = {
    "unet2d": {"image": 16},
    "unet2d_bn": {"image": 16},
    "unet3d_plain": {"image": 8},
    "resnet20": {"image": 16},
}
NORMED = ("unet2d_bn", "resnet20")
NAMES = [
    pytest.param(name, marks=[] if name == "resnet20" else [pytest.mark.slow])
    for name in MODELS
]
CHANNELS = 2


def split_height(graph, parts):
    return split_along(graph, parts, along_height(graph))


def step(name, dtype="float32"):
    return training_graph(narrow_model(name)(1, classes=3, dtype=dtype, **MODELS[name]))


def learning(layers, shape, dtype="float64"):
    """A training graph of layers: functions of a builder and a tensor."""
    g = GraphBuilder(dtype=dtype)
    x = g.input("image", shape)
    x = g.conv(x, CHANNELS, 1)
    for layer in layers:
        x = layer(g, x)
    x = g.conv(x, 3, 1)
    labels = g.input("label", (shape[0], *g.shape(x)[2:]), "int64")
    return training_graph(g.build(g.softmax_cross_entropy(x, labels)))


def agrees(graph, parts, limit=1e-12):
    given = random_feeds(graph)
    expected = computed(graph, given)
    for number in parts:
        cut = split_height(graph, number)
        error, where = furthest(computed(cut, given), expected)
        assert error <= limit, (number, where)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", NAMES)
def test_it_computes_what_the_whole_step_does(name, dtype):
    # In float32 a value ahead of a ReLU that is zero but for rounding lets a gradient
    # of this U-Net through or not, by the machine's kernels: 1.5e-4 was seen, where the
    # unsplit step is 3.5e-5 from float64 (docs/method.md).
    rounding = {"unet2d_bn": 3e-4, "resnet20": 1e-4}.get(name, 2e-6)
    limit = {"float64": 1e-12, "float32": rounding}[dtype]
    agrees(step(name, dtype), (2, 3, 8), limit)


@st.composite
def windows(draw):
    """A layer whose windows reach over rows, and every number of it."""
    kind = draw(st.sampled_from(["conv", "conv_transpose", "max", "avg", "up"]))
    kernel, stride = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    if kind in ("max", "avg"):
        how = {"stride": stride, "padding": draw(st.integers(0, kernel // 2))}
        how["ceil_mode"] = draw(st.booleans())
        if kind == "max":
            return lambda g, x: g.max_pool(x, kernel, **how)
        how["count_include_pad"] = draw(st.booleans())
        return lambda g, x: g.avg_pool(x, kernel, **how)
    if kind == "up":
        scale = draw(st.integers(1, 3))
        linear = draw(st.booleans())
        return lambda g, x: (g.upsample_bilinear if linear else g.upsample_nearest)(
            x, scale
        )
    how = {"stride": stride, "dilation": draw(st.integers(1, 3))}
    how["padding"] = draw(st.integers(0, 3))
    if kind == "conv":
        return lambda g, x: g.conv(x, CHANNELS, kernel, **how)
    more = draw(st.integers(0, stride - 1))
    return lambda g, x: g.conv_transpose(
        x, CHANNELS, kernel, output_padding=more, **how
    )


@examples(40)
@given(data=st.data())
def test_windows_of_every_kind(data):
    layers = data.draw(st.lists(windows(), min_size=1, max_size=3))
    height = data.draw(st.integers(4, 19))
    shape = (data.draw(st.integers(1, 2)), CHANNELS, height, 5)
    try:
        graph = learning(layers, shape)
    except ValueError:  # an empty image
        assume(False)
    assume(max(np.prod(spec.shape) for spec in graph.tensors.values()) < 1e5)
    agrees(graph, (data.draw(st.integers(2, 9)),))


@examples(40)
@given(data=st.data())
def test_every_node_may_have_parts_of_its_own(data):
    graph = data.draw(training_graphs())
    parts = {node.name: data.draw(st.integers(1, 4)) for node in graph.nodes}
    given = feeds(graph)
    error, where = furthest(
        computed(split_height(graph, parts), given), computed(graph, given)
    )
    assert error < 1e-4, where


@pytest.mark.parametrize("shape", [(1, 4, 11, 5), (2, 4, 12, 3, 2), (2, 4, 9)])
def test_norms_of_samples_by_merged_statistics(shape):
    layers = [
        lambda g, x: g.relu(g.group_norm(g.conv(x, 4, 3, padding=1), 2)),
        lambda g, x: g.group_norm(x, 4),  # of every channel
        lambda g, x: g.conv(g.gelu(g.layer_norm(x)), 3, 3, padding=1),
        lambda g, x: g.group_norm(x, 1),
    ]
    graph = learning(layers, shape)
    cut = split_height(graph, 3)
    norms = {n.op for n in cut.nodes if n.op.startswith("group_norm")}
    assert not {"group_norm", "group_norm_grad"} & norms
    agrees(graph, (2, 3, 8))


def test_plans_keep_the_bits_of_norms_and_masks():
    layers = [
        lambda g, x: g.relu(g.group_norm(g.conv(x, 4, 3, padding=1), 2)),
        lambda g, x: g.dropout(g.max_pool(x, 2), 0.3),
        lambda g, x: g.upsample_nearest(g.layer_norm(g.conv(x, 4, 3, padding=1)), 2),
    ]
    bench = Bench.of(split_height(learning(layers, (1, 2, 16, 8), "float32"), 4))
    kept = bench.run(bench.kept())
    for seed in (1, 2, 3):
        plan = bench.plan(bench.random_residency(seed), part=seed / 4)
        same(bench.run(plan.schedule, watcher=RaceDetector()), kept)


def test_norms_of_samples_stay_one_along_the_batch():
    """Samples are normalised on their own, which couples no batch."""
    layers = [lambda g, x: g.group_norm(g.conv(x, 4, 3, padding=1), 2)]
    graph = learning(layers, (4, 2, 6, 6))
    ops = [node.op for node in split_batch(graph, 2).nodes]
    assert ops.count("group_norm") == ops.count("group_norm_grad") == 2
    assert not couples_batch(graph)


@examples(40)
@given(data=st.data())
def test_masks_margins_and_boxes(data):
    """Dropout's masks are the whole image's; zeros around it and boxes of it move."""
    around = st.tuples(*[st.integers(0, 3)] * 2)

    def layer(kind):
        rows, columns = data.draw(around), data.draw(around)
        if kind == "dropout":
            return lambda g, x: g.dropout(x, 0.5)
        before, after = (0, 0, rows[0], columns[0]), (0, 0, rows[1], columns[1])
        if kind == "pad":
            return lambda g, x: g.pad(x, before, after)

        def box(g, x):
            stops = [n - m for n, m in zip(g.shape(x), after, strict=True)]
            return g.slice(x, before, stops)

        return box

    kinds = st.lists(st.sampled_from(["dropout", "pad", "box"]), min_size=1, max_size=4)
    layers = [layer(kind) for kind in data.draw(kinds)]
    shape = (data.draw(st.integers(1, 2)), CHANNELS, data.draw(st.integers(4, 19)), 8)
    try:
        graph = learning(layers, shape)
    except ValueError:  # an empty box
        assume(False)
    agrees(graph, (data.draw(st.integers(2, 9)),))


def test_volumes_are_cut_along_their_depth():
    layers = [
        lambda g, x: g.relu(g.batch_norm(g.conv(x, 3, 3, padding=1))),
        lambda g, x: g.max_pool(x, 2),
        lambda g, x: g.conv_transpose(x, 2, 2, stride=2),
    ]
    agrees(learning(layers, (1, CHANNELS, 8, 6, 4)), (2, 3, 8))


def test_lines_are_images_too():
    layers = [lambda g, x: g.gelu(g.conv(x, 3, 3, padding=1, dilation=1))]
    agrees(learning(layers, (2, CHANNELS, 9)), (2, 3, 8))


@pytest.mark.parametrize("name", NAMES)
def test_every_plan_keeps_the_bits_of_the_strips(name):
    bench = Bench.of(split_height(step(name), 3))
    kept = bench.run(bench.kept())
    recomputed = 0
    for seed in (1, 2):
        plan = bench.plan(bench.random_residency(seed), part=seed / 4)
        recomputed += sum("~" in n.name for n in plan.schedule.graph.nodes)
        same(bench.run(plan.schedule, watcher=RaceDetector()), kept)
    assert recomputed


def test_rows_of_strips_are_stored_once_and_read_beyond():
    layers = [lambda g, x: g.relu(g.conv(x, 3, 3, padding=1))]
    cut = split_height(learning(layers, (1, CHANNELS, 8, 8)), 2)
    nodes = cut.by_name
    problems = [
        node.attrs["problem"]
        for node in cut.nodes
        if node.name.startswith("conv.1/conv@")
    ]
    assert [problem.x_shape[2] for problem in problems] == [6, 6]
    assert {problem.padding for problem in problems} == {(0, 1)}
    (first,) = (
        n for n in cut.nodes if n.name == nodes["conv.1/conv@0"].inputs[0] + ":join"
    )
    assert first.attrs["before"] == 1  # a row of zeros above the image
    assert first.attrs["parts"] == ((0, 4), (0, 1))


def test_of_a_neighbour_only_rows_are_kept():
    """They are copied behind the node that last touched it: it can go by then."""
    layers = [lambda g, x: g.relu(g.conv(x, 3, 3, padding=1))]
    cut = split_height(learning(layers, (1, CHANNELS, 16, 8)), 4)
    (name,) = (n.inputs[0] for n in cut.nodes if n.name == "conv.1/conv@1")
    places = {node.name: place for place, node in enumerate(cut.nodes)}
    join = cut.nodes[places[f"{name}:join"]]
    assert [cut.tensors[t].shape[2] for t in join.inputs] == [1, 4, 1]
    above, _, below = join.inputs
    first, last = (cut.nodes[places[f"{t}:join"]] for t in (above, below))
    assert [node.attrs["parts"] for node in (first, last)] == [((3, 4),), ((0, 1),)]
    reads = [p for p, n in enumerate(cut.nodes) if first.inputs[0] in n.inputs]
    assert places[first.name] - 1 in reads
    assert min(reads) < places[first.name] < places[join.name]


def test_strips_run_as_far_ahead_as_windows_reach():
    """Three nodes, two of which read a row of the next slice."""
    ends = [4, 8, 12, 16]
    names = ("a", "b", "c")
    reads = [
        [{}] * 4,
        [{"a": stop + 1} for stop in ends],
        [{"b": stop + 1} for stop in ends],
    ]
    order = list(interleave_slices(reads, [{name: ends} for name in names]))
    assert order[:6] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0)]
    assert order[6:9] == [(0, 3), (1, 2), (2, 1)]
    assert len(set(order)) == len(order) == 12


def test_without_halos_slices_run_one_after_the_other():
    reads = [[{}, {}], [{"a": 2}, {"a": 4}]]
    order = list(interleave_slices(reads, [{"a": [2, 4]}, {"b": [2, 4]}]))
    assert order == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_the_head_of_a_classifier_stays_whole():
    graph = training_graph(get_model("vgg16")(1, image=64, classes=3))
    able = cuttable(graph, along_height(graph))
    whole = {node.op for node in graph.nodes if node.name not in able}
    assert {"matmul", "reshape", "softmax_cross_entropy", "dropout"} <= whole
    assert not {"conv", "max_pool", "max_pool_grad"} & whole


def test_what_has_no_images_is_refused():
    g = GraphBuilder()
    x, label = g.input("x", (4, 6)), g.input("label", (4,), "int64")
    graph = training_graph(g.build(g.softmax_cross_entropy(g.linear(x, 3), label)))
    with pytest.raises(ValueError, match="no images"):
        split_height(graph, 2)


def test_weights_are_no_images():
    g = GraphBuilder()
    x, label = g.input("x", (1, 2, 6, 6)), g.input("label", (1, 6, 6), "int64")
    w = g.scale(g.parameter("w", (3, 2, 3, 3), Constant(0.1)), 2.0)
    problem = ConvProblem(
        direction="forward", x_shape=(1, 2, 6, 6), w_shape=(3, 2, 3, 3), padding=1
    )
    y = g.append("conv", (x, w), (1, 3, 6, 6), problem=problem)
    graph = training_graph(g.build(g.softmax_cross_entropy(y, label)))
    assert "scale" not in cuttable(graph, along_height(graph))
    agrees(graph, (2, 3), 1e-6)


@pytest.mark.parametrize("throughout", [False, True])
@pytest.mark.parametrize("name", ["resnet20", "unet3d"])
def test_a_network_answers_patch_by_patch(name, throughout):
    """Its largest layers or all are in strips, so that little is there at once."""
    sizes = {"image": 32 if name == "resnet20" else 8}
    forward = narrow_model(name)(1, dtype="float64", training=False, **sizes)
    graph = up_to_answers(forward)
    assert [spec.name for spec in graph.with_role(Role.INPUT)] == ["image"]
    given = random_feeds(graph)
    expected = computed(graph, given)
    cut = Cutting(4, "height", throughout=throughout).cut(graph)
    assert len(cut.nodes) > (3 if throughout else 1) * len(graph.nodes)
    error, where = furthest(computed(cut, given), expected)
    assert error <= 1e-12, where
    whole, patches = (
        peak_bytes(g) - sum(g.tensors[s.name].nbytes for s in g.with_role(*PERSISTENT))
        for g in (graph, cut)
    )
    if name == "resnet20":  # which has no long skips
        assert patches < 0.9 * whole


def test_a_network_without_answers_is_refused():
    g = GraphBuilder()
    graph = g.build(g.relu(g.input("image", (1, 3))))
    with pytest.raises(ValueError, match="predictions are unknown"):
        up_to_answers(graph)


def test_narrow_u_nets_are_the_originals_at_their_width():
    assert narrow_unet2d(64)(1) == unet2d(1)
    assert narrow_unet3d(32)(1) == unet3d(1)
    counts = [narrow_unet2d(width)(1).parameter_count for width in (4, 8, 64)]
    assert counts == sorted(counts)
    with pytest.raises(ValueError, match="channels must be at least 1"):
        narrow_unet3d(0)


def test_sides_of_an_image_differ_and_parts_do_not_divide_them():
    network = narrow_unet2d(2)(1, image=(3, 48, 80), dtype="float64")
    agrees(training_graph(network), (5, 7))
