"""cuDNN's graph API as a library: one algorithm for each engine configuration."""

import ctypes
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
from mucudnn.backends.cuda.descriptors import Descriptor, Session
from mucudnn.backends.cuda.libcudnn import (
    BehaviorNote,
    ConvolutionMode,
    Cudnn,
    DataType,
    DescriptorType,
    HeurMode,
    NanPropagation,
    NumericalNote,
    PointwiseMode,
)
from mucudnn.errors import BackendError, MucudnnError, UnsupportedError
from mucudnn.ir.conv import ConvProblem, Direction
from mucudnn.ir.numerics import DOWN_CONVERT, NATIVE, TF32, Traits

ALIGNMENT = 16
"""Bytes to which tensor-core engines need operands aligned."""

_LISTINGS = 4096  # lists of engines in the cache; each takes a few kilobytes
_PLANS = 2048  # execution plans in the cache; each takes some 40 kilobytes


@dataclass(frozen=True, slots=True)
class PlanKey:
    """Identity of an execution plan of an engine and knobs, as named by `engines`.

    The plan adds to its output with `accumulate`. Operands are aligned to `alignment`
    bytes. `bias` is the data type of a bias that is added before a ReLU; None for a
    plain convolution.
    """

    problem: ConvProblem
    algo: str
    accumulate: bool = False
    alignment: int = ALIGNMENT
    bias: str | None = None


@dataclass(frozen=True, slots=True)
class GraphRow:
    """An engine configuration, without its descriptor."""

    workspace: int
    traits: Traits


class GraphLibrary:
    """A library that lists engines and builds their plans."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.rows = functools.lru_cache(_LISTINGS)(self._rows)
        # The place of each plan, empty until it is built.
        self._slot: Callable[[PlanKey], list[Descriptor]]
        self._slot = functools.lru_cache(_PLANS)(lambda key: [])

    def _rows(
        self, problem: ConvProblem, bias: str | None = None
    ) -> dict[str, GraphRow]:
        """Return every engine configuration (every fused one for a `bias`) by name.

        The workspace of a filter gradient's engine is enough to add as well.
        """
        rows = self._engines(PlanKey(problem, "", bias=bias))
        if problem.direction is Direction.BACKWARD_FILTER:
            # Most engines of channels last add by way of their workspace.
            adding = self._engines(PlanKey(problem, "", accumulate=True))
            for name in rows.keys() & adding.keys():
                most = max(rows[name].workspace, adding[name].workspace)
                rows[name] = replace(rows[name], workspace=most)
        return rows

    def _engines(self, key: PlanKey) -> dict[str, GraphRow]:
        return engines(self._session, self._graph(key), key.problem.dtype)

    def plan(self, key: PlanKey) -> Descriptor:
        """Return the execution plan, built once."""
        if not (slot := self._slot(key)):
            config = configuration(self._session, self._graph(key), key.algo)
            slot.append(self._made(ENGINE_CONFIG=config))
        return slot[0]

    def dumps(self, key: PlanKey) -> str:
        """Return an execution plan as cuDNN's JSON."""
        return self.plan(key).get_text("JSON_REPRESENTATION")

    def loads(self, key: PlanKey, text: str) -> None:
        """Rebuild a plan from its JSON, without asking for engines."""
        self._slot(key)[:] = [self._made(JSON_REPRESENTATION=text)]

    def launch(self, key: PlanKey, operands: Operands, bias: int = 0) -> Launch:
        """Return a call of a plan on given addresses; `bias` if the plan has one."""
        plan = self.plan(key)
        (needed,) = plan.get("WORKSPACE_SIZE")
        if operands.nbytes < needed:
            raise BackendError(
                f"{key.algo} needs {needed} bytes of workspace for {key.problem}, "
                f"got {operands.nbytes}"
            )
        calls = self._session.calls
        uids = [UIDS[name] for name in operand_order(key.problem.direction)]
        pointers = [operands.a, operands.b, operands.out]
        if key.bias is not None:
            uids, pointers = [*uids, BIAS_UID], [*pointers, bias]
        pack = Descriptor.made(
            calls,
            DescriptorType.VARIANT_PACK,
            UNIQUE_IDS=tuple(uids),
            DATA_POINTERS=tuple(pointers),
            WORKSPACE=operands.workspace,
        )
        name, arguments = "cudnnBackendExecute", (plan.pointer, pack.pointer)
        return Launch(calls.function(name), arguments, name, (plan, pack))

    def _graph(self, key: PlanKey) -> Descriptor:
        session, problem, alignment = self._session, key.problem, key.alignment
        if key.bias is not None:
            return bias_relu_graph(session, problem, key.bias, alignment=alignment)
        return operation_graph(
            session, problem, accumulate=key.accumulate, alignment=alignment
        )

    def _made(self, **source: Any) -> Descriptor:
        """Return a plan with its device first; loading JSON crashes without one."""
        session, kind = self._session, DescriptorType.EXECUTION_PLAN
        device = {"HANDLE": session.handle(), "DEVICEPROP": session.description}
        return Descriptor.made(session.calls, kind, **device, **source)


