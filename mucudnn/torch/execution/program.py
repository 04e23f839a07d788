"""Compile a schedule to a Python function.

Every tensor is a local variable. Where the plan frees a storage, its variables are set
to None, and PyTorch's allocator gets the memory back at that line. A planned step
therefore costs no more per node than the same lines written by hand, and its source can
be read.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
from mucudnn.torch.execution.cuda_memory import PROGRAM
from mucudnn.torch.execution.devices import Copies
from mucudnn.torch.lowering.lowered import NOTHING, Layout, Lowered, Number, Operand


@dataclass(frozen=True)
class Segment:
    """A compiled part of a program.

    Attributes:
        source: Its Python source.
        run: Takes a list of values, which it empties, and returns a list of results.
    """

    source: str
    run: Callable[[list[Any]], list[Any]]


@dataclass(frozen=True)
class CarriedValue:
    """A tensor that one segment returns and the next segment takes.

    Attributes:
        variable: Its variable in both segments.
        value: The expression that the first segment returns.
        tensor: Name of the tensor; the storage if the bytes are on the host; None for
            the state of a random generator.
        host_bytes: Size on the host; 0 if it is a tensor on the device.
    """

    variable: str
    value: str
    tensor: str | None = None
    host_bytes: int = 0

    def like(self, layouts: Mapping[str, Layout]) -> torch.Tensor:
        """Return an uninitialized tensor of the same layout."""
        if self.host_bytes or self.tensor is None:
            return torch.empty(self.host_bytes, dtype=torch.uint8, device="cpu")
        return layouts[origin(self.tensor)].empty()


def bind(
    lowered: Lowered, schedule: Schedule, copies: Copies, *, announced: bool = False
) -> Segment:
    """Compile a whole schedule, from the inputs of the graph to its results.

    With `announced`, the program calls a function, which is the last given value,
    before it writes the first input.
    """
    program = Program(lowered, schedule, copies)
    inputs = program.declare_inputs(lowered.inputs)
    if announced:
        inputs.append(program.announce_writes())
    program.begin_segment(inputs)
    program.add_constants()
    program.offload_state()
    program.write(schedule.instructions)
    program.write_back_state()
    return program.end_segment([program.result(value) for value in lowered.results])


class Program:
    """Writes the instructions of a schedule as source, segment by segment."""

    def __init__(self, lowered: Lowered, schedule: Schedule, copies: Copies) -> None:
        self._lowered = lowered
        self._graph = schedule.graph
        self._lines: list[str] = []
        self._inputs: list[str] = []
        self._offloads = False
        self._handles: dict[str, str] = {}
        self._handle_numbers = count()
        self._generator_states: dict[str, str] = {}
        self._names = Names(
            schedule.graph,
            {
                "begin": copies.start_run,
                "copy_back": copies.prefetch,
                "copy_home": copies.write_back,
                "bytes_of": bytes_of,
                "left": copies.on_host,
                "settle": copies.synchronize,
                "lie": lambda whole, layout: layout.view_of(whole),
                "get_state": get_state,
                "set_state": set_state,
                "keep_state": keep_state,
            },
        )
        self._host_resident = schedule.hosted
        self._unannounced: set[str] = set()
        self._live_across = schedule.live_across
        self._changed: set[str] = set()
        self._instructions = schedule.instructions
        self._at = 0
        # Tensor -> the last instruction that reads it under this name.
        self._last_read = {
            name: at
            for at, step in enumerate(schedule.instructions)
            if isinstance(step, Compute)
            and lowered.calls[origin(step.node)] is not NOTHING
            for name in self._graph.by_name[step.node].inputs
        }
        end = len(schedule.instructions)
        self._last_read.update((r, end) for r in lowered.results if isinstance(r, str))
        recomputed = {origin(n.name) for n in self._graph.nodes if "~" in n.name}
        self._redrawn = frozenset(n for n in recomputed if lowered.calls[n].random)

    def declare_inputs(self, inputs: Iterable[str | None]) -> list[str]:
        """Return the variables of graph inputs; `_` if not a tensor or a repetition."""
        return [
            "_"
            if name is None or name in self._names.bound
            else self._names.variable(name)
            for name in inputs
        ]

    def announce_writes(self) -> str:
        """Call a function before an input is first written; return its variable."""
        storages = self._graph.storages
        self._unannounced.update(storages[t] for t in self._lowered.inputs if t)
        return "begin_update"

    def begin_segment(self, inputs: Sequence[str]) -> None:
        """Begin a segment that takes the values of these variables."""
        self._lines = []
        self._inputs = list(inputs)
        self._offloads = False

    def end_segment(self, results: Sequence[str]) -> Segment:
        """Compile the segment."""
        head = ["def run(given):"]
        if self._inputs:
            head.append(f"    {', '.join(self._inputs)}, = given")
        # The caller's list must not keep tensors alive that the program frees.
        head.append("    given.clear()")
        if "_" in self._inputs:
            head.append("    _ = None")
        first = ["copy_out = begin()"] if self._offloads else []
        lines = [*first, *self._lines, f"return [{', '.join(results)}]"]
        body = [f"    {line}" for line in lines]
        if self._handles:  # copies may be in flight while the variables still hold
            body = ["    try:", *(f"    {line}" for line in body)]
            body += ["    except BaseException:", "        settle()", "        raise"]
        source = "\n".join([*head, *body, ""])
        found = dict(self._names.space)
        exec(compile(source, PROGRAM, "exec"), found)
        return Segment(source, found["run"])

    def add_constants(self) -> None:
        """Bind the tensors that are part of the graph."""
        for name, value in self._lowered.constants.items():
            self._lines.append(
                f"{self._names.variable(name)} = {self._names.literal(value)}"
            )

    def result(self, value: Any) -> str:
        """Return the expression of a result: a tensor by its name, or a constant."""
        if isinstance(value, str):
            return self._names.variable(value)
        return self._names.literal(value)

    def offload_state(self) -> None:
        """Treat host-resident inputs as offloaded; prefetch what a step begins with."""
        for storage in self._host_resident:
            handle = self._handle(storage)
            tensor = self._names.variable_of(storage)
            self._lines.append(f"{handle} = left(bytes_of({tensor}), {storage!r})")
            self._free(storage)
        for storage in self._live_across:
            self._swap_in(storage)
        self._lines += [f"{self._handles[s]}.wait()" for s in self._live_across]

    def write_back_state(self) -> None:
        """Write back host-resident storages that are on the device and were changed.

        The schedule lets them stay on the device for the next step. Here every step
        ends with all of them on the host, where users read them between two steps.
        """
        here = [storage for storage in self._live_across if self._names.has(storage)]
        changed = [storage for storage in here if storage in self._changed]
        for storage in changed:
            self._swap_out(storage)
        self._lines += [f"{self._handles[storage]}.wait()" for storage in changed]
        for storage in here:
            self._free(storage)

    def wait_for_copies(self) -> None:
        """Wait for all copies in flight."""
        self._lines += [f"{handle}.wait()" for handle in self._handles.values()]

    def carried_values(self) -> list[CarriedValue]:
        """Return what the remaining instructions need of the ones written so far."""
        later = self._instructions[self._at :]
        back = {step.tensor for step in later if isinstance(step, SwapIn)}
        out = {step.tensor for step in later if isinstance(step, SwapOut)}
        order = {name: i for i, name in enumerate(self._graph.tensors)}
        found = []
        for name in sorted(self._names.bound, key=order.__getitem__):
            storage = self._graph.storages[name]
            if self._last_read.get(name, -1) >= self._at or storage in out:
                variable = self._names.variable(name)
                found.append(CarriedValue(variable, variable, name))
        for storage, handle in self._handles.items():
            if storage in back:
                nbytes = self._graph.tensors[storage].nbytes
                found.append(CarriedValue(handle, f"{handle}.host", storage, nbytes))
        for node, state in self._generator_states.items():
            nbytes = keep_state(generator_of(self._lowered, node)).numel()
            found.append(CarriedValue(state, state, None, nbytes))
        return found

    def resume(self, carried: Sequence[CarriedValue]) -> None:
        """Begin a segment with carried values; bytes on the host become handles."""
        handles = set(self._handles.values())
        self._lines += [
            f"{c.variable} = left({c.variable}, {c.tensor!r})"
            for c in carried
            if c.variable in handles
        ]
        variables = {c.variable for c in carried}
        self._handles = {s: h for s, h in self._handles.items() if h in variables}

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
        # The call: its function, and its arguments as text.
        operands = [self._names.variable(name) for name in node.inputs]
        positional = [self._names.argument(a, operands) for a in call.args]
        named = [
            f"{k}={self._names.argument(a, operands)}" for k, a in call.kwargs.items()
        ]
        function: Any = call.function
        alias = self._graph.tensors[node.outputs[0]].alias if node.outputs else None
        if call.into is not None and alias is not None and alias in node.inputs:
            function = call.into
            if not call.first:
                named.append(f"out={self._names.variable(alias)}")
        if type(function) is torch._ops.OpOverload:
            function = function._op  # saves one Python frame per node
        text = f"{self._names.literal(function)}({', '.join([*positional, *named])})"
        # Announce writes of inputs.
        changed = {self._graph.storages[name] for name in node.mutates}
        self._changed |= changed
        self._announce(changed.difference(self._host_resident))
        # Save the generator's state where random numbers are drawn again later, and
        # put it back around a recomputation, so that the same numbers are drawn.
        if first not in self._redrawn:
            self._assign(node, call.results, text)
            return
        state = self._generator_states.setdefault(
            first, f"s{len(self._generator_states)}"
        )
        device = generator_of(self._lowered, first)
        of = "" if device is None else self._names.literal(device)
        on = f", {of}" if of else ""
        if node.name == first:
            self._lines.append(f"{state} = keep_state({of})")
            self._assign(node, call.results, text)
            return
        self._lines.append(f"drawn = get_state({of})")
        start = len(self._lines)
        self._lines.append(f"set_state({state}{on})")
        self._assign(node, call.results, text)
        indented = [f"    {line}" for line in self._lines[start:]]
        undone = ["finally:", f"    set_state(drawn{on})", "drawn = None"]
        self._lines[start:] = ["try:", *indented, *undone]

    def _announce(self, written: set[str]) -> None:
        """Call `begin_update` before the first write to one of the inputs' storages."""
        if not self._unannounced.isdisjoint(written):
            self._lines.append("begin_update()")
            self._unannounced.clear()

    def _assign(self, node: Node, paths: Sequence[int | None], text: str) -> None:
        """Assign the results of a call to the variables of a node's outputs."""
        names = [self._names.variable(name) for name in node.outputs]
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
        if variables := self._names.release(storage):
            self._lines.append(f"{' = '.join(variables)} = None")

    def _handle(self, storage: str) -> str:
        """Return the variable of an offloaded storage; it is never used for another."""
        if storage not in self._handles:
            self._handles[storage] = f"h{next(self._handle_numbers)}"
        return self._handles[storage]

    def _swap_out(self, storage: str) -> None:
        handle = self._handle(storage)
        tensor = self._names.variable_of(storage)
        if storage in self._host_resident:
            self._announce(self._changed & {storage})
            self._lines.append(f"copy_home({tensor}, {handle})")
            self._changed.discard(storage)
        else:
            self._lines.append(f"{handle} = copy_out({tensor}, {storage!r})")
            self._offloads = True

    def _swap_in(self, storage: str) -> None:
        names = self._names.once_bound(storage)
        wanted = [n for n in names if self._last_read.get(n, -1) >= self._at]
        if not wanted:
            return  # it is for the next step, which begins with it
        self._lines.append(f"back = copy_back({self._handles[storage]})")
        for name in wanted:
            layout = self._names.literal(self._lowered.layouts[origin(name)])
            self._lines.append(f"{self._names.variable(name)} = lie(back, {layout})")
        self._lines.append("back = None")


