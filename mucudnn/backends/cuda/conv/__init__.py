"""cuDNN's two libraries of convolution algorithms behind one interface.

Rows of the graph API come first, in the order of its heuristics; rows of the first
(legacy) API follow. Half-precision filter gradients have every row a second time, with
micro-batches summed in float32.
"""

import functools
import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mucudnn.backends.base import Capture
from mucudnn.backends.cuda.conv import float32_sum
from mucudnn.backends.cuda.conv.graph_api import (
    ALIGNMENT,
    GraphLibrary,
    GraphRow,
    PlanKey,
)
from mucudnn.backends.cuda.conv.launch import Launch, Operands
from mucudnn.backends.cuda.conv.legacy_api import LegacyLibrary, LegacyRow
from mucudnn.backends.cuda.descriptors import Session
from mucudnn.errors import (
    BackendError,
    BackendUnavailableError,
    MucudnnError,
    StepFailedError,
    UnsupportedError,
)
from mucudnn.ir.conv import ConvPlan, ConvProblem, Direction
from mucudnn.ir.numerics import FLOAT32_SUM, HALF_SUM, Traits

_LAUNCHES = 256  # prebuilt calls of `run` in the cache; a plan holds its own
_NO_GRAPH = "graph API"
_NO_LEGACY = "first API"


class CudaConv:
    """The algorithms of libcudnn; `absent` is the reason why nothing can run, if so."""

    def __init__(self, session: Session, absent: str | None = None) -> None:
        self.session = session
        self._absent = absent
        self.graph = GraphLibrary(session)
        self._legacy = LegacyLibrary(session) if absent is None else None
        self._launches = functools.lru_cache(_LAUNCHES)(self.launches)

    def algorithms(self, problem: ConvProblem) -> Sequence[tuple[str, int]]:
        """See `ConvLibrary.algorithms`; in the order of cuDNN's heuristics."""
        rows = [(name, row.workspace) for name, row in self._rows(problem).items()]
        if float32_sum.applies(problem):
            extra = float32_sum.scratch(problem)
            rows += [(n + float32_sum.SUFFIX, nbytes + extra) for n, nbytes in rows]
        return rows

    def excluded(self, problem: ConvProblem) -> Sequence[tuple[str, str]]:
        """See `ConvLibrary.excluded`."""
        reasons = []
        try:
            self.graph.rows(problem, None)
        except UnsupportedError as e:
            reasons.append((_NO_GRAPH, str(e)))
        if self._legacy is None:
            reasons.append((_NO_LEGACY, f"it lists nothing: {self._absent}"))
        else:
            reasons += self._legacy.rows(problem)[1].items()
        return reasons

    def traits(self, problem: ConvProblem, algo: str) -> Traits:
        """See `ConvLibrary.traits`."""
        name = algo.removesuffix(float32_sum.SUFFIX)
        if (row := self._rows(problem).get(name)) is None:
            raise UnsupportedError(f"cuDNN has no algorithm {algo!r} for {problem}")
        traits = row.traits
        if not float32_sum.applies(problem):
            return traits
        note = HALF_SUM if name == algo else FLOAT32_SUM
        return Traits(traits.deterministic, traits.math_mode, (*traits.notes, note))

    def run(
        self,
        problem: ConvProblem,
        algo: str,
        a: Any,
        b: Any,
        out: Any,
        workspace: Any,
        *,
        accumulate: bool = False,
    ) -> None:
        """See `ConvLibrary.run`; the call is cached."""
        operands = operands_of(a, b, out, workspace)
        launches = self._launches(
            problem, algo, operands, first=True, accumulate=accumulate
        )
        execute(self.session, launches)

    def launches(
        self,
        problem: ConvProblem,
        algo: str,
        operands: Operands,
        *,
        first: bool,
        accumulate: bool,
    ) -> Sequence[Launch]:
        """Return the calls of one algorithm on given addresses.

        A filter gradient adds to earlier micro-batches unless this is the `first`.
        Operands with less than the measured alignment get a plan for their true
        alignment.
        """
        if self._absent is not None:
            raise BackendUnavailableError(
                f"this device cannot run anything: {self._absent}"
            )
        name = algo.removesuffix(float32_sum.SUFFIX)
        if name == algo:
            return [self._launch(problem, algo, operands, accumulate or not first)]
        if not float32_sum.applies(problem):
            raise UnsupportedError(f"{algo} is for half-precision filter gradients")
        if operands.nbytes < float32_sum.scratch(problem):
            raise BackendError(
                f"{algo} needs {float32_sum.scratch(problem)} bytes of workspace plus "
                f"the workspace of {name} for {problem}, got {operands.nbytes}"
            )
        # Each part has a buffer of its own, which is added to the float32 sum.
        part = float32_sum.engine_operands(problem, operands)
        added = float32_sum.add_launch(
            problem, operands, first=first, accumulate=accumulate
        )
        return [self._launch(problem, name, part, False), added]

    def _rows(self, problem: ConvProblem) -> Mapping[str, GraphRow | LegacyRow]:
        legacy = {} if self._legacy is None else self._legacy.rows(problem)[0]
        return {**self.graph_rows(problem), **legacy}

    def graph_rows(
        self, problem: ConvProblem, bias: str | None = None
    ) -> Mapping[str, GraphRow]:
        """Return engines (fused with bias and ReLU if given), in heuristic order."""
        try:
            return self.graph.rows(problem, bias)
        except UnsupportedError:  # `excluded` says why
            return {}

    def dumps(
        self, problem: ConvProblem, algo: str, *, accumulate: bool = False
    ) -> str | None:
        """See `PlanSerializer.dumps`: an engine's execution plan as JSON."""
        key = _plan_key(problem, algo, accumulate)
        return self.graph.dumps(key) if key.algo.startswith("eng") else None

    def loads(
        self, problem: ConvProblem, algo: str, text: str, *, accumulate: bool = False
    ) -> None:
        """See `PlanSerializer.loads`."""
        self.graph.loads(_plan_key(problem, algo, accumulate), text)

    def _launch(
        self, problem: ConvProblem, name: str, operands: Operands, accumulate: bool
    ) -> Launch:
        if self._legacy is not None and not name.startswith("eng"):
            return self._legacy.launch(problem, name, accumulate, operands)
        alignment = operands.alignment(ALIGNMENT)
        return self.graph.launch(
            PlanKey(problem, name, accumulate, alignment), operands
        )


