"""Unmodified PyTorch models whose convolutions plan themselves.

with mucudnn.torch.convolutions(workspace_limit="64MiB"):
    loss_fn(model(x), y).backward()
"""

import inspect
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ContextDecorator
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeVar

import torch

from mucudnn.processes import Own
from mucudnn.runtime.tuning.tuner import Tuner
from mucudnn.torch.conv.backend import check_tuner, cpu_backend, overrides, untraced
from mucudnn.torch.conv.kernels import Ready, ReadyMaker

_traced = torch._C._get_tracing_state
"""What `torch.jit.trace` records into, if it does: it has to see PyTorch's kernels."""

_LATE = (
    inspect.isgeneratorfunction,
    inspect.iscoroutinefunction,
    inspect.isasyncgenfunction,
)
"""Of functions whose bodies run after their calls."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class CallCounts:
    """What became of the calls of one operator.

    Attributes:
        calls: How many came.
        ours: Of these, computed by our kernels, at least one of the gradients.
        native: Left to PyTorch's kernel because that was measured to be faster.
        fell_back: Why others were left to it, and how many.
    """

    calls: int
    ours: int
    native: int
    fell_back: Mapping[str, int]

    @classmethod
    def of(cls, ready: Iterable[Ready]) -> "CallCounts":
        """Add up what is ready."""
        why: Counter[str] = Counter()
        ours = native = 0
        for one in ready:
            ours += one.calls if one.run is not None else one.failed
            if one.why is not None:
                why[one.why] += one.calls - one.failed
            elif one.run is None:
                native += one.calls
        calls = ours + native + why.total()
        return cls(calls, ours, native, dict(why))


@dataclass(frozen=True, slots=True)
class Statistics:
    """What became of all calls so far: `aten::convolution` and its backward."""

    forward: CallCounts
    backward: CallCounts


class Convolutions(ContextDecorator):
    """A context in which PyTorch's convolutions run our plans; see `convolutions`."""

    def __init__(self, tuner: Tuner) -> None:
        self.tuner = tuner
        self._overrides = overrides("CPU")
        self._native_forward = self._overrides.native_forward
        self._native_backward = self._overrides.native_backward
        self._maker = ReadyMaker(tuner)
        self._forward: dict[Any, Ready] = {}
        self._backward: dict[Any, Ready] = {}
        self._lock = Own(threading.RLock)

    def __call__(self, function: _Function) -> _Function:
        """A function whose convolutions run our plans while it runs.

        Raises:
            TypeError: It is none, or returns before its body has run.
        """
        if isinstance(function, type | torch.nn.Module) or not callable(function):
            raise TypeError(
                f"only functions can be decorated, got {function!r}: decorate a method "
                "of it, or use `with` where it is called"
            )
        if any(late(function) for late in _LATE):
            raise TypeError(
                f"{function.__qualname__} returns before its body has run: use `with` "
                "in it, or where what it returns is used up"
            )
        return super().__call__(function)

    @untraced
    def __enter__(self) -> Self:
        self._overrides.add(self)
        return self

    @untraced
    def __exit__(self, *error: object) -> None:
        if not self._overrides.remove(self):
            self._maker.arena.release()

    @property
    def stats(self) -> Statistics:
        """What became of the calls so far."""
        return Statistics(
            CallCounts.of([*self._forward.values()]),
            CallCounts.of([*self._backward.values()]),
        )

    @untraced
    def forward(self, *args: Any) -> Any:
        """See `aten::convolution`."""
        x, w, b, stride, padding, dilation, transposed, output_padding, groups = args
        key = (
            x.shape,
            x.stride(),
            x.dtype,
            w.shape,
            w.stride(),
            w.dtype,
            b is None or (b.shape, b.dtype),
            tuple(stride),  # a list may have one entry for all axes
            tuple(padding),
            tuple(dilation),
            transposed,
            tuple(output_padding),
            groups,
        )
        ready = self._forward.get(key)
        if ready is not None and ready.run is None:  # the usual way, without detours
            ready.calls += 1
            return self._native_forward(*args)
        if _traced() is not None:
            return self._native_forward(*args)
        native = partial(self._native_forward, *args)
        if ready is None:
            make = partial(self._maker.forward, native, x, w, b, args[3:])
            ready = self._made(self._forward, key, make)
        return ready.computed(native, x, w, b)

    @untraced
    def backward(self, *args: Any) -> Any:
        """See `aten::convolution_backward`.

        How the output's gradient lies is no part of the key: it changes what a copy of
        it costs, PyTorch's kernels make one too, and looking it up costs every call.
        """
        gy, x, w, sizes, stride, padding, dilation, transposed, more, groups = args[:-1]
        mask = args[-1]
        key = (
            gy.shape,
            gy.dtype,
            x.shape,
            x.stride(),
            x.dtype,
            w.shape,
            w.stride(),
            w.dtype,
            sizes is None,
            tuple(stride),
            tuple(padding),
            tuple(dilation),
            transposed,
            tuple(more),
            groups,
            tuple(mask),
        )
        ready = self._backward.get(key)
        if ready is not None and ready.run is None:
            ready.calls += 1
            return self._native_backward(*args)
        if _traced() is not None:
            return self._native_backward(*args)
        masked = partial(self._native_backward, *args[:-1])
        if ready is None:
            given = (masked, gy, x, w, sizes, args[4:-1], mask)
            make = partial(self._maker.backward, *given)
            ready = self._made(self._backward, key, make)
        return ready.computed(partial(masked, mask), masked, gy, x, w)

    def _made(
        self, known: dict[Any, Ready], key: Any, make: Callable[[], Ready]
    ) -> Ready:
        """Make a call ready, in one thread at a time: what is measured runs alone."""
        with self._lock.mine:
            if (ready := known.get(key)) is None:
                ready = known[key] = make()
            return ready


def convolutions(
    workspace_limit: int | str | None = None, *, tuner: Tuner | None = None
) -> Convolutions:
    """Have PyTorch's convolutions run our plans: a context, and a decorator.

    Within it every convolution on the CPU in float32 or float64 is looked up: forward
    and both gradients, transposed ones too, in 1, 2 or 3 dimensions, in any memory
    format. The first call of its kind is measured and planned; PyTorch's own kernel
    is one of the algorithms, and a plan of ours is run against it, whole, before it is
    believed. Everything else is left to PyTorch, with its errors and its results.

    It stands below autograd, autocast, vmap and double backward, and holds for all
    threads, since PyTorch's table of kernels belongs to the process: a backward pass
    that is to be served has to run within it. Compiled code is served where it calls
    `aten::convolution`; Inductor's own fusions (`mkldnn::_convolution_pointwise`) and
    convolutions on a GPU run as they would without it. Contexts may be nested and left
    in any order: the one that came last serves. Each size that occurs is measured, so
    programs whose sizes always change gain nothing.

    Args:
        workspace_limit: Bytes (or "64MiB") that a kernel of ours may use; what
            PyTorch's uses it does not tell, and is not limited.
        tuner: Measures and plans, instead of one with that limit; its backend is
            `mucudnn.torch.cpu_backend()`.

    Raises:
        ValueError: The limit is no size, both are given, or the tuner has another
            backend.
        TypeError: The tuner is none.
    """
    if tuner is None:
        limit = "64MiB" if workspace_limit is None else workspace_limit
        tuner = Tuner(backend=cpu_backend(), workspace_limit=limit)
    elif workspace_limit is not None:
        raise ValueError("give workspace_limit to the tuner, or no tuner")
    else:
        check_tuner(tuner)
    return Convolutions(tuner)
