"""Filters with channels last that updates keep, instead of a turn in every step."""

from dataclasses import replace

import numpy as np
import pytest

from mucudnn.backends import get_backend
from mucudnn.backends.cpu.kernels import bind as bind_cpu
from mucudnn.backends.cpu.threads import Workers
from mucudnn.backends.cuda.kernels import bind
from mucudnn.ir.optimizers import OPTIMIZERS
from mucudnn.ir.tensor import Role
from mucudnn.models import get_model
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.layouts import with_layout
from mucudnn.passes.graph.precision import copies_of_parameters
from mucudnn.passes.graph.training_step import StepChoices, StepRecipe, build_step
from mucudnn.passes.graph.updates import with_computed_gradients
from mucudnn.runtime.training.parameters import StateStore
from tests.cuda_emulator import COMPILER, Emulator
from tests.kernel_cases import ADAM, normal
from tests.test_cuda_training import losses, stand_in
from tests.training_cases import network, trainer

emulated = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler: g++")
NAMES = ("adagrad", "adam", "momentum", "rmsprop", "sgd")
SHAPES = (
    (5, 3, 3, 3),
    (300, 2, 3, 5),
    (2, 513, 3, 3),
    (1, 7, 11),
    (3, 1, 2),
    (0, 3, 3),
)


def step(forward, precision="float16", *, parts=1, shared=False, **choices):
    recipe = StepRecipe(
        optimizer=OPTIMIZERS["momentum"],
        update_when="late",
        micro_batches=parts,
        precision=precision,
        shared_gradients=shared,
    )
    last = StepChoices(
        layout=lambda graph, trains: with_layout(graph, "NHWC"), **choices
    )
    return build_step(forward, recipe, last).steps[-1]


def turns(graph):
    """What is turned of parameters, or back for their updates."""
    parameters = {s.name for s in graph.with_role(Role.PARAMETER)}
    filters = {graph.tensors[n].shape for n in parameters}
    ops = ("to_channels_last", "to_channels_first")
    return [
        node.name
        for node in graph.nodes
        if node.op in ops
        and {graph.tensors[t].shape for t in (*node.inputs, *node.outputs)} & filters
    ]


@pytest.mark.parametrize("precision", [None, "float16"])
@pytest.mark.parametrize("model", ["resnet18", "unet2d"])
def test_no_step_turns_a_filter_that_an_update_keeps(model, precision):
    graph = step(get_model(model)(2), precision)
    assert turns(graph) == []
    assert turns(step(get_model(model)(2), precision, keep_copies=lambda step: False))
    copies = copies_of_parameters(graph)
    for node in graph.nodes:
        if node.op == "conv":
            assert node.attrs["problem"].layout == "NHWC"
        if node.attrs.get("turned") and node.attrs.get("copied"):
            w, dw = (graph.tensors[name] for name in node.inputs[:2])
            copy = graph.tensors[copies[w.name]]
            assert copy.shape == dw.shape == (w.shape[0], *w.shape[2:], w.shape[1])
            assert (copy.dtype, copy.layout) == (dw.dtype, "NHWC")
    read = {name for node in graph.nodes for name in node.tensors}
    made = {name for node in graph.nodes for name in node.outputs}
    for name in set(copies.values()):
        assert name in read
        assert name not in made
    assert {n for n, s in graph.tensors.items() if s.role is Role.ACTIVATION} <= made


@pytest.mark.parametrize("more", [{"parts": 2}, {"shared": True}])
def test_gradients_that_are_added_up_have_the_layout_of_parameters(more):
    """By parts of a step, or by ranks, whose layouts may be others."""
    graph = step(network(4), **more)
    for w, gradient in graph.gradients.items():
        assert graph.tensors[gradient].shape == graph.tensors[w].shape
        assert graph.tensors[gradient].layout == "NCHW"
    assert not any(node.attrs.get("turned") for node in graph.nodes)


def test_a_gradient_that_is_returned_is_turned_back():
    plain = training_graph(with_layout(network(4), "NHWC"))
    found = with_computed_gradients(plain)
    turned = {w for w, g in found.gradients.items() if g != plain.gradients[w]}
    assert turned
    returned = replace(plain, outputs=(*plain.outputs, *plain.gradients.values()))
    assert with_computed_gradients(returned).gradients == plain.gradients
    assert with_computed_gradients(plain, transposed=False).gradients == plain.gradients


