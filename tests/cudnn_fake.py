"""A libcudnn of a few made-up engines that computes, remembers and fails on demand.

It stands where `Cudnn` stands. Descriptors are objects with attributes;
what is executed is decoded from them and from bare addresses, as the library does, and
computed by the float64 reference, so that a wrong stride or offset gives wrong numbers.
"""

import contextlib
import ctypes
import itertools
import json
import re
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial

from mucudnn.backends.cuda.conv.graph_api import BIAS_UID, NODES, UIDS
from mucudnn.backends.cuda.libcudnn import (
    ATTRIBUTES,
    AttributeType,
    BehaviorNote,
    DescriptorType as Kind,
    HeurMode,
    NumericalNote,
    PointwiseMode,
    Status,
    error_for,
)
from mucudnn.ir.conv import Direction
from tests.cudnn_fake_legacy import ARCH_MISMATCH, FirstApi, StatusError
from tests.cudnn_fake_maps import Maps
from tests.cudnn_kernel import Convolution, Tensor
from tests.cupy_fake import put

At = IntEnum("At", ATTRIBUTES)


@dataclass(frozen=True)
class Engine:
    """How an engine of the fake behaves.

    Attributes:
        bytes_per_sample: Workspace; each knob's value multiplies it by value + 1.
        cost_ms: Of one sample, on the fake's clock.
        least_alignment: Operands less aligned are not supported.
    """

    bytes_per_sample: int = 0
    cost_ms: float = 1.0
    least_alignment: int = 1
    numerical: tuple = ()
    behavior: tuple = ()


ENGINES = {
    0: Engine(),
    1: Engine(1024, 0.1, 16, (NumericalNote.TENSOR_CORE,)),
    2: Engine(
        64,
        0.5,
        1,
        (NumericalNote.NONDETERMINISTIC, 77),
        (BehaviorNote.RUNTIME_COMPILATION,),
    ),
    3: Engine(32, 0.01, 1, (NumericalNote.DOWN_CONVERT_INPUTS,)),
}
"""By global index; the others up to `GLOBAL_COUNT` do not exist on this device."""

_CONVOLUTION = re.compile(
    r"cudnn(?:Get)?Convolution(Forward|BackwardData|BackwardFilter)"
    r"(WorkspaceSize|Algorithm_v7)?"
)
_DESCRIPTOR = re.compile(
    r"cudnn(Create|Destroy)(Tensor|Filter|Convolution|Pooling|LRN)Descriptor"
)

GLOBAL_COUNT = 6
LISTS = {
    HeurMode.A: ((1, ((5, 0),)), (1, ((5, 2), (14, 0))), (2, ())),
    HeurMode.FALLBACK: ((0, ()), (1, ((5, 0),))),
}
"""What the heuristics recommend; mode B is not supported."""


@dataclass
class Object:
    """A descriptor of either API."""

    kind: object
    values: dict = field(default_factory=dict)
    final: bool = False


@dataclass(frozen=True)
class Execution:
    """One convolution that ran: who, where, on what addresses.

    Attributes:
        algo: (engine, knobs), or the number of a legacy algorithm.
        pointers: Of x, w and y.
        beta: 1 added to the output, 0 overwrote it.
    """

    function: str
    handle: int
    stream: int
    algo: object
    batch: int
    pointers: tuple
    workspace: int
    workspace_bytes: int
    beta: float
    alignment: int


@dataclass
class Trouble:
    """Calls of a function that fail: `times` of them, after `skip` that succeed."""

    status: int
    skip: int = 0
    times: int = 1


