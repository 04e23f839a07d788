"""Bindings of libcudnn 9 by ctypes: prototypes, the one struct, status to error.

This module knows nothing of convolutions. `PROTOTYPES` is the whole surface in use;
tests compare it with the headers and replace `Cudnn` by a recording fake.
"""

import ctypes
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

from mucudnn.backends.cuda._enums import Status
from mucudnn.errors import BackendError, OutOfMemoryError, UnsupportedError

__all__ = ["PROTOTYPES", "AlgoPerf", "Calls", "Cudnn", "error_for"]

_INT = ctypes.c_int
_SIZE = ctypes.c_size_t
_DOUBLE = ctypes.c_double
_PTR = ctypes.c_void_p
_OUT_PTR = ctypes.POINTER(ctypes.c_void_p)
_INTS = ctypes.POINTER(ctypes.c_int)
_MESSAGE_BYTES = 4096


class AlgoPerf(ctypes.Structure):
    """`cudnnConvolution{Fwd,BwdData,BwdFilter}AlgoPerf_t`; the three are alike."""

    _fields_ = (
        ("algo", ctypes.c_int),
        ("status", ctypes.c_int),
        ("time", ctypes.c_float),
        ("memory", ctypes.c_size_t),
        ("determinism", ctypes.c_int),
        ("mathType", ctypes.c_int),
        ("reserved", ctypes.c_int * 3),
    )


_PERFS = ctypes.POINTER(AlgoPerf)
_WORKSPACE = (_PTR, _PTR, _PTR, _PTR, _PTR, _INT, ctypes.POINTER(_SIZE))
_BEST = (_PTR, _PTR, _PTR, _PTR, _PTR, _INT, _INTS, _PERFS)
# handle, alpha, a + data, b + data, convolution, algorithm, workspace + size, beta, out
_RUN = (_PTR, _PTR, *[_PTR] * 4, _PTR, _INT, _PTR, _SIZE, _PTR, _PTR, _PTR)
# alpha, x + data, beta, y + data
_MAP = (_PTR,) * 6
# alpha, y + data, dy + data, x + data, beta, dx + data
_MAP_BACK = (_PTR,) * 10
# handle, mode, alpha, beta
_NORM = (_PTR, _INT, _PTR, _PTR)

