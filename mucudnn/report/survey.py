"""A survey of algorithms, as tables and as an HTML page."""

from collections.abc import Iterator

from mucudnn.ir.numerics import RowStatus
from mucudnn.passes.convolution.explain import counted
from mucudnn.report.page import SHEETS, header, interrupted, page, rendered
from mucudnn.report.text import DIRECTIONS, NOTHING, Table, bytes_text, places_text
from mucudnn.studies.algorithms import AlgorithmSurvey, SurveyedBatch


def survey_tables(survey: AlgorithmSurvey) -> tuple[Table, ...]:
    """Return two tables: by micro-batch size and limit, and by layer and limit.

    The second has the largest micro-batch of each layer at which the first choice fits.
    """
    # A row per micro-batch size and limit; and one per layer and limit.
    sizes: list[tuple[str, ...]] = []
    reach: list[tuple[str, ...]] = []
    strong, without, empty = set(), {}, {}
    for layer in survey.layers:
        name = layer.name, DIRECTIONS[layer.direction]
        mini_batch = layer.problem.batch
        for batch in layer.batches:
            first = batch.first_choice
            for limit in survey.limits:
                if first is None:
                    without[len(sizes)] = "no algorithm"
                cells = (
                    str(batch.batch),
                    bytes_text(batch.least_workspace),
                    bytes_text(batch.greatest_workspace),
                    NOTHING if first is None else first.algo,
                    bytes_text(None if first is None else first.workspace),
                    bytes_text(limit),
                    f"{batch.within(limit).algorithms}/{len(batch.algorithms)}",
                )
                sizes.append((*name, *cells, *_best(batch, limit)))
        for limit in survey.limits:
            largest = layer.largest_batch(limit)
            if largest is not None and largest < mini_batch:
                strong.add(len(reach))
            up_to = NOTHING if largest is None else str(largest)
            best = _best(layer.batches[-1], limit)
            if up_to == best[0] == NOTHING:
                empty[len(reach)] = "nothing fits"
            reach.append((*name, bytes_text(limit), str(mini_batch), up_to, *best))
    of_sizes = (
        *("layer", "direction", ">batch", ">least", ">greatest", "first choice"),
        *(">needs", ">limit", ">fit", "best that fits", ">workspace"),
    )
    of_reach = (
        *("layer", "direction", ">limit", ">mini-batch", ">first choice up to"),
        *("best at the mini-batch", ">workspace"),
    )
    title = f"{survey.backend}: {survey.fingerprint}; numerics: {survey.numerics}"
    spare = ("greatest", "least", "fit")
    notes = tuple(_summary(survey))
    return (
        Table(
            *("", of_sizes, tuple(sizes)),
            notes=tuple(_notes(survey)),
            spare=spare,
            empty=without,
        ),
        Table(title, of_reach, tuple(reach), frozenset(strong), notes, empty=empty),
    )


def _best(batch: SurveyedBatch, limit: int) -> tuple[str, str]:
    """Return name and workspace of the first algorithm that fits a limit."""
    best = batch.within(limit).best
    if best is None:
        return NOTHING, NOTHING
    name = "first choice" if best is batch.first_choice else best.algo
    return name, bytes_text(best.workspace)


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
        yield f"not accepted, counted once per layer and direction: {counted(refused)}"
    empty: dict[str, list[str]] = {}
    for layer in survey.layers:
        for batch in layer.batches:
            if not batch.algorithms:
                reason = counted(batch.failures) or "the backend has none"
                where = f"{layer.name} {DIRECTIONS[layer.direction]} at {batch.batch}"
                empty.setdefault(reason, []).append(where)
    for reason, places in empty.items():
        yield f"no algorithm: {reason}: {places_text(places)}"
    if missing := survey.asked - len(survey.layers):
        yield f"interrupted: {missing} of {survey.asked} were not surveyed"


def survey_report(survey: AlgorithmSurvey, title: str) -> str:
    """Return the file as text."""
    tables = survey_tables(survey)
    facts = (
        f"{survey.backend} backend, {survey.fingerprint}; micro-batch sizes: "
        f"{survey.batch_policy}; numerics: {survey.numerics}; nothing was measured"
    )
    warnings = interrupted(len(survey.layers), survey.asked)
    reaches = []
    for limit in survey.limits:
        reach = [(layer, layer.largest_batch(limit)) for layer in survey.layers]
        whole = sum(batch == layer.problem.batch for layer, batch in reach)
        reaches.append((limit, whole, sum(n is not None for _, n in reach) - whole))
    by_limit = "Largest micro-batch of the first choice"
    return page(
        title,
        SHEETS,
        header(f"Algorithms within a limit: {title}", facts, warnings),
        rendered(
            "survey",
            every=len(survey.layers),
            reaches=reaches,
            tables=[(by_limit, tables[1]), ("Every micro-batch size", tables[0])],
        ),
    )
