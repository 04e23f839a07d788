"""Training steps under a budget, their convolution plans fixed and never timed."""

from dataclasses import dataclass

import numpy as np

from mucudnn.backends import Backend, get_backend
from mucudnn.ir.builder import GraphBuilder
from mucudnn.ir.conv import AlgoPerf, ConvPlan
from mucudnn.ir.graph import PERSISTENT, Graph
from mucudnn.ir.optimizers import Momentum
from mucudnn.ir.profile import Profile
from mucudnn.ir.tensor import Role
from mucudnn.models import get_model
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.inplace import in_place
from mucudnn.passes.graph.updates import with_updates
from mucudnn.passes.placement.layout import lay_out
from mucudnn.passes.planning.request import StepRequest, plan_residency
from mucudnn.passes.residency import PERSISTENTS, Residency, saved_tensors
from mucudnn.passes.scheduling.problem import state_bytes
from mucudnn.runtime.executor import Executor
from mucudnn.runtime.training.parameters import StateStore
from mucudnn.runtime.training.sizes import kernel_workspaces
from tests.plain_schedule import keep_all

RATE = 1 << 16


@dataclass
class Bench:
    """A training graph, how its convolutions run, and a profile made up."""

    backend: Backend
    graph: Graph
    plans: dict[str, ConvPlan]
    profile: Profile

    @classmethod
    def of(cls, training, backend=None, *, rates=(RATE, RATE)):
        backend = backend or get_backend("cpu")
        graph = with_updates(training, Momentum(weight_decay=1e-3))
        plans = {
            node.name: plan_of(backend, node.attrs["problem"])
            for node in graph.nodes
            if node.op == "conv"
        }
        profile = Profile(
            node_ms=dict.fromkeys((node.name for node in graph.nodes), 0.25),
            workspaces=kernel_workspaces(backend, graph),
            fronts={name: (plan,) for name, plan in plans.items()},
            out_bytes_per_ms=rates[0],
            in_bytes_per_ms=rates[1],
        )
        return cls(backend, graph, plans, profile)

    @classmethod
    def of_model(cls, name, batch, image, **options):
        forward = get_model(name)(
            batch, image=image, classes=3, dtype="float32", training=True
        )
        return cls.of(training_graph(forward), **options)

    def saved(self):
        return [saved.name for saved in saved_tensors(self.graph)]

    def random_residency(self, seed):
        rng = np.random.default_rng(seed)
        choices = list(Residency)
        odds = ([0.1, 0.7, 0.1, 0.1], [0.4, 0.6, 0, 0], [0.25] * 4)[seed % 3]
        found = {name: choices[rng.choice(4, p=odds)] for name in self.saved()}
        if seed % 2:  # parameters and state visit the device
            moves = (Residency.KEEP, Residency.OFFLOAD, Residency.PAGE)
            found[PERSISTENTS] = moves[rng.choice(3)]
            for spec in self.graph.with_role(*PERSISTENT):
                if rng.random() < 0.5:
                    found[spec.name] = moves[rng.choice(3)]
        return found

    def plan(self, residency, *, part=0.0, scheduler="timed"):
        """A step within a budget: `part` of the way from the least to all it wants."""
        ready = StepRequest(self.graph, self.profile).rewritten(residency)
        least = ready.problem(self.plans_of(ready.graph), float("inf")).least()
        least = least[1].peak()[0]
        most = plan_residency(
            StepRequest(
                self.graph,
                self.profile,
                budget=float("inf"),
                convolutions="fixed",
                plans=self.plans,
            ),
            {},
        ).peak_bytes
        return plan_residency(
            StepRequest(
                self.graph,
                self.profile,
                budget=least + int(part * max(0, most - least)),
                scheduler=scheduler,
                convolutions="fixed",
                plans=self.plans,
            ),
            residency,
        )

    def plans_of(self, graph):
        return {
            node.name: self.plans[node.name.partition("~")[0]]
            for node in graph.nodes
            if node.op == "conv"
        }

    def executor(self, schedule, *, layout=None, **options):
        state = StateStore(
            self.backend.device, schedule.graph, seed=1, hosted=schedule.hosted
        )
        return Executor(
            self.backend,
            schedule,
            layout or lay_out(schedule),
            self.plans_of(schedule.graph),
            state,
            host_buffers=state.host_buffers,
            **options,
        ), state

    def kept(self):
        """The schedule that moves nothing."""
        graph = in_place(self.graph)
        workspaces = kernel_workspaces(self.backend, graph)
        workspaces |= {n: p.workspace for n, p in self.plans.items() if p.workspace}
        return keep_all(graph, workspaces)

    def run(self, schedule, steps=2, **options):
        """Outputs of some steps and the state after them."""
        executor, state = self.executor(schedule, **options)
        try:
            found = [executor.run(self.feeds(step)) for step in range(steps)]
            executor.park()
            return found, state.save()
        finally:
            executor.close()

    def feeds(self, step=0):
        rng = np.random.default_rng(step)
        found = {}
        for spec in self.graph.with_role(Role.INPUT):
            if spec.name == "step":
                found[spec.name] = np.array(step)
            elif spec.name == "learning_rate":
                found[spec.name] = np.array(0.01, spec.dtype)
            elif spec.dtype == "int64":
                found[spec.name] = rng.integers(3, size=spec.shape)
            else:
                found[spec.name] = rng.standard_normal(spec.shape).astype(spec.dtype)
        return found

    def state_bytes(self, schedule=None):
        return state_bytes(self.graph, schedule and schedule.resident)


