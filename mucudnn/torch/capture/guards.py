"""Guards of a captured step: layouts, attributes and plain Python values.

`StepGuards` joins four checks, each of them compiled or written in C, because they run
at every step: tensors (layouts, and which share memory), Python state (one generated
expression of `is`), PyTorch's settings, and values that Python decides by.
"""

import operator
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._dynamo.guards import GlobalStateGuard, TensorGuards, dict_version
from torch.utils import _device

from mucudnn.torch.capture.known_values import Known, known_values
from mucudnn.torch.capture.python_state import (
    MISSING,
    Kind,
    Read,
    contents_of,
    dict_of_class,
    is_alike,
    shown,
)
from mucudnn.torch.capture.reads import Reads
from mucudnn.torch.internals import float32_precisions

_TERMS_A_LINE = 200

_ELEMENTS_COMPARED = 8
"""Containers with more elements are compared by a loop in C, not term by term."""


class StateGuards:
    """A compiled check that recorded Python state is unchanged.

    Entries of dicts are nine tenths of all state. A dict whose version is unchanged has
    the same entries, so their versions are compared first, by one call in C for each;
    entries are compared only where a version changed. A dict that keeps changing, as
    the globals of a script do, is compared entry by entry from then on. All other state
    is compared by identity, in one generated function. Where a value has another
    identity, it is compared, and equal ones are compared from then on.

    Args:
        reads: The state.

    Attributes:
        changed: What was last seen to have changed.
    """

    def __init__(self, reads: Sequence[Read]) -> None:
        self.changed: Read | None = None
        self._reads = reads
        self._by_value: set[int] = set()
        self._changes: Counter[int] = Counter()  # of dicts, by identity
        self._dicts: list[Any] = []
        self._versions: list[int | None] = []
        self._compile()

    def failed(self) -> str:
        """Return which state has changed, and how; empty if none has."""
        # A version only grows, so that equal sums are equal versions.
        total = sum(map(dict_version, self._dicts))
        if total != self._total and (reason := self._changed_entries()):
            return reason
        try:
            if self._holds():
                return ""
        except (LookupError, AttributeError, ValueError):
            pass  # something is missing, which the comparison below names
        equal = []
        for read in self._reads:
            now = read.now()
            if reason := self._difference(read, now):
                return reason
            if now is not read.value and read.kind is not Kind.CONTENTS:
                equal.append(id(read))
        if not self._by_value.issuperset(equal):
            self._by_value.update(equal)
            self._compile()
        return ""

    def _changed_entries(self) -> str:
        """Compare the entries of dicts whose version changed; return a difference."""
        recompile = False
        for i, held in enumerate(self._dicts):
            version = dict_version(held)
            if version == self._versions[i]:
                continue
            for read in self._entries[i]:
                if reason := self._difference(read, read.now()):
                    return reason
            if self._versions[i] is not None:
                self._changes[id(held)] += 1
            self._versions[i] = version
            recompile |= self._changes[id(held)] >= _CHANGES_OF_DICT
        self._total = sum(version or 0 for version in self._versions)
        if recompile:
            self._compile()
        return ""

    def _difference(self, read: Read, now: Any) -> str:
        if read.holds(now) or (_is_unhooked(read) and not now):
            return ""
        self.changed = read
        return f"{read.label} changed: {shown(read.value)} -> {shown(now)}"

    def _compile(self) -> None:
        """Divide the state into dicts with a version and all other state."""
        entries: dict[int, list[Read]] = {}
        others = []
        holders: dict[int, Any] = {}
        for read in self._reads:
            holder = read.holder
            if read.kind is Kind.CLASS:
                holder = dict_of_class(holder)
            held = id(holder)
            if _is_versioned(read, holder) and self._changes[held] < _CHANGES_OF_DICT:
                entries.setdefault(held, []).append(read)
                holders[held] = holder
            else:
                others.append(read)
        # A length alone is compared faster than a version.
        for held in [k for k, v in entries.items() if _are_sizes(v)]:
            others += entries.pop(held)
            del holders[held]
        known = dict(zip(map(id, self._dicts), self._versions, strict=True))
        self._entries = list(entries.values())
        self._dicts = list(holders.values())
        # None until the entries were compared, as dicts may have changed since a read.
        self._versions = [known.get(held) for held in entries]
        self._total = -1
        self._holds = _compiled(others, self._by_value)


