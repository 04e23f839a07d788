"""cuDNN's graph API as a library of algorithms: one per engine configuration."""

from dataclasses import dataclass

from mucudnn.backends.cuda._enums import Attribute, AttributeType, DescriptorType
from mucudnn.backends.cuda.conv.engines import configuration, engines
from mucudnn.backends.cuda.conv.epilogue import BIAS_UID, bias_relu_graph
from mucudnn.backends.cuda.conv.geometry import operand_order
from mucudnn.backends.cuda.conv.launch import Launch, Operands
from mucudnn.backends.cuda.conv.operation import ALIGNMENT, UIDS, operation_graph
from mucudnn.backends.cuda.descriptors import Descriptor
from mucudnn.backends.cuda.recent import Recent
from mucudnn.backends.cuda.session import Session
from mucudnn.errors import BackendError, UnsupportedError
from mucudnn.ir.conv import ConvProblem
from mucudnn.ir.numerics import Traits

__all__ = ["GraphLibrary", "GraphRow", "PlanKey"]

_LISTINGS = 4096  # lists of engines in the cache; each takes a few kilobytes
_PLANS = 2048  # execution plans in the cache; each takes some 40 kilobytes


@dataclass(frozen=True, slots=True)
class PlanKey:
    """Identity of an execution plan.

    Attributes:
        problem: Problem at its micro-batch size.
        algo: Engine and knobs, as named by `engines`.
        accumulate: Whether the plan adds to its output.
        alignment: Alignment of the operands' addresses in bytes.
        bias: Data type of a bias that is added before a ReLU; None for a plain
            convolution.
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
        self._listings: Recent[tuple[ConvProblem, str | None], dict[str, GraphRow]]
        self._listings = Recent(_LISTINGS)
        self._plans: Recent[PlanKey, Descriptor] = Recent(_PLANS)

    def rows(
        self, problem: ConvProblem, bias: str | None = None
    ) -> dict[str, GraphRow]:
        """Return every engine configuration (every fused one for a `bias`) by name."""
        if (rows := self._listings.get((problem, bias))) is not None:
            return rows
        graph = self._graph(PlanKey(problem, "", bias=bias))
        found = engines(
            self._session.calls, graph, self._session.description, problem.dtype
        )
        rows = {
            engine.name: GraphRow(engine.workspace, engine.traits) for engine in found
        }
        self._listings.put((problem, bias), rows)
        return rows

    def plan(self, key: PlanKey) -> Descriptor:
        """Return the execution plan, built once."""
        if (plan := self._plans.get(key)) is None:
            graph = self._graph(key)
            calls, description = self._session.calls, self._session.description
            config = configuration(calls, graph, description, key.algo)
            plan = self._bare_plan()
            plan.set(Attribute.EXECUTION_PLAN_ENGINE_CONFIG, config)
            self._plans.put(key, plan.finalize())
        return plan

    def dumps(self, key: PlanKey) -> str:
        """Return an execution plan as cuDNN's JSON."""
        return self.plan(key).get_text(Attribute.EXECUTION_PLAN_JSON_REPRESENTATION)

    def loads(self, key: PlanKey, text: str) -> None:
        """Rebuild a plan from its JSON, without asking for engines."""
        plan = self._bare_plan()
        plan.set_text(Attribute.EXECUTION_PLAN_JSON_REPRESENTATION, text)
        self._plans.put(key, plan.finalize())

    def launch(self, key: PlanKey, operands: Operands, bias: int = 0) -> Launch:
        """Return a call of a plan on given addresses; `bias` if the plan has one."""
        plan = self.plan(key)
        (needed,) = plan.get(Attribute.EXECUTION_PLAN_WORKSPACE_SIZE)
        if operands.nbytes < needed:
            raise BackendError(
                f"{key.algo} needs {needed} bytes of workspace for {key.problem}, "
                f"got {operands.nbytes}"
            )
        calls = self._session.calls
        uids = [UIDS[name] for name in operand_order(key.problem.direction)]
        pointers, kind = [operands.a, operands.b, operands.out], AttributeType.VOID_PTR
        if key.bias is not None:
            uids, pointers = [*uids, BIAS_UID], [*pointers, bias]
        pack = Descriptor(calls, DescriptorType.VARIANT_PACK)
        pack.set(Attribute.VARIANT_PACK_UNIQUE_IDS, *uids)
        pack.set(Attribute.VARIANT_PACK_DATA_POINTERS, *pointers, kind=kind)
        pack.set(Attribute.VARIANT_PACK_WORKSPACE, operands.workspace, kind=kind)
        name, arguments = "cudnnBackendExecute", (plan.pointer, pack.finalize().pointer)
        return Launch(calls.function(name), arguments, name, (plan, pack))

    def _graph(self, key: PlanKey) -> Descriptor:
        if key.bias is not None:
            return bias_relu_graph(
                self._session.calls,
                key.problem,
                key.bias,
                alignment=key.alignment,
                handle=self._session.handle(),
            )
        return operation_graph(
            self._session.calls,
            key.problem,
            accumulate=key.accumulate,
            alignment=key.alignment,
            handle=self._session.handle(),
        )

    def _bare_plan(self) -> Descriptor:
        """Return a plan with its device; loading JSON crashes without one."""
        plan = Descriptor(self._session.calls, DescriptorType.EXECUTION_PLAN)
        handle = self._session.handle()
        if handle is not None:
            kind = AttributeType.HANDLE
            plan.set(Attribute.EXECUTION_PLAN_HANDLE, handle, kind=kind)
        elif (description := self._session.description) is not None:
            plan.set(Attribute.EXECUTION_PLAN_DEVICEPROP, description)
        else:
            raise UnsupportedError("a plan needs a device or its description")
        return plan