class FakeCudnn:
    """See the module; `log` names every call, `executions` has what ran.

    `ran` names functions other than convolutions, each of which takes `map_ms`.
    """

    def __init__(self, version=1):
        self.version = version
        self.log = []
        self.executions = []
        self.objects = {}
        self.streams = {}
        self.clock_ms = 0.0
        self.lists = dict(LISTS)
        self._troubles, self._methods = {}, {}
        self._first = FirstApi(self)
        self._maps = Maps(self)
        self.ran, self.map_ms = [], 0.5
        self._numbers = itertools.count(0x1000, 8)

    # --- the methods of `Cudnn` -----------------------------------------------------

    def call(self, name, *arguments):
        status = self._invoke(name, arguments)
        if status:
            self.raise_for(name, status)

    def function(self, name):
        return lambda *arguments: self._invoke(name, arguments)

    def raise_for(self, name, status):
        try:
            meaning = f"CUDNN_STATUS_{Status(status).name}"
        except ValueError:
            meaning = "CUDNN_STATUS_SPECIFIC"
        raise error_for(name, status, meaning, "the fake refused")

    # --- what tests ask --------------------------------------------------------------

    def fail(self, name, status, *, skip=0, times=1):
        """Let later calls of a function return a status."""
        self._troubles[name] = Trouble(status, skip, times)

    def calls_of(self, name):
        return [arguments for called, arguments in self.log if called == name]

    def alive(self, kind):
        return [o for o in self.objects.values() if o.kind == kind]

    # --- dispatch --------------------------------------------------------------------

    def _invoke(self, name, arguments):
        self.log.append((name, arguments))
        trouble = self._troubles.get(name)
        if trouble is not None:
            if trouble.skip:
                trouble.skip -= 1
            elif trouble.times:
                trouble.times -= 1
                return trouble.status
        if (method := self._methods.get(name)) is None:
            method = self._methods[name] = self._method(name)
        try:
            return method(*arguments) or 0
        except StatusError as e:
            return e.status

    def _method(self, name):
        """What stands for a function of C."""
        if of := _DESCRIPTOR.fullmatch(name):
            return partial(self._descriptor, *of.groups())
        if match := _CONVOLUTION.fullmatch(name):
            part = {None: "run", "WorkspaceSize": "size", "Algorithm_v7": "best"}
            direction = Direction[_snake(match[1]).upper()]
            return partial(getattr(self._first, part[match[2]]), name, direction)
        words = _snake(name.removeprefix("cudnn").replace("LRN", "Lrn"))
        own = (getattr(api, words, None) for api in (self._first, self._maps))
        return next(filter(None, own), None) or getattr(self, f"_{words}")

    def new(self, kind, out):
        number = next(self._numbers)
        self.objects[number] = Object(kind)
        out._obj.value = number

    def object(self, pointer, kind=None):
        number = pointer.value if isinstance(pointer, ctypes.c_void_p) else pointer
        found = self.objects.get(number)
        if found is None or (kind is not None and found.kind != kind):
            raise StatusError(Status.BAD_PARAM)
        return found

    # --- handles ---------------------------------------------------------------------

    def _create(self, out):
        self.new("handle", out)
        self.streams[out._obj.value] = 0

    def _destroy(self, handle):
        self.object(handle, "handle")
        del self.objects[handle.value]

    def _set_stream(self, handle, stream):
        self.object(handle, "handle")
        self.streams[handle] = stream

    def _descriptor(self, verb, kind, pointer):
        if verb == "Create":
            self.new(kind, pointer)
        else:
            del self.objects[pointer]
        return 0

    # --- the graph API ---------------------------------------------------------------

    def _backend_create_descriptor(self, kind, out):
        self.new(Kind(kind), out)

    def _backend_destroy_descriptor(self, pointer):
        self.object(pointer)
        del self.objects[pointer]

    def _backend_set_attribute(self, pointer, attribute, kind, count, array):
        target = self.object(pointer)
        if target.final or count != len(array):
            raise StatusError(Status.BAD_PARAM)
        values = list(array)
        if kind == AttributeType.BACKEND_DESCRIPTOR:
            values = [self.object(value) for value in values]
            if not all(value.final for value in values):
                raise StatusError(Status.BAD_PARAM)
        if kind == AttributeType.CHAR:
            values = array.value.decode()
        target.values[At(attribute)] = values

    def _backend_finalize(self, pointer):
        target = self.object(pointer)
        match target.kind:
            case Kind.ENGINE:
                graph = target.values[At.ENGINE_OPERATION_GRAPH][0]
                self._supports(graph, target.values[At.ENGINE_GLOBAL_INDEX][0])
            case Kind.ENGINECFG:
                engine = target.values[At.ENGINECFG_ENGINE][0]
                self._configure(target, engine)
            case Kind.ENGINEHEUR:
                if target.values[At.ENGINEHEUR_MODE][0] not in self.lists:
                    raise StatusError(Status.NOT_SUPPORTED)
            case Kind.EXECUTION_PLAN:
                self._build(target)
            case Kind.OPERATIONGRAPH:
                self.object(target.values[At.OPERATIONGRAPH_HANDLE][0], "handle")
                target.values[At.OPERATIONGRAPH_ENGINE_GLOBAL_COUNT] = [GLOBAL_COUNT]
        target.final = True

    def _supports(self, graph, index):
        engine = ENGINES.get(index)
        if engine is None:
            raise StatusError(ARCH_MISMATCH)
        kernel = decoded(graph)
        if kernel.alignment < engine.least_alignment or kernel.bias_is_wide:
            raise StatusError(Status.NOT_SUPPORTED)

    def _configure(self, config, engine):
        index = engine.values[At.ENGINE_GLOBAL_INDEX][0]
        knobs = _knobs(config)
        if knobs and index != 1:
            raise StatusError(Status.NOT_SUPPORTED)
        graph = engine.values[At.ENGINE_OPERATION_GRAPH][0]
        size = ENGINES[index].bytes_per_sample * decoded(graph).batch
        for _, value in knobs:
            size *= value + 1
        config.values[At.ENGINECFG_WORKSPACE_SIZE] = [size]

    def _build(self, plan):
        self.object(plan.values[At.EXECUTION_PLAN_HANDLE][0], "handle")
        text = plan.values.get(At.EXECUTION_PLAN_JSON_REPRESENTATION)
        if text is None:
            config = plan.values[At.EXECUTION_PLAN_ENGINE_CONFIG][0]
            engine = config.values[At.ENGINECFG_ENGINE][0]
            state = {
                "version": self.version,
                "engine": engine.values[At.ENGINE_GLOBAL_INDEX][0],
                "knobs": _knobs(config),
                "workspace": config.values[At.ENGINECFG_WORKSPACE_SIZE][0],
                "graph": decoded(engine.values[At.ENGINE_OPERATION_GRAPH][0]).state(),
            }
        else:
            try:
                state = json.loads(text)
            except ValueError:
                raise StatusError(Status.BAD_PARAM) from None
            if state["version"] != self.version:
                raise StatusError(Status.NOT_SUPPORTED)
        plan.values |= {
            "state": state,
            At.EXECUTION_PLAN_WORKSPACE_SIZE: [state["workspace"]],
            At.EXECUTION_PLAN_JSON_REPRESENTATION: json.dumps(state),
        }

    def _backend_get_attribute(self, pointer, attribute, kind, most, count, array):
        source = self.object(pointer)
        if not source.final:
            raise StatusError(Status.BAD_PARAM)
        if attribute == At.ENGINEHEUR_RESULTS:
            values = list(self._recommended(source))
        else:
            values = self._values(source, attribute)
        if isinstance(values, str):
            values = values.encode() + b"\0"
        count._obj.value = len(values) if array is None else min(len(values), most)
        if array is None:
            return
        for i, value in enumerate(values[:most]):
            if isinstance(value, Object):
                shell = self.object(array[i], value.kind)
                shell.values, shell.final = dict(value.values), True
            else:
                array[i] = value

    def _values(self, source, attribute):
        if source.kind == Kind.ENGINE:
            engine = ENGINES[source.values[At.ENGINE_GLOBAL_INDEX][0]]
            if attribute == At.ENGINE_NUMERICAL_NOTE:
                return engine.numerical
            if attribute == At.ENGINE_BEHAVIOR_NOTE:
                return engine.behavior
        return source.values.get(At(attribute), [])

    def _recommended(self, heuristic):
        graph = heuristic.values[At.ENGINEHEUR_OPERATION_GRAPH][0]
        for index, knobs in self.lists[heuristic.values[At.ENGINEHEUR_MODE][0]]:
            with contextlib.suppress(StatusError):
                self._supports(graph, index)
                chosen = {
                    At.ENGINE_OPERATION_GRAPH: [graph],
                    At.ENGINE_GLOBAL_INDEX: [index],
                }
                engine = Object(Kind.ENGINE, chosen, final=True)
                config = Object(Kind.ENGINECFG, {At.ENGINECFG_ENGINE: [engine]}, True)
                config.values[At.ENGINECFG_KNOB_CHOICES] = [
                    Object(
                        Kind.KNOB_CHOICE,
                        {At.KNOB_CHOICE_KNOB_TYPE: [k], At.KNOB_CHOICE_KNOB_VALUE: [v]},
                        final=True,
                    )
                    for k, v in knobs
                ]
                self._configure(config, engine)
                yield config

    def _backend_execute(self, handle, plan, pack):
        plan, pack = self.object(plan), self.object(pack, Kind.VARIANT_PACK)
        if not (plan.final and pack.final):
            raise StatusError(Status.BAD_PARAM)
        state = plan.values["state"]
        by_uid = dict(
            zip(
                pack.values[At.VARIANT_PACK_UNIQUE_IDS],
                pack.values[At.VARIANT_PACK_DATA_POINTERS],
                strict=True,
            )
        )
        kernel = Convolution.restored(state["graph"])
        pointers = tuple(by_uid[UIDS[name]] for name in "xwy")
        if kernel.bias is not None:
            pointers = *pointers, by_uid[BIAS_UID]
        if any(pointer % kernel.alignment for pointer in pointers):
            raise StatusError(Status.BAD_PARAM_MISALIGNED_POINTER)
        knobs = tuple(map(tuple, state["knobs"]))
        self.run(
            kernel,
            ("cudnnBackendExecute", handle, (state["engine"], knobs)),
            pointers,
            (pack.values[At.VARIANT_PACK_WORKSPACE][0] or 0, state["workspace"]),
            kernel.beta,
            ENGINES[state["engine"]].cost_ms,
        )

    def run(self, kernel, who, pointers, workspace, beta, cost_ms):
        function, handle, algo = who
        self.object(handle, "handle")
        execution = Execution(
            function,
            handle,
            self.streams[handle],
            algo,
            kernel.batch,
            pointers,
            *workspace,
            beta,
            kernel.alignment,
        )

        def work():
            self.executions.append(execution)
            self.clock_ms += 0.01 + cost_ms * kernel.batch
            kernel.compute(pointers, workspace, beta)

        put(work)


