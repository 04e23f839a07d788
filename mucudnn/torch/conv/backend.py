"""The CPU backend with PyTorch's own kernel as an algorithm, and dispatcher overrides.

PyTorch's kernel is measured beside ours, under a fingerprint that names PyTorch's
version and threads, so plans use it wherever ours are slower.
"""

import functools
import threading
import warnings
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from mucudnn.backends.base import Backend
from mucudnn.backends.cpu.conv import CpuConv
from mucudnn.backends.cpu.conv.algorithm import Algorithm, Arrays
from mucudnn.backends.cpu.device import CpuDevice
from mucudnn.backends.cpu.kernels import bind
from mucudnn.backends.cpu.threads import Workers
from mucudnn.errors import BackendUnavailableError
from mucudnn.ir.conv import ConvProblem, Direction
from mucudnn.processes import PerProcess
from mucudnn.runtime.tuning.tuner import Tuner

_NAME = "torch-cpu"


def cpu_backend(*, native: bool = True) -> Backend:
    """Return the CPU backend for tuners of `convolutions`, and for NumPy arrays.

    Measurements are for PyTorch's current number of threads (`torch.set_num_threads`).

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
        TypeError: The argument is not a tuner.
        ValueError: The tuner has another backend.
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


# PyTorch's own kernel as an algorithm of the CPU library.
#
# It allocates its result, which is copied to the caller's array: the copy is part of
# its time. Its workspace is unknown and counts as none.


TORCH = "torch"
"""Name of the algorithm: oneDNN's kernel, or another of PyTorch's choice."""

_Compute = Callable[[Any, Any, Any], Any]


class _NativeKernel:
    """PyTorch's kernel, below autograd and below our overrides; see `Kernel`."""

    nbytes = 0

    def __init__(self, compute: _Compute) -> None:
        self._compute = compute

    def run(
        self, arrays: Arrays, workspace: Any, workers: Workers, accumulate: bool
    ) -> None:
        """Run with PyTorch's threads, not `workers`."""
        first, second, target = map(torch.from_numpy, arrays)
        with torch.inference_mode():
            result = self._compute(first, second, target)
            if accumulate:
                target.add_(result)
            else:
                target.copy_(result)


def _native_kernel(problem: ConvProblem, workers: int) -> _NativeKernel:
    """Return PyTorch's kernel of a problem."""
    forward = overrides().native_forward
    backward = overrides().native_backward
    options = (  # as the operators' schemas order them
        list(problem.stride),
        list(problem.padding),
        list(problem.dilation),
        False,  # not transposed
        [0] * len(problem.stride),  # output padding
        problem.groups,
    )

    match problem.direction:
        case Direction.FORWARD:
            return _NativeKernel(lambda x, w, y: forward(x, w, None, *options))
        case Direction.BACKWARD_DATA:
            mask = [True, False, False]
            return _NativeKernel(
                lambda dy, w, dx: backward(dy, dx, w, None, *options, mask)[0]
            )
        case Direction.BACKWARD_FILTER:
            mask = [False, True, False]
            return _NativeKernel(
                lambda x, dy, dw: backward(dy, x, dw, None, *options, mask)[1]
            )


ALGORITHM = Algorithm(TORCH, _native_kernel, notes=("workspace_not_counted",))


# Overrides of PyTorch's convolution kernels in its dispatcher.
#
# Every convolution of PyTorch calls `aten::convolution` or
# `aten::convolution_backward`, below autograd, autocast and vmap: in eager code, in
# `torch.func` and in most compiled graphs. The dispatcher's table belongs to the
# process, so an override serves all threads, including those that run backward.


_KEY = "CPU"
"""Dispatch key of the kernels that are overridden."""

_NOBODYS_KEY = torch._C.DispatchKey.PrivateUse3
"""Key of a backend that does not exist, which dispatches to the shared kernels."""

_convolution = torch._C._VariableFunctions._convolution

_function_mode_enabled = torch._C._is_torch_function_mode_enabled

_frames = torch._C._dynamo.eval_frame

_SKIP = _frames._FrameAction.SKIP

