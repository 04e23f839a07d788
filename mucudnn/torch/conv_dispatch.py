"""PyTorch's dispatcher: its own convolution kernels, and others in their place.

`aten::convolution` and `aten::convolution_backward` are what every convolution of
PyTorch comes down to, below autograd, autocast and vmap: eager code, `torch.func` and
most compiled graphs. The dispatcher's table belongs to the process, so what stands in
it serves all threads, those in which autograd runs backward among them.
"""

import functools
import threading
import warnings
from typing import Any, Protocol

import torch

from mucudnn.forks import Own

__all__ = ["Convolver", "Overrides", "overrides"]


class Convolver(Protocol):
    """What may stand in for both kernels.

    The first argument is the dispatcher's key set, which the native kernels take; the
    others are those of the operators' schemas.
    """

    def forward(self, keys: Any, *args: Any) -> Any:
        """See `aten::convolution`."""
        ...

    def backward(self, keys: Any, *args: Any) -> Any:
        """See `aten::convolution_backward`."""
        ...


class Overrides:
    """Who serves the convolutions of one dispatch key: the one that came last.

    While nobody does, PyTorch's table is as it was found.

    Attributes:
        native_forward: (key set, arguments) -> what PyTorch's own kernel returns.
        native_backward: Likewise.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        forward = torch.library.get_kernel("aten::convolution", key)
        backward = torch.library.get_kernel("aten::convolution_backward", key)
        self.native_forward = forward.call_boxed
        self.native_backward = backward.call_boxed
        self._serving: list[Convolver] = []
        self._library: Any = None
        self._lock = Own(threading.RLock)

    @property
    def keys(self) -> Any:
        """The key set to call the native kernels with outside a dispatch."""
        return torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, self._key))

    def add(self, convolver: Convolver) -> None:
        """Have it serve, before those that do already; it may be added repeatedly."""
        with self._lock.mine:
            if self._library is None:
                self._library = self._installed()
            self._serving.append(convolver)

    def remove(self, convolver: Convolver) -> bool:
        """Undo one `add`, in any order; whether it still serves by another."""
        with self._lock.mine:
            last = max(i for i, c in enumerate(self._serving) if c is convolver)
            del self._serving[last]
            if not self._serving:
                self._library._destroy()
                self._library = None
            return any(c is convolver for c in self._serving)

    def _installed(self) -> Any:
        library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():  # that there was a kernel is the point
            warnings.simplefilter("ignore")
            for name, function in (
                ("convolution", self._forward),
                ("convolution_backward", self._backward),
            ):
                library.impl(
                    name, function, self._key, with_keyset=True, allow_override=True
                )
        return library

    def _forward(self, keys: Any, *args: Any) -> Any:
        try:
            forward = self._serving[-1].forward
        except IndexError:  # another thread removed the last one meanwhile
            return self.native_forward(keys, *args)
        return forward(keys, *args)

    def _backward(self, keys: Any, *args: Any) -> Any:
        try:
            backward = self._serving[-1].backward
        except IndexError:
            return self.native_backward(keys, *args)
        return backward(keys, *args)


@functools.cache
def overrides(key: str) -> Overrides:
    """The overrides of a dispatch key such as `CPU`; one a process, as its table is."""
    return Overrides(key)
