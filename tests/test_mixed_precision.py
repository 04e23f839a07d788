"""Narrow activations and logits, and the scale of their loss: the same training."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mucudnn import GraphBuilder, Tuner, optim
from mucudnn.backends import get_backend
from mucudnn.backends.cpu.kernels import bind as bind_cpu
from mucudnn.backends.cpu.threads import Workers
from mucudnn.errors import PlanningError
from mucudnn.ir.graph import Phase
from mucudnn.ir.optimizers import Adam, DynamicLossScale, Momentum, Sgd, loss_scale_of
from mucudnn.ir.tensor import Role
from mucudnn.models import get_model
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.inplace import in_place
from mucudnn.passes.graph.precision import COUNTS, to_mixed_precision
from mucudnn.passes.graph.training_step import StepRecipe, build_step
from mucudnn.passes.graph.updates import with_computed_gradients
from mucudnn.runtime.training.budget import MemoryBudget
from mucudnn.runtime.training.checkpoints import Checkpoints
from mucudnn.runtime.training.loop import fit
from mucudnn.runtime.training.trainer import Trainer
from tests.cuda_emulator import COMPILER
from tests.cupy_fake import StrictArray, on_cupy
from tests.kernel_cases import prepared, run
from tests.model_cases import random_feeds
from tests.plain_schedule import keep_all
from tests.schedule_oracle import verify
from tests.training_cases import Epochs, examples, network, trainer, tuner_of, weights

NARROW = ("float16", "bfloat16")
WIDE = ["float32"]


def resnet(**options):
    return get_model("resnet20")(4, **options)


@pytest.mark.parametrize("dtype", NARROW)
def test_activations_are_narrow_and_nothing_else(dtype):
    graph = training_graph(to_mixed_precision(resnet(), dtype), loss_scale=256.0)
    for node in graph.nodes:
        types = [graph.tensors[t].dtype for t in node.inputs]
        results = [graph.tensors[t].dtype for t in node.outputs]
        if node.op in ("conv", "matmul", "relu", "relu_grad", "add", "avg_pool"):
            assert {*types, *results} == {dtype}, node.name
        elif node.op == "batch_norm":
            assert (types, results) == ([dtype, *WIDE * 4], [dtype, *WIDE * 2])
        elif node.op == "batch_norm_grad":
            assert (types, results) == ([dtype] * 2 + WIDE * 3, [dtype, *WIDE * 2])
        elif node.op == "softmax_cross_entropy":
            assert (types, results) == ([dtype, "int64"], WIDE * 2)
        elif node.op == "accuracy":
            assert (types, results) == ([dtype, "int64"], WIDE)
        elif node.op == "softmax_cross_entropy_grad":
            assert (types, results) == ([*WIDE, "int64", *WIDE], [dtype])
    for spec in graph.with_role(Role.PARAMETER):
        assert spec.dtype == "float32"
        assert graph.tensors[graph.gradients[spec.name]].dtype == "float32"


def test_casts_are_few():
    """Weights to the narrow type, the images, what the loss reads; and back."""
    graph = training_graph(to_mixed_precision(resnet(), "bfloat16"))
    read = {node.inputs[0] for node in graph.nodes if node.op == "cast"}
    sizes = [graph.tensors[name].nbytes for name in read]
    weights = [s.nbytes for s in graph.with_role(Role.PARAMETER) if len(s.shape) > 1]
    assert sum(sizes) < 1.6 * sum(weights)


def test_what_a_graph_returns_keeps_its_type():
    g = GraphBuilder()
    x = g.input("x", (2, 3, 8, 8))
    y = g.relu(g.conv(x, 4, 3))
    z = g.max_pool(g.reshape(y, (2, 4, 36)), 2)
    graph = to_mixed_precision(g.build(y, z), "bfloat16")
    assert [graph.tensors[name].dtype for name in (y, z)] == WIDE * 2
    relu = graph.tensors[f"{y}:bfloat16"]
    assert relu.dtype == "bfloat16"
    (view,) = (n for n in graph.nodes if n.op == "reshape")
    assert graph.tensors[view.outputs[0]].alias == view.inputs[0] == relu.name


@pytest.mark.slow
def test_the_loss_scale_changes_no_step():
    labels = np.arange(4)
    images = np.random.default_rng(0).standard_normal((4, 3, 32, 32))
    weights = []
    for scale in (1.0, 1024.0):
        trainer = Trainer(
            resnet(dtype="float64"),
            tuner=tuner_of(),
            optimizer=Momentum(learning_rate=0.1),
            loss_scale=scale,
        )
        for _ in range(2):
            trainer.step(images, labels)
        weights.append(trainer.state.save())
    for name, value in weights[0].items():
        np.testing.assert_allclose(weights[1][name], value, rtol=1e-9, atol=1e-12)


def test_a_backend_without_the_type_says_so_and_one_with_it_runs():
    options = {"optimizer": Momentum(learning_rate=0.1), "precision": "float16"}
    with pytest.raises(PlanningError, match="float16"):
        Trainer(resnet(), tuner=Tuner(batch_policy="undivided"), **options)
    trainer = Trainer(resnet(), tuner=Tuner(backend=get_backend("null")), **options)
    images = np.zeros((4, 3, 32, 32), "f4")
    assert trainer.step(images, np.zeros(4, "i8")).images == 4


@pytest.mark.torch
def test_narrow_gradients_are_near_the_wide_ones():
    torch = pytest.importorskip("torch")
    from tests import torch_ops

    wide = resnet()
    feeds = random_feeds(wide)
    found = []
    for forward in (wide, to_mixed_precision(wide, "bfloat16")):
        graph = training_graph(forward)
        values = {name: torch.from_numpy(np.array(v)) for name, v in feeds.items()}
        with torch.no_grad():
            done = torch_ops.execute(graph, values)
        found.append({n: done[g].double() for n, g in graph.gradients.items()})
    for name, expected in found[0].items():
        error = (found[1][name] - expected).norm() / expected.norm()
        assert error < 0.25, name


def test_updates_read_gradients_as_they_were_computed():
    """Weights of products get narrow ones, uncast; what is returned or shared stays."""
    before = training_graph(to_mixed_precision(resnet(), "float16"))
    graph = with_computed_gradients(before)
    changed = {w for w, g in graph.gradients.items() if g != before.gradients[w]}
    products = {s.name for s in graph.with_role(Role.PARAMETER) if len(s.shape) > 1}
    assert changed == products
    for w, gradient in graph.gradients.items():
        assert graph.tensors[gradient].dtype == ("float16" if w in changed else WIDE[0])
        assert graph.tensors[gradient].shape == graph.tensors[w].shape
    assert len(before.nodes) - len(graph.nodes) == len(changed)
    kept = with_computed_gradients(
        replace(before, outputs=(*before.outputs, *before.gradients.values()))
    )
    assert kept.gradients == before.gradients
    plain = training_graph(resnet())
    assert with_computed_gradients(plain).nodes == plain.nodes


SHAPES = ((5, 8), (9, 7), (3, 4, 5, 6), (2, 1000), (2, 3, 1))


def answers(kernels, shape, dtype, wrap, count="f4"):
    """Loss, log-probabilities, gradient and right answers, of logits in a type."""
    rng = np.random.default_rng(2)
    x = rng.normal(0, 3, shape).astype("f2").astype(dtype)
    labels = rng.integers(0, shape[1], (shape[0], *shape[2:]))
    wide = np.promote_types(dtype, "f4")
    loss, p = np.full((), np.nan, wide), np.full(shape, np.nan, wide)
    dx, right = np.full(shape, np.nan, dtype), np.full((), 113, count)
    scale = np.full((), 64, wide)
    calls = (
        ("softmax_cross_entropy", (x, labels), (loss, p), {}),
        ("softmax_cross_entropy_grad", (p, labels, scale), (dx,), {}),
        ("accuracy", (x, labels), (right,), {"k": 2}),
    )
    for op, inputs, made, attrs in calls:
        call, _ = prepared(kernels[op], inputs, made, attrs, wrap)
        call()
    return loss, p, dx, right


def assert_same_answers(kernels, shape, wrap):
    """What casting before and after gives, to the last bit, and nearly float64's."""
    loss, p, dx, right = answers(kernels, shape, "f2", wrap)
    wide = answers(kernels, shape, "f4", wrap)
    assert (loss.dtype, p.dtype, dx.dtype) == ("f4", "f4", "f2")
    for one, two in zip((loss, p, dx, right), wide, strict=True):
        assert np.array_equal(one, two.astype(one.dtype))
    exact = answers(bind_cpu(Workers(1)), shape, "f8", lambda a: a)
    for one, two, tolerance in zip(
        (loss, p, dx, right), exact, (1e-5, 1e-5, 1e-3, 0), strict=True
    ):
        np.testing.assert_allclose(one, two, rtol=tolerance, atol=tolerance)


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler: g++")
@pytest.mark.parametrize("dtype", ["f2", "f4"])
def test_right_answers_are_counted_in_the_type_of_the_result(dtype):
    """A network counts in a float of its own type, a total may be an integer."""
    for count in ("f4", "i8"):
        with pytest.MonkeyPatch.context() as patch:
            _, kernels = on_cupy(patch)
            *_, found = answers(kernels, (50, 7), dtype, StrictArray, count)
        cpu = bind_cpu(Workers(1))
        *_, expected = answers(cpu, (50, 7), "f8", lambda a: a, count)
        assert found == expected
        assert 0 < expected < 50


