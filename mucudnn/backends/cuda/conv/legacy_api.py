"""cuDNN's first (legacy) API as a second library of convolution algorithms.

It has 8 + 6 + 7 algorithms (by direction) in four math types. It is deprecated since
9.0 but present in all of 9.x; old GPUs keep FFT and Winograd through it.
"""

import ctypes
import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from mucudnn.backends.cuda.conv.launch import (
    DATA_TYPES,
    Launch,
    Operands,
    as_planar,
    compute_type,
    operand_order,
    strides_of,
)
from mucudnn.backends.cuda.descriptors import Descriptors, Session, ints
from mucudnn.backends.cuda.libcudnn import (
    AlgoPerf,
    BackwardDataAlgo,
    BackwardFilterAlgo,
    ConvolutionMode,
    Cudnn,
    Determinism,
    ForwardAlgo,
    MathType,
    TensorFormat,
)
from mucudnn.errors import BackendError, MucudnnError, UnsupportedError
from mucudnn.ir.conv import ConvProblem, Direction
from mucudnn.ir.numerics import DOWN_CONVERT, NATIVE, TF32, Traits


@dataclass(frozen=True, slots=True)
class _Kind:
    """A direction's name in C, and its algorithms."""

    name: str
    algorithms: type[IntEnum]
    documented_nondeterministic: tuple[int, ...]


_KINDS: Mapping[Direction, _Kind] = {
    Direction.FORWARD: _Kind("Forward", ForwardAlgo, ()),
    Direction.BACKWARD_DATA: _Kind(
        "BackwardData", BackwardDataAlgo, (BackwardDataAlgo.ALGO_0,)
    ),
    Direction.BACKWARD_FILTER: _Kind(
        "BackwardFilter",
        BackwardFilterAlgo,
        (BackwardFilterAlgo.ALGO_0, BackwardFilterAlgo.ALGO_3),
    ),
}
_SUFFIXES: Mapping[MathType, str] = {
    MathType.DEFAULT_MATH: "",
    MathType.TENSOR_OP_MATH: "[tensor_op]",
    MathType.TENSOR_OP_MATH_ALLOW_CONVERSION: "[conversion]",
    MathType.FMA_MATH: "[fma]",
}
_LISTINGS = 4096


@dataclass(frozen=True, slots=True)
class LegacyRow:
    """An algorithm in a math type."""

    algo: IntEnum
    math: MathType
    workspace: int
    traits: Traits