_Function = TypeVar("_Function", bound=Callable[..., Any])


def untraced(function: _Function) -> _Function:
    """Exclude a function, and all that it calls, from Dynamo.

    `torch.compiler.disable` does the same by a wrapper that costs 0.4 µs a call, and
    imports Dynamo, which takes seconds. Without either, Dynamo would compile our
    kernels when its own compiled code calls them.
    """
    strategy = _frames._FrameExecStrategy(_SKIP, _SKIP)  # it, and all below it
    _frames.set_code_exec_strategy(function.__code__, strategy)
    function.__dict__["_torchdynamo_disable"] = True  # nor is it inlined
    return function


class Convolver(Protocol):
    """An override of both kernels; the arguments are those of their schemas."""

    def forward(self, *args: Any) -> Any:
        """See `aten::convolution`."""
        ...

    def backward(self, *args: Any) -> Any:
        """See `aten::convolution_backward`."""
        ...


class Overrides:
    """The overrides of kernels on the CPU, of which the last added one serves.

    Without any, PyTorch's table is unchanged. PyTorch's own kernels are the same for
    all backends, so they are called by the key of a backend that nobody overrides. That
    costs 2 µs, but releases Python's global lock, unlike a kernel from
    `torch.library.get_kernel`. PyTorch's `aten::convolution` only calls
    `aten::_convolution`, which can be called directly.

    Attributes:
        native_forward: PyTorch's own `aten::convolution`.
        native_backward: PyTorch's own `aten::convolution_backward`.

    Raises:
        BackendUnavailableError: Another library has kernels of its own in the table.
    """

    def __init__(self) -> None:
        self.native_forward = _forward_of(_shared_kernel("convolution"))
        self.native_backward = _shared_kernel("convolution_backward")
        self._serving: list[Convolver] = []
        self._library: Any = None
        self._lock = PerProcess(threading.RLock)

    def add(self, convolver: Convolver) -> None:
        """Let an override serve instead of earlier ones; it may be added repeatedly."""
        with self._lock.value:
            self._serving.append(convolver)
            self._install_last()

    def remove(self, convolver: Convolver) -> bool:
        """Undo one `add`, in any order; return whether another of its `add`s remains.

        Raises:
            RuntimeError: It was not added.
        """
        with self._lock.value:
            mine = [i for i, c in enumerate(self._serving) if c is convolver]
            if not mine:
                raise RuntimeError("the context was exited without having been entered")
            del self._serving[mine[-1]]
            self._install_last()
            return any(c is convolver for c in self._serving)

    def _install_last(self) -> None:
        """Register the last override itself: an indirection costs every call 1 µs."""
        before, self._library = self._library, None
        if self._serving:
            last = self._serving[-1]
            self._library = library = torch.library.Library("aten", "IMPL")
            with warnings.catch_warnings():  # that it replaces a kernel is intended
                warnings.simplefilter("ignore")
                for name, function in (
                    ("convolution", last.forward),
                    ("convolution_backward", last.backward),
                ):
                    library.impl(name, function, _KEY, allow_override=True)
        if before is not None:
            before._destroy()


def _forward_of(shared: Callable[..., Any]) -> Callable[..., Any]:
    """Return PyTorch's `aten::convolution`, given its shared kernel.

    `aten::_convolution` is called directly unless a torch-function mode is on, which
    would see a call that the user did not write. The additional flags are cuDNN's.
    """

    @untraced
    def forward(*args: Any) -> Any:
        if _function_mode_enabled():
            return shared(*args)
        return _convolution(*args, False, False, False, False)

    return forward


def _shared_kernel(name: str) -> Callable[..., Any]:
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", _KEY):
        raise BackendUnavailableError(
            f"another library has replaced PyTorch's kernel for aten::{name} on "
            f"{_KEY}; mucudnn cannot replace it as well"
        )
    operator = getattr(torch.ops.aten, name).default
    keys = torch._C.DispatchKeySet(_NOBODYS_KEY)
    return functools.partial(operator._handle.redispatch_boxed, keys)


overrides = functools.cache(Overrides)
"""Returns the overrides of the process."""
