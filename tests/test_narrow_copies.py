"""Narrow copies of parameters that updates keep, instead of a cast in every step."""

import numpy as np
import pytest

from mucudnn.backends import get_backend
from mucudnn.backends.cpu.kernels import KERNELS as CPU_KERNELS, bind as bind_cpu
from mucudnn.backends.cpu.threads import Workers
from mucudnn.backends.cuda.kernels import KERNELS, bind
from mucudnn.ir.graph import Phase
from mucudnn.ir.initializers import CopyOf
from mucudnn.ir.optimizers import OPTIMIZERS, DynamicLossScale
from mucudnn.ir.tensor import Role
from mucudnn.models import get_model
from mucudnn.passes.graph.precision import copies_of_parameters
from mucudnn.passes.graph.training_step import StepChoices, StepRecipe, build_step
from mucudnn.passes.liveness import dependencies
from mucudnn.runtime.training.budget import MemoryBudget
from mucudnn.runtime.training.parameters import StateStore
from tests.cuda_emulator import COMPILER, Emulator
from tests.kernel_cases import ADAM, normal
from tests.test_cuda_training import losses, stand_in
from tests.training_cases import examples, network

emulated = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler: g++")


def step(forward, optimizer="momentum", *, keep=True, parts=1, scale=None, when="late"):
    recipe = StepRecipe(
        optimizer=OPTIMIZERS[optimizer],
        update_when=when,
        micro_batches=parts,
        precision="float16",
        loss_scale=scale,
    )
    choices = StepChoices(keep_copies=lambda step: keep)
    return build_step(forward, recipe, choices).steps[-1]


@pytest.mark.parametrize("scale", [None, DynamicLossScale()])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_no_step_casts_a_weight_that_an_update_keeps_narrow(optimizer, scale):
    before = step(network(4), optimizer, keep=False, scale=scale)
    graph = step(network(4), optimizer, scale=scale)
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
    assert not copies_of_parameters(step(network(4), parts=2))


def test_a_network_in_one_precision_has_none():
    recipe = StepRecipe(optimizer=OPTIMIZERS["sgd"], update_when="late")
    (graph,) = build_step(network(4), recipe).steps
    assert not any(isinstance(i, CopyOf) for i in graph.initializers.values())


def updates(op, copied, dtype="f4", narrow="f2"):
    """Calls of an update, all of them with a copy or without one, one not aligned."""
    states = {"sgd": 0, "adam": 2}.get(op, 1)
    attrs = ADAM | {"momentum": 0.9, "nesterov": False, "alpha": 0.9, "copied": copied}
    attrs |= {"weight_decay": 0.0, "gradient_scale": 0.25}
    for i, size in enumerate((3, 4100, 1, 8193)):
        rooms = [normal(size + 8, seed=9 * i + k, dtype=dtype) for k in range(4)]
        first = int(i == 3)
        w, dw, *state = (room[first : first + size] for room in rooms)
        told = [np.array(0.1, dtype), *([np.array(5)] if op == "adam" else [])]
        kept = [np.abs(s) for s in state[:states]]
        copy = [np.full(size + 8, 7, narrow)[first : first + size]] if copied else []
        yield [w, dw.astype(narrow), *told, *kept, *copy], attrs


NAMES = ("adagrad", "adam", "momentum", "rmsprop", "sgd")


@pytest.mark.parametrize("op", NAMES)
def test_the_cpus_updates_keep_a_copy(op):
    kernel = bind_cpu(Workers(2))[op]
    for (plain, attrs), (given, kept) in zip(
        updates(op, False), updates(op, True), strict=True
    ):
        kernel.run(plain, [], attrs, None)
        kernel.run(given, [], kept, None)
        for one, other in zip(plain, given, strict=False):
            assert one.tobytes() == other.tobytes()
        assert np.array_equal(given[-1], given[0].astype(given[-1].dtype))
        assert (given[-1].base[-7:] == 7).all()


@emulated
@pytest.mark.parametrize("op", NAMES)
def test_the_gpus_updates_keep_a_copy(op):
    """One by one and together; the copy is of the type of the gradient."""
    assert op in KERNELS
    assert op in CPU_KERNELS
    kernel = bind(Emulator())[op]
    for together in (False, True):
        plain, given = (
            list(updates(op, copied, "f8", "f4")) for copied in (False, True)
        )
        for calls in (plain, given):
            if together:
                kernel.run_batched([(inputs, [], a, None) for inputs, a in calls])()
            else:
                for inputs, attrs in calls:
                    kernel.run(inputs, [], attrs, None)
        for (before, _), (after, _) in zip(plain, given, strict=True):
            for one, other in zip(before, after, strict=False):
                assert one.tobytes() == other.tobytes()
            assert np.array_equal(after[-1], after[0].astype("f4"))
            assert (after[-1].base[after[-1].size + 1 :] == 7).all()


def test_a_copy_is_made_and_loaded_with_its_parameter():
    graph = step(network(4))
    state = StateStore(get_backend("cpu").device, graph, seed=3)
    copies = copies_of_parameters(graph)
    every = {name: state[name] for name in state}
    assert every.keys() - state.save().keys() == set(copies.values())
    for w, copy in copies.items():
        assert every[w].any()
        assert np.array_equal(every[copy], every[w].astype(np.float16))
    w, copy = next(iter(copies.items()))
    state.load({w: np.full_like(every[w], 0.1)}, [w])
    assert (every[copy] == np.float16(0.1)).all()
    with pytest.raises(ValueError, match="unknown"):
        state.load(state.save() | {copy: every[copy]})


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
