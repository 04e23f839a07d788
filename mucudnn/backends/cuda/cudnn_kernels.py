"""cuDNN's own kernels as alternatives to ours, for operations with equal semantics.

All are of the first API and take no workspace, so the plan's workspace for our kernel
is enough for both. They are optional: if the library rejects a call with any status,
our kernel runs instead, and the library is not called for this case again.

cuDNN functions that are not here compute something else: see `batch_norm` for those
that fuse an activation with a batch normalisation.
"""

import ctypes
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mucudnn.backends.base import Kernel
from mucudnn.backends.cuda.conv.launch import DATA_TYPES, Launch, strides_of
from mucudnn.backends.cuda.descriptors import Descriptors, Session, ints
from mucudnn.backends.cuda.kernels.launch import as_ncs
from mucudnn.backends.cuda.kernels.losses import GIVEN
from mucudnn.backends.cuda.libcudnn import (
    BatchNormMode,
    Cudnn,
    LRNMode,
    NanPropagation,
    PoolingMode,
    SoftmaxAlgorithm,
    SoftmaxMode,
)
from mucudnn.errors import MucudnnError
from mucudnn.ir.channels_last import operands_of
from mucudnn.ir.graph import Graph, Node
from mucudnn.ir.operations import LIBRARY

logger = logging.getLogger(__name__)

_MOST = 2**31 - 1  # most elements of a tensor: the first API counts in 32 bits
_MODE = BatchNormMode.SPATIAL
_EPSILON = 1e-5  # required by the gradient's signature; it uses the saved statistics
_RANKS = (2, 3)  # numbers of spatial axes that cuDNN's windows may have

# Limits of the library's header, CUDNN_LRN_….
_MOST_SIZE = 16
_LEAST_K = 1e-5
_LEAST_BETA = 0.01

_Passed = tuple[Any, ...]  # arguments of a C function after the handle


@dataclass(frozen=True, slots=True)
class Shaped:
    """Shape and type of a dense tensor."""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, tensor: Any) -> "Shaped":
        """Describe an array or a tensor specification."""
        dtype = tensor.dtype
        return cls(tuple(tensor.shape), dtype if isinstance(dtype, str) else dtype.name)


@dataclass(frozen=True, slots=True)
class Case:
    """An operation with its shapes and attributes, the input of `takes`."""

    op: str
    inputs: tuple[Shaped, ...]
    outputs: tuple[Shaped, ...]
    settings: tuple[tuple[str, Any], ...]

    @classmethod
    def of(
        cls,
        op: str,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        attrs: Mapping[str, Any],
    ) -> "Case":
        """Describe an operation on arrays or tensor specifications."""
        settings = sorted((k, v) for k, v in attrs.items() if k != LIBRARY)
        reads, writes = (tuple(map(Shaped.of, each)) for each in (inputs, outputs))
        return cls(op, reads, writes, tuple(settings))

    def __getitem__(self, name: str) -> Any:
        return dict(self.settings)[name]

    def __str__(self) -> str:
        shapes = ", ".join(f"{t.dtype} {t.shape}" for t in self.inputs)
        return f"{self.op} of {shapes}"


class LibraryCall:
    """The case, descriptors, factors and addresses of one call."""

    def __init__(
        self, calls: Cudnn, case: Case, reads: Sequence[int], writes: Sequence[int]
    ) -> None:
        self.calls, self.descriptors = calls, Descriptors(calls)
        self.case, self.reads, self.writes = case, reads, writes
        self._dtype = case.inputs[0].dtype
        scalar = ctypes.c_double if self._dtype == "float64" else ctypes.c_float
        self._factors = scalar(1.0), scalar(0.0)
        self.one, self.zero = map(ctypes.addressof, self._factors)

    def tensor(self, shape: Sequence[int], *, channels_last: bool) -> int:
        """Return the descriptor of a dense image; axes are written (N, C, *spatial)."""
        strides = strides_of(shape, channels_last=channels_last)
        return self.descriptors.tensor(DATA_TYPES[self._dtype], shape, strides)

    def image(self) -> int:
        """Return the descriptor of the first input, with channels of any rank."""
        shape, last = by_channel(self.case.inputs[0].shape)
        return self.tensor(shape, channels_last=last)


@dataclass(frozen=True, slots=True)
class LibraryOperation:
    """An operation as the C function `function` computes it.

    `takes` returns whether it computes the same function, within documented limits. The
    library does not write the results at `unwritten`; our own kernel completes its
    results with the attributes `left`, if given.
    """

    function: str
    takes: Callable[[Case], bool]
    arguments: Callable[[LibraryCall], _Passed]
    unwritten: tuple[int, ...] = ()
    left: Mapping[str, Any] | None = None