# Names of a program's tensors and constants.
#
# Every tensor has one local variable throughout: a storage that is freed and fetched or
# computed again gets the same variables. Values without a literal are globals.


class Names:
    """The names of one program.

    Attributes:
        space: All globals.
        bound: Tensors whose variables have a value at this point of the program.
    """

    def __init__(self, graph: Graph, space: Mapping[str, Any]) -> None:
        self.space: dict[str, Any] = dict(space)
        self.bound: set[str] = set()
        self._variables: dict[str, str] = {}
        self._constants: dict[int, str] = {}
        self._members: dict[str, list[str]] = {}  # all tensors of each storage
        for name, storage in graph.storages.items():
            self._members.setdefault(storage, []).append(name)

    def variable(self, tensor: str) -> str:
        """Return the variable of a tensor, which is bound from now on."""
        self.bound.add(tensor)
        return self._variables.setdefault(tensor, f"t{len(self._variables)}")

    def variable_of(self, storage: str) -> str:
        """Return the variable of some bound tensor of a storage."""
        name = next(n for n in self._members[storage] if n in self.bound)
        return self._variables[name]

    def has(self, storage: str) -> bool:
        """Return whether any tensor of a storage is bound."""
        return not self.bound.isdisjoint(self._members[storage])

    def once_bound(self, storage: str) -> list[str]:
        """Return the tensors of a storage that have been bound so far."""
        return [n for n in self._members[storage] if n in self._variables]

    def release(self, storage: str) -> list[str]:
        """Unbind the tensors of a storage; return their variables."""
        names = [n for n in self._members[storage] if n in self.bound]
        self.bound.difference_update(names)
        return [self._variables[name] for name in names]

    def argument(self, value: Any, operands: Sequence[str]) -> str:
        """Return an argument of a call as text, given its operands' variables."""
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
        """Return a value as text, or the name of a global with this value."""
        if isinstance(value, int | str | None):
            return repr(value)
        key = id(value)
        if key not in self._constants:
            name = f"k{len(self._constants)}"
            self._constants[key] = name
            self.space[name] = value
        return self._constants[key]


# States of random generators, so that a recomputation draws the same numbers.
#
# States are kept outside of PyTorch's allocator and never on the device. The state of a
# CUDA generator is a seed and an offset, which PyTorch has on the host.


def generator_of(lowered: Lowered, node: str) -> torch.device | None:
    """Return the device whose generator a random node draws from; None is the CPU."""
    names = lowered.graph.by_name[node].tensors
    devices = {lowered.layouts[name].device for name in names}
    return next((device for device in devices if device.type != "cpu"), None)


def get_state(device: torch.device | None = None) -> torch.Tensor:
    """Return the state of a device's generator; None is the CPU."""
    if device is None:
        return torch.get_rng_state()
    found: torch.Tensor = torch.cuda.get_rng_state(device)
    return found


def set_state(state: torch.Tensor, device: torch.device | None = None) -> None:
    """Set the state of a device's generator; None is the CPU."""
    if device is None:
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, device)


def keep_state(device: torch.device | None = None) -> torch.Tensor:
    """Return the generator's state in memory outside of PyTorch's allocator."""
    state = get_state(device)
    return torch.frombuffer(bytearray(state.numpy()), dtype=torch.uint8)
