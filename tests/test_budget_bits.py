"""Scheduling never changes numbers: every policy computes what keeping all computes."""

import hashlib
import itertools
import os

import numpy as np
import pytest

from mucudnn.backends import get_backend
from mucudnn.errors import PlanningError
from mucudnn.ir.conv import AlgoPerf, ConvPlan
from mucudnn.ir.optimizers import Momentum
from mucudnn.ir.profile import Profile
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.inplace import in_place
from mucudnn.passes.graph.updates import with_updates
from mucudnn.passes.planning.place_step import place_step
from mucudnn.passes.planning.plan_step import minimum_budget
from mucudnn.passes.planning.request import StepRequest, plan_residency
from mucudnn.passes.residency import policy_names
from mucudnn.passes.scheduling import SCHEDULERS
from mucudnn.runtime.executor import Executor
from mucudnn.runtime.training.parameters import StateStore
from mucudnn.runtime.training.sizes import kernel_workspaces
from tests.model_cases import narrow_model
from tests.race_detector import RaceDetector

MODELS = {
    "resnet20": {"image": 17, "classes": 10},
    "alexnet": {"image": 67, "classes": 10},
    "resnet18": {"image": 33, "classes": 10},
    "googlenet": {"image": 65, "classes": 10},
    "densenet40": {"image": 16, "classes": 10},
    "unet2d": {"image": 16, "classes": 3},
}
EVERYTHING = bool(os.environ.get("BUDGET_GRID"))
if EVERYTHING:
    MODELS["inception_v4"] = {"image": 75, "classes": 10}
STEPS = int(os.environ.get("BUDGET_STEPS", "2"))
SHARES = (0.75, 0.4, 0.0)
"""Of the way from the least that a policy needs to all that a step could use."""

RATE = 1e-3


def digest(array):
    """What stands for an array's bits: two states are not held at once."""
    return hashlib.blake2b(np.ascontiguousarray(array)).hexdigest()


class Step:
    """A model's training graph, its unbounded run, and what it costs on paper."""

    def __init__(self, backend, name):
        self.backend = backend
        forward = narrow_model(name)(2, **MODELS[name])
        self.graph = with_updates(training_graph(forward), Momentum(learning_rate=RATE))
        self.classes = MODELS[name]["classes"]
        self.plans = {
            node.name: self.plan(node.attrs["problem"])
            for node in self.graph.nodes
            if node.op == "conv"
        }
        final = in_place(self.graph)
        times = {
            node.name: 1e-6 * sum(final.tensors[t].nbytes for t in node.tensors)
            for node in final.nodes
        }
        self.profile = Profile(
            node_ms=times,
            workspaces=kernel_workspaces(backend, final),
            fronts={name: (plan,) for name, plan in self.plans.items()},
            out_bytes_per_ms=1e6,
            in_bytes_per_ms=1e6,
        )
        whole = plan_residency(
            StepRequest(
                self.graph,
                self.profile,
                budget=float("inf"),
                convolutions="fixed",
                plans=self.plans,
            ),
            {},
        )
        self.most = whole.peak_bytes
        self.least = {
            policy: minimum_budget(StepRequest(self.graph, self.profile, policy=policy))
            for policy in policy_names()
        }
        self.expected = self.run(float("inf"), "keep_all", "timed")

    def plan(self, problem):
        algo, nbytes = min(
            self.backend.conv.algorithms(problem),
            key=lambda pair: (pair[0] == "IMPLICIT_GEMM", pair[1]),
        )
        perf = AlgoPerf(algo=algo, batch=problem.batch, time_ms=1.0, workspace=nbytes)
        return ConvPlan(problem, (perf,))

    def run(self, budget, policy, scheduler):
        placed = place_step(
            StepRequest(
                self.graph,
                self.profile,
                budget=budget,
                policy=policy,
                scheduler=scheduler,
                convolutions="fixed",
                plans=self.plans,
            )
        )
        assert placed.nbytes <= budget
        plan = placed.plan
        graph, hosted = plan.schedule.graph, plan.schedule.hosted
        state = StateStore(self.backend.device, graph, seed=1, hosted=hosted)
        executor = Executor(
            self.backend,
            plan.schedule,
            placed.layout,
            plan.plans,
            state,
            host_buffers=state.host_buffers,
            watcher=RaceDetector(),
        )
        rng = np.random.default_rng(0)
        feeds = {"lr": np.array(RATE, "f4")}
        losses = []
        for step in range(STEPS):
            image = self.graph.tensors["image"].shape
            label = self.graph.tensors["label"].shape
            feeds["image"] = rng.standard_normal(image, dtype="f4")
            feeds["label"] = rng.integers(0, self.classes, label)
            feeds["step"] = np.array(step)
            losses.append(executor.run(feeds)[self.graph.outputs[0]].tobytes())
        executor.park()
        executor.close()
        return losses, {n: digest(v) for n, v in state.save().items()}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name == "resnet20" else pytest.mark.slow)
        for name in MODELS
    ],
)
def step(request):
    return Step(get_backend("cpu"), request.param)


def cases():
    policies, schedulers = policy_names(), tuple(SCHEDULERS.table)
    if EVERYTHING:
        return list(itertools.product(policies, schedulers, SHARES))
    return [
        (policy, schedulers[i % len(schedulers)], SHARES[i // 2 % len(SHARES)])
        for i, policy in enumerate(policies)
    ]


def test_every_policy_computes_the_same_bits(step, short_search):
    fitted = 0
    for policy, scheduler, share in cases():
        least = step.least[policy]
        budget = least + share * (step.most - least)
        try:
            found = step.run(1.05 * budget, policy, scheduler)
        except PlanningError:
            continue
        fitted += 1
        assert found == step.expected, (policy, scheduler, share)
    assert fitted >= 5
