"""The CPU backend with PyTorch's own kernel as one more algorithm; dispatch.

It joins ours in the tables of measurements, under a fingerprint that names PyTorch and
its threads, so that a plan takes it wherever ours are slower.
"""

import functools
import threading
import warnings
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from mucudnn.backends.base import Backend
from mucudnn.backends.cpu.conv import CpuConv
from mucudnn.backends.cpu.conv.algorithm import Algorithm
from mucudnn.backends.cpu.device import CpuDevice
from mucudnn.backends.cpu.kernels import bind
from mucudnn.backends.cpu.threads import Workers
from mucudnn.errors import BackendUnavailableError
from mucudnn.ir.conv import ConvProblem, Direction
from mucudnn.processes import Own
from mucudnn.runtime.tuning.tuner import Tuner

_NAME = "torch-cpu"


def cpu_backend(*, native: bool = True) -> Backend:
    """The CPU backend, for tuners that `convolutions` takes and for NumPy's arrays.

    Measurements are for as many threads as PyTorch has now (`torch.set_num_threads`).

    Args:
        native: Whether PyTorch's own kernel is one of the algorithms.
    """
    workers = Workers()
    conv = CpuConv(workers, [ALGORITHM] if native else [])
    threads = torch.get_num_threads()
    libraries = (f"torch-{torch.__version__}/{threads}-threads",) if native else ()
    return Backend(
        _NAME,
        CpuDevice(libraries),
        conv,
        binder=lambda plan, replay: conv.bind(plan),
        kernels=bind(workers),
    )


def check_tuner(tuner: Tuner) -> None:
    """Refuse a tuner that does not measure for PyTorch.

    Raises:
        TypeError: It is no tuner.
        ValueError: It has another backend.
    """
    if not isinstance(tuner, Tuner):
        raise TypeError(
            f"tuner must be a Tuner, got {type(tuner).__name__}; make it with "
            "Tuner(backend=mucudnn.torch.cpu_backend())"
        )
    if tuner.backend.name != _NAME:
        raise ValueError(
            f"tuner has backend {tuner.backend.name!r}; make it with "
            "Tuner(backend=mucudnn.torch.cpu_backend())"
        )


# PyTorch's own kernel as one more algorithm of the CPU library.
#
# Its result is an array of PyTorch's, which is copied to where the caller wants it: the
# copy is part of its time. What it uses as workspace it does not tell: it counts as
# none.


TORCH = "torch"
"""Name of the algorithm: oneDNN's kernel, or what PyTorch takes where that has none."""


_Compute = Callable[[Any, Any, Any], Any]


class _Native:
    """PyTorch's kernel, below autograd and whatever is in its place; see `Kernel`.

    Args:
        compute: Of two operands, and a tensor like the result.
    """

    nbytes = 0

    def __init__(self, compute: _Compute) -> None:
        self._compute = compute

    def run(
        self,
        a: Any,
        b: Any,
        out: Any,
        workspace: Any,
        workers: Workers,
        accumulate: bool,
    ) -> None:
        """With PyTorch's threads, not `workers`."""
        one, two, three = map(torch.from_numpy, (a, b, out))
        with torch.inference_mode():
            result = self._compute(one, two, three)
            if accumulate:
                three.add_(result)
            else:
                three.copy_(result)


def _kernel(problem: ConvProblem, workers: int) -> _Native:
    return _Native(_COMPUTE[problem.direction](problem))


def _forward(problem: ConvProblem) -> _Compute:
    run, options = overrides("CPU").native_forward, _options(problem)
    return lambda x, w, y: run(x, w, None, *options)


def _backward_data(problem: ConvProblem) -> _Compute:
    run, options = overrides("CPU").native_backward, _options(problem)
    mask = [True, False, False]
    return lambda dy, w, dx: run(dy, dx, w, None, *options, mask)[0]


def _backward_filter(problem: ConvProblem) -> _Compute:
    run, options = overrides("CPU").native_backward, _options(problem)
    mask = [False, True, False]
    return lambda x, dy, dw: run(dy, x, dw, None, *options, mask)[1]


_COMPUTE: dict[Direction, Callable[[ConvProblem], _Compute]] = {
    Direction.FORWARD: _forward,
    Direction.BACKWARD_DATA: _backward_data,
    Direction.BACKWARD_FILTER: _backward_filter,
}


def _options(problem: ConvProblem) -> tuple[Any, ...]:
    """Stride to groups, as the operators' schemas order them."""
    no_output_padding = [0] * len(problem.stride)
    return (
        list(problem.stride),
        list(problem.padding),
        list(problem.dilation),
        False,
        no_output_padding,
        problem.groups,
    )


ALGORITHM = Algorithm(TORCH, _kernel, notes=("workspace_not_counted",))


