"""`study_memory` plans the step that `Trainer` runs: nodes, peak, and least budget."""

import re

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mucudnn import MemoryBudget, Trainer
from mucudnn.errors import OutOfMemoryError, PlanningError
from mucudnn.ir.builder import GraphBuilder
from mucudnn.passes.planning.place_step import place_step, placeable_budget
from mucudnn.passes.residency import PLANNED
from mucudnn.runtime.profiling.profiler import profile
from mucudnn.runtime.training import planned_steps, trainer
from mucudnn.studies.memory import study_memory
from mucudnn.studies.memory_results import CostedStep, StepSpec
from tests.training_cases import tuner_of

QUICKLY_PLANNED = ("keep_all", "vdnn_all", "superneurons_memory", "lru", "cost_based")


def residual_network(blocks, size=8, classes=3):
    """A network of (channels, whether normalised, whether residual), by the batch."""

    def network(batch, *, image=None, training=True):
        g = GraphBuilder(training=training)
        x = g.conv(g.input("image", (batch, 3, size, size)), 8, 3, padding=1)
        for channels, norm, residual in blocks:
            y = g.conv(x, channels, 3, padding=1, bias=not norm)
            y = g.batch_norm(y) if norm else y
            if residual and g.shape(x) == g.shape(y):
                y = g.add(y, x)
            x = g.relu(y)
        x = g.linear(g.flatten(g.max_pool(x, 2)), classes)
        label = g.input("label", (batch,), "int64")
        return g.build(g.softmax_cross_entropy(x, label), g.accuracy(x, label))

    return network


@st.composite
def steps(draw):
    """Draw a step of a small network."""
    block = st.tuples(st.sampled_from((4, 8)), st.booleans(), st.booleans())
    blocks = draw(st.lists(block, min_size=1, max_size=3))
    return StepSpec(
        model=residual_network(blocks, draw(st.sampled_from((8, 16)))),
        batch=draw(st.integers(1, 6)),
        optimizer=draw(st.sampled_from(("sgd", "momentum", "adam"))),
        precision=draw(st.sampled_from((None, "float16"))),
        layout=draw(st.sampled_from(("NCHW", "NHWC"))),
        device="cpu",
    )


def studied(tuner, spec, budget, policy=PLANNED):
    return study_memory(
        spec,
        policies=[policy],
        budget=budget,
        profile=lambda graph: profile(tuner, graph),
    )


def trained(tuner, spec, nbytes, policy=PLANNED):
    return Trainer(
        spec.network(),
        tuner=tuner,
        optimizer=spec.optimizer,
        precision=spec.precision,
        layout=spec.layout,
        budget=MemoryBudget(nbytes=nbytes, policy=policy),
    )


def unrefined(tuner, known, plans, times, *, memory):
    """Leave the times as they are: a study does not measure the chosen plans again."""
    times.update((plan, plan.time_ms) for plan in plans)
    return known


def check_promise(tuner, spec, budget, policy):
    """Check that a trainer runs what a study promises within a budget."""
    study = studied(tuner, spec, budget, policy)
    promised = study.placed
    assert promised is not None
    with trained(tuner, spec, budget, policy) as made:
        planned = made.placed
        nodes = [len(step.schedule.graph.nodes) for step in (planned, promised)]
        assert nodes[0] == nodes[1]
        assert planned.plan.peak_bytes == promised.plan.peak_bytes
        assert planned.nbytes == promised.nbytes <= budget
        assert study.best.step_ms == promised.plan.prediction.step_ms
        assert planned.plan.prediction.step_ms == pytest.approx(study.best.step_ms)
        image = made.graph.tensors["image"].shape
        made.step(np.zeros(image, "f4"), np.zeros(image[0], "i8"))
    return study


def check_refusal(tuner, spec, least, policy):
    """Check that a trainer names a budget that is enough, and hardly above the least.

    It is the least one unless there is no memory to measure the step in.
    """
    with pytest.raises((PlanningError, OutOfMemoryError)) as refused:
        trained(tuner, spec, least // 2, policy)
    if isinstance(refused.value, PlanningError):
        assert refused.value.least_bytes == least
        return
    enough = int(re.search(r"\((\d+) bytes\) is enough", str(refused.value))[1])
    assert least <= enough <= 1.05 * least
    with trained(tuner, spec, enough, policy) as made:
        assert made.placed.nbytes <= enough


@settings(max_examples=5)
@given(steps(), st.floats(0, 1.2), st.sampled_from(QUICKLY_PLANNED))
def test_a_trainer_runs_what_a_study_promises(spec, share, policy):
    with pytest.MonkeyPatch.context() as patch, tuner_of("null") as tuner:
        patch.setattr(planned_steps, "refine", unrefined)
        study = studied(tuner, spec, "1GiB", policy)
        least, most = study.minimum, study.unbounded.peak_bytes
        for budget in (least, int(least + share * max(0, most - least))):
            assert check_promise(tuner, spec, budget, policy).minimum == least
        check_refusal(tuner, spec, least, policy)


FUSED = "batch_norm_add_relu"


def is_fused(graph):
    return FUSED in {node.op for node in graph.nodes}


def test_fusion_is_given_up_only_where_a_budget_needs_it(monkeypatch, short_search):
    monkeypatch.setattr(planned_steps, "refine", unrefined)
    model = residual_network([(8, True, True)] * 2)
    spec = StepSpec(model=model, batch=4, device="cpu")
    with tuner_of("null") as tuner:
        most = studied(tuner, spec, "1GiB").unbounded.peak_bytes
        least = studied(tuner, spec, most).minimum
        for budget, fuses in ((least, False), (most, True)):
            study = check_promise(tuner, spec, budget, PLANNED)
            assert is_fused(study.placed.schedule.graph) == fuses
        check_refusal(tuner, spec, least, PLANNED)


@pytest.mark.parametrize("policy", ["checkpoint_some_blocks", "knapsack"])
def test_fusion_is_given_up_where_the_step_is_faster_without(monkeypatch, policy):
    monkeypatch.setattr(planned_steps, "refine", unrefined)
    model = residual_network([(8, True, True)], 8)
    spec = StepSpec(model=model, batch=4, device="cpu")
    with tuner_of("null") as tuner:
        step = CostedStep(spec, lambda graph: profile(tuner, graph))
        fused, separate = (form.planned_by(policy) for form in step.forms(0))
        assert is_fused(fused.graph) > is_fused(separate.graph)
        budget = max(placeable_budget(fused), placeable_budget(separate))
        times = [
            place_step(form.within(budget)).plan.prediction.step_ms
            for form in (fused, separate)
        ]
        assert times[1] < times[0]
        study = check_promise(tuner, spec, budget, policy)
        assert not is_fused(study.placed.schedule.graph)
        assert study.best.step_ms == times[1]
        # A later trainer plans only the form that was found to be faster.
        planned = []
        place = trainer.place_steps
        monkeypatch.setattr(
            trainer,
            "place_steps",
            lambda tuner, graphs, *rest, **options: (
                planned.append(is_fused(graphs[0]))
                or place(tuner, graphs, *rest, **options)
            ),
        )
        with trained(tuner, spec, budget, policy) as later:
            assert planned == [False]
            (times_ms,) = later.races.values()
            assert times_ms == pytest.approx(tuple(times))
        # With more memory the fused step is fast, and no other is planned.
        with trained(tuner, spec, 2 * study.unbounded.peak_bytes, policy="keep_all"):
            assert planned == [False, True]
