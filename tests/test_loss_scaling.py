"""A loss scale that follows what overflows: decided by the step, kept in its state."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mucudnn import optim
from mucudnn.ir.graph import Phase
from mucudnn.ir.optimizers import Adam, DynamicLossScale, Momentum, Sgd, loss_scale_of
from mucudnn.ir.tensor import Role
from mucudnn.passes.graph.inplace import in_place
from mucudnn.passes.graph.precision import COUNTS
from mucudnn.passes.graph.training_step import StepRecipe, build_step
from mucudnn.runtime.training.budget import MemoryBudget
from mucudnn.runtime.training.checkpoints import Checkpoints
from mucudnn.runtime.training.loop import fit
from tests.kernel_cases import run
from tests.plain_schedule import keep_all
from tests.schedule_oracle import verify
from tests.training_cases import Epochs, examples, network, trainer, weights

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


def test_it_is_a_number_a_word_or_settings():
    assert loss_scale_of(None, 1024.0) == 1024.0
    assert loss_scale_of(3, 1.0) == 3.0
    assert (
        loss_scale_of("dynamic", 1.0) == DynamicLossScale() == optim.DynamicLossScale()
    )
    assert loss_scale_of(DynamicLossScale(8.0), 1.0).initial == 8.0


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


def test_a_type_holds_the_scale_it_starts_from():
    assert DynamicLossScale(2.0**15).range_in("float16") == (2.0**-14, 2.0**15)
    with pytest.raises(ValueError, match=r"the loss is float16: .* not from 65536"):
        DynamicLossScale().range_in("float16")
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