# PyTorch's dispatcher: its own convolution kernels, and others in their place.
#
# `aten::convolution` and `aten::convolution_backward` are what every convolution of
# PyTorch comes down to, below autograd, autocast and vmap: eager code, `torch.func` and
# most compiled graphs. The dispatcher's table belongs to the process, so what stands in
# it serves all threads, those in which autograd runs backward among them.


_NOBODYS_KEY = torch._C.DispatchKey.PrivateUse3
"""Of a backend that does not exist: its entries are the kernels that all share."""


_convolution = torch._C._VariableFunctions._convolution

_watched = torch._C._is_torch_function_mode_enabled


_frames = torch._C._dynamo.eval_frame

_SKIP = _frames._FrameAction.SKIP


_Function = TypeVar("_Function", bound=Callable[..., Any])


def untraced(function: _Function) -> _Function:
    """Have Dynamo run a function, and whatever that calls, as they are.

    So does `torch.compiler.disable`, by a wrapper of 0.4 µs a call; and it imports
    Dynamo, which takes seconds. Without either Dynamo would compile kernels of ours
    that run while its own compiled code does.
    """
    strategy = _frames._FrameExecStrategy(_SKIP, _SKIP)  # it, and all below it
    _frames.set_code_exec_strategy(function.__code__, strategy)
    function.__dict__["_torchdynamo_disable"] = True  # nor is it inlined
    return function


class Convolver(Protocol):
    """What may stand in for both kernels; the arguments are those of their schemas."""

    def forward(self, *args: Any) -> Any:
        """See `aten::convolution`."""
        ...

    def backward(self, *args: Any) -> Any:
        """See `aten::convolution_backward`."""
        ...


class Overrides:
    """Who serves the convolutions of one dispatch key: the one that came last.

    While nobody does, PyTorch's table is as it was found. Its own kernels are the same
    for all backends, so they are called by a backend's key that nobody overrides: it
    costs 2 µs, and other threads run meanwhile, which they cannot in a kernel that
    `torch.library.get_kernel` hands out. PyTorch's `aten::convolution` does nothing but
    call `aten::_convolution`, for which there is a way without that detour.

    Attributes:
        native_forward: PyTorch's own `aten::convolution`.
        native_backward: And `aten::convolution_backward`.

    Raises:
        BackendUnavailableError: Another library has kernels of its own in the table.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self.native_forward = _forward_of(_shared_kernel("convolution", key))
        self.native_backward = _shared_kernel("convolution_backward", key)
        self._serving: list[Convolver] = []
        self._library: Any = None
        self._lock = Own(threading.RLock)

    def add(self, convolver: Convolver) -> None:
        """Have it serve, before those that do already; it may be added repeatedly."""
        with self._lock.mine:
            self._serving.append(convolver)
            self._install_last()

    def remove(self, convolver: Convolver) -> bool:
        """Undo one `add`, in any order; whether it still serves by another.

        Raises:
            RuntimeError: There was none.
        """
        with self._lock.mine:
            mine = [i for i, c in enumerate(self._serving) if c is convolver]
            if not mine:
                raise RuntimeError("the context is left, but it was not entered")
            del self._serving[mine[-1]]
            self._install_last()
            return any(c is convolver for c in self._serving)

    def _install_last(self) -> None:
        """Put who came last into the table itself: a detour costs every call 1 µs."""
        before, self._library = self._library, None
        if self._serving:
            self._library = self._installed(self._serving[-1])
        if before is not None:
            before._destroy()

    def _installed(self, convolver: Convolver) -> Any:
        library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():  # that there was a kernel is the point
            warnings.simplefilter("ignore")
            for name, function in (
                ("convolution", convolver.forward),
                ("convolution_backward", convolver.backward),
            ):
                library.impl(name, function, self._key, allow_override=True)
        return library


def _forward_of(shared: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch's `aten::convolution`, given its shared kernel.

    Modes that watch calls of Python's functions see none that the user did not write.
    The flags that it adds are cuDNN's.
    """

    @untraced
    def forward(*args: Any) -> Any:
        if _watched():
            return shared(*args)
        return _convolution(*args, False, False, False, False)

    return forward


def _shared_kernel(name: str, key: str) -> Callable[..., Any]:
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key):
        raise BackendUnavailableError(
            f"another library has put its own kernel for aten::{name} on {key} in "
            "place of PyTorch's; ours cannot stand in for both"
        )
    operator = getattr(torch.ops.aten, name).default
    keys = torch._C.DispatchKeySet(_NOBODYS_KEY)
    return functools.partial(operator._handle.redispatch_boxed, keys)


@functools.cache
def overrides(key: str) -> Overrides:
    """The overrides of a dispatch key such as `CPU`; one a process, as its table is."""
    return Overrides(key)
