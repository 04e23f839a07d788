"""Checks, before every step, that what the capture of a plan has read is still there.

`StepGuards` joins four checks, each of them compiled or written in C, because they run
at every step: tensors (layouts, and which share memory), Python state (one generated
expression of `is`), PyTorch's settings, and decisions by values of tensors.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._dynamo.guards import GlobalStateGuard, TensorGuards
from torch.utils import _device

from mucudnn.torch.capture.decisions import Decision, all_hold
from mucudnn.torch.capture.python_state import (
    MISSING,
    Kind,
    Read,
    contents_of,
    is_alike,
    shown,
)
from mucudnn.torch.capture.reads import Reads

_TERMS_A_LINE = 200
_ELEMENTS_COMPARED = 8
"""Containers with more elements are compared by a loop in C, not term by term."""


class StateGuards:
    """A compiled check that noted Python state is as it was.

    Identity of all values is checked first, in one generated function. Where a value
    has another identity, it is compared, and equal ones are compared from then on.

    Args:
        reads: The state.

    Attributes:
        changed: What was last seen to have changed.
    """

    def __init__(self, reads: Sequence[Read]) -> None:
        self.changed: Read | None = None
        self._reads = reads
        self._by_value: set[int] = set()
        self._holds = _compiled(reads, self._by_value)

    def failed(self) -> str:
        """Return which state has changed, and how; empty if none has."""
        try:
            if self._holds():
                return ""
        except (LookupError, AttributeError, ValueError):
            pass  # something is missing, which the comparison below names
        equal = []
        for read in self._reads:
            now = read.now()
            if not is_alike(now, read.value):
                self.changed = read
                return f"{read.label} changed: {shown(read.value)} -> {shown(now)}"
            if now is not read.value and read.kind is not Kind.CONTENTS:
                equal.append(id(read))
        if not self._by_value.issuperset(equal):
            self._by_value.update(equal)
            self._holds = _compiled(self._reads, self._by_value)
        return ""


def _compiled(reads: Sequence[Read], by_value: set[int]) -> Callable[[], bool]:
    """Return a function without arguments: whether all state is the same object."""
    names: dict[int, str] = {}
    held: dict[str, Any] = {"is_alike": is_alike, "is_same": _is_same}
    terms: list[str] = []
    empty = []

    def name(value: Any) -> str:
        if id(value) not in names:
            names[id(value)] = f"v{len(names)}"
            held[names[id(value)]] = value  # which keeps the identity its own
        return names[id(value)]

    for read in reads:
        holder, key, value = read.holder, read.key, read.value
        kind = read.kind
        if kind is Kind.CLASS:
            kind, holder = Kind.ENTRY, holder.__dict__
        if kind is Kind.CONTENTS and not value:
            empty.append(holder)  # most are dicts of hooks: one call looks at all
        elif kind is Kind.SIZE:
            terms.append(f"len({name(holder)}) == {value}")
        elif kind is Kind.ENTRY and value is MISSING:
            terms.append(f"{key!r} not in {name(holder)}")
        elif kind is Kind.CONTENTS and _has_few(holder):
            terms.append(f"len({name(holder)}) == {len(holder)}")
            for i, element in enumerate(value):
                terms.append(f"{name(holder)}[{i}] is {name(element)}")
        elif kind is Kind.CONTENTS:
            terms.append(f"is_same({name(holder)}, {name(value)})")
        else:
            now = {
                Kind.ENTRY: f"{name(holder)}[{key!r}]",
                Kind.SLOT: f"{name(holder)}.{key}",
                Kind.CELL: f"{name(holder)}.cell_contents",
                Kind.TYPE: f"type({name(holder)})",
            }.get(kind, f"{name(read)}.now()")
            same = kind in _BY_IDENTITY and id(read) not in by_value
            value = name(value)
            terms.append(f"{now} is {value}" if same else f"is_alike({now}, {value})")
    terms.append(f"not any({name(empty)})")
    lines = [
        f"  if not ({' and '.join(terms[i : i + _TERMS_A_LINE])}): return False\n"
        for i in range(0, len(terms), _TERMS_A_LINE)
    ]
    # As defaults, all values are local variables of the function.
    defaults = ", ".join(f"{key}={key}" for key in held)
    source = f"def holds({defaults}):\n{''.join(lines)}  return True\n"
    exec(compile(source, "<mucudnn guards>", "exec"), held)
    return held["holds"]  # type: ignore[no-any-return]


_BY_IDENTITY = (Kind.ENTRY, Kind.SLOT, Kind.CELL, Kind.TYPE)


def _has_few(container: Any) -> bool:
    return type(container) is list and len(container) <= _ELEMENTS_COMPARED


def _is_same(container: Any, contents: Sequence[Any]) -> bool:
    now = contents_of(container)
    return len(now) == len(contents) and all(map(operator.is_, now, contents))


class Settings:
    """PyTorch's settings that decide what a step computes."""

    def __init__(self) -> None:
        # Grad mode, autocast, default type, determinism, TF32, threads.
        self._own = GlobalStateGuard()
        self._others = _other_settings()

    def failed(self) -> str:
        """Return which settings have changed; empty if none have."""
        if not self._own.check():
            return f"PyTorch's setting {self._own.reason().strip()} changed"
        now = _other_settings()
        for name, before in self._others.items() if now != self._others else ():
            if now[name] != before:
                return f"PyTorch's {name} changed: {before} -> {now[name]}"
        return ""