def _snake(name):
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def _knobs(config):
    return tuple(
        (
            choice.values[At.KNOB_CHOICE_KNOB_TYPE][0],
            choice.values[At.KNOB_CHOICE_KNOB_VALUE][0],
        )
        for choice in config.values.get(At.ENGINECFG_KNOB_CHOICES, [])
    )


def decoded(graph):
    """The convolution that a finalized operation graph describes, and what follows."""
    operation, *behind = graph.values[At.OPERATIONGRAPH_OPS]
    direction, names = next(
        (d, names) for d, (kind, names) in NODES.items() if kind == operation.kind
    )
    prefix = operation.kind.name.replace("BACKWARD", "BWD")
    convolution = operation.values[At[f"{prefix}_CONV_DESC"]][0].values
    found = {
        name: operation.values[At[f"{prefix}_{own}"]][0]
        for name, own in zip("xwy", names.split(), strict=True)
    }
    bias = None
    if behind:
        bias, found["y"] = _bias_and_relu(behind, found["y"])
    tensors = {name: _tensor(found[name], UIDS[name]) for name in found}
    return Convolution(
        direction,
        tensors["x"],
        tensors["w"],
        tensors["y"],
        tuple(convolution[At.CONVOLUTION_FILTER_STRIDES]),
        tuple(convolution[At.CONVOLUTION_PRE_PADDINGS]),
        tuple(convolution[At.CONVOLUTION_DILATIONS]),
        operation.values[At[f"{prefix}_BETA"]][0],
        None if bias is None else _tensor(bias, BIAS_UID),
    )