def describable(*tensors: Shaped) -> bool:
    """Return whether the tensors have one type, elements, and 32-bit sizes."""
    return (
        tensors[0].dtype in DATA_TYPES
        and len({tensor.dtype for tensor in tensors}) == 1
        and all(0 < math.prod(tensor.shape) <= _MOST for tensor in tensors)
    )


def by_channel(shape: Sequence[int]) -> tuple[tuple[int, ...], bool]:
    """Return four axes (N, C, H, W), and whether channels are last in memory.

    Kernels get images with channels last as (M, C), all pixels being samples, and so
    are tensors without pixels. Here they become the pixels of one image.
    """
    if len(shape) == 2:
        return (1, shape[1], shape[0], 1), True
    return (*shape[:2], math.prod(shape[2:]), 1), False


# Batch normalisation by cuDNN: training, inference, gradients.
#
# Its conventions are ours: the mean and 1 / sqrt(variance + epsilon) of the batch are
# saved, and running statistics take a share `momentum` of the new ones, with the
# unbiased variance. The mode that may be faster but may overflow is not used.
#
# Its functions for a normalisation fused with a ReLU, or with a sum and a ReLU
# (`…ForwardTrainingEx`, `…BackwardEx`), are therefore missing here: they are documented
# for that mode, in half precision with channels last, and the header says that it
# limits the range of values. A training run that is stable with ours could end in NaN.
# They also save a mask, one more tensor from the forward pass to the backward: an
# eighth of a byte an element, 308 MB in ResNet-50 at 256 images. Our gradient of a
# fused ReLU reads x and dy only.


def _batch_norm_takes(case: Case) -> bool:
    """Return whether images have one type, and per-channel numbers the required one."""
    tensors, x = (*case.inputs, *case.outputs), case.inputs[0]
    images = [t for t in tensors if t.shape == x.shape]
    wide = "float64" if x.dtype == "float64" else "float32"
    numbers = {t for t in tensors if t.shape != x.shape}
    return (
        describable(*images)
        and math.prod(x.shape) > x.shape[1]  # one sample has no unbiased variance
        and numbers == {Shaped(x.shape[1:2], wide)}
    )


def _training(call: LibraryCall) -> _Passed:
    t, numbers, case = *_batch_norm_tensors(call), call.case
    (x, gamma, beta, *running), (y, mean, inv_std) = call.reads, call.writes
    moved = running if case["update"] else [None, None]
    factor, epsilon = float(case["momentum"]), float(case["eps"])
    images = _MODE, call.one, call.zero, t, x, t, y
    return *images, numbers, gamma, beta, factor, *moved, epsilon, mean, inv_std


def _inference(call: LibraryCall) -> _Passed:
    t, numbers = _batch_norm_tensors(call)
    (x, *of_channels), (y,) = call.reads, call.writes
    images = _MODE, call.one, call.zero, t, x, t, y
    return *images, numbers, *of_channels, float(call.case["eps"])


def _gradient(call: LibraryCall) -> _Passed:
    t, numbers = _batch_norm_tensors(call)
    (x, dy, gamma, *saved), (dx, *of_parameters) = call.reads, call.writes
    factors = call.one, call.zero, call.one, call.zero
    images = _MODE, *factors, t, x, t, dy, t, dx
    return *images, numbers, gamma, *of_parameters, _EPSILON, *saved


def _batch_norm_tensors(call: LibraryCall) -> tuple[int, int]:
    """Return the descriptors of images, and of numbers per channel."""
    x, numbers = call.image(), call.descriptors.empty("Tensor")
    call.calls.call("cudnnDeriveBNTensorDescriptor", numbers, x, _MODE)
    return x, numbers


# Local response normalisation by cuDNN, for odd windows only: an even window extends
# one channel further ahead in cuDNN, and one further back here.


def _lrn_takes(case: Case) -> bool:
    size = case["size"]
    return (
        describable(*case.inputs, *case.outputs)
        and size % 2 == 1
        and size <= _MOST_SIZE
        and case["k"] >= _LEAST_K
        and case["beta"] >= _LEAST_BETA
    )


def _lrn_forward(call: LibraryCall) -> _Passed:
    rules, t = _lrn_rules(call), call.image()
    (x,), (y,) = call.reads, call.writes
    return *rules, call.one, t, x, call.zero, t, y


def _lrn_gradient(call: LibraryCall) -> _Passed:
    rules, t = _lrn_rules(call), call.image()
    (x, y, dy), (dx,) = call.reads, call.writes
    return *rules, call.one, t, y, t, dy, t, x, call.zero, t, dx