# Enumeration of all engine configurations of cuDNN for a convolution.
#
# These are the heuristics' lists A, B and FALLBACK in their order, then the default
# configuration of every engine index, each (engine, knobs) once. The exact workspace of
# a configuration is an attribute, read before any plan is built.


_HEURISTICS = (HeurMode.A, HeurMode.B, HeurMode.FALLBACK)
_MOST_KNOBS = 40
_MOST_NOTES = 32
_NAME = re.compile(r"eng(\d+)((?:_k\d+=-?\d+)*)")
_KNOB = re.compile(r"_k(\d+)=(-?\d+)")
Knobs = tuple[tuple[int, int], ...]


def engine_name(index: int, knobs: Knobs) -> str:
    """Return a name such as `eng22_k5=2_k14=0`: engine index, knob types and values."""
    return f"eng{index}" + "".join(f"_k{kind}={value}" for kind, value in knobs)


def parse_engine_name(name: str) -> tuple[int, Knobs]:
    """Parse a name made by `engine_name`."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise UnsupportedError(f"{name!r} is not an engine of cuDNN's graph API")
    knobs = tuple((int(k), int(v)) for k, v in _KNOB.findall(match[2]))
    return int(match[1]), knobs


def engines(session: Session, graph: Descriptor, dtype: str) -> dict[str, GraphRow]:
    """Return all engine configurations for a finalized graph, in heuristic order.

    `dtype` is that of the operands.
    """
    found: dict[str, GraphRow] = {}
    for config in _configurations(session, graph):
        try:
            name, row = _read(config, dtype)
        except MucudnnError:  # not available on this device after all
            continue
        found.setdefault(name, row)
    return found


def configuration(session: Session, graph: Descriptor, name: str) -> Descriptor:
    """Rebuild the configuration of a name, without asking the heuristics."""
    index, knobs = parse_engine_name(name)
    kind, calls = DescriptorType.KNOB_CHOICE, session.calls
    choices = tuple(
        Descriptor.made(calls, kind, KNOB_TYPE=knob, KNOB_VALUE=value)
        for knob, value in knobs
    )
    engine, kind = _engine(session, graph, index), DescriptorType.ENGINECFG
    return Descriptor.made(calls, kind, ENGINE=engine, KNOB_CHOICES=choices or None)


def _configurations(session: Session, graph: Descriptor) -> Iterator[Descriptor]:
    for mode in _HEURISTICS:
        try:
            yield from _recommended(session, graph, mode)
        except UnsupportedError:  # the heuristic's list is empty
            continue
    (count,) = graph.get("ENGINE_GLOBAL_COUNT")
    for index in range(count):
        try:
            engine, kind = _engine(session, graph, index), DescriptorType.ENGINECFG
            yield Descriptor.made(session.calls, kind, ENGINE=engine)
        except MucudnnError:  # most engines need other devices, types or shapes
            continue


def _recommended(
    session: Session, graph: Descriptor, mode: HeurMode
) -> list[Descriptor]:
    heuristic = Descriptor.made(
        session.calls,
        DescriptorType.ENGINEHEUR,
        OPERATION_GRAPH=graph,
        MODE=mode,
        DEVICEPROP=session.description,
    )
    configs = heuristic.get_new("RESULTS", DescriptorType.ENGINECFG)
    return [config.keep(heuristic) for config in configs]


def _engine(session: Session, graph: Descriptor, index: int) -> Descriptor:
    return Descriptor.made(
        session.calls,
        DescriptorType.ENGINE,
        OPERATION_GRAPH=graph,
        GLOBAL_INDEX=index,
        DEVICEPROP=session.description,
    )


def _read(config: Descriptor, dtype: str) -> tuple[str, GraphRow]:
    """Return the name and the row of a configuration."""
    (engine,) = config.get_new("ENGINE", DescriptorType.ENGINE, 1)
    (index,) = engine.get("GLOBAL_INDEX")
    (workspace,) = config.get("WORKSPACE_SIZE")
    # The library reports 0 choices if asked for their number alone.
    kind, knobs = DescriptorType.KNOB_CHOICE, []
    for choice in config.get_new("KNOB_CHOICES", kind, _MOST_KNOBS):
        (knob,), (value,) = choice.get("KNOB_TYPE"), choice.get("KNOB_VALUE")
        knobs.append((knob, value))
    name = engine_name(index, tuple(knobs))
    return name, GraphRow(workspace, _traits(engine, dtype))


def _traits(engine: Descriptor, dtype: str) -> Traits:
    numerical = engine.get("NUMERICAL_NOTE", _MOST_NOTES)
    behavior = engine.get("BEHAVIOR_NOTE", _MOST_NOTES)
    if NumericalNote.DOWN_CONVERT_INPUTS in numerical:
        mode = DOWN_CONVERT
    elif NumericalNote.TENSOR_CORE in numerical and dtype == "float32":
        mode = TF32
    else:
        mode = NATIVE
    notes = [_note(NumericalNote, "numerical_note", value) for value in numerical]
    notes += [_note(BehaviorNote, "behavior_note", value) for value in behavior]
    deterministic = NumericalNote.NONDETERMINISTIC not in numerical
    return Traits(deterministic, mode, tuple(notes))


def _note(
    kinds: type[NumericalNote] | type[BehaviorNote], unknown: str, value: int
) -> str:
    try:
        return kinds(value).name.lower()
    except ValueError:  # a note of a newer library
        return f"{unknown}_{value}"


# The operation graphs: of one convolution, and of a convolution, a bias and a ReLU.


UIDS: Mapping[str, int] = {"x": 1, "w": 2, "y": 3}
"""Ids of the tensors in a variant pack."""

BIAS_UID = 4
"""Id of the bias in a variant pack, beside those of the other tensors."""

_PRODUCT, _SUM = 5, 6  # ids of the virtual tensors, which are never in memory

NODES: Mapping[Direction, tuple[DescriptorType, str]] = {
    Direction.FORWARD: (DescriptorType.OPERATION_CONVOLUTION_FORWARD, "X W Y"),
    Direction.BACKWARD_DATA: (
        DescriptorType.OPERATION_CONVOLUTION_BACKWARD_DATA,
        "DX W DY",
    ),
    Direction.BACKWARD_FILTER: (
        DescriptorType.OPERATION_CONVOLUTION_BACKWARD_FILTER,
        "X DW DY",
    ),
}
"""Type of a direction's node, and its names of x, w and y."""


