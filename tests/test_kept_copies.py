"""Copies of parameters that updates keep, narrow or with channels last.

They save a cast or a turn in every step.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from mucudnn.backends import get_backend
from mucudnn.backends.cpu.kernels import bind as bind_cpu
from mucudnn.backends.cpu.threads import Workers
from mucudnn.backends.cuda.kernels import bind
from mucudnn.ir.graph import Phase
from mucudnn.ir.initializers import CopyOf
from mucudnn.ir.optimizers import OPTIMIZERS, DynamicLossScale
from mucudnn.ir.tensor import Role
from mucudnn.models import get_model
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.layouts import with_layout
from mucudnn.passes.graph.precision import copies_of_parameters
from mucudnn.passes.graph.training_step import StepChoices, StepRecipe, build_step
from mucudnn.passes.graph.updates import with_computed_gradients
from mucudnn.passes.liveness import dependencies
from mucudnn.runtime.training.budget import MemoryBudget
from mucudnn.runtime.training.parameters import StateStore
from tests.cuda_emulator import COMPILER, Emulator
from tests.kernel_cases import ADAM, normal
from tests.test_cuda_training import losses, stand_in
from tests.training_cases import examples, network

pytestmark = pytest.mark.usefixtures("short_searches")
emulated = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler: g++")


NAMES = ("adagrad", "adam", "momentum", "rmsprop", "sgd")
SHAPES = (
    *((5, 3, 3, 3), (300, 2, 3, 5), (2, 513, 3, 3)),
    *((1, 7, 11), (3, 1, 2), (0, 3, 3)),
)


def step(
    forward, optimizer="momentum", *, layout="NCHW", keep=True, when="late", **more
):
    """The last graph of a step in half precision, unless another one is named."""
    recipe = {"precision": "float16", "update_when": when} | more
    choices = StepChoices(
        layout=lambda graph, trains: with_layout(graph, layout),
        keep_copies=lambda step: keep,
    )
    recipe = StepRecipe(optimizer=OPTIMIZERS[optimizer], **recipe)
    return build_step(forward, recipe, choices).steps[-1]


# What steps keep


@pytest.mark.parametrize("scale", [None, DynamicLossScale()])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_no_step_casts_a_weight_that_an_update_keeps_narrow(optimizer, scale):
    before = step(network(4), optimizer, keep=False, loss_scale=scale)
    graph = step(network(4), optimizer, loss_scale=scale)
    copies = copies_of_parameters(graph)
    products = {s.name for s in graph.with_role(Role.PARAMETER) if len(s.shape) > 1}
    assert set(copies) == products
    cast = {n.inputs[0] for n in before.nodes if n.op == "cast"}
    assert cast - {n.inputs[0] for n in graph.nodes if n.op == "cast"} == products
    for w, copy in copies.items():
        spec = graph.tensors[copy]
        assert (spec.role, spec.dtype) == (Role.STATE, "float16")
        (update,) = (n for n in graph.nodes if copy in n.mutates)
        assert update.mutates[0] == w
        assert update.inputs.index(copy) == len(update.inputs) - 1 - 2 * bool(scale)


@pytest.mark.parametrize("model", ["resnet18", "unet2d"])
def test_an_early_update_is_behind_all_that_read_the_copy(model):
    graph = step(get_model(model)(2), when="early")
    copies, waits = copies_of_parameters(graph), dependencies(graph)
    assert copies
    for position, node in enumerate(graph.nodes):
        if node.phase is Phase.UPDATE:
            continue
        for copy in set(copies.values()).intersection(node.inputs):
            (update,) = (i for i, n in enumerate(graph.nodes) if copy in n.mutates)
            assert position < update
            assert position in waits[update]


def test_totals_of_several_parts_are_wide_so_nothing_is_kept():
    assert not copies_of_parameters(step(network(4), micro_batches=2))
    graph = step(network(4), "sgd", precision=None)  # of one precision
    assert not any(isinstance(i, CopyOf) for i in graph.initializers.values())


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
    graph, unkept = (
        step(get_model(model)(2), layout="NHWC", precision=precision, keep=keep)
        for keep in (True, False)
    )
    assert turns(graph) == []
    assert turns(unkept)
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


@pytest.mark.parametrize("more", [{"micro_batches": 2}, {"shared_gradients": True}])
def test_gradients_that_are_added_up_have_the_layout_of_parameters(more):
    """By parts of a step, or by ranks, whose layouts may be others."""
    graph = step(network(4), layout="NHWC", **more)
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


# What updates write


def run_all(kernel, calls, *, together):
    if together:
        kernel.run_batched([(inputs, [], attrs, None) for inputs, attrs in calls])()
    else:
        for inputs, attrs in calls:
            kernel.run(inputs, [], attrs, None)


@pytest.fixture(
    params=[
        "cpu",
        pytest.param("gpu", marks=emulated),
        pytest.param("gpu, together", marks=emulated),
    ]
)
def machine(request):
    """Kernels, a type and a narrower one, and a way to run calls."""
    if request.param == "cpu":
        kernels, types = bind_cpu(Workers(2)), ("f4", "f2")
    else:
        kernels, types = bind(Emulator()), ("f8", "f4")
    return kernels, types, partial(run_all, together="together" in request.param)


def attrs_of(**more):
    common = {"momentum": 0.9, "nesterov": False, "alpha": 0.9, "gradient_scale": 0.25}
    return ADAM | common | more


def told_of(op, dtype):
    return [np.array(0.1, dtype), *([np.array(5)] if op == "adam" else [])]


def state_of(op, arrays):
    return [np.abs(a) for a in arrays[: {"sgd": 0, "adam": 2}.get(op, 1)]]


def copying(op, copied, dtype, narrow):
    """Calls of an update, all of them with a copy or without one, one not aligned."""
    attrs = attrs_of(copied=copied, weight_decay=0.0)
    for i, size in enumerate((3, 4100, 1, 8193)):
        rooms = [normal(size + 8, seed=9 * i + k, dtype=dtype) for k in range(4)]
        first = int(i == 3)
        w, dw, *state = (room[first : first + size] for room in rooms)
        copy = [np.full(size + 8, 7, narrow)[first : first + size]] if copied else []
        inputs = [w, dw.astype(narrow), *told_of(op, dtype), *state_of(op, state)]
        yield [*inputs, *copy], attrs


def run_both(machine, op, calls_of):
    """Pairs of equal calls that have run, the first of each without a change."""
    kernels, types, run = machine
    plain, changed = (list(calls_of(op, change, *types)) for change in (False, True))
    for calls in (plain, changed):
        run(kernels[op], calls)
    return zip(plain, changed, strict=True)


@pytest.mark.parametrize("op", NAMES)
def test_updates_keep_a_narrow_copy(op, machine):
    """The copy is of the type of the gradient, and nothing is written beside it."""
    for (before, _), (after, _) in run_both(machine, op, copying):
        for one, other in zip(before, after, strict=False):
            assert one.tobytes() == other.tobytes()
        assert np.array_equal(after[-1], after[0].astype(machine[1][1]))
        assert (after[-1].base[after[-1].size + 1 :] == 7).all()


def turning(op, turned, dtype, narrow):
    """Calls of an update with copies, all in the order of weights or all turned."""
    attrs = attrs_of(copied=True, nesterov=True) | ({"turned": True} if turned else {})
    told = told_of(op, dtype)
    for i, shape in enumerate(SHAPES):
        w, dw, *state = (normal(*shape, seed=9 * i + k, dtype=dtype) for k in range(4))
        dw, copy = dw.astype(narrow), np.full(shape, 7, narrow)
        if turned:
            dw, copy = (np.ascontiguousarray(np.moveaxis(a, 1, -1)) for a in (dw, copy))
        inputs = [w, dw, *told, *state_of(op, state), copy]
        yield inputs, attrs | {"weight_decay": 0.02 * (i % 2)}


@pytest.mark.parametrize("op", NAMES)
def test_updates_turn(op, machine):
    """To the last bit what the same update leaves without turning."""
    for (before, _), (after, _) in run_both(machine, op, turning):
        assert np.array_equal(after[-1], np.moveaxis(before[-1], 1, -1))
        for place in {*range(len(before) - 1)} - {1}:
            assert before[place].tobytes() == after[place].tobytes()


@emulated
def test_those_that_turn_and_those_that_do_not_are_one_launch():
    emulator = Emulator()
    plain, turned, expected = (
        list(turning("momentum", t, "f8", "f4")) for t in (False, True, False)
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


# Kept copies in training


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_a_copy_is_made_and_loaded_with_its_parameter(layout):
    graph = step(network(4), layout=layout)
    state = StateStore(get_backend("cpu").device, graph, seed=3)
    copies = copies_of_parameters(graph)
    every = {name: state[name] for name in state}
    assert every.keys() - state.save().keys() == set(copies.values())
    shapes = {w: graph.tensors[w].shape for w in copies}
    assert {w: state.save()[w].shape for w in copies} == shapes
    turned = {w for w, copy in copies.items() if graph.tensors[copy].layout == "NHWC"}
    assert bool(turned) == (layout == "NHWC")

    def converted(w, values):
        narrow = values.astype(np.float16)
        return np.moveaxis(narrow, 1, -1) if w in turned else narrow

    for w, copy in copies.items():
        assert every[w].any()
        assert np.array_equal(every[copy], converted(w, every[w]))
    w = next(iter(turned or copies))
    values = normal(*every[w].shape, dtype=np.float32)
    state.load({w: values}, [w])
    assert np.array_equal(every[copies[w]], converted(w, values))
    with pytest.raises(ValueError, match="unknown"):
        state.load(state.save() | {copies[w]: every[copies[w]]})


@emulated
def test_within_a_budget_copies_are_kept_where_all_fits(monkeypatch):
    _, gpu = stand_in(monkeypatch)
    free, made = losses(gpu, precision="float16")
    assert copies_of_parameters(made.graph)
    for share, kept in ((1.5, True), (0.7, False)):
        nbytes = int(made.peak_bytes * share)
        budget = MemoryBudget(nbytes=nbytes, convolutions="fixed")
        _, gpu = stand_in(monkeypatch, lazy=True)
        found, within = losses(gpu, precision="float16", budget=budget)
        assert bool(copies_of_parameters(within.graph)) == kept
        assert within.peak_bytes <= nbytes
        assert np.array_equal(found, free)


@emulated
@pytest.mark.slow
@pytest.mark.parametrize("scale", [None, DynamicLossScale(2.0**30, backoff=2.0**-10)])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the stand-in
def test_steps_and_checkpoints_know_masters_only(scale, monkeypatch):
    """The same bits as with casts, whatever is loaded in between."""
    more = {"precision": "float16", "loss_scale": scale}
    _, gpu = stand_in(monkeypatch)
    found, kept = losses(gpu, **more)
    _, gpu = stand_in(monkeypatch)
    budget = MemoryBudget(nbytes=int(kept.peak_bytes * 0.7), convolutions="fixed")
    expected, cast = losses(gpu, budget=budget, **more)  # tight: weights are cast
    copies = copies_of_parameters(kept.graph)
    assert copies
    assert not copies_of_parameters(cast.graph)
    assert np.array_equal(found, expected)
    saved = kept.state.save()
    assert saved.keys() == cast.state.save().keys()
    assert not saved.keys() & set(copies.values())
    assert all(np.array_equal(v, saved[n]) for n, v in cast.state.save().items())
    kept.state.load({name: np.zeros_like(value) for name, value in saved.items()})
    kept.state.load(saved)
    images, labels = examples(8)
    assert kept.step(images, labels).loss == cast.step(images, labels).loss


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