def _lrn_rules(call: LibraryCall) -> tuple[int, LRNMode]:
    numbers = (float(call.case[name]) for name in ("alpha", "beta", "k"))
    rules = call.descriptors.create("LRN", "LRN", call.case["size"], *numbers)
    return rules, LRNMode.CROSS_CHANNEL_DIM1


# Pooling by cuDNN: averages in both directions, maxima where no gradient is needed.
#
# Our gradient of a maximum reads its position in the window, which cuDNN does not
# report; nor does it specify which of several equal maxima its own gradient goes to. So
# maxima are computed by cuDNN only if nothing reads their positions.


class _Windows:
    """Windows over an image in cuDNN's terms; shapes are (N, C, *spatial).

    Images with channels last are passed as (N, 1, *spatial, C), with windows of size 1
    along the channels; any other image of that form is equivalent.
    """

    def __init__(self, case: Case, image: Sequence[int], made: Sequence[int]) -> None:
        axes = [tuple(case[name]) for name in ("kernel", "stride", "padding")]
        shapes = [tuple(image), tuple(made)]
        last = len(image) > 3 and image[1] == 1 and [a[-1] for a in axes] == [1, 1, 0]
        if last:
            shapes = [(s[0], s[-1], *s[2:-1]) for s in shapes]
            axes = [a[:-1] for a in axes]
        if len(axes[0]) == 1:  # a line: an image of height 1
            shapes = [(*s[:2], 1, *s[2:]) for s in shapes]
            axes = [(n, *a) for n, a in zip((1, 1, 0), axes, strict=True)]
        self.channels_last, (self.image, self.made) = last, shapes
        self.kernel, self.stride, self.padding = axes