@pytest.mark.parametrize("shape", SHAPES)
def test_the_cpu_reads_narrow_logits(shape):
    assert_same_answers(bind_cpu(Workers(2)), shape, lambda a: a)


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler: g++")
def test_a_gpu_reads_narrow_logits(monkeypatch):
    _, kernels = on_cupy(monkeypatch)
    for shape in SHAPES:
        assert_same_answers(kernels, shape, StrictArray)


BATCH = 8
HUGE = 2.0**127


def take(made, steps, first=0):
    images, labels = examples((first + steps) * BATCH)
    rows = [slice(i * BATCH, (i + 1) * BATCH) for i in range(first, first + steps)]
    return [made.step(images[r], labels[r]).loss for r in rows]


def same(one, other, *, but=()):
    for name in one:
        if not name.startswith(("loss_scale", *but)):
            np.testing.assert_array_equal(one[name], other[name], err_msg=name)


# -- what is asked for --------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "error", "words"),
    [
        ("static", ValueError, "a positive number or \"dynamic\", not 'static'"),
        (0, ValueError, "above 0"),
        (float("nan"), ValueError, "above 0"),
        (True, TypeError, "must be a number"),
        (object(), TypeError, "must be a number"),
    ],
)
def test_anything_else_is_refused(choice, error, words):
    with pytest.raises(error, match=words):
        trainer(evaluate=False, loss_scale=choice)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"initial": v} for v in (0, -1, float("inf"), "a")),
        *({"growth": v} for v in (0.5, float("inf"))),
        *({"backoff": v} for v in (0, 1, 2)),
        *({"interval": v} for v in (0, 1.5)),
    ],
)
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises((ValueError, TypeError), match=f"loss scale's {min(wrong)}"):
        DynamicLossScale(**wrong)


