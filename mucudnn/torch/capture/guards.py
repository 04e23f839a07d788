"""Guards of a captured step: layouts, attributes and plain Python values.

`StepGuards` joins four checks that run at every step: tensors (layouts, and which share
memory), Python state (by identity, in loops of C), PyTorch's settings, and values that
Python decides by.
"""

import decimal
from collections.abc import Sequence
from operator import contains, getitem, is_
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch._C._dynamo.guards import GlobalStateGuard, TensorGuards
from torch.distributions import Distribution
from torch.utils import _device

from mucudnn.torch.capture.known_values import Known, known_values
from mucudnn.torch.capture.python_state import (
    MISSING,
    Kind,
    Read,
    shown,
)
from mucudnn.torch.capture.reads import Reads
from mucudnn.torch.internals import float32_precisions


class StateGuards:
    """A check that recorded Python state is unchanged.

    Most state is compared by identity, by loops in C over columns of it. Where a value
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
        self._divide()

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
            if not read.holds(now) and not (_is_unhooked(read) and not now):
                self.changed = read
                return f"{read.label} changed: {shown(read.value)} -> {shown(now)}"
            contents = read.kind is Kind.CONTENTS
            if not (all(map(is_, now, read.value)) if contents else now is read.value):
                equal.append(id(read))
        if not self._by_value.issuperset(equal):
            self._by_value.update(equal)
            self._divide()
        return ""

    def _divide(self) -> None:
        """Divide the state into columns: holders, keys and values."""
        self._empty: list[Any] = []  # most are dicts of hooks
        self._unhooked = _Columns()
        self._absent = _Columns()
        self._items = _Columns()
        self._attributes = _Columns()
        self._sizes = _Columns()
        self._types = _Columns()
        self._others: list[Read] = []
        for read in self._reads:
            holder, key, value, kind = read.holder, read.key, read.value, read.kind
            if kind is Kind.CLASS:
                kind, holder = Kind.ENTRY, holder.__dict__
            is_plain = type(holder) in (dict, MappingProxyType)
            if kind in (Kind.CONTENTS, Kind.SIZE) and not value:
                self._empty.append(holder)
            elif _is_unhooked(read):
                self._unhooked.add(holder, key, value)
            elif id(read) in self._by_value:
                self._others.append(read)
            elif kind is Kind.ENTRY and is_plain:
                column = self._absent if value is MISSING else self._items
                column.add(holder, key, value)
            elif kind is Kind.SLOT:
                self._attributes.add(holder, key, value)
            elif kind is Kind.CELL:
                self._attributes.add(holder, "cell_contents", value)
            elif kind is Kind.SIZE:
                self._sizes.add(holder, key, value)
            elif kind is Kind.TYPE:
                self._types.add(holder, key, value)
            elif kind is Kind.CONTENTS and type(holder) is list:
                self._sizes.add(holder, key, len(value))
                for i, element in enumerate(value):
                    self._items.add(holder, i, element)
            else:
                self._others.append(read)

    def _holds(self) -> bool:
        """Return whether all state is the same objects, or equal where noted."""
        items, attributes = self._items, self._attributes
        return (
            not any(self._empty)
            and not any(map(getattr, self._unhooked.holders, self._unhooked.keys))
            and not any(map(contains, self._absent.holders, self._absent.keys))
            and all(map(is_, map(getitem, items.holders, items.keys), items.values))
            and all(
                map(
                    is_,
                    map(getattr, attributes.holders, attributes.keys),
                    attributes.values,
                )
            )
            and list(map(len, self._sizes.holders)) == self._sizes.values
            and list(map(type, self._types.holders)) == self._types.values
            and all(read.holds(read.now()) for read in self._others)
        )


class _Columns:
    """Holders, keys and values of some state."""

    def __init__(self) -> None:
        self.holders: list[Any] = []
        self.keys: list[Any] = []
        self.values: list[Any] = []

    def add(self, holder: Any, key: Any, value: Any) -> None:
        self.holders.append(holder)
        self.keys.append(key)
        self.values.append(value)


HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Attributes of tensors that are None or an empty dict without hooks."""


def _is_unhooked(read: Read) -> bool:
    return read.kind is Kind.SLOT and read.value is None and read.key in HOOKS


