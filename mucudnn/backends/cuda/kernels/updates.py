"""Optimizer steps in PyTorch's conventions, and kernels on gradients.

Half-precision weights are computed in float32 and rounded once; their learning rate has
the type of the weights. Gradients may be narrower than weights. If the loss scale is
state, an update's last two inputs are the scale and its counts
(`passes.graph.precision`): gradients are divided by the scale, and after an overflow
nothing changes. Before these two comes the weight's copy in the gradient's type and
layout, if there is one: both may be `turned`, stored as (K, *taps, C) for a filter
(K, C, *taps).

Consecutive updates are one launch over a table of their tensors.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from mucudnn.backends.cuda.kernels.launch import (
    KernelCall,
    Operation,
    Program,
    Row,
    as_ncs,
    flat,
    table_of,
)

UPDATES = Program.load("kernels/updates.cu")
GRADIENTS = Program.load("kernels/gradients.cu")
_PER_THREAD = 4  # elements per thread in a launch for one tensor


def accumulate(call: KernelCall) -> None:
    """Compute total += factor part."""
    total, part = call.inputs
    size, factor = total.size, float(call.attrs["factor"])
    arguments = total, part, size, factor
    call.launch(GRADIENTS, "accumulate", flat(size), *arguments, beside=part)


def accumulate_all(calls: Sequence[KernelCall]) -> None:
    """Accumulate several totals, with one launch per type and factor."""
    groups: dict[Hashable, list[KernelCall]] = defaultdict(list)
    for call in calls:
        total, part = call.inputs
        groups[total.dtype, part.dtype, call.attrs["factor"]].append(call)
    for group in groups.values():
        call, (total, part) = group[0], group[0].inputs
        table, count, blocks = table_of(call.gpu, [Row(c.inputs) for c in group])
        arguments = table, count, float(call.attrs["factor"])
        name = "accumulate_all"
        call.launch(GRADIENTS, name, (blocks,), *arguments, like=total, beside=part)


def find_overflow(call: KernelCall) -> None:
    """Set counts[0] = 1 if a gradient is infinite or NaN."""
    gradient, counts = call.inputs
    arguments = gradient, counts, gradient.size
    call.launch(GRADIENTS, "find_overflow", flat(gradient.size), *arguments)


def find_overflow_all(calls: Sequence[KernelCall]) -> None:
    """Check several gradients, with one launch per type."""
    groups: dict[Hashable, list[KernelCall]] = defaultdict(list)
    for call in calls:
        gradient, counts = call.inputs
        groups[gradient.dtype, call.gpu.address(counts)].append(call)
    for group in groups.values():
        first, (gradient, counts) = group[0], group[0].inputs
        rows = [Row(call.inputs[:1]) for call in group]
        table, count, blocks = table_of(first.gpu, rows)
        arguments, name = (table, counts, count), "find_overflow_all"
        first.launch(GRADIENTS, name, (blocks,), *arguments, like=gradient)


def adjust_loss_scale(call: KernelCall) -> None:
    """Update the loss scale for the next step, and the counts."""
    numbers = call.numbers("growth", "backoff", "least", "most")
    arguments = *call.inputs, *numbers, int(call.attrs["interval"])
    call.launch(GRADIENTS, "adjust_loss_scale", (1,), *arguments)


@dataclass(frozen=True, slots=True)
class _Update:
    """An update with its attributes and flags, in its kernels' order."""

    kernel: str
    names: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    counted: bool = False

    def run(self, call: KernelCall) -> None:
        """Update one tensor."""
        (w, dw, *others), scalars = self._operands(call)
        numbers = *call.numbers("weight_decay", "gradient_scale"), *self._numbers(call)
        blocks = flat(-(-w.size // _PER_THREAD))
        arguments = w, dw, *others, *_turned(call), *scalars, w.size, *numbers
        call.launch(UPDATES, self.kernel, blocks, *arguments, beside=dw)

    def run_batched(self, calls: Sequence[KernelCall]) -> None:
        """Update many tensors, with one launch per type, scalars and weight decay."""
        groups: dict[Hashable, list[KernelCall]] = defaultdict(list)
        for call in calls:
            arrays, scalars = self._operands(call)
            places = tuple(a if a is None else call.gpu.address(a) for a in scalars)
            types = arrays[0].dtype, arrays[1].dtype
            factor = call.attrs["gradient_scale"]
            groups[*types, places, factor, *self._numbers(call)].append(call)
        for group in groups.values():
            known = {call.attrs["weight_decay"] for call in group}
            decays = sorted(known - {0.0}) or [0.0]
            # A launch takes one decay; tensors without any go along with the first.
            for decay in decays:
                mine = {decay, 0.0} if decay == decays[0] else {decay}
                part = [c for c in group if c.attrs["weight_decay"] in mine]
                self._launch(part, decay)

    def _launch(self, calls: Sequence[KernelCall], decay: float) -> None:
        """Launch calls whose weight decay is this one or none."""
        first = calls[0]
        rows = [
            Row(self._operands(c)[0], c.attrs["weight_decay"] != 0, _turned(c))
            for c in calls
        ]
        table, count, blocks = table_of(first.gpu, rows)
        (w, dw, *_), scalars = self._operands(first)
        numbers = decay, *first.numbers("gradient_scale"), *self._numbers(first)
        arguments = table, *scalars, count, *numbers
        name = f"{self.kernel}_all"
        first.launch(UPDATES, name, (blocks,), *arguments, like=w, beside=dw)

    def _operands(self, call: KernelCall) -> tuple[list[Any], tuple[Any, ...]]:
        """Return weight, gradient, states, copy; and rate, step, scale, counts."""
        w, dw, lr, *others = call.inputs
        step = others.pop(0) if self.counted else None
        scale = counts = None
        if call.attrs.get("scaled"):
            *others, scale, counts = others
        copy = others.pop() if call.attrs.get("copied") else None
        others += [None] * (2 - len(others))
        return [w, dw, *others, copy], (lr, step, scale, counts)

    def _numbers(self, call: KernelCall) -> tuple[float | int, ...]:
        flags = (int(call.attrs[name]) for name in self.flags)
        return (*call.numbers(*self.names), *flags)


def _turned(call: KernelCall) -> tuple[int, int]:
    """Return (channels, taps) of a filter with a transposed gradient, else (0, 0)."""
    if not call.attrs.get("turned"):
        return 0, 0
    _, channels, taps = as_ncs(call.inputs[0].shape)
    return channels, taps


OPERATIONS: dict[str, Operation] = {
    **{
        update.kernel: Operation(update.run, run_batched=update.run_batched)
        for update in (
            _Update("adagrad", ("eps",)),
            _Update("adam", ("beta1", "beta2", "eps"), ("decoupled",), counted=True),
            _Update("momentum", ("momentum",), ("nesterov",)),
            _Update("rmsprop", ("alpha", "eps")),
            _Update("sgd"),
        )
    },
    "accumulate": Operation(accumulate, run_batched=accumulate_all),
    "adjust_loss_scale": Operation(adjust_loss_scale),
    "find_overflow": Operation(
        find_overflow, run_batched=find_overflow_all, flags=(1,)
    ),
}