def _plan_key(problem: ConvProblem, algo: str, accumulate: bool) -> PlanKey:
    """Return the key of an algorithm's plan; with the float32 sum it never adds."""
    name = algo.removesuffix(float32_sum.SUFFIX)
    return PlanKey(problem, name, accumulate and name == algo)


def operands_of(a: Any, b: Any, out: Any, workspace: Any) -> Operands:
    """Return the addresses of CuPy arrays."""
    scratch = (0, 0) if workspace is None else (workspace.data.ptr, workspace.nbytes)
    return Operands(a.data.ptr, b.data.ptr, out.data.ptr, *scratch)


def execute(session: Session, launches: Sequence[Launch]) -> None:
    """Make the calls, in order, on the calling thread's stream."""
    handle = session.handle()
    for launch in launches:
        status = launch.function(handle, *launch.arguments)
        if status:
            session.calls.raise_for(launch.name, status)


# A plan bound to cuDNN: one prebuilt call per micro-batch, reused for known addresses.
#
# For operands at known addresses, running is a dictionary lookup and one C call per
# micro-batch: no allocation, no descriptor, no synchronisation. Such a run can be
# captured; with `replay` the whole plan is captured once and launched as one graph.


logger = logging.getLogger(__name__)
_KNOWN = 64  # sets of addresses in the cache; at this number all are dropped


@dataclass(slots=True)
class _Bound:
    """The launches of a plan (with algorithm and first sample), and their calls."""

    launches: Sequence[tuple[Launch, str, int]]
    calls: Sequence[tuple[Callable[..., int], tuple[Any, ...]]]
    graph: Callable[[], None] | None = None


