"""The context in which PyTorch's convolutions run planned kernels.

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

from mucudnn.errors import MucudnnError
from mucudnn.processes import PerProcess
from mucudnn.runtime.tuning.tuner import Tuner
from mucudnn.torch.conv.backend import check_tuner, cpu_backend, overrides, untraced
from mucudnn.torch.conv.kernels import CallPreparer, PreparedCall

_traced = torch._C._get_tracing_state
"""The state of `torch.jit.trace`, which has to see PyTorch's kernels; None outside."""

_RETURN_EARLY = (
    inspect.isgeneratorfunction,
    inspect.iscoroutinefunction,
    inspect.isasyncgenfunction,
)
"""Tests for functions that return before their bodies run."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class CallCounts:
    """Numbers of calls of one operator, by the kernels that ran them.

    Attributes:
        calls: All calls.
        ours: Calls that ran our kernels, for at least one of the gradients.
        native: Calls of PyTorch's kernel because it was measured to be faster.
        fell_back: Reason for PyTorch's kernel otherwise -> number of calls.
    """

    calls: int
    ours: int
    native: int
    fell_back: Mapping[str, int]

    @classmethod
    def of(cls, prepared: Iterable[PreparedCall]) -> "CallCounts":
        """Add up the counts of prepared calls."""
        fell_back: Counter[str] = Counter()
        ours = native = 0
        for one in prepared:
            ours += one.calls if one.run is not None else one.succeeded
            if one.why is not None:
                fell_back[one.why] += one.calls - one.succeeded
            elif one.run is None:
                native += one.calls
        return cls(ours + native + fell_back.total(), ours, native, dict(fell_back))


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counts of all calls so far: `aten::convolution` and its backward."""

    forward: CallCounts
    backward: CallCounts


class Convolutions(ContextDecorator):
    """A context in which PyTorch's convolutions run our plans; see `convolutions`."""

    def __init__(self, tuner: Tuner) -> None:
        self.tuner = tuner
        self._overrides = overrides()
        self._native_forward = self._overrides.native_forward
        self._native_backward = self._overrides.native_backward
        self._preparer = CallPreparer(tuner)
        self._forward: dict[Any, PreparedCall] = {}
        self._backward: dict[Any, PreparedCall] = {}
        self._lock = PerProcess(threading.RLock)

    def __call__(self, function: _Function) -> _Function:
        """Return a function that runs in this context.

        Raises:
            TypeError: It is not a function, or returns before its body has run.
        """
        if isinstance(function, type | torch.nn.Module) or not callable(function):
            raise TypeError(
                f"only functions can be decorated, got {function!r}: decorate a method "
                "of it, or use `with` where it is called"
            )
        if any(returns_early(function) for returns_early in _RETURN_EARLY):
            raise TypeError(
                f"{function.__qualname__} returns before its body has run; use `with` "
                "inside it, or around the code that consumes its result"
            )
        return super().__call__(function)

    @untraced
    def __enter__(self) -> Self:
        self._overrides.add(self)
        return self

    @untraced
    def __exit__(self, *error: object) -> None:
        if not self._overrides.remove(self):
            self._preparer.arena.release()

    @property
    def stats(self) -> Statistics:
        """Counts of all calls so far."""
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
        call = self._forward.get(key)
        if call is not None and call.run is None:  # the fast path of PyTorch's kernel
            call.calls += 1
            return self._native_forward(*args)
        if _traced() is not None:
            return self._native_forward(*args)
        native = partial(self._native_forward, *args)
        if call is None:
            prepare = partial(self._preparer.forward, native, x, w, b, args[3:])
            call = self._prepared(self._forward, key, prepare)
        return call.compute(native, x, w, b)

    @untraced
    def backward(self, *args: Any) -> Any:
        """See `aten::convolution_backward`.

        The strides of the output's gradient are not part of the key: they only change
        the cost of copying it, which PyTorch's kernels do as well, and looking them up
        costs every call.
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
        call = self._backward.get(key)
        # PyTorch's kernel was found to be the faster or the only one.
        if call is not None and call.run is None:
            call.calls += 1
            return self._native_backward(*args)
        if _traced() is not None:
            return self._native_backward(*args)
        masked = partial(self._native_backward, *args[:-1])
        if call is None:
            given = (masked, gy, x, w, sizes, args[4:-1], mask)
            prepare = partial(self._preparer.backward, *given)
            call = self._prepared(self._backward, key, prepare)
        return call.compute(partial(masked, mask), masked, gy, x, w)

    def _prepared(
        self,
        known: dict[Any, PreparedCall],
        key: Any,
        prepare: Callable[[], PreparedCall],
    ) -> PreparedCall:
        """Prepare a call, in one thread at a time: measurements must run alone."""
        with self._lock.value:
            if (call := known.get(key)) is None:
                try:
                    call = prepare()
                except (MucudnnError, ValueError, RuntimeError) as e:
                    why = str(e).splitlines()[0] if str(e) else type(e).__name__
                    call = PreparedCall(None, why)
                known[key] = call
            return call


def convolutions(
    workspace_limit: int | str | None = None, *, tuner: Tuner | None = None
) -> Convolutions:
    """Run PyTorch's convolutions with our plans, in a context or a decorated function.

    The context covers every convolution on the CPU in float32 or float64: forward and
    both gradients, transposed ones as well, in 1, 2 or 3 dimensions, in any memory
    format. The first call of each kind is measured and planned. PyTorch's own kernel is
    one of the algorithms, and a plan of ours is accepted only if it wins against it in
    a comparison of whole calls. All other convolutions are left to PyTorch, with its
    errors and results.

    The kernels are replaced below autograd, autocast, vmap and double backward, and for
    all threads, since PyTorch's table of kernels belongs to the process: a backward
    pass has to run within the context to be covered. Compiled code is covered where it
    calls `aten::convolution`; Inductor's own fusions
    (`mkldnn::_convolution_pointwise`) and convolutions on a GPU are not affected.
    Contexts may be nested and left in any order: the last entered one is in effect.
    Each new shape is measured, so programs whose shapes always change gain nothing.

    Args:
        workspace_limit: Bytes (or "64MiB") that our kernels may use. The workspace of
            PyTorch's kernels is unknown, and not limited.
        tuner: Measures and plans, instead of one with that limit; its backend is
            `mucudnn.torch.cpu_backend()`.

    Raises:
        ValueError: The limit is not a size, both are given, or the tuner has another
            backend.
        TypeError: `tuner` is not a tuner.
    """
    if tuner is None:
        limit = "64MiB" if workspace_limit is None else workspace_limit
        tuner = Tuner(backend=cpu_backend(), workspace_limit=limit)
    elif workspace_limit is not None:
        raise ValueError(
            "workspace_limit and tuner cannot both be given; pass "
            "Tuner(workspace_limit=...)"
        )
    else:
        check_tuner(tuner)
    return Convolutions(tuner)