def operation_graph(
    session: Session,
    problem: ConvProblem,
    *,
    accumulate: bool,
    alignment: int = ALIGNMENT,
) -> Descriptor:
    """Return a finalized graph: out = convolution + (out if `accumulate`).

    Groups need no attribute: the filter has C // groups channels. All operands'
    addresses are multiples of `alignment`.
    """
    calls, problem = session.calls, as_planar(problem)
    shapes = {"x": problem.x_shape, "w": problem.w_shape, "y": problem.y_shape}
    tensors = [
        _tensor(calls, problem, alignment, UIDS[name], shape)
        for name, shape in shapes.items()
    ]
    node = _convolution(calls, problem, tensors, 1.0 if accumulate else 0.0)
    return _graph_of(session, [node])


def bias_relu_graph(
    session: Session, problem: ConvProblem, bias: str, *, alignment: int
) -> Descriptor:
    """Return a finalized graph of a forward convolution: y = max(x * w + b, 0).

    `bias` is the data type of b, one number per channel of y. The results of the
    convolution and of the sum are virtual tensors: only y is written. Sums are in the
    compute type, whatever the types of x and w.
    """
    calls, problem = session.calls, as_planar(problem)
    wide, y = compute_type(problem), problem.y_shape

    tensor = partial(_tensor, calls, problem, alignment)
    product, total = (tensor(uid, y, wide) for uid in (_PRODUCT, _SUM))
    b = tensor(BIAS_UID, (1, y[1], *(1 for _ in y[2:])), DATA_TYPES[bias])
    x, w = tensor(UIDS["x"], problem.x_shape), tensor(UIDS["w"], problem.w_shape)
    node = _convolution(calls, problem, (x, w, product), 0.0)
    plus = _pointwise(calls, wide, PointwiseMode.ADD, (product, b), total)
    result = tensor(UIDS["y"], y)
    relu = _pointwise(calls, wide, PointwiseMode.RELU_FWD, (total,), result)
    return _graph_of(session, [node, plus, relu])


