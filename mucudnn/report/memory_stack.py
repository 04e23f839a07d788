"""Chart of tensor lifetimes, stacked by residence in memory.

Parameters and state are at the bottom. The intervals with the largest product of size
and duration are stacked above them in order of arrival, and sink when one below ends.
All other tensors follow, and workspaces up to the memory curve.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mucudnn.ir.graph import Graph, Role
from mucudnn.passes.memory_timeline import WORKSPACE, Interval, memory_intervals
from mucudnn.passes.scheduling.step_plan import StepPlan
from mucudnn.report.axes import Frame, Scale, bytes_axis, linear_scale
from mucudnn.report.markup import Markup, tag
from mucudnn.report.memory_charts import WIDTH, memory_path
from mucudnn.report.svg import box, drawing
from mucudnn.report.words import bytes_text, ms_text

__all__ = ["KINDS", "stack_chart"]

_NAMED = 60
_FRAME = Frame(left=56.0, right=990.0, top=26.0, bottom=330.0)
_LETTER, _LINE = 5.6, 11.0

KINDS = {
    "state": "parameters and state",
    "activation": "activations",
    "again": "activations computed again",
    "gradient": "gradients",
    "rest": "all other tensors",
    "workspace": "workspaces",
}
"""Class in the style sheet -> its meaning."""


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
    frame = _FRAME
    x = linear_scale(plan.prediction.step_ms, frame.left, frame.right)
    y, unit, size = bytes_axis(plan.peak_bytes, frame.bottom, frame.top)
    bottom = sum(i.nbytes for i in intervals if i.persistent)
    layers = _layers(plan.schedule.graph, intervals, bottom)
    label = (
        f"Who holds the memory: {bytes_text(bottom)} of parameters and state all the "
        f"time, and {len(layers)} long stays of large tensors."
    )
    return drawing(
        WIDTH,
        frame.bottom + 34,
        label,
        frame.vertical(y, unit, size),
        _rest(intervals, x, y),
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
    moving = [i for i in intervals if not i.persistent and not _is_workspace(i)]
    largest = sorted(moving, key=lambda i: -i.nbytes * (i.stop_ms - i.start_ms))
    layers = [_Layer(i, _style_class(graph, i)) for i in largest[:_NAMED]]
    changes = sorted(
        [(layer.interval.first, layer.interval.start_ms, layer) for layer in layers]
        + [(layer.interval.last, layer.interval.stop_ms, layer) for layer in layers],
        key=lambda change: change[0],
    )
    stack: list[_Layer] = []
    for position, ms, layer in changes:
        if position == layer.interval.first:
            stack.append(layer)
        else:
            stack.remove(layer)
        height = bottom
        for one in stack:
            if not one.lower or one.lower[-1][1] != height:
                one.lower.append((ms, height))
            height += one.interval.nbytes
    return sorted(layers, key=lambda layer: layer.interval.first)


def _style_class(graph: Graph, interval: Interval) -> str:
    if "~" in interval.name:
        return "again"
    spec = graph.tensors[interval.name]
    return "gradient" if spec.role is Role.GRADIENT else "activation"


def _is_workspace(interval: Interval) -> bool:
    return interval.name.startswith(WORKSPACE)


def _rest(intervals: Sequence[Interval], x: Scale, y: Scale) -> Iterator[Markup]:
    """Draw all memory under the curve, and all but workspaces on top of it."""
    tensors = [i for i in intervals if not _is_workspace(i)]
    for some, kind in ((intervals, "workspace"), (tensors, "rest")):
        area = f"{memory_path(some, x, y)}H{x.stop:.1f}V{y(0):.1f}H{x.start:.1f}z"
        title = tag("title", KINDS[kind])
        yield tag("path", title, class_=f"stay under {kind}", d=area)


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