def updates(op, turned, dtype, narrow):
    """Calls of an update with copies, all in the order of weights or all turned."""
    states = {"sgd": 0, "adam": 2}.get(op, 1)
    attrs = ADAM | {"momentum": 0.9, "nesterov": True, "alpha": 0.9, "copied": True}
    attrs |= {"gradient_scale": 0.25} | ({"turned": True} if turned else {})
    told = [np.array(0.1, dtype), *([np.array(5)] if op == "adam" else [])]
    for i, shape in enumerate(SHAPES):
        w, dw, *state = (normal(*shape, seed=9 * i + k, dtype=dtype) for k in range(4))
        kept = [np.abs(s) for s in state[:states]]
        dw, copy = dw.astype(narrow), np.full(shape, 7, narrow)
        if turned:
            dw, copy = (np.ascontiguousarray(np.moveaxis(a, 1, -1)) for a in (dw, copy))
        yield [w, dw, *told, *kept, copy], attrs | {"weight_decay": 0.02 * (i % 2)}


def same(plain, turned):
    for (before, _), (after, _) in zip(plain, turned, strict=True):
        assert np.array_equal(after[-1], np.moveaxis(before[-1], 1, -1))
        for place in {*range(len(before) - 1)} - {1}:
            assert before[place].tobytes() == after[place].tobytes()


@pytest.mark.parametrize("op", NAMES)
def test_the_cpus_updates_turn(op):
    kernel = bind_cpu(Workers(2))[op]
    plain, turned = (list(updates(op, t, "f4", "f2")) for t in (False, True))
    for inputs, attrs in (*plain, *turned):
        kernel.run(inputs, [], attrs, None)
    same(plain, turned)


@emulated
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("op", NAMES)
def test_the_gpus_updates_turn(op, together):
    """To the last bit what the same update leaves without turning."""
    kernel = bind(Emulator())[op]
    plain, turned = (list(updates(op, t, "f8", "f4")) for t in (False, True))
    for calls in (plain, turned):
        if together:
            kernel.run_batched([(inputs, [], attrs, None) for inputs, attrs in calls])()
        else:
            for inputs, attrs in calls:
                kernel.run(inputs, [], attrs, None)
    same(plain, turned)


@emulated
def test_those_that_turn_and_those_that_do_not_are_one_launch():
    emulator = Emulator()
    plain, turned, expected = (
        list(updates("momentum", t, "f8", "f4")) for t in (False, True, False)
    )
    rate = plain[0][0][2]
    for inputs, _ in turned:
        inputs[2] = rate
    mixed = [*plain[::2], *turned[1::2]]
    launches = []
    prepared = emulator.prepared
    emulator.prepared = lambda one: (launches.append(one), prepared(one))[1]
    bind(emulator)["momentum"].run_batched([(i, [], a, None) for i, a in mixed])()
    assert len(launches) == 1
    for inputs, attrs in expected:
        bind_cpu(Workers(1))["momentum"].run(inputs, [], attrs, None)
    for (one, _), (other, _) in zip(
        mixed, [*expected[::2], *expected[1::2]], strict=True
    ):
        np.testing.assert_allclose(one[0], other[0], rtol=1e-12)


def test_a_copy_is_made_and_loaded_turned():
    graph = step(network(4))
    state = StateStore(get_backend("cpu").device, graph, seed=3)
    copies = copies_of_parameters(graph)
    turned = {w for w, c in copies.items() if graph.tensors[c].layout == "NHWC"}
    assert turned
    for w, copy in copies.items():
        value = state[w].astype(np.float16)
        value = np.moveaxis(value, 1, -1) if w in turned else value
        assert np.array_equal(state[copy], value)
    w = next(iter(turned))
    values = normal(*state[w].shape, dtype=np.float32)
    state.load({w: values}, [w])
    assert np.array_equal(
        state[copies[w]], np.moveaxis(values, 1, -1).astype(np.float16)
    )


@emulated
@pytest.mark.parametrize("precision", [None, "float16"])
def test_a_gpu_trains_with_turned_copies(precision, monkeypatch):
    _, gpu = stand_in(monkeypatch)
    found, made = losses(gpu, precision=precision, layout="NHWC")
    assert turns(made.graph) == []
    assert any(node.attrs.get("turned") for node in made.graph.nodes)
    _, gpu = stand_in(monkeypatch)
    expected, _ = losses(gpu, precision=precision)
    tolerance = 1e-5 if precision is None else 5e-3
    np.testing.assert_allclose(found, expected, rtol=tolerance)


def test_weights_are_saved_with_channels_first():
    made = trainer(layout="NHWC")
    copies = copies_of_parameters(made.graph)
    assert copies
    saved = made.state.save()
    assert not saved.keys() & set(copies.values())
    for w in copies:
        assert saved[w].shape == made.graph.tensors[w].shape
