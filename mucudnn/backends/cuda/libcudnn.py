"""The raw calls of libcudnn 9 by ctypes: prototypes, enumerators, status -> error.

This module knows nothing of convolutions. `PROTOTYPES` is the whole surface in use;
tests compare it with the headers and replace `Cudnn` by a recording fake.
"""

import ctypes
from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import Any

from mucudnn.errors import BackendError, OutOfMemoryError, UnsupportedError


class Status(IntEnum):
    """Status codes; categories are thousands, to which unlisted codes belong."""

    SUCCESS = 0
    NOT_INITIALIZED = 1001
    SUBLIBRARY_LOADING_FAILED = 1008
    BAD_PARAM = 2000
    BAD_PARAM_MISALIGNED_POINTER = 2003
    NOT_SUPPORTED = 3000
    INTERNAL_ERROR = 4000
    INTERNAL_ERROR_HOST_ALLOCATION_FAILED = 4003
    INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED = 4004
    EXECUTION_FAILED = 5000


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

PROTOTYPES: Mapping[str, tuple[Any, tuple[Any, ...]]] = {
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
    **{
        f"cudnn{verb}{kind}Descriptor": (_INT, (pointer,))
        for kind in ("Tensor", "Filter", "Convolution", "Pooling", "LRN")
        for verb, pointer in (("Create", _OUT_PTR), ("Destroy", _PTR))
    },
    "cudnnSetTensorNdDescriptor": (_INT, (_PTR, _INT, _INT, _INTS, _INTS)),
    "cudnnSetFilterNdDescriptor": (_INT, (_PTR, _INT, _INT, _INT, _INTS)),
    "cudnnSetConvolutionNdDescriptor": (
        _INT,
        (_PTR, _INT, _INTS, _INTS, _INTS, _INT, _INT),
    ),
    "cudnnSetConvolutionGroupCount": (_INT, (_PTR, _INT)),
    "cudnnSetConvolutionMathType": (_INT, (_PTR, _INT)),
    "cudnnGetConvolutionNdForwardOutputDim": (_INT, (_PTR, _PTR, _PTR, _INT, _INTS)),
    **{
        name.format(direction): (_INT, arguments)
        for direction in ("Forward", "BackwardData", "BackwardFilter")
        for name, arguments in (
            ("cudnnGetConvolution{}WorkspaceSize", _WORKSPACE),
            ("cudnnGetConvolution{}Algorithm_v7", _BEST),
            ("cudnnConvolution{}", _RUN),
        )
    },
    "cudnnSetPoolingNdDescriptor": (
        _INT,
        (_PTR, _INT, _INT, _INT, _INTS, _INTS, _INTS),
    ),
    "cudnnPoolingForward": (_INT, (_PTR, _PTR, *_MAP)),
    "cudnnPoolingBackward": (_INT, (_PTR, _PTR, *_MAP_BACK)),
    "cudnnSetLRNDescriptor": (_INT, (_PTR, ctypes.c_uint, *[_DOUBLE] * 3)),
    "cudnnLRNCrossChannelForward": (_INT, (_PTR, _PTR, _INT, *_MAP)),
    "cudnnLRNCrossChannelBackward": (_INT, (_PTR, _PTR, _INT, *_MAP_BACK)),
    "cudnnSoftmaxForward": (_INT, (_PTR, _INT, _INT, *_MAP)),
    "cudnnDeriveBNTensorDescriptor": (_INT, (_PTR, _PTR, _INT)),
    "cudnnBatchNormalizationForwardTraining": (
        _INT,
        (*_NORM, *[_PTR] * 7, _DOUBLE, _PTR, _PTR, _DOUBLE, _PTR, _PTR),
    ),
    "cudnnBatchNormalizationForwardInference": (_INT, (*_NORM, *[_PTR] * 9, _DOUBLE)),
    "cudnnBatchNormalizationBackward": (
        _INT,
        (*_NORM, *[_PTR] * 12, _DOUBLE, _PTR, _PTR),
    ),
}
"""Function name to (result, arguments)."""

_NO_STATUS = frozenset(name for name in PROTOTYPES if PROTOTYPES[name][0] is not _INT)


