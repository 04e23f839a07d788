"""Training steps, the loop over them, and going on where it stopped."""

import signal
import weakref

import numpy as np
import pytest

from mucudnn.errors import CheckpointError, TrainingError
from mucudnn.ir.builder import GraphBuilder
from mucudnn.ir.optimizers import Adam, Momentum, Sgd
from mucudnn.models import get_model
from mucudnn.runtime.training.budget import MemoryBudget
from mucudnn.runtime.training.checkpoints import Checkpoints
from mucudnn.runtime.training.history import plans_of
from mucudnn.runtime.training.loop import fit
from mucudnn.runtime.training.trainer import Trainer
from mucudnn.runtime.tuning.tuner import Tuner
from tests.doubles import QUICK, without_collection
from tests.training_cases import Epochs, examples, network, trainer, tuner_of, weights

BATCH = 8


def take(made, steps, batch=BATCH, seed=0):
    images, labels = examples(steps * batch, seed)
    return [
        made.step(images[i : i + batch], labels[i : i + batch])
        for i in range(0, steps * batch, batch)
    ]


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


# -- steps --------------------------------------------------------------------------


def test_one_seed_gives_the_same_bits_and_another_does_not():
    made = [trainer(seed=seed, options={"dropout": 0.3}) for seed in (1, 1, 2)]
    results = [take(one, 4) for one in made]
    assert results[0] == results[1]
    assert_same(weights(made[0]), weights(made[1]))
    assert results[0] != results[2]


@pytest.mark.parametrize("order", ["builder", "depth_first", "least_peak"])
def test_neither_order_nor_time_of_update_changes_a_bit(order):
    reference = trainer(update_when="late")
    expected = take(reference, 3)
    made = trainer(order=order, update_when="early")
    assert take(made, 3) == expected
    assert_same(weights(made), weights(reference))
    assert made.peak_bytes <= reference.peak_bytes


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("optimizer", [Momentum(0.05, weight_decay=0.01), Adam(0.01)])
def test_parts_of_a_batch_add_up_to_it(parts, optimizer):
    options = {"norm": False, "dtype": "float64"}
    whole = trainer(options=options, optimizer=optimizer)
    divided = trainer(options=options, optimizer=optimizer, parts=parts)
    for a, b in zip(take(whole, 3), take(divided, 3), strict=True):
        assert a.loss == pytest.approx(b.loss, rel=1e-12)
        assert (a.correct, a.labels, a.images) == (b.correct, b.labels, b.images)
    expected = weights(whole)
    for name, value in weights(divided).items():
        if name.endswith(":total"):
            assert not value.any()
        else:
            np.testing.assert_allclose(value, expected[name], rtol=1e-9, atol=1e-12)


def test_parts_of_a_step_drop_different_values():
    """With one image twice, equal masks would give equal losses."""
    options = {"dropout": 0.5, "norm": False}
    images, labels = examples(1)
    both = np.repeat(images, 2, 0), labels.repeat(2)
    one = trainer(batch=1, options=options).step(images, labels)
    two = trainer(batch=2, parts=2, options=options).step(*both)
    assert two.loss != pytest.approx(one.loss, rel=1e-6)


def test_the_learning_rate_is_asked_for_every_step():
    asked = []
    made = trainer(learning_rate=lambda step: asked.append(step) or 0.0)
    before = weights(made)
    assert [r.learning_rate for r in take(made, 3)] == [0.0] * 3
    assert asked == [0, 1, 2]
    unchanged = {n for n in before if n.endswith(("weight", "bias"))}
    after = weights(made)
    for name in unchanged:
        np.testing.assert_array_equal(before[name], after[name])


def test_a_step_against_numpy():
    """A dense layer by hand: one step of plain gradient descent."""
    rate, g = 0.5, GraphBuilder(dtype="float64")
    x = g.flatten(g.input("image", (4, 3, 1, 1)))
    logits = g.linear(x, 2)
    label = g.input("label", (4,), "int64")
    graph = g.build(g.softmax_cross_entropy(logits, label), g.accuracy(logits, label))
    made = Trainer(graph, tuner=Tuner(rule=QUICK), optimizer=Sgd(rate))
    before = weights(made)
    rng = np.random.default_rng(0)
    images, labels = rng.standard_normal((4, 3, 1, 1)), np.array([0, 1, 1, 0])
    result = made.step(images, labels)
    z = images.reshape(4, 3) @ before["linear/weight"].T + before["linear/bias"]
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    assert result.loss == pytest.approx(-np.log(p[range(4), labels]).mean())
    assert result.correct == (z.argmax(1) == labels).sum()
    dz = (p - np.eye(2)[labels]) / 4
    after = weights(made)
    for name, gradient in (
        ("linear/weight", dz.T @ images.reshape(4, 3)),
        ("linear/bias", dz.sum(0)),
    ):
        np.testing.assert_allclose(after[name], before[name] - rate * gradient)