def plan_of(backend, problem):
    """The algorithm of least workspace; two micro-batches where there are images."""
    halves = (problem.batch - problem.batch // 2, problem.batch // 2)
    steps = []
    for batch in filter(None, halves):
        known = backend.conv.algorithms(problem.with_batch(batch))
        algo, nbytes = min(known, key=lambda pair: pair[1])
        steps.append(AlgoPerf(algo=algo, batch=batch, time_ms=0.5, workspace=nbytes))
    return ConvPlan(problem, tuple(steps))


def same(found, expected):
    """Whether two runs gave the same bits."""
    outputs, state = found
    assert state.keys() == expected[1].keys()
    for name, array in expected[1].items():
        np.testing.assert_array_equal(state[name], array, err_msg=name)
    for mine, theirs in zip(outputs, expected[0], strict=True):
        for name, array in theirs.items():
            np.testing.assert_array_equal(mine[name], array, err_msg=name)
    assert all(np.isfinite(array).all() for array in state.values())


def random_network(seed):
    """A training graph with forks, joins, views, norms and dropout."""
    rng = np.random.default_rng(seed)
    g = GraphBuilder(seed=seed)
    batch = int(rng.integers(2, 5))
    alive = [g.conv(g.input("image", (batch, 3, 4, 4)), 4, 3, padding=1)]
    for _ in range(rng.integers(1, 9)):
        x, other = alive[rng.integers(max(0, len(alive) - 3), len(alive))], alive[0]
        layers = {
            "conv": lambda x=x: g.conv(x, 4, 3, padding=1),
            "norm": lambda x=x: g.batch_norm(x),
            "relu": lambda x=x: g.relu(x),
            "dropout": lambda x=x: g.dropout(x, 0.3),
            "gelu": lambda x=x: g.gelu(x),
            "add": lambda x=x, y=other: g.add(x, y),
            "multiply": lambda x=x, y=other: g.multiply(x, y),
            "concat": lambda x=x, y=other: g.conv(g.concat([x, y]), 4, 1),
            "view": lambda x=x: g.reshape(g.relu(g.flatten(x)), g.shape(x)),
            "pool": lambda x=x: g.max_pool(x, 3, stride=1, padding=1),
        }
        alive.append(layers[rng.choice(list(layers))]())
    label = g.input("label", (batch,), "int64")
    logits = g.linear(g.flatten(g.add(alive[-1], alive[len(alive) // 2])), 3)
    return training_graph(g.build(g.softmax_cross_entropy(logits, label)))