_CHANGES_OF_DICT = 2
"""Changes of a dict after which its entries are compared at every step."""


def _is_versioned(read: Read, holder: Any) -> bool:
    """Return whether state is unchanged while the version of its holder is."""
    if read.kind is Kind.CONTENTS:  # the order of an OrderedDict has no version
        return bool(read.value) and type(holder) is dict
    entry = read.kind in (Kind.ENTRY, Kind.CLASS) or (
        read.kind is Kind.SIZE and read.value
    )
    return bool(entry) and type(holder) in (dict, defaultdict, OrderedDict)


def _are_sizes(reads: Sequence[Read]) -> bool:
    return all(read.kind is Kind.SIZE for read in reads)


def _compiled(reads: Sequence[Read], by_value: set[int]) -> Callable[[], bool]:
    """Return a function without arguments: whether all state is the same object."""
    names: dict[int, str] = {}
    held: dict[str, Any] = {"is_alike": is_alike, "is_same": _is_same}
    terms: list[str] = []
    empty = []
    hooked: dict[str, list[Any]] = {}  # by attribute: tensors without such hooks
    objects: list[Any] = []
    types: list[Any] = []
    sized: list[Any] = []
    sizes: list[int] = []

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
        if kind in (Kind.CONTENTS, Kind.SIZE) and not value:
            empty.append(holder)  # most are dicts of hooks: one call looks at all
        elif _is_unhooked(read):
            hooked.setdefault(key, []).append(holder)
        elif kind is Kind.TYPE:
            objects.append(holder)
            types.append(value)
        elif kind is Kind.SIZE:
            sized.append(holder)
            sizes.append(value)
        elif kind is Kind.ENTRY and value is MISSING:
            terms.append(f"{key!r} not in {name(holder)}")
        elif (
            kind is Kind.CONTENTS
            and type(holder) is list
            and len(holder) <= _ELEMENTS_COMPARED
        ):
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
            }.get(kind, f"{name(read)}.now()")
            same = kind in _BY_IDENTITY and id(read) not in by_value
            value = name(value)
            terms.append(f"{now} is {value}" if same else f"is_alike({now}, {value})")
    # What many objects have in common is compared by loops in C.
    terms.append(f"not any({name(empty)})")
    for key, holders in hooked.items():
        terms.append(f"not any(map({name(operator.attrgetter(key))}, {name(holders)}))")
    if sized:
        terms.append(f"list(map(len, {name(sized)})) == {name(sizes)}")
    if objects:
        terms.append(f"list(map(type, {name(objects)})) == {name(types)}")
    lines = [
        f"  if not ({' and '.join(terms[i : i + _TERMS_A_LINE])}): return False\n"
        for i in range(0, len(terms), _TERMS_A_LINE)
    ]
    # As defaults, all values are local variables of the function.
    defaults = ", ".join(f"{key}={key}" for key in held)
    source = f"def holds({defaults}):\n{''.join(lines)}  return True\n"
    exec(compile(source, "<mucudnn guards>", "exec"), held)
    # The function would hold itself, and thereby all values until they are collected.
    return held.pop("holds")  # type: ignore[no-any-return]


_BY_IDENTITY = (Kind.ENTRY, Kind.SLOT, Kind.CELL)

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Attributes of tensors that are None or an empty dict without hooks."""


def _is_unhooked(read: Read) -> bool:
    return read.kind is Kind.SLOT and read.value is None and read.key in _HOOKS


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
        "precision of float32 products": float32_precisions(),
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
