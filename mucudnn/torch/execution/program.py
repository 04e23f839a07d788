"""A schedule as a Python function: generated source, compiled.

Every tensor is a local variable. What the plan frees is set to None: PyTorch's
allocator has it back at that very line. So a planned step costs no more per node than
the same lines written by hand, and it can be read.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any

import torch

from mucudnn.ir.graph import Graph, Node
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
from mucudnn.passes.scheduling.problem import origin
from mucudnn.torch.execution.copies import bytes_of
from mucudnn.torch.execution.devices import Copies
from mucudnn.torch.lowering.lowered import NOTHING, Layout, Lowered, Number, Operand


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


def bind(
    lowered: Lowered, schedule: Schedule, copies: Copies, *, announced: bool = False
) -> Segment:
    """A whole schedule: the inputs of the graph in, its results out.

    Args:
        lowered: How nodes are called.
        schedule: What is run.
        copies: What runs its copies.
        announced: Whether the last value given is a function to call before the first
            input is written.
    """
    program = Program(lowered, schedule, copies)
    given = program.given(lowered.inputs)
    program.begin([*given, program.announced()] if announced else given)
    for name, value in lowered.constants.items():
        program.constant(name, value)
    program.depart()
    program.write(schedule.instructions)
    program.come_home()
    return program.end([program.result(value) for value in lowered.results])


class Program:
    """Writes instructions down, segment by segment.

    Args:
        lowered: How nodes are called.
        schedule: In which order, and what is there when.
        copies: What runs its copies.
    """

    def __init__(self, lowered: Lowered, schedule: Schedule, copies: Copies) -> None:
        self._lowered = lowered
        self._graph = schedule.graph
        self._lines: list[str] = []
        self._given: list[str] = []
        self._leaves = False
        self._handles: dict[str, str] = {}
        self._numbers = count()
        self._states: dict[str, str] = {}
        self._names = Names(
            schedule.graph,
            {
                "begin": copies.begin,
                "copy_back": copies.back,
                "copy_home": copies.home,
                "bytes_of": bytes_of,
                "left": copies.left,
                "settle": copies.settle,
                "lie": _lie,
                "get_state": get_state,
                "set_state": set_state,
                "keep_state": keep_state,
            },
        )
        self._hosted = schedule.hosted
        self._unannounced: set[str] = set()
        self._across = schedule.live_across
        self._changed: set[str] = set()
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
    def _again(self) -> frozenset[str]:
        """Random nodes that are computed again."""
        copies = (n.name for n in self._graph.nodes if "~" in n.name)
        calls = self._lowered.calls
        return frozenset(o for name in copies if calls[o := origin(name)].random)

    def given(self, inputs: Iterable[str | None]) -> list[str]:
        """Variables of a graph's inputs; `_` for one that is no tensor or known."""
        return [
            "_" if name is None or name in self._names.bound else self._variable(name)
            for name in inputs
        ]

    def begin(self, given: Sequence[str]) -> None:
        """A new segment, given values of these variables."""
        self._lines = []
        self._given = list(given)
        self._leaves = False

    def constant(self, tensor: str, value: torch.Tensor) -> None:
        """A tensor that is part of the graph."""
        self._lines.append(f"{self._variable(tensor)} = {self._names.literal(value)}")

    def result(self, value: Any) -> str:
        """What is returned: a tensor by its name, or a constant."""
        return (
            self._variable(value)
            if isinstance(value, str)
            else self._names.literal(value)
        )

    def depart(self) -> None:
        """Leave inputs that are host-resident at home.

        What a step begins with is copied to the device first.
        """
        for storage in self._hosted:
            handle = self._handle(storage)
            tensor = self._names.any_of(storage)
            self._lines.append(f"{handle} = left(bytes_of({tensor}), {storage!r})")
            self._free(storage)
        for storage in self._across:
            self._swap_in(storage)
        self._lines += [f"{self._handles[storage]}.wait()" for storage in self._across]

    def come_home(self) -> None:
        """Copy home what a step ends with and has changed.

        A schedule lets it stay on the device for the next step. Here a step ends with
        everything where whoever reads it between two steps finds it.
        """
        here = [storage for storage in self._across if self._names.has(storage)]
        changed = [storage for storage in here if storage in self._changed]
        for storage in changed:
            self._swap_out(storage)
        self._lines += [f"{self._handles[storage]}.wait()" for storage in changed]
        for storage in here:
            self._free(storage)

    def settle(self) -> None:
        """Wait for all copies that are under way."""
        self._lines += [f"{handle}.wait()" for handle in self._handles.values()]

    def kept(self) -> list[Kept]:
        """What instructions that follow need of those so far."""
        later = self._instructions[self._at :]
        back = {step.tensor for step in later if isinstance(step, SwapIn)}
        out = {step.tensor for step in later if isinstance(step, SwapOut)}
        found = []
        for name in sorted(self._names.bound, key=self._graph_order.__getitem__):
            storage = self._graph.storages[name]
            if self._last_read.get(name, -1) >= self._at or storage in out:
                variable = self._variable(name)
                found.append(Kept(variable, variable, name))
        for storage, handle in self._handles.items():
            if storage in back:
                nbytes = self._graph.tensors[storage].nbytes
                found.append(Kept(handle, f"{handle}.host", storage, nbytes))
        for node, state in self._states.items():
            nbytes = keep_state(generator_of(self._lowered, node)).numel()
            found.append(Kept(state, state, None, nbytes))
        return found

    def resume(self, kept: Sequence[Kept]) -> None:
        """Begin with what was kept: what is on the host has left."""
        handles = set(self._handles.values())
        self._lines += [
            f"{k.variable} = left({k.variable}, {k.tensor!r})"
            for k in kept
            if k.variable in handles
        ]
        mine = {k.variable for k in kept}
        self._handles = {s: h for s, h in self._handles.items() if h in mine}

    @cached_property
    def _graph_order(self) -> Mapping[str, int]:
        return {name: i for i, name in enumerate(self._graph.tensors)}

    def end(self, results: Sequence[str]) -> Segment:
        """The segment, compiled."""
        settle = "settle()" if self._handles else None
        first = ["copy_out = begin()"] if self._leaves else []
        lines = [*first, *self._lines]
        return compiled(self._given, lines, results, self._names.space, settle)

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
        operands = [self._variable(name) for name in node.inputs]
        positional = [self._names.argument(a, operands) for a in call.args]
        named = [
            f"{k}={self._names.argument(a, operands)}" for k, a in call.kwargs.items()
        ]
        function, taken = call.function, self._taken(node)
        if call.into is not None and taken is not None:
            function = call.into
            if not call.first:
                named.append(f"out={self._variable(taken)}")
        called = self._names.literal(_direct(function))
        text = f"{called}({', '.join([*positional, *named])})"
        changed = {self._graph.storages[name] for name in node.mutates}
        self._changed |= changed
        self._announce(changed.difference(self._hosted))
        start = len(self._lines)
        if first in self._again:
            self._drawing(first, node)
        self._assign(node, call.results, text)
        if first in self._again and node.name != first:
            _, on = self._generator_text(first)
            saved, *drawing = self._lines[start:]
            indented = [f"    {line}" for line in drawing]
            undone = ["finally:", f"    set_state(drawn{on})", "drawn = None"]
            self._lines[start:] = [saved, "try:", *indented, *undone]

    def announced(self) -> str:
        """Return the variable of a function called before an input is first written."""
        storages = self._graph.storages
        self._unannounced.update(storages[t] for t in self._lowered.inputs if t)
        return "begin_update"

    def _announce(self, written: set[str]) -> None:
        """Call `begin_update` before the first of these storages that is an input's."""
        if not self._unannounced.isdisjoint(written):
            self._lines.append("begin_update()")
            self._unannounced.clear()

    def _taken(self, node: Node) -> str | None:
        """The operand that a node's result overwrites, if it does."""
        if not node.outputs:
            return None
        alias = self._graph.tensors[node.outputs[0]].alias
        return alias if alias in node.inputs else None

    def _drawing(self, first: str, node: Node) -> None:
        """Random numbers that are drawn again are the same: the state is put back."""
        state = self._states.setdefault(first, f"s{len(self._states)}")
        of, on = self._generator_text(first)
        if node.name == first:
            self._lines.append(f"{state} = keep_state({of})")
        else:
            self._lines += [f"drawn = get_state({of})", f"set_state({state}{on})"]

    def _generator_text(self, node: str) -> tuple[str, str]:
        """The same as the only argument of a call, and as one more."""
        device = generator_of(self._lowered, node)
        text = "" if device is None else self._names.literal(device)
        return text, f", {text}" if text else ""

    def _assign(self, node: Node, paths: Sequence[int | None], text: str) -> None:
        names = [self._variable(name) for name in node.outputs]
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
        if variables := self._names.released(storage):
            self._lines.append(f"{' = '.join(variables)} = None")

    def _handle(self, storage: str) -> str:
        """The variable of what has left; none has another's, whatever is back."""
        if storage not in self._handles:
            self._handles[storage] = f"h{next(self._numbers)}"
        return self._handles[storage]

    def _swap_out(self, storage: str) -> None:
        handle = self._handle(storage)
        tensor = self._names.any_of(storage)
        if storage in self._hosted:
            self._announce(self._changed & {storage})
            self._lines.append(f"copy_home({tensor}, {handle})")
            self._changed.discard(storage)
        else:
            self._lines.append(f"{handle} = copy_out({tensor}, {storage!r})")
            self._leaves = True

    def _swap_in(self, storage: str) -> None:
        known = self._names.known(storage)
        wanted = [n for n in known if self._last_read.get(n, -1) >= self._at]
        if not wanted:
            return  # it is for the next step, which begins with it
        self._lines.append(f"back = copy_back({self._handles[storage]})")
        for name in wanted:
            layout = self._names.literal(self._lowered.layouts[origin(name)])
            self._lines.append(f"{self._variable(name)} = lie(back, {layout})")
        self._lines.append("back = None")

    def _variable(self, tensor: str) -> str:
        return self._names.variable(tensor)


