"""A memory study as one HTML file: what a step needs, and what needing less costs."""

from collections.abc import Iterable, Mapping
from importlib.resources import files

from mucudnn.passes.planning.comparison import Technique
from mucudnn.passes.planning.evaluate import StepPlan
from mucudnn.passes.registry import name_of
from mucudnn.report.markup import Child, Markup, tag
from mucudnn.report.memory_charts import (
    Series,
    lanes_chart,
    memory_chart,
    speed_chart,
)
from mucudnn.report.memory_stack import KINDS, stack_chart
from mucudnn.report.memory_text import COLUMNS, placed_words, technique_cells
from mucudnn.report.svg import drawing, marker
from mucudnn.report.words import bytes_text, ms_text, speedup_text
from mucudnn.studies.memory_study import MemoryStudy

__all__ = ["memory_report", "speed_series"]

_OURS = "planned"
_QUEUES = {
    "heavy": "convolutions and matrix products",
    "light": "all other nodes",
    "again": "computed again",
    "update": "updates",
    "stall": "compute waits",
    "copy-out": "copies to the host",
    "copy-in": "copies back",
}


def memory_report(study: MemoryStudy) -> str:
    """The whole file, as text."""
    style = "".join(
        files("mucudnn.report").joinpath(name).read_text(encoding="utf-8")
        for name in ("style.css", "memory.css")
    )
    title = f"{study.spec.title} within {bytes_text(study.budget)}"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"{title} · mucudnn"),
        tag("style", Markup(style)),
    )
    body = tag(
        "body",
        _header(study, title),
        tag("main", _cards(study), _pictures(study), _table(study), _sources(study)),
    )
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"


def _header(study: MemoryStudy, title: str) -> Markup:
    image = "×".join(map(str, study.image))
    facts = (
        f"Batch {study.spec.batch}, images of {image}, "
        f"{study.parameters:,} parameters, "
        f"{name_of(study.spec.optimizer)}; node order: "
        f"{name_of(study.spec.order)}; {study.device}"
    )
    notes: list[Markup] = []
    if not study.measured:
        which = (
            "Times other than those of recorded convolutions"
            if study.convolutions.measured
            else "All times"
        )
        notes.append(
            tag(
                "p",
                f"{which} are estimates from published figures of the device: they "
                "compare techniques, they do not promise a speed.",
                class_="warn",
            )
        )
    if study.interrupted:
        notes.append(
            tag("p", "Interrupted: this is what was done by then.", class_="warn")
        )
    return tag(
        "header",
        tag("p", "mucudnn", class_="brand"),
        tag("h1", f"A training step of {title}"),
        tag("p", facts, class_="facts"),
        notes,
    )


def _cards(study: MemoryStudy) -> Markup:
    best, whole = study.best, study.unbounded
    cards = [
        _card(
            "Without a budget",
            bytes_text(whole.peak_bytes),
            "at most in use",
            f"{ms_text(study.unbounded_ms)} ms a step, everything kept",
        )
    ]
    if best is not None and best.plan is not None:
        prediction = best.plan.prediction
        cards += [
            _card(
                f"{best.policy} within {bytes_text(study.budget)}",
                speedup_text(study.slowdown(best)),
                "the time of a step without a budget",
                f"{ms_text(prediction.step_ms)} ms; no order of the same work takes "
                f"less than {ms_text(prediction.bound_ms)} ms",
            ),
            _card(
                "What it does for that",
                bytes_text(prediction.out_bytes),
                "offloaded in a step",
                f"{best.plan.recomputed} nodes run again; compute waits "
                f"{ms_text(sum(prediction.stalls_ms.values()))} ms",
            ),
        ]
    else:
        cards.append(
            _card(
                f"Within {bytes_text(study.budget)}",
                "nothing fits",
                "of what was tried",
                "see the table for how many bytes each is short",
            )
        )
    if study.minimum is not None:
        cards.append(
            _card(
                "The least budget",
                bytes_text(study.minimum),
                "that any policy can run the step in",
                f"{study.minimum / whole.peak_bytes:.0%} of what it takes without one",
            )
        )
    return tag("div", cards, class_="cards")


def _card(head: str, big: str, small: str, foot: str) -> Markup:
    return tag(
        "div",
        tag("p", head, class_="limit-head"),
        tag("p", big, tag("small", small), class_="big"),
        tag("p", foot, class_="range"),
        class_="card",
    )