def _pooling_takes(case: Case) -> bool:
    image, made = case.inputs[0], case.outputs[0]
    if case.op.endswith("_grad"):
        image, made = made, image
    windows = _Windows(case, image.shape, made.shape)
    axes = windows.image[2:], windows.kernel, windows.stride, windows.padding
    # With equal padding at both ends the windows must be those of the result.
    fitting = ((n + 2 * p - k) // step + 1 for n, k, step, p in zip(*axes, strict=True))
    even = tuple(fitting) == windows.made[2:] and len(windows.kernel) in _RANKS
    return describable(image, made) and even


def _pooling_forward(call: LibraryCall) -> _Passed:
    shapes = call.case.inputs[0].shape, call.case.outputs[0].shape
    pooling, x, y = _pooling_descriptors(call, *shapes)
    return pooling, call.one, x, call.reads[0], call.zero, y, call.writes[0]


def _average_gradient(call: LibraryCall) -> _Passed:
    """Return the arguments; x and y do not matter, so dx and dy stand for them."""
    shapes = call.case.outputs[0].shape, call.case.inputs[0].shape
    pooling, x, y = _pooling_descriptors(call, *shapes)
    (dy,), (dx,) = call.reads, call.writes
    return pooling, call.one, y, dy, y, dy, x, dx, call.zero, x, dx


def _pooling_descriptors(
    call: LibraryCall, image: Sequence[int], made: Sequence[int]
) -> tuple[int, int, int]:
    """Return the descriptors of the windows, the image and the pooled result."""
    windows = _Windows(call.case, image, made)
    if call.case.op == "max_pool":
        mode = PoolingMode.MAX
    elif call.case["count_include_pad"]:
        mode = PoolingMode.AVERAGE_COUNT_INCLUDE_PADDING
    else:
        mode = PoolingMode.AVERAGE_COUNT_EXCLUDE_PADDING
    axes = map(ints, (windows.kernel, windows.padding, windows.stride))
    values = mode, NanPropagation.PROPAGATE_NAN, len(windows.kernel), *axes
    pooling = call.descriptors.create("Pooling", "PoolingNd", *values)
    last = windows.channels_last
    x = call.tensor(windows.image, channels_last=last)
    return pooling, x, call.tensor(windows.made, channels_last=last)


# Softmax with cross entropy: cuDNN computes the logarithms of probabilities of all
# classes, and our own kernel the mean of those at the labels. cuDNN needs one type for
# both: logits narrower than the loss stay with our kernel.


def _logarithms(call: LibraryCall) -> _Passed:
    shape = *as_ncs(call.case.inputs[0].shape), 1
    t = call.tensor(shape, channels_last=False)
    how = SoftmaxAlgorithm.LOG, SoftmaxMode.CHANNEL
    return *how, call.one, t, call.reads[0], call.zero, t, call.writes[1]


OPERATIONS: Mapping[str, LibraryOperation] = {
    "batch_norm": LibraryOperation(
        "cudnnBatchNormalizationForwardTraining", _batch_norm_takes, _training
    ),
    "batch_norm_eval": LibraryOperation(
        "cudnnBatchNormalizationForwardInference", _batch_norm_takes, _inference
    ),
    "batch_norm_grad": LibraryOperation(
        "cudnnBatchNormalizationBackward", _batch_norm_takes, _gradient
    ),
    "lrn": LibraryOperation("cudnnLRNCrossChannelForward", _lrn_takes, _lrn_forward),
    "lrn_grad": LibraryOperation(
        "cudnnLRNCrossChannelBackward", _lrn_takes, _lrn_gradient
    ),
    "avg_pool": LibraryOperation(
        "cudnnPoolingForward", _pooling_takes, _pooling_forward
    ),
    "avg_pool_grad": LibraryOperation(
        "cudnnPoolingBackward", _pooling_takes, _average_gradient
    ),
    "max_pool": LibraryOperation(
        "cudnnPoolingForward", _pooling_takes, _pooling_forward, unwritten=(1,)
    ),
    "softmax_cross_entropy": LibraryOperation(
        "cudnnSoftmaxForward",
        lambda case: describable(case.inputs[0], case.outputs[1]),
        _logarithms,
        left={GIVEN: True},
    ),
}
"""Operation -> how the library computes it."""


class CudnnKernels:
    """cuDNN's kernels; see `LibraryKernels`."""

    name = "cudnn"

    def __init__(self, session: Session) -> None:
        self._session = session
        self.times_ms: dict[str, tuple[float, float]] = {}
        self._refused: set[Case] = set()

    def offers(self, graph: Graph, node: Node) -> bool:
        """See `LibraryKernels.offers`."""
        found = OPERATIONS.get(node.op)
        if found is None:
            return False
        unwritten = {node.outputs[place] for place in found.unwritten}
        if any(graph.readers[name] or name in graph.outputs for name in unwritten):
            return False
        case = Case.of(node.op, *operands_of(graph, node))
        return case not in self._refused and found.takes(case)

    def beside(self, kernels: Mapping[str, Kernel]) -> Mapping[str, Kernel]:
        """Return a kernel table in which nodes can ask for the library's kernels."""
        both = {op: self._either(op, kernels[op]) for op in OPERATIONS}
        return {**kernels, **both}

    def _either(self, op: str, own: Kernel) -> Kernel:
        def prebind(*arguments: Any) -> Callable[[], None]:
            attrs = arguments[2]
            if attrs.get(LIBRARY) != self.name:
                return own.call(*arguments)
            return self._guarded(op, own, arguments)

        def run(*arguments: Any) -> None:
            if arguments[2].get(LIBRARY) != self.name:
                own.run(*arguments)
            else:
                self._guarded(op, own, arguments)()

        return Kernel(run, own.workspace, prebind, own.run_batched, own.flags)

    def _guarded(
        self, op: str, own: Kernel, arguments: tuple[Any, ...]
    ) -> Callable[[], None]:
        """Return a call of the library that falls back to our kernel on rejection."""
        inputs, outputs, attrs, workspace = arguments
        case = Case.of(op, inputs, outputs, attrs)
        launch = self._launch(case, inputs, outputs)
        if launch is None:
            return own.call(*arguments)
        # Has our kernel once the library has refused; it runs from then on.
        kept: list[Callable[[], None]] = []
        # Our kernel does the rest of an operation that the library does in part.
        left, rest = OPERATIONS[op].left, None
        if left is not None:
            rest = own.call(inputs, outputs, {**attrs, **left}, workspace)

        def call() -> None:
            if not kept:
                status = launch.function(self._session.handle(), *launch.arguments)
                if not status:
                    if rest is not None:
                        rest()
                    return
                try:
                    self._session.calls.raise_for(launch.name, status)
                except MucudnnError as e:
                    self._refuse(case, e)
                kept.append(own.call(*arguments))
            kept[0]()

        return call

    def _launch(
        self, case: Case, inputs: Sequence[Any], outputs: Sequence[Any]
    ) -> Launch | None:
        """Return the library's call; None if it does not take the case."""
        found = OPERATIONS[case.op]
        reads, writes = ([a.data.ptr for a in each] for each in (inputs, outputs))
        in_place = set(reads) & set(writes)
        if in_place or case in self._refused or not found.takes(case):
            return None
        calls, name = self._session.calls, found.function
        try:
            made = LibraryCall(calls, case, reads, writes)
            return Launch(calls.function(name), found.arguments(made), name, (made,))
        except MucudnnError as e:
            self._refuse(case, e)
            return None

    def _refuse(self, case: Case, error: MucudnnError) -> None:
        if case not in self._refused:
            logger.warning("our kernel computes %s: %s", case, error)
        self._refused.add(case)
