"""Convolutions of a plan fused with bias and ReLU, where an engine supports it.

The engines of such a graph differ from those of a plain convolution, so a plan's
algorithms do not carry over. Its micro-batches do, and its workspace and arithmetic are
limits. The first engine within them, in the order of cuDNN's heuristics, is taken, so
that the same plan gives the same bits every time.
"""

import logging
from collections.abc import Callable
from typing import Any

from mucudnn.backends.cuda.conv import CudaConv, execute, operands_of, step_operands
from mucudnn.backends.cuda.conv.graph_api import ALIGNMENT, PlanKey
from mucudnn.backends.cuda.conv.launch import Launch, Operands
from mucudnn.errors import MucudnnError
from mucudnn.ir.conv import AlgoPerf, ConvPlan, ConvProblem

logger = logging.getLogger(__name__)
_TRIED = 8  # most engines to build per micro-batch: some refuse only when built


class CudaEpilogues:
    """See `Epilogues`."""

    def __init__(self, conv: CudaConv) -> None:
        self._conv = conv

    def offers(self, problem: ConvProblem, bias: str) -> bool:
        """See `Epilogues.offers`."""
        return bool(self._conv.fused_rows(problem, bias))

    def bind(
        self, plan: ConvPlan, x: Any, w: Any, bias: Any, y: Any, scratch: Any
    ) -> Callable[[], None] | None:
        """See `Epilogues.bind`."""
        operands, address = operands_of(x, w, y, scratch), bias.data.ptr
        launches: list[Launch] = []
        for window, step in plan.slices():
            micro = plan.problem.with_batch(step.batch)
            own = step_operands(plan, window.start, operands)
            launch = self._launch(micro, step, own, bias.dtype.name, address)
            if launch is None:
                logger.info("no engine does bias and ReLU within %s", plan)
                return None
            launches.append(launch)
        session = self._conv.session
        return lambda: execute(session, launches)

    def _launch(
        self,
        micro: ConvProblem,
        step: AlgoPerf,
        operands: Operands,
        dtype: str,
        bias: int,
    ) -> Launch | None:
        """Return the call of the first usable engine for a micro-batch."""
        alignment = operands.alignment(ALIGNMENT)
        while bias % alignment:
            alignment //= 2
        fitting = (
            name
            for name, row in self._conv.fused_rows(micro, dtype).items()
            if row.workspace <= operands.nbytes
            and row.traits.math_mode == step.math_mode
            and row.traits.deterministic >= step.deterministic
        )
        for _, name in zip(range(_TRIED), fitting, strict=False):
            key = PlanKey(micro, name, alignment=alignment, bias=dtype)
            try:
                return self._conv.fused_launch(key, operands, bias)
            except MucudnnError as e:
                logger.debug("%s for %s: %s", name, micro, e)
        return None
