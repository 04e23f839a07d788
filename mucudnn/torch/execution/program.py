"""A schedule as a function: what the plan says, written down as Python and compiled.

Every tensor is a local variable. What the plan frees is set to None: PyTorch's
allocator has it back at that very line. So a planned step costs no more per node than
the same lines written by hand, and it can be read.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from mucudnn.ir.graph import Node
from mucudnn.ir.schedule import (
    Alloc,
    Compute,
    Free,
    Instruction,
    Schedule,
    SwapIn,
    SwapOut,
    Wait,
)
from mucudnn.passes.scheduling.costs import origin
from mucudnn.torch.execution.copies import Leaving, ThreadCopies
from mucudnn.torch.lowering.lowered import NOTHING, Layout, Lowered, Number, Operand

__all__ = ["Kept", "Program", "Segment", "bind"]

_BY_NAME = (int, bool, str, type(None))


@dataclass(frozen=True)
class Segment:
    """Part of a program as a function of what is there at its start.

    Attributes:
        source: Python.
        run: Takes a list, which it empties, and returns a list.
    """

    source: str
    run: Callable[[list[Any]], list[Any]]


@dataclass(frozen=True)
class Kept:
    """What one segment leaves to the next, as a tensor.

    Attributes:
        variable: That has it in both.
        value: What the first returns of it.
        tensor: Whose it is; of a storage on the host, the storage; else None.
        host_bytes: Its size on the host; 0 if it is a tensor on the device.
    """

    variable: str
    value: str
    tensor: str | None = None
    host_bytes: int = 0

    def like(self, layouts: Mapping[str, Layout]) -> torch.Tensor:
        """A tensor of its kind."""
        if self.host_bytes or self.tensor is None:
            return torch.empty(self.host_bytes, dtype=torch.uint8)
        layout = layouts[origin(self.tensor)]
        return torch.empty_strided(
            layout.shape, layout.stride, dtype=layout.dtype, device=layout.device
        )


def bind(lowered: Lowered, schedule: Schedule, copies: ThreadCopies) -> Segment:
    """A whole schedule: the inputs of the graph in, its results out."""
    program = Program(lowered, schedule, copies)
    program.begin(program.given(lowered.inputs))
    for name, value in lowered.constants.items():
        program.constant(name, value)
    program.write(schedule.instructions)
    return program.end([program.result(value) for value in lowered.results])


class Program:
    """Writes instructions down, segment by segment.

    Args:
        lowered: How nodes are called.
        schedule: In which order, and what is there when.
        copies: What runs its copies.
    """

    def __init__(
        self, lowered: Lowered, schedule: Schedule, copies: ThreadCopies
    ) -> None:
        self._lowered = lowered
        self._graph = schedule.graph
        self._lines: list[str] = []
        self._given: list[str] = []
        self._variables: dict[str, str] = {}
        self._bound: set[str] = set()
        self._handles: dict[str, str] = {}
        self._states: dict[str, str] = {}
        self._constants: dict[int, str] = {}
        self._space: dict[str, Any] = {
            "copy_out": copies.out,
            "copy_back": copies.back,
            "left": Leaving,
            "lie": _lie,
            "get_state": torch.get_rng_state,
            "set_state": set_state,
            "keep_state": _kept_state,
        }
        self._instructions = schedule.instructions
        self._last_read = self._reads(schedule.instructions)
        self._at = 0

    def _reads(self, instructions: Sequence[Instruction]) -> dict[str, int]:
        """Tensor -> the last instruction that reads it under this name."""
        calls = self._lowered.calls
        found = {
            name: at
            for at, step in enumerate(instructions)
            if isinstance(step, Compute) and calls[origin(step.node)] is not NOTHING
            for name in self._graph.by_name[step.node].inputs
        }
        end = len(instructions)
        found.update((r, end) for r in self._lowered.results if isinstance(r, str))
        return found

    @cached_property
    def _members(self) -> Mapping[str, list[str]]:
        """Storage -> all names of its bytes."""
        found: dict[str, list[str]] = {}
        for name, storage in self._graph.storages.items():
            found.setdefault(storage, []).append(name)
        return found

    @cached_property
    def _again(self) -> frozenset[str]:
        """Random nodes that are computed again."""
        copies = (n.name for n in self._graph.nodes if "~" in n.name)
        calls = self._lowered.calls
        return frozenset(o for name in copies if calls[o := origin(name)].random)

    def variable(self, tensor: str) -> str:
        """The local variable of a tensor."""
        self._bound.add(tensor)
        return self._variables.setdefault(tensor, f"t{len(self._variables)}")

    def given(self, inputs: Iterable[str | None]) -> list[str]:
        """Variables of a graph's inputs; `_` for one that is no tensor or known."""
        return [
            "_" if name is None or name in self._bound else self.variable(name)
            for name in inputs
        ]

    def begin(self, given: Sequence[str]) -> None:
        """A new segment, given values of these variables."""
        self._lines = []
        self._given = list(given)

    def constant(self, tensor: str, value: torch.Tensor) -> None:
        """A tensor that is part of the graph."""
        self._lines.append(f"{self.variable(tensor)} = {self._literal(value)}")

    def result(self, value: Any) -> str:
        """What is returned: a tensor by its name, or a constant."""
        return self.variable(value) if isinstance(value, str) else self._literal(value)

    def settle(self) -> None:
        """Wait for all copies that are under way."""
        self._lines += [f"{handle}.wait()" for handle in self._handles.values()]

    def kept(self) -> list[Kept]:
        """What instructions that follow need of those so far."""
        later = self._instructions[self._at :]
        back = {step.tensor for step in later if isinstance(step, SwapIn)}
        out = {step.tensor for step in later if isinstance(step, SwapOut)}
        found = []
        for name in sorted(self._bound, key=self._graph_order.__getitem__):
            storage = self._graph.storages[name]
            if self._last_read.get(name, -1) >= self._at or storage in out:
                variable = self._variables[name]
                found.append(Kept(variable, variable, name))
        for storage, handle in self._handles.items():
            if storage in back:
                nbytes = self._graph.tensors[storage].nbytes
                found.append(Kept(handle, f"{handle}.host", storage, nbytes))
        found += [
            Kept(state, state, None, _state_bytes()) for state in self._states.values()
        ]
        return found

    def resume(self, kept: Sequence[Kept]) -> None:
        """Begin with what was kept: what is on the host has left."""
        handles = set(self._handles.values())
        self._lines += [
            f"{k.variable} = left({k.variable})" for k in kept if k.variable in handles
        ]
        mine = {k.variable for k in kept}
        self._handles = {s: h for s, h in self._handles.items() if h in mine}

    @cached_property
    def _graph_order(self) -> Mapping[str, int]:
        return {name: i for i, name in enumerate(self._graph.tensors)}

    def end(self, results: Sequence[str]) -> Segment:
        """The segment, compiled."""
        head = ["def run(given):"]
        if self._given:
            head.append(f"    {', '.join(self._given)}, = given")
        head.append("    given.clear()")
        if "_" in self._given:
            head.append("    _ = None")
        body = [f"    {line}" for line in self._lines]
        source = "\n".join([*head, *body, f"    return [{', '.join(results)}]", ""])
        space = dict(self._space)
        exec(compile(source, "<planned step>", "exec"), space)
        return Segment(source, space["run"])

    def write(self, instructions: Iterable[Instruction]) -> None:
        """Append instructions."""
        for instruction in instructions:
            match instruction:
                case Compute(name):
                    self._compute(self._graph.by_name[name])
                case Free(storage):
                    self._free(storage)
                case SwapOut(storage):
                    self._swap_out(storage)
                case SwapIn(storage):
                    self._swap_in(storage)
                case Wait(storage) if storage in self._handles:
                    self._lines.append(f"{self._handles[storage]}.wait()")
                case Alloc() | Wait():
                    pass
            self._at += 1

    def _compute(self, node: Node) -> None:
        first = origin(node.name)
        call = self._lowered.planned.get(node.name, self._lowered.calls[first])
        if call is NOTHING:
            return
        operands = [self.variable(name) for name in node.inputs]
        positional = [self._argument(a, operands) for a in call.args]
        named = [f"{k}={self._argument(a, operands)}" for k, a in call.kwargs.items()]
        function, taken = call.function, self._taken(node)
        if call.into is not None and taken is not None:
            function = call.into
            if not call.first:
                named.append(f"out={self.variable(taken)}")
        text = f"{self._literal(function)}({', '.join([*positional, *named])})"
        if first in self._again:
            self._drawing(first, node)
        self._assign(node, call.results, text)
        if first in self._again and node.name != first:
            self._lines += ["set_state(drawn)", "drawn = None"]

    def _taken(self, node: Node) -> str | None:
        """The operand that a node's result overwrites, if it does."""
        if not node.outputs:
            return None
        alias = self._graph.tensors[node.outputs[0]].alias
        return alias if alias in node.inputs else None

    def _drawing(self, first: str, node: Node) -> None:
        """Random numbers that are drawn again are the same: the state is put back."""
        state = self._states.setdefault(first, f"s{len(self._states)}")
        if node.name == first:
            self._lines.append(f"{state} = keep_state()")
        else:
            self._lines += ["drawn = get_state()", f"set_state({state})"]

    def _assign(self, node: Node, paths: Sequence[int | None], text: str) -> None:
        names = [self.variable(name) for name in node.outputs]
        if not names:
            self._lines.append(text)
        elif paths[0] is None:
            self._lines.append(f"{names[0]} = {text}")
        elif len(names) == 1:
            self._lines.append(f"{names[0]} = {text}[{paths[0]}]")
        else:
            self._lines.append(f"all_ = {text}")
            parts = ", ".join(f"all_[{path}]" for path in paths)
            self._lines += [f"{', '.join(names)} = {parts}", "all_ = None"]

    def _free(self, storage: str) -> None:
        names = [n for n in self._members[storage] if n in self._bound]
        self._bound.difference_update(names)
        self._forget([self._variables[name] for name in names])

    def _forget(self, variables: Sequence[str]) -> None:
        if variables:
            self._lines.append(f"{' = '.join(variables)} = None")

    def _swap_out(self, storage: str) -> None:
        name = next(n for n in self._members[storage] if n in self._bound)
        handle = self._handles.setdefault(storage, f"h{len(self._handles)}")
        self._lines.append(
            f"{handle} = copy_out({self._variables[name]}, {handle[1:]})"
        )

    def _swap_in(self, storage: str) -> None:
        known = (n for n in self._members[storage] if n in self._variables)
        wanted = [n for n in known if self._last_read.get(n, -1) > self._at]
        self._lines.append(f"back = copy_back({self._handles[storage]})")
        for name in wanted:
            layout = self._literal(self._layout(name))
            self._lines.append(f"{self.variable(name)} = lie(back, {layout})")
        self._lines.append("back = None")

    def _layout(self, tensor: str) -> Any:
        return self._lowered.layouts[origin(tensor)]

    def _argument(self, value: Any, operands: Sequence[str]) -> str:
        match value:
            case Operand(index):
                return operands[index]
            case Number(function, args):
                given = ", ".join(self._argument(a, operands) for a in args)
                return f"{self._literal(function)}({given})"
            case list() | tuple():
                inside = "".join(f"{self._argument(v, operands)}, " for v in value)
                return f"[{inside}]" if isinstance(value, list) else f"({inside})"
            case _:
                return self._literal(value)

    def _literal(self, value: Any) -> str:
        """A value as text, or a name that stands for it."""
        if isinstance(value, _BY_NAME):
            return repr(value)
        key = id(value)
        if key not in self._constants:
            name = f"k{len(self._constants)}"
            self._constants[key] = name
            self._space[name] = value
        return self._constants[key]


def _lie(whole: torch.Tensor, layout: Any) -> torch.Tensor:
    """A tensor in given bytes."""
    return torch.empty(0, dtype=layout.dtype, device=whole.device).set_(
        whole.untyped_storage(), layout.offset, layout.shape, layout.stride
    )


def set_state(state: torch.Tensor) -> None:
    """Have random numbers drawn from a state on."""
    torch.set_rng_state(state)


def _kept_state() -> torch.Tensor:
    """The generator's state, in memory that is not of PyTorch's allocator."""
    return torch.frombuffer(bytearray(torch.get_rng_state().numpy()), dtype=torch.uint8)


def _state_bytes() -> int:
    return int(torch.get_rng_state().numel())