def _pictures(study: MemoryStudy) -> Iterable[Markup]:
    best = study.best
    if best is not None and best.plan is not None:
        yield from _of_plan(study, best.plan)
    if len({t.budget for t in study.curve}) > 1:
        series = speed_series(study)
        yield _panel(
            "Speed against budget",
            "How fast the step is under each budget, against its speed without one. A "
            "line ends where its policy no longer fits.",
            speed_chart(series),
            tag(
                "ul",
                (
                    tag("li", drawing(12, 12, "", _mark(i, one)), one.name)
                    for i, one in enumerate(series)
                ),
                class_="legend",
            ),
        )


def _mark(index: int, one: Series) -> Markup:
    return marker(index, 6, 6, filled=one.strong)


def _of_plan(study: MemoryStudy, plan: StepPlan) -> Iterable[Markup]:
    yield _panel(
        "Memory over the step",
        "All bytes on the device, parameters, workspaces and rounding included.",
        memory_chart(plan, study.unbounded, study.budget),
        tag(
            "ul",
            _line("solid", f"{plan.policy}, within the budget"),
            _line("dash", "everything kept, without a budget"),
            _line("line", "the budget")
            if study.budget <= 2 * study.unbounded.peak_bytes
            else [],
            class_="legend",
        ),
    )
    yield _panel(
        "Who holds it",
        "Tensors that hold much for long, from arrival to departure; one that is "
        "offloaded and comes back is here twice. Point at one for its name and size.",
        stack_chart(plan),
        _keys(KINDS),
    )
    yield _panel(
        "The three queues",
        "Compute, and the link in each direction. They work at the same time; where "
        "compute has to wait, its lane says so.",
        lanes_chart(plan),
        _keys(_QUEUES),
    )


def _panel(name: str, text: str, *content: Child) -> Markup:
    picture, *rest = content
    return tag(
        "section",
        tag("h2", name),
        tag("p", text),
        tag("div", picture, class_="wide"),
        rest,
        class_="panel",
    )


def _keys(kinds: Mapping[str, str]) -> Markup:
    items = (
        tag("li", drawing(12, 12, "", _square(kind)), text)
        for kind, text in kinds.items()
    )
    return tag("ul", items, class_="legend")


def _square(kind: str) -> Markup:
    return tag("rect", class_=f"key {kind}", x=1, y=1, width=10, height=10, rx=2)


def _line(class_: str, text: str) -> Markup:
    stroke = tag("line", class_=class_, x1=0, x2=12, y1=6, y2=6)
    return tag("li", drawing(12, 12, "", stroke), text)


def _table(study: MemoryStudy) -> Markup:
    words = ("policy", "scheduler", "fits", "remark")
    classes = ["text" if column in words else None for column in COLUMNS]
    head = (
        tag("th", column.removeprefix(">"), class_=class_, scope="col")
        for column, class_ in zip(COLUMNS, classes, strict=True)
    )
    rows = (
        tag(
            "tr",
            (
                tag("td", cell, class_=class_)
                for cell, class_ in zip(
                    technique_cells(study, technique), classes, strict=True
                )
            ),
            class_=_row_class(study, technique),
        )
        for technique in study.techniques
    )
    table = tag("table", tag("thead", tag("tr", head)), tag("tbody", rows))
    return _panel(
        "Every technique",
        f"Within {bytes_text(study.budget)}. The peak of one that does not fit is what "
        "it needs at the least. Bound: no order of the same computations and copies "
        "takes less.",
        tag("div", table, class_="scroll"),
        tag("p", placed_words(study), class_="soft"),
    )


def _row_class(study: MemoryStudy, technique: Technique) -> str | None:
    if technique is study.best:
        return "best"
    return None if technique.fits else "unfit"


def _sources(study: MemoryStudy) -> Markup:
    items = (tag("li", f"{name}: {text}") for name, text in study.figures.items())
    return tag(
        "section",
        tag("h2", "Where the figures are from"),
        tag("ul", items, class_="sources"),
        class_="panel",
    )


def speed_series(study: MemoryStudy) -> tuple[Series, ...]:
    """Speed under each budget, policy by policy, those with no point left out."""
    points: dict[str, list[tuple[int, float]]] = {}
    for technique in study.curve:
        if technique.step_ms is not None:
            speed = study.unbounded_ms / technique.step_ms
            points.setdefault(technique.policy, []).append((technique.budget, speed))
    ours_first = sorted(points, key=lambda policy: policy != _OURS)
    return tuple(Series(p, tuple(points[p]), p == _OURS) for p in ours_first)
