"""Report of a memory study as one HTML file: needs and costs of a step."""

from collections.abc import Iterable, Iterator

from mucudnn.passes.planning.comparison import best_technique
from mucudnn.passes.registry import name_of
from mucudnn.passes.scheduling.step_plan import StepPlan
from mucudnn.report.markup import Child, Markup, tag
from mucudnn.report.memory_charts import Series, lanes_chart, memory_chart, speed_chart
from mucudnn.report.memory_stack import KINDS, stack_chart
from mucudnn.report.memory_text import budget_text, placed_words, technique_table
from mucudnn.report.pages.page import big_card, header, page, swatches, table
from mucudnn.report.words import bytes_text, ms_text, speedup_text
from mucudnn.studies.memory_study import MemoryStudy

__all__ = ["SHEETS", "memory_body", "memory_report", "speed_series"]

SHEETS = ("style.css", "memory.css")
"""Style sheets of the charts of a step."""

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
    """Return the file as text."""
    title = f"{study.spec.title} within {budget_text(study)}"
    image = "×".join(map(str, study.image))
    facts = (
        f"Batch {study.spec.batch}, images of {image}, "
        f"{study.parameters:,} parameters, "
        f"{study.kind}; node order: "
        f"{name_of(study.spec.order)}; {study.device}"
    )
    what = "Inference" if study.inference else "A training step"
    return page(
        title,
        SHEETS,
        header(f"{what} of {title}", facts, _warnings(study)),
        memory_body(study),
    )


def memory_body(study: MemoryStudy) -> Markup:
    """Return cards, charts, the table of techniques, and sources."""
    return tag("main", _cards(study), _pictures(study), _table(study), _sources(study))


def _warnings(study: MemoryStudy) -> Iterator[str]:
    if not study.measured:
        which = (
            "Times other than those of recorded convolutions"
            if study.convolutions.measured
            else "All times"
        )
        yield (
            f"{which} are estimates from published figures of the device: they "
            "compare techniques, they do not promise a speed."
        )
    if study.interrupted:
        yield "Interrupted: this is what was done by then."


def _cards(study: MemoryStudy) -> Markup:
    best, whole = study.best, study.unbounded
    least = study.least_ms.get(study.budget)
    bound = (
        "" if least is None else f", and no plan at all less than {ms_text(least)} ms"
    )
    cards = [
        big_card(
            "Without a budget",
            bytes_text(whole.peak_bytes),
            "at most in use",
            f"{ms_text(study.unbounded_ms)} ms a step, everything kept",
        )
    ]
    if best is not None and best.plan is not None:
        prediction = best.plan.prediction
        cards += [
            big_card(
                f"{best.policy} within {budget_text(study)}",
                speedup_text(study.slowdown(best)),
                f"the time of a step without a budget{_rival(study)}",
                f"{ms_text(prediction.step_ms)} ms; no order of the same work takes "
                f"less than {ms_text(prediction.bound_ms)} ms{bound}",
            ),
            big_card(
                "What it does for that",
                bytes_text(prediction.out_bytes),
                "offloaded in a step",
                f"{best.plan.recomputed} nodes run again; compute waits "
                f"{ms_text(sum(prediction.stalls_ms.values()))} ms",
            ),
        ]
    else:
        cards.append(
            big_card(
                f"Within {budget_text(study)}",
                "nothing fits",
                "of what was tried",
                "see the table for how many bytes each is short",
            )
        )
    if study.minimum is not None:
        cards.append(
            big_card(
                "The least budget",
                bytes_text(study.minimum, study.budget),
                "that any policy can run the step in",
                f"{study.minimum / whole.peak_bytes:.0%} of what it takes without one",
            )
        )
    return tag("div", cards, class_="cards")


def _rival(study: MemoryStudy) -> str:
    """Return the best of the other policies, as the end of a sentence."""
    best = study.best
    others = [t for t in study.techniques if best and t.policy != best.policy]
    second = best_technique(others)
    if second is not None:
        slowdown = speedup_text(study.slowdown(second))
        return f", instead of {slowdown} by {second.policy}"
    return "; nothing else fits" if others else ""


def _pictures(study: MemoryStudy) -> Iterable[Markup]:
    best = study.best
    if best is not None and best.plan is not None:
        yield from _plan_panels(study, best.plan)
    if len({t.budget for t in study.curve}) > 1:
        series = speed_series(study)
        yield _panel(
            "Speed against budget",
            "How fast the step is under each budget, against its speed without one. A "
            "line ends where its policy no longer fits.",
            speed_chart(series),
        )


def _plan_panels(study: MemoryStudy, plan: StepPlan) -> Iterable[Markup]:
    yield _panel(
        "Memory over the step",
        "All bytes on the device, parameters, workspaces and rounding included. "
        "Dashed: without a budget.",
        memory_chart(plan, study.unbounded, study.budget),
    )
    yield _panel(
        "Who holds it",
        "Tensors that hold much for long, from arrival to departure; one that is "
        "offloaded and comes back is here twice. Point at one for its name and size.",
        swatches(KINDS),
        stack_chart(plan),
    )
    yield _panel(
        "The three queues",
        "Compute, and the link in each direction. They work at the same time; where "
        "compute has to wait, its lane says so.",
        swatches(_QUEUES),
        lanes_chart(plan),
    )


def _panel(name: str, text: str, *content: Child) -> Markup:
    *above, picture = content
    return tag(
        "section",
        tag("h2", name),
        tag("p", text),
        above,
        tag("div", picture, class_="wide"),
        class_="panel",
    )


def _table(study: MemoryStudy) -> Markup:
    faint = {i for i, technique in enumerate(study.techniques) if not technique.fits}
    return _panel(
        "Every technique",
        f"Within {budget_text(study)}. The peak of one that does not fit is what "
        "it needs at the least. Bound: no order of the same computations and copies "
        "takes less.",
        tag("p", placed_words(study), class_="soft"),
        table(technique_table(study), faint=faint),
    )


def _sources(study: MemoryStudy) -> Markup:
    items = (tag("li", f"{name}: {text}") for name, text in study.figures.items())
    return tag(
        "section",
        tag("h2", "Where the figures are from"),
        tag("ul", items, class_="sources"),
        class_="panel",
    )


def speed_series(study: MemoryStudy) -> tuple[Series, ...]:
    """Return the speed under each budget by policy, without empty ones."""
    points: dict[str, list[tuple[int, float]]] = {}
    for technique in study.curve:
        if technique.step_ms is not None:
            speed = study.unbounded_ms / technique.step_ms
            points.setdefault(technique.policy, []).append((technique.budget, speed))
    ours_first = sorted(points, key=lambda policy: policy != _OURS)
    return tuple(Series(p, tuple(points[p]), p == _OURS) for p in ours_first)
