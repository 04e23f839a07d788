"""Report of a comparison as one HTML file that loads nothing else.

The essentials come first (one card per limit, then a table with every layer's
speed-up), followed by each layer and direction with its two charts and their numbers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mucudnn.ir.conv import Direction
from mucudnn.report.conv_charts import curve, timeline, undivided_perfs
from mucudnn.report.page import header, interrupted, legend, page, rendered
from mucudnn.report.svg import Markup, marker, tag
from mucudnn.report.text import (
    MOST_EMPTY_ROWS,
    Table,
    bytes_text,
    compared_text,
    empty_text,
    limit_text,
    ms_text,
    plan_text,
    problem_text,
    speedup_text,
)
from mucudnn.studies.convolutions import Comparison, LayerResult

_OPEN_UP_TO = 24
"""Maximum number of layers that are shown unfolded."""

_HOTTEST = 4.0
"""Speed-up of the darkest cells."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """All directions of one layer."""

    anchor: str | None
    directions: Sequence[LayerResult]

    @property
    def first(self) -> LayerResult:
        return self.directions[0]

    @property
    def measured(self) -> bool:
        return any(one.front for one in self.directions)

    @property
    def empty(self) -> bool:
        """True if nothing was measured, so that there are only reasons."""
        outcomes = (outcome for one in self.directions for outcome in one.outcomes)
        return not self.measured and all(o.choice is None for o in outcomes)

    def speedup(self, direction: Direction, index: int) -> float | None:
        found = (x for x in self.directions if x.direction is direction)
        return next((x.outcomes[index].speedup for x in found), None)


def html_report(comparison: Comparison, title: str) -> str:
    """Return the file as text."""
    facts = (
        f"{comparison.backend} backend, {comparison.fingerprint}; "
        f"micro-batch sizes: {comparison.batch_policy}; planner: {comparison.planner}; "
        f"numerics: {comparison.numerics}"
    )
    warnings = interrupted(len(comparison.layers), comparison.asked)
    return page(
        title,
        ("style.css",),
        header(f"Micro-batched convolutions: {title}", facts, warnings),
        comparison_body(comparison),
        tag("footer", "Times are medians; both times of a speed-up come from one run."),
    )


def comparison_body(comparison: Comparison, *, linked: bool = True) -> Markup:
    """Return cards, the table of speed-ups, and every layer.

    If `linked`, the table links to the layers: anchors must be unique in a page.
    """
    # Group the directions of each layer, in order of appearance.
    groups: dict[tuple[str, object], list[LayerResult]] = {}
    for layer in comparison.layers:
        key = (layer.name, layer.problem.with_direction(Direction.FORWARD))
        groups.setdefault(key, []).append(layer)
    layers = [
        _Layer(f"layer-{i}" if linked else None, group)
        for i, group in enumerate(groups.values(), start=1)
    ]
    empty = [layer for layer in layers if layer.empty]
    folded = ""
    # Many layers without a result become one sentence.
    if len(empty) > MOST_EMPTY_ROWS:
        layers = [layer for layer in layers if not layer.empty]
        firsts = (layer.first.outcomes[0] for layer in empty)
        folded = empty_text("layers", (str(first.missing) for first in firsts))
    shown = {layer.direction for layer in comparison.layers}
    return rendered(
        "comparison",
        comparison=comparison,
        layers=layers,
        folded=folded,
        directions=[d for d in Direction if d in shown],
        linked=linked,
        few=len(layers) <= _OPEN_UP_TO,
        colours={algo: i for i, algo in enumerate(comparison.algorithms)},
        heat=_heat,
        compared_text=compared_text,
        limit_text=limit_text,
        problem_text=problem_text,
        curve=curve,
        timeline=timeline,
        algorithms=_algorithms,
        numbers=_numbers,
    )


def _heat(speedup: float) -> str:
    """Return the strength of a cell's colour in percent."""
    share = math.log(speedup) / math.log(_HOTTEST)
    return f"{55 * min(1.0, max(0.0, share)):.0f}"


def _algorithms(layer: LayerResult, colours: Mapping[str, int]) -> Markup:
    used = {perf.algo for perf in undivided_perfs(layer)}
    choices = (o.choice for o in layer.outcomes if o.choice is not None)
    used |= {s.algo for choice in choices for s in choice.plan.steps}
    marks = ((marker(i, 6, 6), algo) for algo, i in colours.items() if algo in used)
    return legend(marks, "Algorithms")


def _numbers(layer: LayerResult) -> list[Table]:
    outcomes = tuple(
        (
            limit_text(o.limit),
            ms_text(o.choice.undivided_ms),
            ms_text(o.choice.planned_ms),
            ms_text(o.choice.predicted_ms),
            speedup_text(o.speedup),
            bytes_text(o.choice.plan.workspace),
            plan_text(o.choice.plan),
        )
        for o in layer.outcomes
        if o.choice is not None
    )
    undivided = tuple(
        (p.algo, ms_text(p.time_ms), ms_text(p.noise_ms), bytes_text(p.workspace))
        for p in undivided_perfs(layer)
    )
    front = tuple(
        (bytes_text(p.workspace), ms_text(p.time_ms), plan_text(p)) for p in layer.front
    )
    measured = (
        *(">limit", ">undivided ms", ">planned ms", ">predicted ms", ">speed-up"),
        *(">workspace", "plan"),
    )
    predicted = "Divisions worth their workspace, predicted"
    missing = "Algorithms without a measurement"
    tables = (
        Table("Plans, measured", measured, outcomes),
        Table("One call", ("algorithm", ">ms", ">± ms", ">workspace"), undivided),
        Table(predicted, (">workspace", ">ms", "plan"), front),
        Table(missing, ("algorithm", "reason"), layer.left_out),
    )
    return [table for table in tables if table.rows]
