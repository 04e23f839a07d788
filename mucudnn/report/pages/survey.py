"""A survey as one HTML file: how far each convolution's first choice reaches."""

from collections.abc import Iterable, Iterator

from mucudnn.report.algorithm_survey import survey_tables
from mucudnn.report.markup import Markup, tag
from mucudnn.report.pages.page import big_card, header, page, table
from mucudnn.report.text import Table
from mucudnn.report.words import bytes_text
from mucudnn.studies.algorithm_survey import AlgorithmSurvey, SurveyedLayer

__all__ = ["survey_report"]


def survey_report(survey: AlgorithmSurvey, title: str) -> str:
    """The whole file, as text."""
    sizes, reach = survey_tables(survey)
    facts = (
        f"{survey.backend} backend, {survey.fingerprint}; micro-batch sizes: "
        f"{survey.batch_policy}; numerics: {survey.numerics}; nothing was measured"
    )
    return page(
        title,
        ("style.css", "memory.css"),
        header(f"Algorithms within a limit: {title}", facts, _warnings(survey)),
        tag(
            "main",
            tag("div", _cards(survey), class_="cards"),
            _panel("How far the first choice reaches", reach, unfolded=True),
            _panel("Every micro-batch size", sizes, unfolded=False),
        ),
    )


def _warnings(survey: AlgorithmSurvey) -> Iterator[str]:
    done = len(survey.layers)
    if done < survey.asked:
        yield f"Interrupted: {done} of {survey.asked} convolutions are here."


def _cards(survey: AlgorithmSurvey) -> Iterable[Markup]:
    every = len(survey.layers)
    for limit in survey.limits:
        reach = [(layer, layer.largest_batch(limit)) for layer in survey.layers]
        whole = sum(_fits_whole(layer, limit) for layer in survey.layers)
        parts = sum(n is not None for _, n in reach) - whole
        yield big_card(
            f"Workspace limit {bytes_text(limit)}",
            f"{whole} of {every}",
            "first choices fit the whole mini-batch",
            f"{parts} more fit a micro-batch; {every - whole - parts} fit none",
        )


def _fits_whole(layer: SurveyedLayer, limit: int) -> bool:
    return layer.largest_batch(limit) == layer.problem.batch


def _panel(name: str, shown: Table, *, unfolded: bool) -> Markup:
    notes = (tag("li", note) for note in shown.notes)
    return tag(
        "details",
        tag("summary", tag("h2", name)),
        tag("article", table(shown), tag("ul", notes, class_="notes")),
        class_="layer",
        open="" if unfolded else None,
    )