def test_a_scale_is_a_number_a_word_or_settings_and_held_by_the_type():
    assert loss_scale_of(None, 1024.0) == 1024.0
    assert loss_scale_of(3, 1.0) == 3.0
    default = DynamicLossScale()
    assert loss_scale_of("dynamic", 1.0) == default == optim.DynamicLossScale()
    assert loss_scale_of(DynamicLossScale(8.0), 1.0).initial == 8.0
    assert DynamicLossScale(2.0**15).range_in("float16") == (2.0**-14, 2.0**15)
    with pytest.raises(ValueError, match=r"the loss is float16: .* not from 65536"):
        default.range_in("float16")
    with pytest.raises(ValueError, match="not from 1e-06"):
        DynamicLossScale(1e-6).range_in("float32")


# -- the graph ----------------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 2])
def test_every_gradient_is_looked_at_before_the_first_update(parts):
    scaling = DynamicLossScale(64.0)
    recipe = StepRecipe(optimizer=Momentum(), micro_batches=parts, loss_scale=scaling)
    *first, last = build_step(network(4), recipe).steps
    looked = [n.inputs[0] for n in last.nodes if n.op == "find_overflow"]
    updates = [n for n in last.nodes if n.op == "momentum"]
    assert looked == [n.inputs[1] for n in updates]
    assert len(looked) == len(last.gradients)
    ops = [n.op for n in last.nodes if n.phase is Phase.UPDATE]
    at = {op: [i for i, o in enumerate(ops) if o == op] for op in set(ops)}
    assert max(at["find_overflow"]) < min(at["momentum"])
    assert at["adjust_loss_scale"] == [max(i for op in at for i in at[op])] or parts > 1
    assert last.tensors["loss_scale"].role is last.tensors[COUNTS].role is Role.STATE
    for graph in (*first, last):
        verify(keep_all(in_place(graph)))
        assert not any(n.op == "find_overflow" for n in graph.nodes) or graph is last