class Settings:
    """Settings of PyTorch, NumPy and Python that decide what a step computes."""

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
                return f"the setting {name!r} changed: {before} -> {now[name]}"
        return ""


def _other_settings() -> dict[str, Any]:
    own, digits = torch._C, decimal.getcontext()
    return {
        "call of modules": torch.nn.Module.__call__,
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
        "precision of float32 products": float32_precisions(),
        "anomaly mode": own.is_anomaly_enabled(),
        "flash attention": own._get_flash_sdp_enabled(),
        "memory-efficient attention": own._get_mem_efficient_sdp_enabled(),
        "attention of plain operations": own._get_math_sdp_enabled(),
        "fast path of attention": torch.backends.mha.get_fastpath_enabled(),
        "backends.mkldnn.deterministic": own._get_mkldnn_deterministic(),
        "checks of distributions": Distribution._validate_args,
        "context of decimal numbers": (digits.prec, digits.rounding),
        "errors of NumPy": np.geterr(),
    }


Overlaps = list[tuple[int, int]]


def overlaps_of(given: Sequence[torch.Tensor]) -> Overlaps:
    """Return the places of tensors that share memory, each with one before it."""
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + extent_of(tensor), i)
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


def extent_of(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to behind its last."""
    axes = zip(tensor.shape, tensor.stride(), strict=True)
    elements = sum((n - 1) * s for n, s in axes) + 1
    return int(elements * tensor.element_size())


OTHER_VALUES = "a value that Python decides by, or a size computed from one"
"""Reason why a capture does not hold for the values of a batch."""


class StepGuards:
    """Conditions under which a captured step is valid for a batch.

    Args:
        given: Inputs of the step.
        inner: Slice of the inputs that are optimizer state. Nothing else refers to
            their memory, so their addresses are compared at a capture only.
        reads: Python state that the capture read.
        known: Values that the capture used: branches it took, and tensors.
        overlaps: Inputs that share memory.
        settings: PyTorch's settings at the capture.

    Attributes:
        state: The check of Python state.
    """

    def __init__(
        self,
        given: Sequence[torch.Tensor],
        inner: slice,
        reads: Reads,
        known: Sequence[Known],
        overlaps: Overlaps,
        settings: Settings,
    ) -> None:
        self.state = StateGuards(reads.reads)
        self._constants = list(reads.constants)
        self._tensors = _TensorGuards([*given, *self._constants])
        self._known = known
        self._overlaps = overlaps
        self._inner = inner
        self._pointers = self._outer_pointers(given)
        self._settings = settings

    def inputs(self, given: list[torch.Tensor]) -> tuple[list[torch.Tensor], str]:
        """Return the graph's inputs, and which condition fails; empty if none does.

        Args:
            given: The tensors of the step. The graph's inputs are these, and those that
                are computed from them before it runs.
        """
        if not self._tensors.holds([*given, *self._constants]):
            return given, "tensors of another shape, type, memory format or device"
        if reason := self._settings.failed() or self.state.failed():
            return given, reason
        inputs = known_values(self._known, given)
        if inputs is None:
            return given, OTHER_VALUES
        pointers = self._outer_pointers(given)
        if pointers != self._pointers:
            if overlaps_of(given) != self._overlaps:
                return given, "which tensors share memory"
            self._pointers = pointers
        return inputs, ""

    def _outer_pointers(self, given: Sequence[torch.Tensor]) -> list[int]:
        outer = (*given[: self._inner.start], *given[self._inner.stop :])
        return list(map(torch.Tensor.data_ptr, outer))


class _TensorGuards:
    """Comparison of tensors' layouts by Dynamo's C code; no public API is as fast."""

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
        """Return whether tensors have the layouts of those at the capture."""
        if len(tensors) != self._count:
            return False
        if self._repeated:
            rows = zip(tensors, self._which, strict=True)
            if any(tensor is not tensors[place] for tensor, place in rows):
                return False
        return bool(self._guards.check(*self._others(tensors)))

    def _others(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return each tensor once: `TensorGuards` takes distinct objects."""
        if not self._repeated:
            return tensors
        return [tensor for i, tensor in enumerate(tensors) if self._which[i] == i]
