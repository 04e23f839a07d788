"""Report of a survey as one HTML file: reach of each first choice."""

from collections.abc import Iterable

from mucudnn.report.algorithm_survey import survey_tables
from mucudnn.report.markup import Markup, tag
from mucudnn.report.pages.page import big_card, header, page, table
from mucudnn.report.text import Table
from mucudnn.report.words import bytes_text
from mucudnn.studies.algorithm_survey import AlgorithmSurvey

__all__ = ["survey_report"]


def survey_report(survey: AlgorithmSurvey, title: str) -> str:
    """Return the file as text."""
    sizes, reach = survey_tables(survey)
    facts = (
        f"{survey.backend} backend, {survey.fingerprint}; micro-batch sizes: "
        f"{survey.batch_policy}; numerics: {survey.numerics}; nothing was measured"
    )
    done = len(survey.layers)
    warning = f"Interrupted: {done} of {survey.asked} convolutions are here."
    warnings = [warning] if done < survey.asked else []
    return page(
        title,
        ("style.css", "memory.css"),
        header(f"Algorithms within a limit: {title}", facts, warnings),
        tag(
            "main",
            tag("div", _cards(survey), class_="cards"),
            _panel("How far the first choice reaches", reach, unfolded=True),
            _panel("Every micro-batch size", sizes, unfolded=False),
        ),
    )


def _cards(survey: AlgorithmSurvey) -> Iterable[Markup]:
    every = len(survey.layers)
    for limit in survey.limits:
        reach = [(layer, layer.largest_batch(limit)) for layer in survey.layers]
        whole = sum(batch == layer.problem.batch for layer, batch in reach)
        parts = sum(n is not None for _, n in reach) - whole
        yield big_card(
            f"Workspace limit {bytes_text(limit)}",
            f"{whole} of {every}",
            "first choices fit the whole mini-batch",
            f"{parts} more fit a micro-batch; {every - whole - parts} fit none",
        )


def _panel(name: str, shown: Table, *, unfolded: bool) -> Markup:
    notes = (tag("li", note) for note in shown.notes)
    return tag(
        "details",
        tag("summary", tag("h2", name)),
        tag("article", table(shown), tag("ul", notes, class_="notes")),
        class_="layer",
        open="" if unfolded else None,
    )