# -- training -----------------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 2])
def test_without_an_overflow_the_step_is_the_same_and_the_scale_grows(parts):
    scaling = DynamicLossScale(2.0**10, interval=2)
    made = trainer(BATCH, parts=parts, evaluate=False, loss_scale=scaling)
    fixed = trainer(BATCH, parts=parts, evaluate=False, loss_scale=1024.0)
    scales = []
    for step in range(5):
        assert take(made, 1, step) == take(fixed, 1, step)
        scales.append(made.loss_scale)
    assert scales == [2.0**10, 2.0**11, 2.0**11, 2.0**12, 2.0**12]
    assert fixed.loss_scale == 1024.0
    same(weights(fixed), weights(made))
    assert weights(made)[COUNTS].tolist() == [0, 1, 0]


@pytest.mark.parametrize("optimizer", [Sgd(0.05), Momentum(0.02), Adam(0.01)])
@pytest.mark.parametrize("parts", [1, 2])
def test_an_overflow_skips_the_step_as_if_it_had_not_been(optimizer, parts):
    scaling = DynamicLossScale(HUGE, backoff=2.0**-8)
    options = {"norm": False}  # its running statistics move all the same
    more = {"optimizer": optimizer, "evaluate": False, "parts": parts}
    made = trainer(BATCH, options=options, loss_scale=scaling, **more)
    before = weights(made)
    take(made, 1)
    assert made.loss_scale == HUGE * 2.0**-8
    assert weights(made)[COUNTS].tolist() == [0, 0, 1]
    same(before, weights(made))
    fixed = trainer(BATCH, options=options, loss_scale=made.loss_scale, **more)
    for step in range(2):  # nothing overflows any more; Adam counts from its first
        assert take(made, 1, step) == take(fixed, 1, step)
    assert made.loss_scale == HUGE * 2.0**-8
    same(weights(fixed), weights(made))


@given(st.lists(st.sampled_from([0, 1]), max_size=40), st.integers(1, 4))
def test_the_scale_follows_its_rule(overflows, interval):
    scale, counts = np.array(8.0), np.zeros(3, np.int64)
    limits = {"growth": 2.0, "backoff": 0.5, "least": 1.0, "most": 64.0}
    expected, good = 8.0, 0
    for overflowed in overflows:
        counts[0] |= overflowed
        run("adjust_loss_scale", [scale, counts], [], limits | {"interval": interval})
        good = 0 if overflowed else good + 1
        if overflowed:
            expected = max(1.0, expected / 2)
        elif good == interval:
            expected, good = min(64.0, expected * 2), 0
        assert float(scale) == expected
        assert counts[:2].tolist() == [0, good]
    assert counts[2] == sum(overflows)


@pytest.mark.parametrize("split", ["none", 2])
def test_within_a_budget_the_bits_are_the_same(split):
    scaling = DynamicLossScale(HUGE, backoff=2.0**-8, interval=2)
    free = trainer(BATCH, evaluate=False, loss_scale=scaling, split=split)
    budget = MemoryBudget(nbytes=int(free.peak_bytes * 0.8), convolutions="fixed")
    made = trainer(
        BATCH, evaluate=False, loss_scale=scaling, split=split, budget=budget
    )
    assert made.peak_bytes < free.peak_bytes
    assert take(made, 5) == take(free, 5)
    same(weights(free), weights(made))
    assert made.loss_scale == free.loss_scale == HUGE * 2.0**-6


def test_a_checkpoint_holds_the_scale(tmp_path):
    scaling = DynamicLossScale(2.0**10, interval=2)
    epochs = Epochs(6 * BATCH, BATCH)
    whole = trainer(BATCH, loss_scale=scaling)
    fit(whole, epochs, epochs=1)
    folder = Checkpoints(tmp_path)
    begun = trainer(BATCH, loss_scale=scaling)
    fit(begun, epochs, epochs=1, max_steps=3, checkpoints=folder)
    resumed = trainer(BATCH, loss_scale=scaling)
    fit(resumed, epochs, epochs=1, resume=folder.load())
    assert resumed.loss_scale == whole.loss_scale == 2.0**13
    same(weights(whole), weights(resumed))
    whole.save_weights(tmp_path / "weights.safetensors")
    plain = trainer(BATCH)
    plain.load_weights(tmp_path / "weights.safetensors")