def test_profile_names_every_kernel():
    made = trainer()
    images, labels = examples(BATCH)
    nodes, whole = made.profile(images, labels)
    assert nodes.keys() == {n.name for n in made.graph.nodes if n.op != "reshape"}
    assert 0 < sum(nodes.values()) <= whole
    assert made.steps == 1


# -- what does not fit --------------------------------------------------------------


def made_of(*graphs, **options):
    return Trainer(*graphs, tuner=Tuner(backend="null"), optimizer=Sgd(), **options)


def without_images():
    g = GraphBuilder()
    x = g.input("x", (2, 3))
    return g.build(g.mean_squared_error(g.linear(x, 3), g.input("y", (2, 3))))


EIGHT = Epochs(8, 8)
REFUSED = [
    (lambda: trainer().step(*examples(9)), r"images of shape \(8, 2, 6, 6\)"),
    (
        lambda: made_of(network(4), network(4, dtype="float64")),
        "another network",
    ),
    (lambda: made_of(network(4), gradient_accumulation=0), "at least 1, got 0"),
    (lambda: made_of(network(4), update_when="never"), "never"),
    (lambda: made_of(network(4), order="?"), "unknown order"),
    (lambda: trainer(evaluate=False).evaluate(EIGHT), "no evaluation graph"),
    (lambda: trainer(evaluate=False).predict([]), "no evaluation graph"),
    (lambda: trainer().evaluate(Epochs(0, 8)), "no image"),
    (lambda: fit(trainer(), EIGHT, epochs=0), "at least 1"),
    (lambda: fit(trainer(), EIGHT, epochs=1, max_steps=0), "at least 1"),
    (lambda: fit(trainer(), Epochs(4, 8), epochs=1), "no batch"),
    (lambda: made_of(without_images()), "has the inputs 'image' and 'label'"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_does_not_fit_is_told(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# -- evaluation ---------------------------------------------------------------------


def test_any_number_of_images_is_evaluated_and_answered_and_changes_nothing():
    made, one_by_one = trainer(), trainer(batch=1)
    take(made, 5)
    before = weights(made)
    one_by_one.state.load(before)
    images, _ = examples(24)
    for count in (0, 1, 7, 8, 9, 20, 24):
        answers = made.predict(images[:count])
        assert (answers.shape, answers.dtype) == ((count, 3), np.float32)
        for image, answer in zip(images, answers, strict=False):
            expected = one_by_one.predict(image[None])[0]
            np.testing.assert_allclose(expected, answer, rtol=1e-4, atol=1e-5)
    for count in (1, 7, 8, 9, 20, 24):
        found = made.evaluate(Epochs(count, BATCH, partial=True))
        expected = one_by_one.evaluate(Epochs(count, 1))
        assert (found.correct, found.labels) == (expected.correct, count)
        assert found.loss == pytest.approx(expected.loss, rel=1e-5)
        assert found.accuracy == found.correct / count
    assert_same(before, weights(made))


# -- epochs -------------------------------------------------------------------------


def test_it_learns_what_there_is_to_learn():
    reports = fit(
        trainer(), Epochs(64, BATCH), Epochs(30, BATCH, partial=True), epochs=6
    )
    assert [r.epoch for r in reports] == list(range(6))
    assert reports[-1].loss < 0.3 * reports[0].loss
    assert reports[-1].test_accuracy > 0.9
    assert all(r.images_per_s > 0 for r in reports)


@pytest.mark.parametrize("most", [1, 3, 4, 5, 6])
def test_steps_can_be_limited_and_progress_is_told_of_each_and_every_epoch(most):
    made, seen = trainer(), []
    options = {"max_steps": most, "progress": lambda *at: seen.append(at)}
    reports = fit(made, Epochs(24, BATCH), epochs=2, **options)
    assert made.steps == most
    steps = [(at.epoch, at.batch, at.steps) for at, report in seen if report is None]
    assert steps == [(i // 3, i % 3 + 1, i + 1) for i in range(most)]
    told = [report for _, report in seen if report is not None]
    assert [r.epoch for r in told] == [r.epoch for r in reports]
    assert [r.epoch for r in reports] == ([0] if most <= 3 else [0, 1])


class SwitchedOffError(Exception):
    """Stands for the machine's end."""


def switched_off():
    raise SwitchedOffError


def training(
    folder, *, epochs=3, stop_at=None, stop=switched_off, resume=False, **more
):
    """Train with checkpoints; something stops it after a step."""
    checkpoints = Checkpoints(folder)
    last = checkpoints.load() if resume else None
    every = more.pop("every", None)
    made = trainer(options={"dropout": 0.2}, **more)

    def progress(at, report):
        if at.steps == stop_at and report is None:
            stop()

    reports = fit(
        made,
        Epochs(40, BATCH),
        Epochs(10, BATCH, partial=True),
        epochs=epochs,
        checkpoints=checkpoints,
        checkpoint_every=every,
        words={"model": "small"},
        resume=last,
        progress=progress,
    )
    figures = [
        (r.epoch, r.loss, r.accuracy, r.test_loss, r.test_accuracy) for r in reports
    ]
    return made, figures


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A training that was never stopped: weights and figures."""
    made, figures = training(tmp_path_factory.mktemp("whole"))
    assert made.steps == 15
    return weights(made), figures


@pytest.mark.parametrize("stop_at", [1, 5, 7, 14])
@pytest.mark.parametrize("every", [1, 2, None])
def test_going_on_is_the_same_as_never_having_stopped(tmp_path, stop_at, every, whole):
    expected, figures = whole
    with pytest.raises(SwitchedOffError):
        training(tmp_path / "parts", stop_at=stop_at, every=every)
    made, found = training(tmp_path / "parts", resume=True, every=every)
    assert found == figures
    assert made.steps == 15
    assert_same(weights(made), expected)


def test_a_finished_training_can_be_continued(tmp_path, whole):
    expected, figures = whole
    training(tmp_path / "parts", epochs=2)
    made, found = training(tmp_path / "parts", resume=True)
    assert found == figures
    assert_same(weights(made), expected)
    again, same = training(tmp_path / "parts", resume=True)
    assert same == figures
    assert_same(weights(again), expected)


def test_ctrl_c_leaves_after_the_step_with_a_checkpoint(tmp_path, whole):
    expected, figures = whole
    with pytest.raises(KeyboardInterrupt):
        training(tmp_path, stop_at=7, stop=lambda: signal.raise_signal(signal.SIGINT))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert Checkpoints(tmp_path).load().step == 7
    resumed, found = training(tmp_path, resume=True)
    assert found == figures
    assert_same(weights(resumed), expected)


def test_a_second_ctrl_c_leaves_at_once_and_one_in_an_evaluation_after_it(tmp_path):
    class Tests(Epochs):
        def epoch(self, epoch, start=0):
            signal.raise_signal(signal.SIGINT)
            return super().epoch(epoch, start)

    def interrupt(at, report):
        seen.append(at.steps)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    seen, checkpoints = [], Checkpoints(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        fit(trainer(), Epochs(40, BATCH), epochs=3, progress=interrupt)
    assert seen == [1]
    with pytest.raises(KeyboardInterrupt):
        fit(trainer(), Epochs(16, 8), Tests(8, 8), epochs=1, checkpoints=checkpoints)
    found = checkpoints.load()
    assert [report["epoch"] for report in found.progress["epochs"]] == [0]


def test_a_loss_that_is_no_number_is_an_error_and_keeps_the_checkpoint(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    made = trainer(
        options={"norm": False}, learning_rate=lambda step: 0.01 if step < 7 else 1e30
    )
    with pytest.raises(TrainingError, match=r"of epoch 2 .*learning rate 1e\+30") as e:
        fit(made, Epochs(40, BATCH), epochs=3, checkpoints=checkpoints)
    assert (e.value.epoch, e.value.step) == (1, made.steps - 1)
    found = checkpoints.load()
    assert found.step == 5
    assert all(np.isfinite(array).all() for array in found.arrays.values())


def test_plans_are_kept_for_the_same_device_only(tmp_path, null):
    made, _ = training(tmp_path)
    found = Checkpoints(tmp_path).load()
    assert plans_of(found, made.backend) == dict(made.plans)
    assert plans_of(found, null) == {}


def test_a_checkpoint_of_other_tensors_changes_nothing(tmp_path):
    training(tmp_path)
    made = trainer(options={"norm": False})
    before = weights(made)
    with pytest.raises(CheckpointError, match="another model"):
        fit(made, Epochs(8, 8), epochs=1, resume=Checkpoints(tmp_path).load())
    assert_same(before, weights(made))


# -- answers ------------------------------------------------------------------------


def test_answers_are_what_is_evaluated():
    made = trainer(options={"dropout": 0.5})
    take(made, 5)
    epochs = Epochs(20, BATCH, partial=True)
    answers = made.predict(epochs.images)
    found = made.evaluate(epochs)
    assert (answers.argmax(1) == epochs.labels).sum() == found.correct
    p = np.exp(answers) / np.exp(answers).sum(1, keepdims=True)
    loss = -np.log(p[range(20), epochs.labels]).mean()
    assert found.loss == pytest.approx(loss, rel=1e-5)


def test_answers_within_a_budget_are_the_same():
    made = trainer()
    images, _ = examples(20)
    budget = MemoryBudget(nbytes=made.peak_bytes * 9 // 10, convolutions="fixed")
    bounded = trainer(budget=budget)
    for one in (made, bounded):
        take(one, 2)
    np.testing.assert_array_equal(bounded.predict(images), made.predict(images))
    assert bounded.peak_bytes <= budget.nbytes


@pytest.mark.parametrize("loss", ["softmax_cross_entropy", "mean_squared_error"])
def test_answers_of_every_pixel_with_and_without_a_classifier(loss):
    g = GraphBuilder(training=False)
    logits = g.conv(g.input("image", (2, 1, 4, 4)), 3, 1)
    shape, dtype = (
        ((2, 4, 4), "int64") if "cross" in loss else ((2, 3, 4, 4), "float32")
    )
    graph = g.build(getattr(g, loss)(logits, g.input("label", shape, dtype)))
    made = Trainer(graph, graph, tuner=Tuner(rule=QUICK), optimizer="sgd")
    images = np.random.default_rng(0).standard_normal((5, 1, 4, 4), np.float32)
    values = weights(made)
    expected = np.einsum("nchw,kc->nkhw", images, values["conv/weight"][:, :, 0, 0])
    np.testing.assert_allclose(made.predict(images), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("images", "error", "message"),
    [
        (np.zeros((2, 6, 6)), ValueError, r"\('n', 2, 6, 6\), got \(2, 6, 6\)"),
        (np.zeros((3, 2, 6, 5)), ValueError, "takes images of shape"),
        (3, ValueError, "takes images of shape"),
        ("cat", TypeError, "images must be numbers"),
        ([[1], [1, 2]], TypeError, "even lists of numbers"),
    ],
)
def test_images_that_cannot_be_answered(images, error, message):
    with pytest.raises(error, match=message):
        trainer().predict(images)


# -- from beginning to end ----------------------------------------------------------


def test_one_line_says_what_it_is():
    made = trainer()
    take(made, 2)
    assert (
        repr(made)
        == "<Trainer of 195 parameters, batch 8, on cpu, no budget, 2 steps done>"
    )
    bounded = trainer(budget=MemoryBudget(nbytes="1MiB", convolutions="fixed"))
    assert "batch 8, on cpu, within 1.0 MiB, 0 steps done" in repr(bounded)


def test_what_is_closed_is_free(tmp_path, copying_threads):
    """Without a collection of garbage: device memory does not wait for one."""
    with without_collection():
        with trainer() as made:
            budget = MemoryBudget(
                nbytes=made.peak_bytes * 9 // 10, convolutions="fixed", disk=tmp_path
            )
            take(made, 1)
            arena = weakref.ref(made._arena._executors[0])
        assert arena() is None
        with trainer(budget=budget) as bounded:
            take(bounded, 2)
            arena = weakref.ref(bounded._arena._executors[0])
            assert copying_threads()
        assert arena() is None
        assert not copying_threads()
    made.close()
    images, labels = examples(BATCH)
    for call in (
        lambda: made.step(images, labels),
        lambda: made.predict(images),
        lambda: made.evaluate(Epochs(8, 8)),
    ):
        with pytest.raises(ValueError, match="this trainer is closed"):
            call()
    other = trainer()
    other.state.load(weights(made))
    assert_same(weights(other), weights(made))
    with pytest.raises(ZeroDivisionError), other:
        1 / 0  # noqa: B018
    with pytest.raises(ValueError, match="closed"):
        take(other, 1)


@pytest.mark.parametrize("nbytes", [6_600_000, 64_000_000])
def test_what_is_deleted_is_gone(nbytes, short_search):
    """Without a collection of garbage, and though budgets were refused on the way."""
    tuner = Tuner(backend="null", cache=None)
    with without_collection():
        made = Trainer(
            get_model("lenet")(16), tuner=tuner, optimizer="adam", budget=nbytes
        )
        gone = [weakref.ref(made), weakref.ref(made.state)]
        del made
        assert [ref() for ref in gone] == [None, None]


@pytest.mark.slow
def test_alexnet_learns_two_patterns():
    labels = np.arange(4) % 2
    patterns = np.random.default_rng(0).standard_normal((2, 3, 67, 67))
    made = Trainer(
        get_model("alexnet")(4, image=67, classes=2),
        tuner=tuner_of(),
        optimizer=Momentum(0.01),
    )
    losses = [made.step(patterns[labels], labels).loss for _ in range(30)]
    assert max(losses[-5:]) < 0.1
