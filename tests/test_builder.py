"""Layers of the builder: shapes by definition, names, and what is refused."""

import inspect
import math
import re

import pytest
from hypothesis import assume, given, strategies as st

from mucudnn.ir import layers
from mucudnn.ir.builder import GraphBuilder
from mucudnn.ir.initializers import Constant, HeNormal, Normal
from mucudnn.ir.tensor import Role

IMAGE = (2, 6, 9, 8)
HELPERS = {"biased", "common_shape"}


def builder(*shapes, **options):
    g = GraphBuilder(**options)
    return g, *(g.input(f"x{i}", shape) for i, shape in enumerate(shapes))


def layer_functions():
    for name, function in inspect.getmembers(layers, inspect.isfunction):
        ours = function.__module__ == layers.__name__ and not name.startswith("_")
        if ours and name not in HELPERS:
            yield name, function


@pytest.mark.parametrize(("name", "function"), [*layer_functions()])
def test_every_layer_is_a_method(name, function):
    assert vars(GraphBuilder)[name] is function
    first = next(iter(inspect.signature(function).parameters.values()))
    assert first.annotation == "GraphBuilder"


def axes(rank):
    """Of an image and a window: size, kernel, stride, padding, dilation."""
    sizes = (st.integers(1, 7), *(st.integers(1, 3) for _ in range(2)))
    one = st.tuples(*sizes, st.integers(0, 2), st.integers(1, 2))
    return st.lists(one, min_size=rank, max_size=rank)


