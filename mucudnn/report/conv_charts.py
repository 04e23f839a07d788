"""Charts of a layer: time against workspace, and timelines of plans."""

from collections.abc import Iterable, Iterator, Mapping

from mucudnn.ir.conv import AlgoPerf, ConvPlan
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
    bytes_text,
    limit_text,
    ms_text,
    plan_text,
    runs,
    speedup_text,
)
from mucudnn.studies.convolutions import LayerResult, LimitResult

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