class Cudnn:
    """The functions of a loaded `libcudnn.so.9`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._functions: dict[str, Any] = {}
        for name, (result, arguments) in PROTOTYPES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
            self._functions[name] = function

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function by its C name; return its result if that is no status."""
        result = self._functions[name](*arguments)
        if name in _NO_STATUS:
            return result
        if result:
            self.raise_for(name, result)
        return None

    def function(self, name: str) -> Any:
        """Return the bare function, which returns its status: for the hot path."""
        return self._functions[name]

    def raise_for(self, name: str, status: int) -> None:
        """Raise the error of a bare function's status, with this thread's message."""
        meaning = self._functions["cudnnGetErrorString"](status).decode()
        buffer = ctypes.create_string_buffer(_MESSAGE_BYTES)
        self._functions["cudnnGetLastErrorString"](buffer, _MESSAGE_BYTES)
        detail = buffer.value.decode(errors="replace").strip()
        raise error_for(name, status, meaning, detail)


def error_for(
    name: str, status: int, meaning: str, detail: str
) -> BackendError | OutOfMemoryError | UnsupportedError:
    """Return the exception of a status: out of memory, not supported, or other."""
    message = f"{name} returned {meaning} ({status})"
    message += f": {detail}" if detail else ""
    if status in (
        Status.INTERNAL_ERROR_HOST_ALLOCATION_FAILED,
        Status.INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED,
    ):
        return OutOfMemoryError(message)
    if status // 1000 * 1000 == Status.NOT_SUPPORTED:
        return UnsupportedError(message)
    return BackendError(message)


# Enumerators of cuDNN 9 that the binding uses, under their own names; a test compares
# every one with the compiler's reading of the headers.


DataType = IntEnum("DataType", {"FLOAT": 0, "DOUBLE": 1, "HALF": 2, "BFLOAT16": 9})
"""Element types."""

TensorFormat = IntEnum("TensorFormat", "NCHW NHWC", start=0)
"""Storage orders of the legacy API."""

ConvolutionMode = IntEnum("ConvolutionMode", "CONVOLUTION CROSS_CORRELATION", start=0)
"""Flipped filters (convolution) or not (cross-correlation)."""

MathType = IntEnum(
    "MathType",
    "DEFAULT_MATH TENSOR_OP_MATH TENSOR_OP_MATH_ALLOW_CONVERSION FMA_MATH",
    start=0,
)
"""Permitted use of tensor cores in the legacy API."""

Determinism = IntEnum("Determinism", "NON_DETERMINISTIC DETERMINISTIC", start=0)
"""Bitwise reproducibility of a legacy algorithm."""

ForwardAlgo = IntEnum(
    "ForwardAlgo",
    "IMPLICIT_GEMM IMPLICIT_PRECOMP_GEMM GEMM DIRECT FFT FFT_TILING WINOGRAD "
    "WINOGRAD_NONFUSED",
    start=0,
)
"""Legacy algorithms, forward."""

BackwardDataAlgo = IntEnum(
    "BackwardDataAlgo",
    "ALGO_0 ALGO_1 FFT FFT_TILING WINOGRAD WINOGRAD_NONFUSED",
    start=0,
)
"""Legacy algorithms, gradient of the input."""

BackwardFilterAlgo = IntEnum(
    "BackwardFilterAlgo",
    "ALGO_0 ALGO_1 FFT ALGO_3 WINOGRAD WINOGRAD_NONFUSED FFT_TILING",
    start=0,
)
"""Legacy algorithms, gradient of the filter."""


class DescriptorType(IntEnum):
    """Objects of the graph API."""

    POINTWISE = 0
    CONVOLUTION = 1
    ENGINE = 2
    ENGINECFG = 3
    ENGINEHEUR = 4
    EXECUTION_PLAN = 5
    KNOB_CHOICE = 7
    OPERATION_CONVOLUTION_FORWARD = 10
    OPERATION_CONVOLUTION_BACKWARD_FILTER = 11
    OPERATION_CONVOLUTION_BACKWARD_DATA = 12
    OPERATION_POINTWISE = 13
    OPERATIONGRAPH = 15
    VARIANT_PACK = 16
    TENSOR = 17
    DEVICEPROP = 38


class AttributeType(IntEnum):
    """Types of the values of attributes."""

    HANDLE = 0
    DATA_TYPE = 1
    BOOLEAN = 2
    INT64 = 3
    FLOAT = 4
    DOUBLE = 5
    VOID_PTR = 6
    CONVOLUTION_MODE = 7
    HEUR_MODE = 8
    KNOB_TYPE = 9
    NAN_PROPOGATION = 10  # as the header spells it
    NUMERICAL_NOTE = 11
    POINTWISE_MODE = 14
    BACKEND_DESCRIPTOR = 15
    BEHAVIOR_NOTE = 19
    INT32 = 23
    CHAR = 24