PROTOTYPES: Mapping[str, tuple[Any, tuple[Any, ...]]] = MappingProxyType(
    {
        "cudnnGetVersion": (_SIZE, ()),
        "cudnnGetCudartVersion": (_SIZE, ()),
        "cudnnGetErrorString": (ctypes.c_char_p, (_INT,)),
        "cudnnGetLastErrorString": (None, (ctypes.c_char_p, _SIZE)),
        "cudnnCreate": (_INT, (_OUT_PTR,)),
        "cudnnDestroy": (_INT, (_PTR,)),
        "cudnnSetStream": (_INT, (_PTR, _PTR)),
        "cudnnBackendCreateDescriptor": (_INT, (_INT, _OUT_PTR)),
        "cudnnBackendDestroyDescriptor": (_INT, (_PTR,)),
        "cudnnBackendFinalize": (_INT, (_PTR,)),
        "cudnnBackendSetAttribute": (_INT, (_PTR, _INT, _INT, ctypes.c_int64, _PTR)),
        "cudnnBackendGetAttribute": (
            _INT,
            (_PTR, _INT, _INT, ctypes.c_int64, ctypes.POINTER(ctypes.c_int64), _PTR),
        ),
        "cudnnBackendExecute": (_INT, (_PTR, _PTR, _PTR)),
        "cudnnCreateTensorDescriptor": (_INT, (_OUT_PTR,)),
        "cudnnSetTensorNdDescriptor": (_INT, (_PTR, _INT, _INT, _INTS, _INTS)),
        "cudnnDestroyTensorDescriptor": (_INT, (_PTR,)),
        "cudnnCreateFilterDescriptor": (_INT, (_OUT_PTR,)),
        "cudnnSetFilterNdDescriptor": (_INT, (_PTR, _INT, _INT, _INT, _INTS)),
        "cudnnDestroyFilterDescriptor": (_INT, (_PTR,)),
        "cudnnCreateConvolutionDescriptor": (_INT, (_OUT_PTR,)),
        "cudnnSetConvolutionNdDescriptor": (
            _INT,
            (_PTR, _INT, _INTS, _INTS, _INTS, _INT, _INT),
        ),
        "cudnnSetConvolutionGroupCount": (_INT, (_PTR, _INT)),
        "cudnnSetConvolutionMathType": (_INT, (_PTR, _INT)),
        "cudnnDestroyConvolutionDescriptor": (_INT, (_PTR,)),
        "cudnnGetConvolutionNdForwardOutputDim": (
            _INT,
            (_PTR, _PTR, _PTR, _INT, _INTS),
        ),
        "cudnnGetConvolutionForwardWorkspaceSize": (_INT, _WORKSPACE),
        "cudnnGetConvolutionBackwardDataWorkspaceSize": (_INT, _WORKSPACE),
        "cudnnGetConvolutionBackwardFilterWorkspaceSize": (_INT, _WORKSPACE),
        "cudnnGetConvolutionForwardAlgorithm_v7": (_INT, _BEST),
        "cudnnGetConvolutionBackwardDataAlgorithm_v7": (_INT, _BEST),
        "cudnnGetConvolutionBackwardFilterAlgorithm_v7": (_INT, _BEST),
        "cudnnConvolutionForward": (_INT, _RUN),
        "cudnnConvolutionBackwardData": (_INT, _RUN),
        "cudnnConvolutionBackwardFilter": (_INT, _RUN),
        "cudnnCreatePoolingDescriptor": (_INT, (_OUT_PTR,)),
        "cudnnSetPoolingNdDescriptor": (
            _INT,
            (_PTR, _INT, _INT, _INT, _INTS, _INTS, _INTS),
        ),
        "cudnnDestroyPoolingDescriptor": (_INT, (_PTR,)),
        "cudnnPoolingForward": (_INT, (_PTR, _PTR, *_MAP)),
        "cudnnPoolingBackward": (_INT, (_PTR, _PTR, *_MAP_BACK)),
        "cudnnCreateLRNDescriptor": (_INT, (_OUT_PTR,)),
        "cudnnSetLRNDescriptor": (_INT, (_PTR, ctypes.c_uint, *[_DOUBLE] * 3)),
        "cudnnDestroyLRNDescriptor": (_INT, (_PTR,)),
        "cudnnLRNCrossChannelForward": (_INT, (_PTR, _PTR, _INT, *_MAP)),
        "cudnnLRNCrossChannelBackward": (_INT, (_PTR, _PTR, _INT, *_MAP_BACK)),
        "cudnnSoftmaxForward": (_INT, (_PTR, _INT, _INT, *_MAP)),
        "cudnnDeriveBNTensorDescriptor": (_INT, (_PTR, _PTR, _INT)),
        "cudnnBatchNormalizationForwardTraining": (
            _INT,
            (*_NORM, *[_PTR] * 7, _DOUBLE, _PTR, _PTR, _DOUBLE, _PTR, _PTR),
        ),
        "cudnnBatchNormalizationForwardInference": (
            _INT,
            (*_NORM, *[_PTR] * 9, _DOUBLE),
        ),
        "cudnnBatchNormalizationBackward": (
            _INT,
            (*_NORM, *[_PTR] * 12, _DOUBLE, _PTR, _PTR),
        ),
    }
)
"""Function name to (result, arguments)."""

_NO_STATUS = frozenset(name for name in PROTOTYPES if PROTOTYPES[name][0] is not _INT)


class Calls(Protocol):
    """The interface of the raw calls, for fakes."""

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function by its C name.

        Raises:
            BackendError: Its status is not success; see `error_for`.
        """

    def function(self, name: str) -> Any:
        """Return the bare function, which returns its status: for the hot path."""

    def raise_for(self, name: str, status: int) -> None:
        """Raise the error of a bare function's status."""


class Cudnn:
    """The functions of a loaded `libcudnn.so.9`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._functions: dict[str, Any] = {}
        for name, (result, arguments) in PROTOTYPES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
            self._functions[name] = function

    def call(self, name: str, *arguments: Any) -> Any:
        """See `Calls.call`; functions without a status return their result."""
        result = self._functions[name](*arguments)
        if name in _NO_STATUS:
            return result
        if result:
            self.raise_for(name, result)
        return None

    def function(self, name: str) -> Any:
        """See `Calls.function`."""
        return self._functions[name]

    def raise_for(self, name: str, status: int) -> None:
        """See `Calls.raise_for`; includes the library's message of this thread."""
        meaning = self._functions["cudnnGetErrorString"](status).decode()
        buffer = ctypes.create_string_buffer(_MESSAGE_BYTES)
        self._functions["cudnnGetLastErrorString"](buffer, _MESSAGE_BYTES)
        detail = buffer.value.decode(errors="replace").strip()
        raise error_for(name, status, meaning, detail)


_OUT_OF_MEMORY = (
    Status.INTERNAL_ERROR_HOST_ALLOCATION_FAILED,
    Status.INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED,
)


def error_for(
    name: str, status: int, meaning: str, detail: str
) -> BackendError | OutOfMemoryError | UnsupportedError:
    """Return the exception of a status: out of memory, not supported, or other."""
    message = f"{name} returned {meaning} ({status})" + (
        f": {detail}" if detail else ""
    )
    if status in _OUT_OF_MEMORY:
        return OutOfMemoryError(message)
    if status // 1000 * 1000 == Status.NOT_SUPPORTED:
        return UnsupportedError(message)
    return BackendError(message)