def _direct(function: Any) -> Any:
    """What an overload calls itself: a frame of Python's less for every node."""
    return function._op if type(function) is torch._ops.OpOverload else function


def _lie(whole: torch.Tensor, layout: Any) -> torch.Tensor:
    """A tensor in given bytes."""
    tensor = torch.empty(0, dtype=layout.dtype, device=whole.device).set_(
        whole.untyped_storage(), layout.offset, layout.shape, layout.stride
    )
    return layout.read(tensor)


# What a program calls its tensors and its constants.
#
# Every tensor is a local variable, which keeps its name for good: what was freed and is
# there again is the same one. Values that Python cannot write down are globals.


_WRITTEN = (int, bool, str, type(None))


class Names:
    """The names of one program.

    Args:
        graph: Whose tensors it has.
        space: Global name -> value, to begin with.

    Attributes:
        space: All of them.
        bound: Tensors whose variables have a value at this point of the program.
    """

    def __init__(self, graph: Graph, space: Mapping[str, Any]) -> None:
        self.space: dict[str, Any] = dict(space)
        self.bound: set[str] = set()
        self._graph = graph
        self._variables: dict[str, str] = {}
        self._constants: dict[int, str] = {}

    @cached_property
    def _members(self) -> Mapping[str, list[str]]:
        """Storage -> all names of its bytes."""
        found: dict[str, list[str]] = {}
        for name, storage in self._graph.storages.items():
            found.setdefault(storage, []).append(name)
        return found

    def variable(self, tensor: str) -> str:
        """The local variable of a tensor, which is there from now on."""
        self.bound.add(tensor)
        return self._variables.setdefault(tensor, f"t{len(self._variables)}")

    def any_of(self, storage: str) -> str:
        """The variable of some tensor that is there and has these bytes."""
        name = next(n for n in self._members[storage] if n in self.bound)
        return self._variables[name]

    def has(self, storage: str) -> bool:
        """Whether any tensor that is there has these bytes."""
        return not self.bound.isdisjoint(self._members[storage])

    def known(self, storage: str) -> list[str]:
        """Tensors with these bytes that have been there."""
        return [n for n in self._members[storage] if n in self._variables]

    def released(self, storage: str) -> list[str]:
        """Variables that have these bytes; their tensors are no longer there."""
        names = [n for n in self._members[storage] if n in self.bound]
        self.bound.difference_update(names)
        return [self._variables[name] for name in names]

    def argument(self, value: Any, operands: Sequence[str]) -> str:
        """An argument of a call as text, given its operands'."""
        match value:
            case Operand(index):
                return operands[index]
            case Number(function, args):
                given = ", ".join(self.argument(a, operands) for a in args)
                return f"{self.literal(function)}({given})"
            case list() | tuple():
                inside = "".join(f"{self.argument(v, operands)}, " for v in value)
                return f"[{inside}]" if isinstance(value, list) else f"({inside})"
            case _:
                return self.literal(value)

    def literal(self, value: Any) -> str:
        """A value as text, or a name that stands for it."""
        if isinstance(value, _WRITTEN):
            return repr(value)
        key = id(value)
        if key not in self._constants:
            name = f"k{len(self._constants)}"
            self._constants[key] = name
            self.space[name] = value
        return self._constants[key]


