"""A budget for models compiled with `torch.compile`: both halves are one schedule.

    model = torch.compile(model, backend=mt.backend(budget="8GiB"))

AOTAutograd hands over forward and backward as one graph. It is planned as one and cut
where the forward pass has ended. What the second half still needs are ordinary tensors,
which autograd keeps: those on the device, those on the host, and states of the random
generator. So a forward pass without a backward pass leaves nothing behind, two may be
under way at once, and autograd sees what has been changed between the halves.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput
from torch.utils._python_dispatch import _disable_current_modes

from mucudnn.errors import UnsupportedError
from mucudnn.ir.graph import Graph, Node, Phase
from mucudnn.ir.schedule import Compute, Schedule
from mucudnn.torch.copies import ThreadCopies
from mucudnn.torch.lower import NOTHING, Lowered, lower
from mucudnn.torch.measure import measured
from mucudnn.torch.planning import Planner, as_budget
from mucudnn.torch.program import Kept, Program, Segment
from mucudnn.torch.step_plan import TorchPlan

__all__ = ["CompileBackend", "backend", "compile_graph"]

_CHANGED = "changed"
"""The node at which inputs have other values than in the forward pass."""


def backend(*, budget: float | str | None = None) -> "CompileBackend":
    """A backend for `torch.compile` that keeps a budget in training.

    The budget counts what one compiled graph has in use, forward to backward: its
    parameters and buffers, activations, gradients, results and scratch memory. The
    other inputs, the gradients that come in, and the optimizer's state are the
    caller's. Where a model is compiled to several graphs each keeps the budget for
    itself. Without gradients nothing is planned. Batches of several sizes need
    `dynamic=False`: each has a plan of its own.

    Args:
        budget: Bytes, or a size such as "8GiB"; None plans without a limit.
    """
    return CompileBackend(as_budget(budget))


def compile_graph(
    module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """What `torch.compile(backend="mucudnn", options={"budget": ...})` calls.

    Raises:
        ValueError: An option is not known.
    """
    given = dict(options or {})
    budget = given.pop("budget", None)
    if given:
        raise ValueError(
            f"unknown option {next(iter(given))!r}; there is only 'budget'"
        )
    return CompileBackend(as_budget(budget))(module, inputs)


class CompileBackend:
    """Plans every graph that it is given.

    Args:
        budget: Bytes for each graph.

    Attributes:
        plans: What was decided, in the order in which graphs were compiled.
    """

    def __init__(self, budget: float) -> None:
        self._budget = budget
        self._halves: dict[Any, Segment] = {}
        self.plans: list[TorchPlan] = []

    def __call__(
        self, module: torch.fx.GraphModule, inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        """Compile one graph."""
        compiler = aot_autograd(
            fw_compiler=self._compiled,
            bw_compiler=self._compiled,
            partition_fn=self._partitioned,
        )
        found: Callable[..., Any] = compiler(module, inputs)
        return found

    def _partitioned(
        self,
        joint: torch.fx.GraphModule,
        joint_inputs: Sequence[Any],
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None,
        **_: Any,
    ) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
        """Two graphs of one node each: the halves of one planned program."""
        del joint_inputs
        parts = _Joint.of(joint, num_fwd_outputs)
        parts.check()
        with _disable_current_modes(), torch.no_grad():
            lowered = parts.lowered()
            own = {lowered.inputs[i] for i in static_lifetime_input_indices or ()}
            given = {t for t in lowered.inputs if t is not None} - own
            planner = Planner(lowered, measured(lowered), given)
            plan = planner.plan(self._budget)
            halves = bind_halves(lowered, plan.plan.schedule, parts.count)
        source = f"{halves.forward.source}\n{halves.backward.source}"
        self.plans.append(replace(plan, source=source))
        return parts.split(halves, self._halves)

    def _compiled(
        self, module: torch.fx.GraphModule, example: Sequence[Any]
    ) -> Callable[..., Any]:
        """One half, or a graph that no gradient is asked of."""
        del example
        targets = (node.target for node in module.graph.nodes)
        segment = next(
            (self._halves[t] for t in targets if _is_half(t, self._halves)), None
        )

        def run(args: list[Any]) -> Any:
            if segment is not None:
                with torch.no_grad():
                    return segment.run(args)
            mine = list(args)
            args.clear()
            return module(*mine)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


def _is_half(target: Any, halves: Mapping[Any, Segment]) -> bool:
    return callable(target) and target in halves


@dataclass(frozen=True)
class _Halves:
    """The two halves of a program, and what goes from one to the other."""

    forward: Segment
    backward: Segment
    kept: Sequence[Kept]
    layouts: Mapping[str, Any]


def bind_halves(lowered: Lowered, schedule: Schedule, count: "_Count") -> _Halves:
    """A schedule in two halves, cut where the last forward node has run."""
    cut = _cut(schedule)
    program = Program(lowered, schedule, ThreadCopies(reuse=False))
    names = program.given(lowered.inputs)
    program.begin(names[: count.primals])
    for name, value in lowered.constants.items():
        program.constant(name, value)
    program.write(schedule.instructions[:cut])
    program.settle()
    results = [program.result(r) for r in lowered.results[: count.results]]
    tangents = names[count.primals :]
    kept = [k for k in program.kept() if k.variable not in tangents]
    forward = program.end([*results, *(k.value for k in kept)])
    program.begin([*(k.variable for k in kept), *tangents])
    program.resume(kept)
    program.write(schedule.instructions[cut:])
    results = [program.result(r) for r in lowered.results[count.results :]]
    return _Halves(forward, program.end(results), kept, lowered.layouts)


def _cut(schedule: Schedule) -> int:
    """The first instruction of the second half."""
    nodes = schedule.graph.by_name
    program = schedule.instructions
    last = max(
        (
            i
            for i, step in enumerate(program)
            if isinstance(step, Compute) and nodes[step.node].phase is Phase.FORWARD
        ),
        default=-1,
    )
    rest = range(last + 1, len(program))
    return next((i for i in rest if isinstance(program[i], Compute)), len(program))


@dataclass(frozen=True)
class _Count:
    """How many inputs and results the forward half has."""

    primals: int
    results: int


@dataclass(frozen=True)
class _Joint:
    """AOTAutograd's joint graph."""

    module: torch.fx.GraphModule
    primals: Sequence[torch.fx.Node]
    tangents: Sequence[torch.fx.Node]
    output: torch.fx.Node
    count: _Count

    @classmethod
    def of(cls, module: torch.fx.GraphModule, results: int) -> "_Joint":
        """A graph by its parts."""
        given = [node for node in module.graph.nodes if node.op == "placeholder"]
        primals = [node for node in given if "tangents" not in node.name]
        tangents = [node for node in given if "tangents" in node.name]
        output = next(node for node in module.graph.nodes if node.op == "output")
        return cls(module, primals, tangents, output, _Count(len(primals), results))

    def check(self) -> None:
        """Refuse what cannot be planned, or not be run yet.

        Raises:
            UnsupportedError: An input is on another device, or its size is a symbol.
        """
        for node in self.primals:
            value = node.meta.get("val")
            tensor = isinstance(value, torch.Tensor)
            if tensor and not value.is_cpu:
                raise UnsupportedError(
                    f"{node.name} is on {value.device}; budgets are kept on the CPU "
                    "so far"
                )
            sizes = value.shape if tensor else (value,)
            if any(isinstance(size, torch.SymInt) for size in sizes):
                raise UnsupportedError(
                    f"{node.name} has a size that is a symbol; give torch.compile "
                    "dynamic=False, and every size has a plan of its own"
                )

    def lowered(self) -> Lowered:
        """The graph as ours; what follows from a tangent is of the backward pass."""
        following = set(self.tangents)
        begun = False
        backward = set()
        for node in self.module.graph.nodes:
            if any(operand in following for operand in node.all_input_nodes):
                following.add(node)
                begun = True
            if begun:
                backward.add(node.name)

        def phase_of(node: str) -> Phase:
            return Phase.BACKWARD if node in backward else Phase.FORWARD

        return _remembering(lower(self.module, phase_of), self._mutated())

    def _mutated(self) -> list[int]:
        """Inputs that AOTAutograd changes between the halves."""
        changed = [
            result.mutated_input
            for result in self.output.meta.get("desc", ())
            if isinstance(result, InputMutationAOTOutput)
        ]
        given = [node.meta.get("desc") for node in self.primals]
        return [i for i, described in enumerate(given) if described in changed]

    def split(
        self, halves: _Halves, known: dict[Any, Segment]
    ) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
        """Forward and backward as AOTAutograd wants them."""
        values = [node.meta.get("val") for node in self.primals]
        mode = next(v.fake_mode for v in values if isinstance(v, torch.Tensor))
        with mode:
            kept = [keeps.like(halves.layouts) for keeps in halves.kept]
        flat = self.output.args[0]
        results = [_value(r) for r in flat[: self.count.results]]
        forward = _one_call(
            self.module,
            [(node.name, dict(node.meta)) for node in self.primals],
            [*results, *kept],
            _half(halves.forward, known),
        )
        saved = [(f"kept_{i}", {"val": value}) for i, value in enumerate(kept)]
        tangents = [(node.name, dict(node.meta)) for node in self.tangents]
        backward = _one_call(
            self.module,
            [*saved, *tangents],
            [_value(r) for r in flat[self.count.results :]],
            _half(halves.backward, known),
        )
        return forward, backward