class LegacyLibrary:
    """The algorithms of the first API, to be listed and called; needs a device."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._calls = session.calls
        self.rows = functools.lru_cache(_LISTINGS)(self._rows)

    def _rows(
        self, problem: ConvProblem
    ) -> tuple[Mapping[str, LegacyRow], Mapping[str, str]]:
        """Return usable algorithms and the others' reasons, both by name."""
        rows: dict[str, LegacyRow] = {}
        reasons: dict[str, str] = {}
        nondeterministic = self._nondeterministic(problem)
        algorithms = _KINDS[problem.direction].algorithms
        bound_in = functools.cache(functools.partial(_Bound, self._calls, problem))
        for (math, suffix), algo in itertools.product(_SUFFIXES.items(), algorithms):
            name, nbytes = f"{algo.name}{suffix}", ctypes.c_size_t()
            try:
                size = ctypes.byref(nbytes)
                self._ask("WorkspaceSize", bound_in(math), int(algo), size)
            except MucudnnError as e:
                reasons[name] = str(e)
            else:
                traits = _traits(problem, algo, math, algo not in nondeterministic)
                rows[name] = LegacyRow(algo, math, nbytes.value, traits)
        return rows, reasons

    def launch(
        self, problem: ConvProblem, algo: str, accumulate: bool, operands: Operands
    ) -> Launch:
        """Return a call of an algorithm on given addresses."""
        rows, reasons = self.rows(problem)
        if algo in reasons:
            raise UnsupportedError(f"{algo} cannot run {problem}: {reasons[algo]}")
        if (row := rows.get(algo)) is None:
            raise UnsupportedError(f"cuDNN has no algorithm {algo!r} for {problem}")
        if operands.nbytes < row.workspace:
            raise BackendError(
                f"{algo} needs {row.workspace} bytes of workspace for {problem}, "
                f"got {operands.nbytes}"
            )
        bound = _Bound(self._calls, problem, row.math)
        # cuDNN reads alpha and beta as doubles for float64 tensors, else as floats.
        scalar = ctypes.c_double if problem.dtype == "float64" else ctypes.c_float
        one, beta = scalar(1.0), scalar(1.0 if accumulate else 0.0)
        a, b, out = bound.tensors
        # The call for the gradient of data takes the filter before dy.
        data = operands.a, operands.b
        if problem.direction is Direction.BACKWARD_DATA:
            data = operands.b, operands.a
        name = f"cudnnConvolution{_KINDS[problem.direction].name}"
        scratch = operands.workspace, operands.nbytes
        inputs = ctypes.addressof(one), a, data[0], b, data[1], bound.convolution
        output = ctypes.addressof(beta), out, operands.out
        arguments = *inputs, int(row.algo), *scratch, *output
        # `arguments` has mere addresses: the launch keeps alive what they point at.
        return Launch(self._calls.function(name), arguments, name, (bound, one, beta))

    def _nondeterministic(self, problem: ConvProblem) -> frozenset[int]:
        """Return the nondeterministic algorithms, as reported or else documented."""
        most = len(_KINDS[problem.direction].algorithms) * len(MathType)
        perfs, count = (AlgoPerf * most)(), ctypes.c_int()
        try:
            bound = _Bound(self._calls, problem, MathType.DEFAULT_MATH)
            self._ask("Algorithm_v7", bound, most, ctypes.byref(count), perfs)
        except MucudnnError:
            return frozenset(_KINDS[problem.direction].documented_nondeterministic)
        return frozenset(
            perf.algo
            for perf in perfs[: count.value]
            if perf.determinism == Determinism.NON_DETERMINISTIC
        )

    def _ask(self, what: str, bound: "_Bound", *arguments: Any) -> None:
        """Call `cudnnGetConvolution…` of the problem's direction."""
        name = f"cudnnGetConvolution{_KINDS[bound.direction].name}{what}"
        a, b, out = bound.tensors
        handle = self._session.handle()
        self._calls.call(name, handle, a, b, bound.convolution, out, *arguments)


class _Bound:
    """The descriptors of one problem in one math type, destroyed with this object.

    `tensors` are two inputs and the output, in the order of the C functions: for the
    gradient of the input (w, dy), not (dy, w).
    """

    def __init__(self, calls: Cudnn, problem: ConvProblem, math: MathType) -> None:
        self._made = descriptors = Descriptors(calls)
        self.direction = problem.direction
        of, last = as_planar(problem), problem.layout == "NHWC"
        layout = TensorFormat.NHWC if last else TensorFormat.NCHW
        data_type, w = DATA_TYPES[problem.dtype], of.w_shape

        def tensor(shape: tuple[int, ...]) -> int:
            strides = strides_of(shape, channels_last=last)
            return descriptors.tensor(data_type, shape, strides)

        made = {
            "x": tensor(of.x_shape),
            "w": descriptors.create(
                "Filter", "FilterNd", data_type, layout, len(w), ints(w)
            ),
            "y": tensor(of.y_shape),
        }
        axes = map(ints, (of.padding, of.stride, of.dilation))
        mode = ConvolutionMode.CROSS_CORRELATION
        values = len(of.stride), *axes, mode, compute_type(of)
        self.convolution = descriptors.create("Convolution", "ConvolutionNd", *values)
        calls.call("cudnnSetConvolutionGroupCount", self.convolution, of.groups)
        calls.call("cudnnSetConvolutionMathType", self.convolution, math)
        a, b, out = (made[name] for name in operand_order(problem.direction))
        backward_data = problem.direction is Direction.BACKWARD_DATA
        self.tensors = (b, a, out) if backward_data else (a, b, out)


def _traits(
    problem: ConvProblem, algo: IntEnum, math: MathType, deterministic: bool
) -> Traits:
    mode = NATIVE
    if math is MathType.TENSOR_OP_MATH_ALLOW_CONVERSION:
        mode = DOWN_CONVERT
    elif problem.dtype == "float32" and math is not MathType.FMA_MATH:
        mode = TF32
    notes = ["legacy"]
    for word in ("FFT", "WINOGRAD"):
        if word in algo.name:
            notes.append(word.lower())
    return Traits(deterministic, mode, tuple(notes))