@given(st.integers(1, 3).flatmap(axes), st.sampled_from([1, 2]))
def test_a_transposed_convolution_undoes_the_shape_of_a_convolution(image, groups):
    size, kernel, stride, padding, dilation = zip(*image, strict=True)
    spans = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    over = [n + 2 * p - s for n, p, s in zip(size, padding, spans, strict=True)]
    assume(min(over) >= 0)
    window = {"stride": stride, "padding": padding, "dilation": dilation}
    g, x = builder((2, 4, *size))
    y = g.conv(x, 6, kernel, groups=groups, **window)
    assert g.shape(y) == (
        *(2, 6),
        *(n // step + 1 for n, step in zip(over, stride, strict=True)),
    )
    missing = [n % step for n, step in zip(over, stride, strict=True)]
    back = g.conv_transpose(
        y, 4, kernel, groups=groups, output_padding=missing, **window
    )
    assert g.shape(back) == g.shape(x)


@given(*(st.integers(1, top) for top in (12, 4, 5)), st.integers(0, 2), st.booleans())
def test_pooling_leaves_a_number_for_every_window(n, k, step, pad, ceil_mode):
    assume(2 * pad <= k <= n + 2 * pad)
    whole = [s for s in range(0, n + 2 * pad, step) if s + k <= n + 2 * pad]
    begun = [s for s in range(0, n + 2 * pad, step) if s < n + pad]
    partial = ceil_mode and whole[-1] + k < n + 2 * pad and len(begun) > len(whole)
    g, x = builder((2, 3, n))
    for pool in (g.max_pool, g.avg_pool):
        y = pool(x, k, step, pad, ceil_mode=ceil_mode)
        assert g.shape(y) == (2, 3, len(whole) + partial)


@given(st.data())
def test_a_box_of_a_padded_tensor_is_the_tensor(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    before, after = (
        [data.draw(st.integers(0, 3)) for _ in shape] for _ in ("before", "after")
    )
    g, x = builder(shape)
    padded = g.pad(x, before, after)
    stops = [b + n for b, n in zip(before, shape, strict=True)]
    assert g.shape(g.slice(padded, before, stops)) == shape
    assert math.prod(g.shape(g.flatten(padded))) == math.prod(g.shape(padded))


def test_names_count_up_within_their_scope():
    g, x = builder(IMAGE)
    for _ in range(2):
        with g.scope("block"):
            g.relu(g.relu(g.conv(x, 4, 1)))
    g.relu(x)
    with g.scope("outer"), g.scope("inner"):
        g.relu(x)
    assert [node.name for node in g.nodes if node.op == "relu"] == [
        *("block/relu", "block/relu.1", "block.1/relu", "block.1/relu.1"),
        *("relu", "outer/inner/relu"),
    ]
    assert list(g.initializers) == [
        f"{block}/conv/{name}"
        for block in ("block", "block.1")
        for name in ("weight", "bias")
    ]


def test_parameters_start_as_asked():
    g, x = builder(IMAGE)
    g.conv(x, 4, 1, bias=Constant(2.0), initializer=Normal(0.5))
    g.conv_transpose(x, 4, 1, bias=False)
    g.linear(g.flatten(x), 3, bias=Normal(0.1))
    assert g.initializers == {
        "conv/weight": Normal(0.5),
        "conv/bias": Constant(2.0),
        "conv_transpose/weight": HeNormal(),
        "linear/weight": HeNormal(),
        "linear/bias": Normal(0.1),
    }


def test_dropouts_share_a_step_and_no_mask_and_statistics_change_in_training_only():
    g, x = builder(IMAGE, seed=7)
    for p in (0.5, 0.0, 0.5):
        x = g.dropout(x, p)
    assert [node.attrs["seed"] for node in g.nodes] == [7, 8]
    assert {node.inputs[1] for node in g.nodes} == {"step"}
    for training in (True, False):
        g, x = builder(IMAGE, training=training)
        assert (g.dropout(x) == x) is not training
        g.batch_norm(x)
        states = {s.name for s in g.tensors.values() if s.role is Role.STATE}
        assert set(g.nodes[-1].mutates) == (states - {"step"} if training else set())


def test_a_cast_is_the_only_layer_that_changes_the_data_type():
    g, x = builder(IMAGE, dtype="float64")
    half = g.cast(x, "float16")
    y = g.batch_norm(g.relu(half))
    assert {g.spec(name).dtype for name in (half, y)} == {"float16"}
    assert g.spec(f"{y}:mean").dtype == "float64"  # as the parameters
    assert g.nodes[0].attrs == {}


def test_an_operation_of_ones_own():
    g, x = builder(IMAGE)
    saved = (("mask", (3,), "uint8"),)
    y = g.append("mine", (x,), (5, 5), saved, dtype="float64", factor=3)
    graph = g.build(y)
    (node,) = graph.nodes
    assert (node.op, node.outputs, dict(node.attrs)) == (
        *("mine", ("mine", "mine:mask")),
        {"factor": 3},
    )
    assert graph.tensors["mine"].nbytes == 200
    assert graph.tensors["mine:mask"].nbytes == 3
    g.conv(x, 3, 1)  # what is built stays as it was
    assert (len(graph.nodes), len(graph.tensors)) == (1, 3)
    assert not graph.initializers


REFUSED = [
    (lambda g, x: g.conv("y", 3, 1), "there is no tensor 'y'"),
    (lambda g, x: g.conv(x, 3, (1, 1, 1)), "3 entries for 2 axes"),
    (lambda g, x: g.conv(x, 3, 99), "padded input"),
    (lambda g, x: g.conv(x, 4, 3, groups=5), "5 group"),
    (lambda g, x: g.conv_transpose(x, 3, 3, output_padding=1), "below stride (1, 1)"),
    (lambda g, x: g.linear(x, 3), "got (2, 6, 9, 8); flatten it first"),
    (lambda g, x: g.max_pool(x, 10), "does not fit an image of 9"),
    (lambda g, x: g.max_pool(x, 2, padding=2), "more than half the kernel"),
    (lambda g, x: g.max_pool(x, 16, 1, 8), "more than 255 values"),
    (lambda g, x: g.group_norm(x, 4), "6 channels cannot be divided into 4 groups"),
    (lambda g, x: g.leaky_relu(x, 0), "slope must be above 0, got 0"),
    (lambda g, x: g.dropout(x, 1), "below 1, got 1"),
    (lambda g, x: g.add(x, "small"), "'small' has (2, 3)"),
    (lambda g, x: g.multiply("small", x), "'small' has shape (2, 3)"),
    (lambda g, x: g.mean_squared_error(x, "small"), "'small' has (2, 3)"),
    (lambda g, x: g.concat([x, "small"]), "cannot concatenate"),
    (lambda g, x: g.slice("small", (0, 1), (2, 4)), "no box from (0, 1) to (2, 4)"),
    (lambda g, x: g.pad("small", (0, -1), (0, 0)), "cannot pad (2, 3)"),
    (lambda g, x: g.reshape("small", (7,)), "(2, 3) cannot be viewed as (7,)"),
    (lambda g, x: g.upsample_nearest(x, 0), "scale must be at least 1"),
    (lambda g, x: g.softmax_cross_entropy("small", x), "labels must be int64 (2,)"),
    (lambda g, x: g.accuracy("small", "small"), "got float32 (2, 3)"),
    (lambda g, x: g.input(x, IMAGE), "'x0' is already declared"),
]


@pytest.mark.parametrize(("layer", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_a_refusal_says_why_and_leaves_the_builder_as_it_was(layer, message):
    drafts = [builder(IMAGE) for _ in range(2)]
    for g, _ in drafts:
        g.input("small", (2, 3))
    (g, x), (fresh, y) = drafts
    with pytest.raises(ValueError, match=re.escape(message)):
        layer(g, x)
    assert g.build(g.conv(x, 3, 3)) == fresh.build(fresh.conv(y, 3, 3))