def _other_settings() -> dict[str, Any]:
    own = torch._C
    return {
        "default device": _device.CURRENT_DEVICE,
        "number of torch function modes": own._len_torch_function_stack(),
        "number of dispatch modes": own._len_torch_dispatch_stack(),
        "inference mode": torch.is_inference_mode_enabled(),
        "hooks of saved tensors": own._autograd._top_saved_tensors_default_hooks(True),
        "fill_uninitialized_memory": own._get_deterministic_fill_uninitialized_memory(),
        "backends.cudnn.enabled": own._get_cudnn_enabled(),
        "backends.cudnn.benchmark": own._get_cudnn_benchmark(),
        "backends.cudnn.deterministic": own._get_cudnn_deterministic(),
        "backends.mkldnn.enabled": own._get_mkldnn_enabled(),
        "matmul precision": own._get_float32_matmul_precision(),
        "anomaly mode": own.is_anomaly_enabled(),
        "flash attention": own._get_flash_sdp_enabled(),
        "memory-efficient attention": own._get_mem_efficient_sdp_enabled(),
        "attention of plain operations": own._get_math_sdp_enabled(),
    }


Overlaps = list[tuple[int, int]]


def overlaps_of(given: Sequence[torch.Tensor]) -> Overlaps:
    """Return the places of tensors that share memory, each with one before it."""
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + _extent(tensor), i)
        for i, tensor in enumerate(given)
        if tensor.numel()
    )
    pairs, end, last = [], 0, -1
    for start, stop, i in spans:
        if start < end:
            pairs.append((last, i))
        if stop > end:
            end, last = stop, i
    return sorted(pairs)


def _extent(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to behind its last."""
    axes = zip(tensor.shape, tensor.stride(), strict=True)
    elements = sum((n - 1) * s for n, s in axes) + 1
    return int(elements * tensor.element_size())


class StepGuards:
    """What must hold for a captured step to be used for a batch.

    Args:
        given: The inputs of the step.
        inner: Which of these are the optimizer's own: a slice in their middle. Nothing
            else refers to their memory, so that it is compared at a capture only.
        reads: What its capture has read.
        decisions: What it has decided by values of tensors.
        overlaps: Which inputs share memory.
        settings: PyTorch's settings at its capture.

    Attributes:
        state: The check of Python state.
    """

    def __init__(
        self,
        given: Sequence[torch.Tensor],
        inner: slice,
        reads: Reads,
        decisions: Sequence[Decision],
        overlaps: Overlaps,
        settings: Settings,
    ) -> None:
        self.state = StateGuards(reads.reads)
        self._constants = list(reads.constants)
        self._tensors = _TensorGuards([*given, *self._constants])
        self._decisions = decisions
        self._overlaps = overlaps
        self._inner = inner
        self._pointers = self._outer_pointers(given)
        self._settings = settings

    def failed(self, given: Sequence[torch.Tensor]) -> str:
        """Return what does not hold for inputs; empty if everything holds."""
        if not self._tensors.holds([*given, *self._constants]):
            return "tensors of another shape, type, memory format or device"
        if reason := self._settings.failed() or self.state.failed():
            return reason
        if not all_hold(self._decisions, given):
            return "a value that Python decides by"
        pointers = self._outer_pointers(given)
        if pointers != self._pointers:
            if overlaps_of(given) != self._overlaps:
                return "which tensors share memory"
            self._pointers = pointers
        return ""

    def _outer_pointers(self, given: Sequence[torch.Tensor]) -> list[int]:
        outer = (*given[: self._inner.start], *given[self._inner.stop :])
        return list(map(torch.Tensor.data_ptr, outer))


class _TensorGuards:
    """Layouts of tensors, as Dynamo compares them in C: no public way is as fast."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        places = {id(tensor): i for i, tensor in enumerate(tensors)}
        self._count = len(tensors)
        self._which = [places[id(tensor)] for tensor in tensors]
        self._repeated = len(places) < len(tensors)
        others = self._others(tensors)
        self._guards = TensorGuards(
            *others,
            dynamic_dims_sizes=[list(t.shape) for t in others],
            dynamic_dims_strides=[list(t.stride()) for t in others],
        )

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether tensors are laid out as the others were."""
        if len(tensors) != self._count:
            return False
        if self._repeated:
            rows = zip(tensors, self._which, strict=True)
            if any(tensor is not tensors[place] for tensor, place in rows):
                return False
        return bool(self._guards.check(*self._others(tensors)))

    def _others(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return each tensor once: the guards demand that all are other objects."""
        if not self._repeated:
            return tensors
        return [tensor for i, tensor in enumerate(tensors) if self._which[i] == i]