def _bias_and_relu(operations, product):
    """The descriptors of the bias and of the result, of operations as they must be."""
    add, relu = (operation.values for operation in operations)
    modes = [
        values[At.OPERATION_POINTWISE_PW_DESCRIPTOR][0].values[At.POINTWISE_MODE][0]
        for values in (add, relu)
    ]
    (total,) = add[At.OPERATION_POINTWISE_YDESC]
    if (
        modes != [PointwiseMode.ADD, PointwiseMode.RELU_FWD]
        or add[At.OPERATION_POINTWISE_XDESC] != [product]
        or relu[At.OPERATION_POINTWISE_XDESC] != [total]
        or not all(t.values.get(At.TENSOR_IS_VIRTUAL) for t in (product, total))
    ):
        raise StatusError(Status.NOT_SUPPORTED)
    return add[At.OPERATION_POINTWISE_BDESC][0], relu[At.OPERATION_POINTWISE_YDESC][0]


def _tensor(descriptor, uid):
    values = descriptor.values
    if values[At.TENSOR_UNIQUE_ID] != [uid] or values.get(At.TENSOR_IS_VIRTUAL):
        raise StatusError(Status.BAD_PARAM)
    return Tensor(
        tuple(values[At.TENSOR_DIMENSIONS]),
        tuple(values[At.TENSOR_STRIDES]),
        values[At.TENSOR_DATA_TYPE][0],
        values[At.TENSOR_BYTE_ALIGNMENT][0],
    )
