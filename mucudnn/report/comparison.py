"""Report of a comparison as one HTML file that loads nothing else.

The essentials come first (one card per limit, then a table with every layer's
speed-up), followed by each layer and direction with its two charts and their numbers.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from mucudnn.ir.conv import Direction
from mucudnn.report.conv_charts import curve, timeline, undivided_perfs
from mucudnn.report.page import big_card, card, header, interrupted, legend, page, table
from mucudnn.report.svg import Child, Markup, marker, tag
from mucudnn.report.text import (
    DIRECTIONS,
    NOTHING,
    Table,
    bytes_text,
    compared_text,
    limit_text,
    ms_text,
    plan_text,
    problem_text,
    speedup_text,
)
from mucudnn.studies.convolutions import Comparison, LayerResult, LimitSummary

_OPEN_UP_TO = 24
"""Maximum number of layers that are shown unfolded."""
_HOTTEST = 4.0
"""Speed-up of the darkest cells."""

Layers = Sequence[tuple[str | None, Sequence[LayerResult]]]
"""(anchor, directions) of every layer."""


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


def comparison_body(comparison: Comparison, *, linked: bool = True) -> list[Markup]:
    """Return cards, the table of speed-ups, and every layer.

    If `linked`, the table links to the layers: anchors must be unique in a page.
    """
    colours = {algo: i for i, algo in enumerate(comparison.algorithms)}
    # Group the directions of each layer, in order of appearance.
    groups: dict[tuple[str, object], list[LayerResult]] = {}
    for layer in comparison.layers:
        key = (layer.name, layer.problem.with_direction(Direction.FORWARD))
        groups.setdefault(key, []).append(layer)
    layers = [
        (f"layer-{i}" if linked else None, group)
        for i, group in enumerate(groups.values(), start=1)
    ]
    cards = tag("div", map(_card, comparison.summary), class_="cards")
    speedups = _speedup_map(comparison, layers, "speedups" if linked else None)
    return [tag("main", cards, speedups), *_layers(layers, colours)]


def _card(entry: LimitSummary) -> Markup:
    """Return a limit's card; without a mean if layers are missing for lack of time."""
    head = f"Workspace limit {limit_text(entry.limit)}"
    counted = compared_text(entry)
    if entry.cut_short or entry.geomean is None:
        count, _, why = counted.partition("; ")
        return card(
            head, tag("p", count, class_="lacking"), tag("p", why, class_="range")
        )
    longest = max(entry.undivided_ms, entry.planned_ms)
    bars = (
        (
            tag("span", name),
            tag("i", class_=class_, style=f"--w:{100 * ms / (longest or 1.0):.1f}"),
            tag("span", f"{ms_text(ms)} ms"),
        )
        for name, ms, class_ in (
            ("undivided", entry.undivided_ms, None),
            ("planned", entry.planned_ms, "ours"),
        )
    )
    pair = tag("div", bars, class_="pair")
    spread = f"{speedup_text(entry.worst)} to {speedup_text(entry.best)} · {counted}"
    return big_card(head, speedup_text(entry.geomean), "geometric mean", spread, pair)


def _speedup_map(comparison: Comparison, layers: Layers, id_: str | None) -> Markup:
    """Return speed-ups by layer (rows), direction and limit (columns)."""
    directions = [
        d for d in Direction if any(x.direction is d for x in comparison.layers)
    ]
    n = len(comparison.limits)

    def heading(name: str, anchor: str | None) -> Child:
        return name if anchor is None else tag("a", name, href=f"#{anchor}")

    names = (tag("th", DIRECTIONS[d], colspan=n, class_="first") for d in directions)
    limits = (
        tag("th", limit_text(limit), class_=None if i else "first", scope="col")
        for _ in directions
        for i, limit in enumerate(comparison.limits)
    )
    rows = (
        tag(
            "tr",
            tag("th", heading(group[0].name, anchor), scope="row"),
            [_heat(group, d, i) for d in directions for i in range(n)],
        )
        for anchor, group in layers
    )
    head = tag(
        "thead",
        tag("tr", tag("th", "layer", class_="text", rowspan=2, scope="col"), names),
        tag("tr", limits),
    )
    return tag(
        "section",
        tag("h2", "Speed-up over undivided", id=id_),
        tag(
            "div",
            tag("table", head, tag("tbody", rows)),
            class_="scroll",
            tabindex=0,
            role="region",
            aria_labelledby=id_,
        ),
        class_="map",
    )


def _heat(group: Iterable[LayerResult], direction: Direction, index: int) -> Markup:
    class_ = None if index else "first"
    found = (x.outcomes[index].speedup for x in group if x.direction is direction)
    speedup = next(found, None)
    if speedup is None:
        return tag("td", NOTHING, class_=f"none {class_ or ''}".strip())
    heat = 55 * min(1.0, max(0.0, math.log(speedup) / math.log(_HOTTEST)))
    return tag("td", speedup_text(speedup), class_=class_, style=f"--p:{heat:.0f}")


def _layers(layers: Layers, colours: Mapping[str, int]) -> Iterator[Markup]:
    few = len(layers) <= _OPEN_UP_TO
    for anchor, group in layers:
        first = group[0]
        measured = any(one.front for one in group)
        badges = [f"{first.count} times"] if first.count > 1 else []
        badges += [] if measured else ["not measured"]
        drawn = (tag("span", badge, class_="badge") for badge in badges)
        heading = tag("h2", first.name, drawn, id=anchor)
        facts = tag("p", problem_text(first.problem), class_="facts")
        yield tag(
            "details",
            tag("summary", heading, facts),
            (_direction(layer, colours) for layer in group),
            class_="layer",
            open="" if few and measured else None,
        )


def _direction(layer: LayerResult, colours: Mapping[str, int]) -> Markup:
    return tag(
        "article",
        tag("h3", DIRECTIONS[layer.direction].capitalize()),
        _figures(layer, colours) if layer.front else [],
        _notes(layer),
        _numbers(layer) if layer.front else [],
    )


def _figures(layer: LayerResult, colours: Mapping[str, int]) -> Iterator[Markup]:
    figures = (
        (
            curve(layer, colours),
            "Line: the best division for each workspace. Hollow marks: one call for "
            "the whole mini-batch. Dashed: the limits.",
        ),
        (
            timeline(layer, colours),
            "Each box is a micro-batch, as wide as its time; the number is its size.",
        ),
    )
    drawn = (tag("figure", one, tag("figcaption", text)) for one, text in figures)
    yield tag("div", drawn, class_="figures")
    used = {perf.algo for perf in undivided_perfs(layer)}
    choices = (o.choice for o in layer.outcomes if o.choice is not None)
    used |= {s.algo for choice in choices for s in choice.plan.steps}
    marks = ((marker(i, 6, 6), algo) for algo, i in colours.items() if algo in used)
    yield legend(marks, "Algorithms")


def _notes(layer: LayerResult) -> Child:
    items = [
        tag("li", f"{limit_text(outcome.limit)}: {outcome.reason}")
        for outcome in layer.outcomes
        if outcome.reason is not None
    ]
    return tag("ul", items, class_="notes") if items else []


def _numbers(layer: LayerResult) -> Markup:
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
    drawn = (table(one, captioned=True) for one in tables if one.rows)
    return tag("details", tag("summary", "Numbers"), drawn, class_="numbers")
