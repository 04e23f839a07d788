"""Report of a comparison as one HTML file that loads nothing else.

The essentials come first (one card per limit, then a table with every layer's
speed-up), followed by each layer and direction with its two charts and their numbers.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mucudnn.ir.conv import AlgoPerf, ConvPlan, Direction
from mucudnn.report.page import header, interrupted, legend, page, rendered
from mucudnn.report.svg import (
    COLOURS,
    Frame,
    Label,
    Markup,
    Scale,
    box,
    byte_scale,
    drawing,
    labels,
    linear_scale,
    marker,
    tag,
    time_scale,
)
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
    runs,
    speedup_text,
)
from mucudnn.studies.convolutions import Comparison, LayerResult, LimitResult

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


# Charts of a layer: time against workspace, and timelines of plans.


_WIDTH = 360.0
_FRAME = Frame(left=40.0, right=350.0, top=34.0, bottom=216.0)
_LABELS = Frame(left=0.0, right=360.0, top=34.0, bottom=212.0)
"""Area for names of algorithms."""
_LABEL_GAP = 52.0
_DIGIT = 6.4  # width of a figure at the size of bar labels
_BAR, _ROW = 15.0, 62.0
_BARS_FROM, _BARS_TO = 56.0, 298.0


def undivided_perfs(layer: LayerResult) -> tuple[AlgoPerf, ...]:
    """Return measurements at the whole mini-batch, fastest first."""
    whole = (p for p in layer.table.usable if p.batch == layer.problem.batch)
    return tuple(sorted(whole, key=lambda p: p.time_ms))


def drawn_front(front: Iterable[ConvPlan]) -> tuple[ConvPlan, ...]:
    """Return the plans that take less time than all with less workspace.

    Planners add noise and launch overhead to the times, so a plan with a higher cost
    may be a little faster. Without this filter, the curve of times would rise in
    places.
    """
    falling: list[ConvPlan] = []
    for plan in sorted(front, key=lambda plan: (plan.workspace, plan.time_ms)):
        if not falling or plan.time_ms < falling[-1].time_ms:
            falling.append(plan)
    return tuple(falling)


def curve(layer: LayerResult, colours: Mapping[str, int]) -> Markup:
    """Draw time against workspace: the Pareto front, undivided algorithms, limits."""
    # Scales span everything drawn: limits, divisions and undivided calls.
    points = undivided_perfs(layer)
    limits = [o.limit.nbytes for o in layer.outcomes if not o.limit.total]
    front = drawn_front(layer.front)
    sizes = [plan.workspace for plan in front]
    x = byte_scale(
        [*limits, *sizes, *(p.workspace for p in points)], _FRAME.left, _FRAME.right
    )
    times = [plan.time_ms for plan in front] + [p.time_ms for p in points]
    y = time_scale(times or [1.0], _FRAME.bottom, _FRAME.top)
    label = "Time against workspace."
    if front:
        least, best = front[0], front[-1]
        label += (
            f" The best division takes {ms_text(least.time_ms)} ms with "
            f"{bytes_text(least.workspace)} and {ms_text(best.time_ms)} ms "
            f"with {bytes_text(best.workspace)} of workspace."
        )
    return drawing(
        _WIDTH,
        252,
        label,
        _axes(x, y),
        _limits(limits, x),
        _front(front, x, y),
        labels(
            (
                Label(
                    x(p.workspace),
                    y(p.time_ms) - 6,
                    p.algo,
                    6.0,
                    class_=f"label a{colours[p.algo] % COLOURS}",
                )
                for p in points
            ),
            _LABELS,
            [(x(p.workspace), y(p.time_ms)) for p in points],
        ),
        [
            marker(
                colours[p.algo],
                x(p.workspace),
                y(p.time_ms),
                title=f"{p.algo}({p.batch}) undivided: {ms_text(p.time_ms)} ms, "
                f"{bytes_text(p.workspace)}",
                filled=False,
            )
            for p in points
        ],
    )


def timeline(layer: LayerResult, colours: Mapping[str, int]) -> Markup:
    """Draw the undivided call and the planned micro-batches of each limit."""
    done = [(o.limit, o.choice) for o in layer.outcomes if o.choice is not None]
    times = (max(c.planned_ms, c.undivided_ms or 0.0) for _, c in done)
    longest = max(times, default=1.0)
    scale = Scale(0.0, longest or 1.0, 0.0, _BARS_TO - _BARS_FROM, ())
    label = "; ".join(
        f"within {limit_text(limit)} undivided {ms_text(choice.undivided_ms)} ms, "
        f"planned {ms_text(choice.planned_ms)} ms as {plan_text(choice.plan)}"
        for limit, choice in done
    )
    rows = (
        tag("g", _limit_row(o, scale, colours), transform=f"translate(0 {i * _ROW:g})")
        for i, o in enumerate(layer.outcomes)
    )
    return drawing(_WIDTH, _ROW * len(layer.outcomes), f"Plans: {label}", rows)


def plan_bar(plan: ConvPlan, colours: Mapping[str, int]) -> Markup:
    """Draw the micro-batches of one plan as consecutive bars."""
    frame = Frame(left=4.0, right=716.0, top=4.0, bottom=_BAR + 10)
    x = linear_scale(plan.time_ms, frame.left, frame.right)
    return drawing(
        720,
        frame.bottom + 34,
        f"Micro-batches: {plan_text(plan)}, {ms_text(plan.time_ms)} ms, "
        f"{bytes_text(plan.workspace)} of workspace",
        _segments(plan, frame.left, frame.right, frame.top, colours),
        frame.horizontal(x, "milliseconds"),
    )


def _axes(x: Scale, y: Scale) -> Iterator[Markup]:
    yield from _FRAME.grid(y)
    yield from _FRAME.base(x, lambda value: bytes_text(int(value)) if value else "0")
    middle = (_FRAME.left + _FRAME.right) / 2
    bottom, left = _FRAME.bottom, _FRAME.left
    yield tag("text", "workspace", class_="name mid", x=middle, y=bottom + 31)
    yield tag("text", "ms", class_="name end", x=left - 6, y=_FRAME.top - 8)


def _limits(limits: Iterable[int], x: Scale) -> Iterator[Markup]:
    """Draw limits as dashed lines; labels that would touch use two rows."""
    last, raised = -_LABEL_GAP, False
    for limit in sorted(limits):
        at = x(limit)
        raised = at - last < _LABEL_GAP and not raised
        last = at
        top = 10.0 if raised else 22.0
        yield tag("line", class_="limit", x1=at, x2=at, y1=top + 3, y2=_FRAME.bottom)
        text = bytes_text(limit)
        anchor = "end" if at > _FRAME.right - 24 else "mid"
        anchor = anchor if at > _FRAME.left else "start"  # beside the unit of times
        where = min(at + 4, _WIDTH) if anchor == "end" else at
        yield tag("text", text, class_=f"limit-name {anchor}", x=where, y=top)


def _front(front: Iterable[ConvPlan], x: Scale, y: Scale) -> Iterator[Markup]:
    """Draw the Pareto front as a staircase."""
    steps = [(x(plan.workspace), y(plan.time_ms), plan) for plan in front]
    if not steps:
        return
    left, top, _ = steps[0]
    along = "".join(f"H{px:.1f}V{py:.1f}" for px, py, _ in steps[1:])
    path = f"M{left:.1f} {top:.1f}{along}H{_FRAME.right:g}"
    area = f"{path}V{_FRAME.bottom:g}H{left:.1f}z"
    yield tag("path", class_="area", d=area)
    yield tag("path", class_="front", d=path)
    for px, py, plan in steps:
        cost = f"{bytes_text(plan.workspace)}: {ms_text(plan.time_ms)} ms"
        title = f"{cost}, {plan_text(plan)}"
        yield tag("circle", tag("title", title), class_="knee", cx=px, cy=py, r=2.6)


def _limit_row(
    outcome: LimitResult, scale: Scale, colours: Mapping[str, int]
) -> Iterator[Markup]:
    yield tag("text", limit_text(outcome.limit), class_="row-name", x=0, y=13)
    choice = outcome.choice
    if choice is None:
        yield tag("text", "no plan", class_="bar-name", x=0, y=32)
        return
    gain = outcome.speedup
    shade = "gain" if gain is not None and gain > 1 else "even"
    text = speedup_text(gain)
    yield tag("text", text, class_=f"row-gain end {shade}", x=_WIDTH, y=13)
    for name, plan, time_ms, top in (
        ("undivided", choice.undivided, choice.undivided_ms, 20.0),
        ("planned", choice.plan, choice.planned_ms, 38.0),
    ):
        y = top + 11.5
        yield tag("text", name, class_="bar-name", x=0, y=y)
        if plan is None or time_ms is None:
            yield tag("text", "none fits", class_="bar-name", x=_BARS_FROM, y=y)
            continue
        end = _BARS_FROM + scale(time_ms)
        yield from _segments(plan, _BARS_FROM, end, top, colours)
        yield tag("text", f"{ms_text(time_ms)} ms", class_="bar-time", x=end + 5, y=y)


def _segments(
    plan: ConvPlan, start: float, end: float, top: float, colours: Mapping[str, int]
) -> Iterator[Markup]:
    """Draw micro-batches, as wide as their predicted share of the measured time."""
    predicted = plan.time_ms or 1.0
    at = start
    step_ms = iter(step.time_ms for step in plan.steps)
    for algo, batch, times in runs(plan):
        share = sum(next(step_ms) for _ in range(times)) / predicted
        width = share * (end - start)
        each = width / times
        parts = times if each >= 4 else 1
        shade = f"seg a{colours[algo] % COLOURS}"
        title = f"{times} × {algo}({batch})" if times > 1 else f"{algo}({batch})"
        size = (max(width / parts - 1, 0.5), _BAR)
        boxes = (
            box(None, at + i * width / parts, top, size, rx=2) for i in range(parts)
        )
        labels = _labels(batch, times, at, width, top + 11)
        yield tag("g", tag("title", title), boxes, labels, class_=shade)
        at += width


def _labels(
    batch: int, times: int, at: float, width: float, y: float
) -> Iterator[Markup]:
    """Draw the micro-batch size in every box, once for all boxes, or not at all."""
    each = width / times
    if len(str(batch)) * _DIGIT + 4 <= each:
        for i in range(times):
            middle = at + (i + 0.5) * each
            yield tag("text", str(batch), class_="seg-name mid", x=middle, y=y)
    elif len(text := f"{times}×{batch}") * _DIGIT + 4 <= width and each < 4:
        yield tag("text", text, class_="seg-name mid", x=at + width / 2, y=y)