def _graph_of(session: Session, operations: Sequence[Descriptor]) -> Descriptor:
    """Return a finalized graph of finalized operations, in order."""
    kind, handle = DescriptorType.OPERATIONGRAPH, session.handle()
    return Descriptor.made(session.calls, kind, OPS=tuple(operations), HANDLE=handle)


def _convolution(
    calls: Cudnn, problem: ConvProblem, tensors: Sequence[Descriptor], beta: float
) -> Descriptor:
    """Return the finalized node of a convolution of the tensors x, w and y."""
    computed = compute_type(problem)
    rules = Descriptor.made(
        calls,
        DescriptorType.CONVOLUTION,
        COMP_TYPE=computed,
        CONV_MODE=ConvolutionMode.CROSS_CORRELATION,
        SPATIAL_DIMS=len(problem.stride),
        DILATIONS=problem.dilation,
        FILTER_STRIDES=problem.stride,
        PRE_PADDINGS=problem.padding,
        POST_PADDINGS=problem.padding,
    )
    kind, names = NODES[problem.direction]
    named = dict(zip(names.split(), tensors, strict=True))
    scalar = ctypes.c_double if computed is DataType.DOUBLE else ctypes.c_float
    factors = {"ALPHA": scalar(1.0), "BETA": scalar(beta)}
    return Descriptor.made(calls, kind, **factors, CONV_DESC=rules, **named)


def _tensor(
    calls: Cudnn,
    problem: ConvProblem,
    alignment: int,
    uid: int,
    shape: tuple[int, ...],
    data_type: DataType | None = None,
) -> Descriptor:
    """Return the finalized descriptor of a dense tensor (N, C, *spatial).

    `problem` has the layout, and the type unless given.
    """
    return Descriptor.made(
        calls,
        DescriptorType.TENSOR,
        DATA_TYPE=DATA_TYPES[problem.dtype] if data_type is None else data_type,
        IS_VIRTUAL=True if uid in (_PRODUCT, _SUM) else None,
        UNIQUE_ID=uid,
        BYTE_ALIGNMENT=alignment,
        DIMENSIONS=shape,
        STRIDES=strides_of(shape, channels_last=problem.layout == "NHWC"),
    )


def _pointwise(
    calls: Cudnn,
    computed: DataType,
    mode: PointwiseMode,
    read: tuple[Descriptor, ...],
    made: Descriptor,
) -> Descriptor:
    nan = NanPropagation.PROPAGATE_NAN if mode is PointwiseMode.RELU_FWD else None
    rules = {"MODE": mode, "MATH_PREC": computed, "NAN_PROPAGATION": nan}
    what = Descriptor.made(calls, DescriptorType.POINTWISE, **rules)
    x, b = (*read, None)[:2]
    tensors = {"PW_DESCRIPTOR": what, "XDESC": x, "BDESC": b, "YDESC": made}
    return Descriptor.made(calls, DescriptorType.OPERATION_POINTWISE, **tensors)