def _value(result: Any) -> Any:
    return result.meta.get("val") if isinstance(result, torch.fx.Node) else result


def _half(segment: Segment, known: dict[Any, Segment]) -> Callable[..., Any]:
    def planned_half(*args: Any) -> Any:
        return segment.run(list(args))

    known[planned_half] = segment
    return planned_half


def _one_call(
    module: torch.fx.GraphModule,
    inputs: Sequence[tuple[str, dict[str, Any]]],
    results: Sequence[Any],
    function: Callable[..., Any],
) -> torch.fx.GraphModule:
    """A graph that calls one function with all that it is given."""
    graph = torch.fx.Graph()
    given = []
    for name, meta in inputs:
        node = graph.placeholder(name)
        node.meta = meta
        given.append(node)
    whole = graph.call_function(function, tuple(given))
    outputs: list[Any] = []
    for i, value in enumerate(results):
        if value is None:
            outputs.append(None)
            continue
        node = graph.call_function(operator.getitem, (whole, i))
        node.meta["val"] = value
        outputs.append(node)
    output = graph.output(tuple(outputs))
    output.meta["desc"] = [None] * len(outputs)
    return torch.fx.GraphModule(module, graph)


def _remembering(lowered: Lowered, mutated: Sequence[int]) -> Lowered:
    """The graph with it said that some inputs are others in the backward pass.

    Nothing that reads them may be computed again there.
    """
    changed = tuple(
        dict.fromkeys(t for i in mutated if (t := lowered.inputs[i]) is not None)
    )
    if not changed:
        return lowered
    graph = lowered.graph
    node = Node(_CHANGED, "store", changed, (), phase=Phase.BACKWARD, mutates=changed)
    forward = [n for n in graph.nodes if n.phase is Phase.FORWARD]
    backward = [n for n in graph.nodes if n.phase is not Phase.FORWARD]
    calls = MappingProxyType({**lowered.calls, _CHANGED: NOTHING})
    nodes = (*forward, node, *backward)
    return replace(
        lowered, graph=Graph(graph.tensors, nodes, graph.outputs), calls=calls
    )
