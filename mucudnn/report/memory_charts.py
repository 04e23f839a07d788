"""Charts of a planned step: memory over time, queues, speed against budget."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from mucudnn.ir.graph import Graph, Phase
from mucudnn.ir.tensor import Role
from mucudnn.passes.scheduling.problem import origin
from mucudnn.passes.scheduling.step_plan import (
    WORKSPACE,
    Interval,
    StepPlan,
    memory_intervals,
    memory_points,
    stalls,
)
from mucudnn.passes.simulate import Lane
from mucudnn.report.svg import (
    COLOURS,
    Frame,
    Label,
    Markup,
    Scale,
    box,
    bytes_axis,
    drawing,
    labels,
    linear_scale,
    marker,
    reduce_to_columns,
    steps_path,
    tag,
)
from mucudnn.report.text import bytes_text, ms_text, places_text
from mucudnn.report.trace import lanes_of

WIDTH = 1000.0
_FRAME = Frame(left=56.0, right=982.0, top=26.0, bottom=250.0)
_LANE, _LANE_GAP, _LANES_LEFT = 30.0, 12.0, 140.0
_THINNEST = 0.5
_LABEL_ROOM = 15.0
_NAMES = 3  # of equal lines: more may not fit on either side of a point


def memory_chart(plan: StepPlan, unbounded: StepPlan, budget: int) -> Markup:
    """Draw bytes in use over the step, with and without the budget."""
    end = max(plan.prediction.step_ms, unbounded.prediction.step_ms)
    most = max(plan.peak_bytes, unbounded.peak_bytes)
    # A budget far above both curves would flatten them: it is not drawn.
    drawn = budget if budget <= 1.6 * most else most
    frame = _FRAME
    x = linear_scale(end, frame.left, frame.right)
    y, unit, size = bytes_axis(max(most, drawn), frame.bottom, frame.top)
    label = (
        f"Memory over the step: at most "
        f"{bytes_text(plan.peak_bytes, budget)} with {plan.policy}, "
        f"{bytes_text(unbounded.peak_bytes, budget)} without a budget, which is "
        f"{bytes_text(budget, plan.peak_bytes, unbounded.peak_bytes)}."
    )
    curves = [
        _curve(plan, x, y, "ours", f"{plan.policy}, with the budget"),
        _curve(unbounded, x, y, "other", "all activations kept, without a budget"),
    ]
    limit = []
    if budget <= y.high:
        at = y(budget)
        # The name is below the line where there is no room above it.
        below = at + 12 if at - frame.top < _LABEL_ROOM else at - 5
        text, right = f"budget {bytes_text(budget)}", frame.right
        limit = [
            tag("line", class_="budget", x1=frame.left, x2=right, y1=at, y2=at),
            tag("text", text, class_="budget-name end", x=right - 2, y=below),
        ]
    return drawing(
        WIDTH,
        frame.bottom + 34,
        label,
        frame.vertical(y, unit, size),
        frame.horizontal(x, "milliseconds"),
        curves,
        limit,
        labels(_curve_names(plan, unbounded, x, y), frame),
    )


def _curve_names(
    plan: StepPlan, unbounded: StepPlan, x: Scale, y: Scale
) -> Iterator[Label]:
    """Yield labels of the two curves, beside the top of each."""
    for one, name, class_, beside in (
        (unbounded, "everything kept", "other", -4.0),
        (plan, plan.policy, "ours", 12.0),
    ):
        points = memory_points(memory_intervals(one))
        at, most = max(points, key=lambda point: point[1], default=(0.0, 0))
        yield Label(
            x(max(at, 0.0)), y(most) + beside, name, 0.0, class_=f"label {class_}"
        )


def _curve(
    plan: StepPlan, x: Scale, y: Scale, class_: str, name: str
) -> Iterator[Markup]:
    end = x(plan.prediction.step_ms)
    path = f"{memory_path(memory_intervals(plan), x, y, end)}H{end:.1f}"
    title = (
        f"{name}: at most {bytes_text(plan.peak_bytes)}, "
        f"{ms_text(plan.prediction.step_ms)} ms"
    )
    if class_ == "ours":
        area = f"{path}V{y(0):.1f}H{x.start:.1f}z"
        yield tag("path", tag("title", title), class_="memory-area", d=area)
    yield tag("path", tag("title", title), class_=f"memory {class_}", d=path)


def memory_path(
    intervals: Sequence[Interval], x: Scale, y: Scale, end: float = math.inf
) -> str:
    """Return bytes in use as a staircase up to the coordinate `end`."""
    points = memory_points(intervals)
    drawn = reduce_to_columns([(x(ms), nbytes) for ms, nbytes in points], _THINNEST)
    return steps_path((max(at, x.start), y(n)) for at, n in drawn if at <= end)


def lanes_chart(plan: StepPlan) -> Markup:
    """Draw the activity of compute, the copy queues, and the network if it is used."""
    engines = lanes_of(plan)
    bottom = 8 + len(engines) * _LANE + (len(engines) - 1) * _LANE_GAP + 6
    frame = Frame(_LANES_LEFT, _FRAME.right, 8.0, bottom)
    x = linear_scale(plan.prediction.step_ms, frame.left, frame.right)
    rows: list[Markup] = []
    shares = []
    for i, (engine, name) in enumerate(engines.items()):
        top = frame.top + i * (_LANE + _LANE_GAP)
        lanes = [lane for lane in plan.prediction.lanes if lane.engine == engine]
        busy_ms = sum(lane.stop_ms - lane.start_ms for lane in lanes)
        busy = f"{busy_ms / (plan.prediction.step_ms or 1.0):.0%}"
        shares.append(f"{name} {busy}")
        rows += _lane_row(plan, name, busy, lanes, x, top)
        if engine == "compute":
            for start, stop in stalls(plan.prediction.lanes):
                width = x(stop) - x(start)
                if width >= _THINNEST:
                    title = f"compute waits for a copy: {ms_text(stop - start)} ms"
                    size = (width, _LANE)
                    rows.append(box("box stall", x(start), top, size, title=title))
    label = f"Busy share of the step: {', '.join(shares)}."
    return drawing(WIDTH, bottom + 34, label, frame.horizontal(x, "milliseconds"), rows)


def _lane_row(
    plan: StepPlan, name: str, busy: str, lanes: Sequence[Lane], x: Scale, top: float
) -> Iterator[Markup]:
    middle = top + _LANE / 2
    yield tag("text", name, class_="lane-name end", x=x.start - 10, y=middle - 1)
    yield tag("text", f"busy {busy}", class_="tick end", x=x.start - 10, y=middle + 11)
    yield box("lane", x.start, top, (x.stop - x.start, _LANE), rx=2)
    for kind, first, last, members in _merge_thin(plan, lanes, x):
        size = (max(last - first, 0.3), _LANE)
        yield box(f"box {kind}", first, top, size, title=_title(plan, members))


def _merge_thin(
    plan: StepPlan, lanes: Sequence[Lane], x: Scale
) -> Iterator[tuple[str, float, float, list[Lane]]]:
    """Yield the boxes of a lane; adjacent boxes too thin to see are merged."""
    current: tuple[str, float, float, list[Lane]] | None = None
    for lane in lanes:
        kind, first, last = _style_class(plan, lane), x(lane.start_ms), x(lane.stop_ms)
        if current is not None:
            before, start, stop, members = current
            thin = last - start < _THINNEST * 2
            if before == kind and thin and first - stop < _THINNEST:
                current = (kind, start, last, [*members, lane])
                continue
            yield current
        current = (kind, first, last, [lane])
    if current is not None:
        yield current


def _style_class(plan: StepPlan, lane: Lane) -> str:
    if lane.engine == "network":
        return "collective"
    if lane.engine != "compute":
        return f"copy-{lane.engine}"
    if origin(lane.name) != lane.name:
        return "again"
    node = plan.schedule.graph.by_name[lane.name]
    if node.phase is Phase.UPDATE:
        return "update"
    return "heavy" if node.traits.expensive else "light"


def _title(plan: StepPlan, members: Sequence[Lane]) -> str:
    first, last = members[0], members[-1]
    ms = ms_text(last.stop_ms - first.start_ms)
    if len(members) > 1:
        return f"{len(members)} from {first.name} to {last.name}: {ms} ms"
    graph = plan.schedule.graph
    if first.engine == "network":
        return f"{first.name} ({graph.by_name[first.name].op}): {ms} ms"
    if first.engine != "compute":
        return f"{first.name}: {bytes_text(graph.tensors[first.name].nbytes)}, {ms} ms"
    scratch = plan.schedule.workspaces.get(first.name, 0)
    more = f", workspace {bytes_text(scratch)}" if scratch else ""
    return f"{first.name} ({graph.by_name[first.name].op}): {ms} ms{more}"


@dataclass(frozen=True, slots=True)
class Series:
    """The speed of a policy under budgets; a `strong` one is highlighted.

    Colours go by position; one without points is not drawn.
    `points` are (budget in bytes, speed as a share of the speed without a budget).
    """

    name: str
    points: tuple[tuple[int, float], ...]
    strong: bool = False


def speed_chart(
    series: Sequence[Series], *, width: float = WIDTH, height: float = 300.0
) -> Markup:
    """Draw speed against budget, relative to the speed without one."""
    frame = Frame(56.0, width - 14, 26.0, height - 44)
    budgets = [budget for one in series for budget, _ in one.points]
    x, unit, size = bytes_axis(max(budgets, default=1), frame.left, frame.right)
    y = linear_scale(1.0, frame.bottom, frame.top, per_unit=0.01)
    parts = "; ".join(
        f"{one.name} {speed:.0%} within {bytes_text(budget)}"
        for one in series
        if one.strong
        for budget, speed in one.points
    )
    # Strong lines are drawn last, on top of the others.
    order = sorted(enumerate(series), key=lambda pair: pair[1].strong)
    marks = [(x(budget), y(speed)) for one in series for budget, speed in one.points]
    return drawing(
        width,
        height,
        f"Speed against budget. {parts}",
        frame.vertical(y, "% of the speed without a budget", 0.01),
        frame.horizontal(x, f"budget, {unit}", size),
        (_speed_line(i, one, x, y) for i, one in order),
        labels(_speed_names(series, x, y), frame, marks),
    )


def _speed_names(series: Sequence[Series], x: Scale, y: Scale) -> Iterator[Label]:
    """Yield a label at the end of each line; equal lines share one."""
    same: dict[tuple[tuple[int, float], ...], list[int]] = {}
    for i, one in enumerate(series):
        if one.points:
            same.setdefault(tuple(sorted(one.points)), []).append(i)
    for points, members in same.items():
        budget, speed = points[0]
        text = places_text([series[i].name for i in members], _NAMES)
        strong = " strong" if any(series[i].strong for i in members) else ""
        class_ = f"label a{members[0] % COLOURS}{strong}"
        yield Label(x(budget), y(speed) + 3.5, text, left=True, class_=class_)


def _speed_line(index: int, one: Series, x: Scale, y: Scale) -> Iterable[Markup]:
    points = sorted(one.points)
    line = "L".join(f"{x(budget):.1f} {y(speed):.1f}" for budget, speed in points)
    strong = " strong" if one.strong else ""
    if len(points) > 1:
        yield tag("path", class_=f"speed a{index % COLOURS}{strong}", d=f"M{line}")
    for budget, speed in points:
        title = f"{one.name} within {bytes_text(budget)}: {speed:.0%}"
        yield marker(index, x(budget), y(speed), title=title, filled=one.strong)


# Chart of tensor lifetimes, stacked by residence in memory.
#
# Parameters and state are at the bottom. The intervals with the largest product of size
# and duration are stacked above them in order of arrival, and sink when one below ends.
# All other tensors follow, and workspaces up to the memory curve.


_NAMED = 60
_STACK_FRAME = Frame(left=56.0, right=982.0, top=26.0, bottom=330.0)
_LETTER, _LINE = 5.6, 11.0

KINDS = {
    "state": "parameters and state",
    "activation": "activations",
    "again": "recomputed activations",
    "gradient": "gradients",
    "rest": "all other tensors",
    "workspace": "workspaces",
}
"""Class in the style sheet -> its meaning."""

_OF_PHASE = {
    Phase.FORWARD: "activation",
    Phase.BACKWARD: "gradient",
    Phase.UPDATE: "rest",
}


@dataclass(slots=True)
class _Layer:
    interval: Interval
    kind: str
    lower: list[tuple[float, int]] = field(default_factory=list)

    @property
    def stretches(self) -> Iterator[tuple[float, float, int]]:
        """(start, stop, height of the lower edge) of every level part."""
        stops = [*(ms for ms, _ in self.lower[1:]), self.interval.stop_ms]
        for (start, height), stop in zip(self.lower, stops, strict=True):
            yield start, stop, height


def stack_chart(plan: StepPlan) -> Markup:
    """Draw the stack; the largest tensors are named."""
    intervals = memory_intervals(plan)
    frame = _STACK_FRAME
    x = linear_scale(plan.prediction.step_ms, frame.left, frame.right)
    y, unit, size = bytes_axis(plan.peak_bytes, frame.bottom, frame.top)
    bottom = sum(i.nbytes for i in intervals if i.persistent)
    layers = _layers(plan.schedule.graph, intervals, bottom)
    label = (
        f"Tensors in memory: {bytes_text(bottom)} of parameters and state all the "
        f"time, and {len(layers)} large tensors that stay long."
    )
    return drawing(
        WIDTH,
        frame.bottom + 34,
        label,
        frame.vertical(y, unit, size),
        (
            # All memory under the curve, and all but workspaces on top of it.
            tag(
                "path",
                tag("title", KINDS[kind]),
                class_=f"stay under {kind}",
                d=f"{memory_path(some, x, y)}H{x.stop:.1f}V{y(0):.1f}H{x.start:.1f}z",
            )
            for some, kind in (
                (intervals, "workspace"),
                (_without_workspaces(intervals), "rest"),
            )
        ),
        box(
            "stay state",
            x.start,
            y(bottom),
            (x.stop - x.start, y(0) - y(bottom)),
            title=f"parameters and state: {bytes_text(bottom)}",
        ),
        (_polygon(layer, x, y) for layer in layers),
        frame.horizontal(x, "milliseconds"),
    )


def _layers(graph: Graph, intervals: Sequence[Interval], bottom: int) -> list[_Layer]:
    """Return the largest intervals, each with the height of its lower edge."""
    moving = [i for i in _without_workspaces(intervals) if not i.persistent]
    largest = sorted(moving, key=lambda i: -i.nbytes * (i.stop_ms - i.start_ms))

    def kind(interval: Interval) -> str:
        if "~" in interval.name:
            return "again"
        role = graph.tensors[interval.name].role
        if role in (Role.PARAMETER, Role.STATE):
            return "state"
        if role is Role.GRADIENT:
            return "gradient"
        # PyTorch's graphs have one role for all results; the phase tells them apart.
        node = graph.producers.get(interval.name)
        return _OF_PHASE[Phase.FORWARD if node is None else node.phase]

    layers = [_Layer(interval, kind(interval)) for interval in largest[:_NAMED]]
    changes = sorted(
        [
            (one.interval.first, one.interval.start_ms, list.append, one)
            for one in layers
        ]
        + [
            (one.interval.last, one.interval.stop_ms, list.remove, one)
            for one in layers
        ],
        key=lambda change: change[0],
    )
    stack: list[_Layer] = []
    for _, ms, add_or_remove, layer in changes:
        add_or_remove(stack, layer)
        # Layers above a change move: each gets a corner where its height changes.
        height = bottom
        for one in stack:
            if not one.lower or one.lower[-1][1] != height:
                one.lower.append((ms, height))
            height += one.interval.nbytes
    return sorted(layers, key=lambda layer: layer.interval.first)


def _without_workspaces(intervals: Sequence[Interval]) -> list[Interval]:
    return [i for i in intervals if not i.name.startswith(WORKSPACE)]


def _polygon(layer: _Layer, x: Scale, y: Scale) -> Iterator[Markup]:
    interval, edge = layer.interval, layer.lower
    upper = f"M{x(interval.start_ms):.1f} {y(edge[0][1] + interval.nbytes):.1f}"
    for _, stop, height in layer.stretches:
        upper += f"V{y(height + interval.nbytes):.1f}H{x(stop):.1f}"
    lower = "".join(f"V{y(h):.1f}H{x(start):.1f}" for start, h in reversed(edge))
    title = (
        f"{interval.name}: {bytes_text(interval.nbytes)}, from "
        f"{ms_text(interval.start_ms)} to {ms_text(interval.stop_ms)} ms"
    )
    area = f"{upper}{lower}z"
    yield tag("path", tag("title", title), class_=f"stay {layer.kind}", d=area)
    yield from _label(layer, x, y)


def _label(layer: _Layer, x: Scale, y: Scale) -> Iterator[Markup]:
    """Draw the name on the longest level stretch that has room for it."""
    interval = layer.interval
    room, start, height = max(
        (x(stop) - x(start), x(start), height)
        for start, stop, height in layer.stretches
    )
    text = interval.name
    thickness = y(0) - y(interval.nbytes)
    if thickness >= _LINE and room >= _LETTER * len(text) + 8:
        middle = y(height + interval.nbytes / 2) + 3.3
        yield tag("text", text, class_="stay-name mid", x=start + room / 2, y=middle)