class CudaPlan:
    """A bound plan, replayed as a CUDA graph by `capture` if given; see `Runner`."""

    def __init__(
        self, conv: CudaConv, plan: ConvPlan, capture: Capture | None = None
    ) -> None:
        self._conv = conv
        self.plan = plan
        self._capture = capture
        self._known: dict[tuple[int, int, int, int, bool], _Bound] = {}
        micro = {n: plan.problem.with_batch(n) for n in {s.batch for s in plan.steps}}
        self._parts = [
            (step, window.start, micro[step.batch]) for window, step in plan.slices()
        ]

    def run(self, a: Any, b: Any, out: Any, workspace: Any, accumulate: bool) -> None:
        """See `Runner.run`."""
        scratch = 0 if workspace is None else workspace.data.ptr
        key = (a.data.ptr, b.data.ptr, out.data.ptr, scratch, accumulate)
        bound = self._known.get(key)
        if bound is None:
            bound = self._bind(operands_of(a, b, out, workspace), accumulate)
            if len(self._known) >= _KNOWN:
                self._known.clear()
            self._known[key] = bound
        elif self._capture is not None:
            self._replay(bound, self._capture)
            return
        self._launch(bound)

    def _bind(self, operands: Operands, accumulate: bool) -> _Bound:
        launches: list[tuple[Launch, str, int]] = []
        sums = self.plan.problem.direction is Direction.BACKWARD_FILTER
        for step, start, micro in self._parts:
            try:
                made = self._conv.launches(
                    micro,
                    step.algo,
                    step_operands(self.plan, start, operands),
                    first=start == 0 or not sums,
                    accumulate=accumulate,
                )
            except MucudnnError as e:
                raise StepFailedError(step.algo, 0, e) from e
            launches += [(launch, step.algo, start) for launch in made]
        return _Bound(launches, [(c.function, c.arguments) for c, _, _ in launches])

    def _launch(self, bound: _Bound) -> None:
        position, session = 0, self._conv.session
        try:
            handle = session.handle()
            for position, (function, arguments) in enumerate(bound.calls):
                status = function(handle, *arguments)
                if status:
                    session.calls.raise_for(bound.launches[position][0].name, status)
        except MucudnnError as e:
            _, algo, start = bound.launches[position]
            raise StepFailedError(algo, start, e) from e

    def _replay(self, bound: _Bound, capture: Capture) -> None:
        """Launch the graph, captured on the second run, when all kernels are loaded.

        Nothing runs during a capture, so a call that cannot be captured leaves no
        partial result; such a plan continues call by call.
        """
        if bound.graph is None:
            try:
                bound.graph = capture(lambda: self._launch(bound))
            except MucudnnError as e:
                logger.warning("the plan is not replayed: %s", e)
                bound.graph = lambda: self._launch(bound)
        bound.graph()


def step_operands(plan: ConvPlan, start: int, operands: Operands) -> Operands:
    """Return the addresses of the micro-batch that begins at sample `start`."""
    problem = plan.problem
    x, y = (
        start * problem.itemsize * math.prod(shape[1:])
        for shape in (problem.x_shape, problem.y_shape)
    )
    match problem.direction:
        case Direction.FORWARD:
            a, b, out = x, 0, y
        case Direction.BACKWARD_DATA:
            a, b, out = y, 0, x
        case Direction.BACKWARD_FILTER:
            a, b, out = x, y, 0
    return replace(operands, a=operands.a + a, b=operands.b + b, out=operands.out + out)


# Convolutions of a plan fused with bias and ReLU, where an engine supports it.
#
# The engines of such a graph differ from those of a plain convolution, so a plan's
# algorithms do not carry over. Its micro-batches do, and its workspace and arithmetic
# are limits. The first engine within them, in the order of cuDNN's heuristics, is
# taken, so that the same plan gives the same bits every time.


_TRIED = 8  # most engines to build per micro-batch: some refuse only when built


class CudaEpilogues:
    """See `Epilogues`."""

    def __init__(self, conv: CudaConv) -> None:
        self._conv = conv

    def offers(self, problem: ConvProblem, bias: str) -> bool:
        """See `Epilogues.offers`."""
        return bool(self._conv.graph_rows(problem, bias))

    def bind(
        self, plan: ConvPlan, x: Any, w: Any, bias: Any, y: Any, scratch: Any
    ) -> Callable[[], None] | None:
        """See `Epilogues.bind`."""
        operands, address = operands_of(x, w, y, scratch), bias.data.ptr
        kind, launches = bias.dtype.name, []
        for window, step in plan.slices():
            micro = plan.problem.with_batch(step.batch)
            own = step_operands(plan, window.start, operands)
            alignment = own.alignment(ALIGNMENT)
            # The engine may assume this alignment of every address, also the bias's.
            while address % alignment:
                alignment //= 2
            fitting = (
                name
                for name, row in self._conv.graph_rows(micro, kind).items()
                if row.workspace <= own.nbytes
                and row.traits.math_mode == step.math_mode
                and row.traits.deterministic >= step.deterministic
            )
            # Some engines refuse only when they are built: try the next ones.
            for name in itertools.islice(fitting, _TRIED):
                key = PlanKey(micro, name, alignment=alignment, bias=kind)
                try:
                    launches.append(self._conv.graph.launch(key, own, address))
                    break
                except MucudnnError as e:
                    logger.debug("%s for %s: %s", name, micro, e)
            else:
                logger.info("no engine does bias and ReLU within %s", plan)
                return None
        session = self._conv.session
        return lambda: execute(session, launches)
