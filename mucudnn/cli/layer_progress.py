"""Which layer is being measured, and what came of it."""

from mucudnn.cli.progress import Show
from mucudnn.report.words import DIRECTIONS, limit_text, speedup_text
from mucudnn.runtime.tuning.sweep import Progress
from mucudnn.studies.algorithm_survey import SurveyProgress
from mucudnn.studies.conv_comparison import Advance
from mucudnn.suites import Layer

__all__ = ["LayerProgress"]


class LayerProgress:
    """Puts layers and their measurements into words.

    Args:
        show: Where to.
    """

    def __init__(self, show: Show) -> None:
        self._show = show
        self._layer, self._done, self._total = "", 0, 1

    def advance(self, at: Advance) -> None:
        """A layer begins or has been compared."""
        outcomes = ""
        if at.result is not None:
            outcomes = ", ".join(
                f"{speedup_text(o.speedup)} within {limit_text(o.limit)}"
                for o in at.result.outcomes
            )
        self._at(at.layer, at.index, at.total, outcomes)

    def surveyed(self, at: SurveyProgress) -> None:
        """A layer begins or its algorithms are known."""
        counts = ""
        if at.result is not None:
            batches = at.result.batches
            most = max(len(batch.algorithms) for batch in batches)
            counts = f"up to {most} algorithms at {len(batches)} sizes"
        self._at(at.layer, at.index, at.total, counts)

    def planned(self, layer: Layer, index: int, total: int) -> None:
        """A layer begins, of which nothing but its plan is wanted."""
        self._at(layer, index, total, "")

    def measured(self, at: Progress) -> None:
        """One algorithm was timed at one size."""
        text = f"{self._layer}: {at.algo}({at.batch}) {at.done}/{at.total}"
        self._show(text, self._done, self._total)

    def _at(self, layer: Layer, index: int, total: int, result: str) -> None:
        self._layer = f"{layer.name} {DIRECTIONS[layer.problem.direction]}"
        self._done, self._total = index + bool(result), total
        self._show(self._layer, self._done, total, result=result)