def compiled(
    given: Sequence[str],
    lines: Sequence[str],
    results: Sequence[str],
    space: Mapping[str, Any],
    failed: str | None = None,
) -> Segment:
    """A function of these variables with these lines.

    Args:
        given: Variables, in the order of their values; `_` for a value of no use.
        lines: Statements.
        results: What it returns, as text.
        space: Name -> what it stands for.
        failed: What is done if it raises, while its variables are still there.
    """
    head = ["def run(given):"]
    if given:
        head.append(f"    {', '.join(given)}, = given")
    head.append("    given.clear()")
    if "_" in given:
        head.append("    _ = None")
    body = [f"    {line}" for line in (*lines, f"return [{', '.join(results)}]")]
    if failed is not None:
        body = ["    try:", *(f"    {line}" for line in body)]
        body += ["    except BaseException:", f"        {failed}", "        raise"]
    source = "\n".join([*head, *body, ""])
    found = dict(space)
    exec(compile(source, "<planned step>", "exec"), found)
    return Segment(source, found["run"])


# States of random generators: what is drawn again is what was drawn.
#
# They are kept in memory that is not of PyTorch's allocator: not on the device. A CUDA
# generator is a seed and an offset, which PyTorch has on the host.


def generator_of(lowered: Lowered, node: str) -> torch.device | None:
    """The device whose generator a random node draws from; None is the CPU."""
    names = lowered.graph.by_name[node].tensors
    devices = {lowered.layouts[name].device for name in names}
    return next((device for device in devices if device.type != "cpu"), None)


def get_state(device: torch.device | None = None) -> torch.Tensor:
    """The state of a device's generator; None is the CPU's."""
    if device is None:
        return torch.get_rng_state()
    found: torch.Tensor = torch.cuda.get_rng_state(device)
    return found


def set_state(state: torch.Tensor, device: torch.device | None = None) -> None:
    """Have random numbers drawn from a state on."""
    if device is None:
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, device)


def keep_state(device: torch.device | None = None) -> torch.Tensor:
    """The generator's state, in memory that is not of PyTorch's allocator."""
    state = get_state(device)
    return torch.frombuffer(bytearray(state.numpy()), dtype=torch.uint8)
