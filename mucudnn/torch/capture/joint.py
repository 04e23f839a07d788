"""AOTAutograd's joint graph, planned as one and cut into a forward and a backward half.

Each half is a graph of one node, which runs its part of the program.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput

from mucudnn.errors import UnsupportedError
from mucudnn.ir.graph import Graph, Node, Phase
from mucudnn.ir.schedule import Compute, Schedule
from mucudnn.torch.execution.lanes import DEVICES, copies_for, device_of
from mucudnn.torch.execution.program import Kept, Program, Segment
from mucudnn.torch.lowering.lower import lower
from mucudnn.torch.lowering.lowered import NOTHING, Lowered

__all__ = ["Count", "Halves", "Joint", "bind_halves"]

_CHANGED = "changed"
"""The node at which inputs have other values than in the forward pass."""


@dataclass(frozen=True)
class Halves:
    """The two halves of a program, and what goes from one to the other."""

    forward: Segment
    backward: Segment
    kept: Sequence[Kept]
    layouts: Mapping[str, Any]


def bind_halves(lowered: Lowered, schedule: Schedule, count: "Count") -> Halves:
    """A schedule in two halves, cut where the last forward node has run."""
    cut = _cut(schedule)
    program = Program(
        lowered, schedule, copies_for(device_of(lowered.layouts), reuse=False)
    )
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
    return Halves(forward, program.end(results), kept, lowered.layouts)


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
class Count:
    """How many inputs and results the forward half has."""

    primals: int
    results: int


@dataclass(frozen=True)
class Joint:
    """AOTAutograd's joint graph."""

    module: torch.fx.GraphModule
    primals: Sequence[torch.fx.Node]
    tangents: Sequence[torch.fx.Node]
    output: torch.fx.Node
    count: Count

    @classmethod
    def of(cls, module: torch.fx.GraphModule, results: int) -> "Joint":
        """A graph by its parts."""
        given = [node for node in module.graph.nodes if node.op == "placeholder"]
        primals = [node for node in given if "tangents" not in node.name]
        tangents = [node for node in given if "tangents" in node.name]
        output = next(node for node in module.graph.nodes if node.op == "output")
        return cls(module, primals, tangents, output, Count(len(primals), results))

    def check(self) -> None:
        """Refuse what cannot be planned, or not be run yet.

        Raises:
            UnsupportedError: An input is on another device, or its size is a symbol.
        """
        for node in self.primals:
            value = node.meta.get("val")
            tensor = isinstance(value, torch.Tensor)
            if tensor and value.device.type not in DEVICES:
                raise UnsupportedError(
                    f"{node.name} is on {value.device}; budgets are kept on the CPU "
                    "and on CUDA devices"
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
        self, halves: Halves, known: dict[Any, Segment]
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
