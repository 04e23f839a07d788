"""Tables of a survey: algorithms that fit, and the largest micro-batches."""

from collections.abc import Iterator

from mucudnn.ir.status import RowStatus
from mucudnn.passes.convolution.explain import counted
from mucudnn.report.text import Table
from mucudnn.report.words import DIRECTIONS, NOTHING, bytes_text
from mucudnn.studies.algorithm_survey import (
    Algorithm,
    AlgorithmSurvey,
    SurveyedBatch,
    SurveyedLayer,
)

__all__ = ["survey_tables"]

_MOST_PLACES = 6
_SAME = "first choice"


def survey_tables(survey: AlgorithmSurvey) -> tuple[Table, ...]:
    """Return two tables: by micro-batch size and limit, and by layer and limit."""
    return (_sizes_table(survey), _reach_table(survey))


def _sizes_table(survey: AlgorithmSurvey) -> Table:
    rows = tuple(
        _size_row(layer, batch, limit)
        for layer in survey.layers
        for batch in layer.batches
        for limit in survey.limits
    )
    columns = (
        *("layer", "direction", ">batch", ">least", ">greatest", "first choice"),
        *(">needs", ">limit", ">fit", "best that fits", ">workspace"),
    )
    spare = ("greatest", "least", "fit")
    return Table("", columns, rows, notes=tuple(_notes(survey)), spare=spare)


def _size_row(
    layer: SurveyedLayer, batch: SurveyedBatch, limit: int
) -> tuple[str, ...]:
    fit = batch.within(limit)
    first = batch.first_choice
    return (
        layer.name,
        DIRECTIONS[layer.direction],
        str(batch.batch),
        bytes_text(batch.least_workspace),
        bytes_text(batch.greatest_workspace),
        NOTHING if first is None else first.algo,
        _workspace(first),
        bytes_text(limit),
        f"{fit.algorithms}/{len(batch.algorithms)}",
        _best(batch, fit.best),
        _workspace(fit.best),
    )


def _reach_table(survey: AlgorithmSurvey) -> Table:
    """Return the largest micro-batch of each layer at which the first choice fits."""
    rows: list[tuple[str, ...]] = []
    strong = set()
    for layer in survey.layers:
        whole = layer.batches[-1]
        for limit in survey.limits:
            largest, fit = layer.largest_batch(limit), whole.within(limit)
            if largest is not None and largest < layer.problem.batch:
                strong.add(len(rows))
            rows.append(
                (
                    layer.name,
                    DIRECTIONS[layer.direction],
                    bytes_text(limit),
                    str(layer.problem.batch),
                    NOTHING if largest is None else str(largest),
                    _best(whole, fit.best),
                    _workspace(fit.best),
                )
            )
    columns = (
        *("layer", "direction", ">limit", ">mini-batch", ">first choice up to"),
        *("best at the mini-batch", ">workspace"),
    )
    title = f"{survey.backend}: {survey.fingerprint}; numerics: {survey.numerics}"
    notes = tuple(_summary(survey))
    return Table(title, columns, tuple(rows), frozenset(strong), notes)


def _summary(survey: AlgorithmSurvey) -> Iterator[str]:
    for limit in survey.limits:
        fits = sum(x.batches[-1].within(limit).first_choice_fits for x in survey.layers)
        largest = ((x.largest_batch(limit), x.problem.batch) for x in survey.layers)
        divided = sum(n is not None and n < batch for n, batch in largest)
        yield (
            f"{bytes_text(limit)}: the first choice fits the whole mini-batch in "
            f"{fits} of {len(survey.layers)} convolutions, only a micro-batch in "
            f"{divided}"
        )


def _notes(survey: AlgorithmSurvey) -> Iterator[str]:
    """Yield notes on refused algorithms, empty rows and missing layers."""
    refused = {
        (f"{algo} {layer.name} {layer.direction.value}", reason)
        for layer in survey.layers
        for batch in layer.batches
        for algo, reason in batch.failures
        if RowStatus.of(reason) is RowStatus.REFUSED
    }
    if refused:
        yield f"not accepted, counted once a layer and direction: {counted(refused)}"
    empty: dict[str, list[str]] = {}
    for layer in survey.layers:
        for batch in layer.batches:
            if not batch.algorithms:
                reason = counted(batch.failures) or "the backend has none"
                where = f"{layer.name} {DIRECTIONS[layer.direction]} at {batch.batch}"
                empty.setdefault(reason, []).append(where)
    for reason, places in empty.items():
        more = len(places) - _MOST_PLACES
        shown = [*places[:_MOST_PLACES], *([f"{more} more"] if more > 0 else [])]
        yield f"no algorithm: {reason}: {', '.join(shown)}"
    if missing := survey.asked - len(survey.layers):
        yield f"interrupted: {missing} of {survey.asked} were not looked at"


def _best(batch: SurveyedBatch, best: Algorithm | None) -> str:
    if best is None:
        return NOTHING
    return _SAME if best is batch.first_choice else best.algo


def _workspace(algorithm: Algorithm | None) -> str:
    return NOTHING if algorithm is None else bytes_text(algorithm.workspace)