_ATTRIBUTES = {
    "POINTWISE": "0 MODE MATH_PREC NAN_PROPAGATION",
    "CONVOLUTION": "100 COMP_TYPE CONV_MODE DILATIONS FILTER_STRIDES POST_PADDINGS "
    "PRE_PADDINGS SPATIAL_DIMS",
    "ENGINEHEUR": "200 MODE OPERATION_GRAPH RESULTS 204 DEVICEPROP",
    "ENGINECFG": "300 ENGINE 302 KNOB_CHOICES WORKSPACE_SIZE",
    "EXECUTION_PLAN": "400 HANDLE ENGINE_CONFIG WORKSPACE_SIZE "
    "405 JSON_REPRESENTATION 407 DEVICEPROP",
    "KNOB_CHOICE": "600 KNOB_TYPE KNOB_VALUE",
    "OPERATION_CONVOLUTION_FORWARD": "700 ALPHA BETA CONV_DESC W X Y",
    "OPERATION_CONVOLUTION_BWD_DATA": "706 ALPHA BETA CONV_DESC W DX DY",
    "OPERATION_CONVOLUTION_BWD_FILTER": "712 ALPHA BETA CONV_DESC DW X DY",
    "OPERATION_POINTWISE": "750 PW_DESCRIPTOR XDESC BDESC YDESC",
    "OPERATIONGRAPH": "800 HANDLE OPS ENGINE_GLOBAL_COUNT",
    "TENSOR": "900 BYTE_ALIGNMENT DATA_TYPE DIMENSIONS STRIDES "
    "906 UNIQUE_ID IS_VIRTUAL",
    "VARIANT_PACK": "1000 UNIQUE_IDS DATA_POINTERS 1003 WORKSPACE",
    "ENGINE": "1300 OPERATION_GRAPH GLOBAL_INDEX 1303 NUMERICAL_NOTE "
    "1305 BEHAVIOR_NOTE 1307 DEVICEPROP",
    "DEVICEPROP": "2700 DEVICE_ID 2702 JSON_REPRESENTATION",
}
"""Prefix -> names of attributes, consecutive from the number ahead of them."""


def _numbered_attributes() -> Iterator[tuple[str, int]]:
    for prefix, words in _ATTRIBUTES.items():
        number = 0
        for word in words.split():
            if word.isdecimal():
                number = int(word)
            else:
                yield f"{prefix}_{word}", number
                number += 1


ATTRIBUTES: Mapping[str, int] = dict(_numbered_attributes())
"""Attributes of the graph API's objects."""

HeurMode = IntEnum("HeurMode", {"B": 1, "FALLBACK": 2, "A": 3})
"""Lists of engine configurations that a heuristic gives."""

PointwiseMode = IntEnum("PointwiseMode", {"ADD": 0, "RELU_FWD": 100})
"""Functions of each element."""

NanPropagation = IntEnum("NanPropagation", "NOT_PROPAGATE_NAN PROPAGATE_NAN", start=0)
"""Result of a comparison with NaN: the number or NaN."""

PoolingMode = IntEnum(
    "PoolingMode",
    "MAX AVERAGE_COUNT_INCLUDE_PADDING AVERAGE_COUNT_EXCLUDE_PADDING",
    start=0,
)
"""Reductions of a window."""

LRNMode = IntEnum("LRNMode", "CROSS_CHANNEL_DIM1", start=0)
"""Neighbourhoods of local response normalisation."""

BatchNormMode = IntEnum("BatchNormMode", {"SPATIAL": 1})
"""Axes of the statistics; the persistent mode, unused, may overflow."""

SoftmaxAlgorithm = IntEnum("SoftmaxAlgorithm", "FAST ACCURATE LOG", start=0)
"""Result and numerics of a softmax."""

SoftmaxMode = IntEnum("SoftmaxMode", "INSTANCE CHANNEL", start=0)
"""Range of the sum: a whole sample, or the channels of each pixel."""

NumericalNote = IntEnum(
    "NumericalNote",
    "TENSOR_CORE DOWN_CONVERT_INPUTS REDUCED_PRECISION_REDUCTION FFT "
    "NONDETERMINISTIC WINOGRAD WINOGRAD_TILE_4x4 WINOGRAD_TILE_6x6 "
    "WINOGRAD_TILE_13x13 STRICT_NAN_PROP",
    start=0,
)
"""Numerical properties of an engine."""

BehaviorNote = IntEnum(
    "BehaviorNote",
    "RUNTIME_COMPILATION REQUIRES_FILTER_INT8x32_REORDER "
    "REQUIRES_BIAS_INT8x32_REORDER SUPPORTS_CUDA_GRAPH_NATIVE_API "
    "CUBLASLT_DEPENDENCY",
    start=0,
)
"""Other properties of an engine."""
