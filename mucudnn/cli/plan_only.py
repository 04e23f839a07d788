"""`mucudnn tune --plan-only`: what a library offers, with nothing measured."""

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from mucudnn.cli.app import BadInputError
from mucudnn.cli.exit_codes import ExitCode
from mucudnn.cli.output import emit
from mucudnn.suites import Layer

if TYPE_CHECKING:
    from mucudnn.runtime.tuning.tuner import Tuner
    from mucudnn.studies.algorithm_survey import AlgorithmSurvey

__all__ = ["refuse_measuring", "take_survey"]


def refuse_measuring(options: Mapping[str, object]) -> None:
    """Complain about options that make sense only with measurements.

    Args:
        options: What was given for each, by its spelling; empty if it was not given.

    Raises:
        BadInputError: One was given; names all of them.
    """
    given = [name for name, value in options.items() if value]
    if given:
        raise BadInputError(
            f"--plan-only measures nothing and so takes no {', no '.join(given)}"
        )


def take_survey(
    ctx: click.Context,
    tuner: "Tuner",
    layers: Sequence[Layer],
    limits: Sequence[int],
    *,
    json_file: str | None,
    verbose: bool,
) -> None:
    """Ask for all algorithms and show them; Ctrl-C shows what is done."""
    from mucudnn.cli.layer_progress import LayerProgress
    from mucudnn.cli.progress import progress_display
    from mucudnn.studies.algorithm_survey import SurveyInterrupted, survey_algorithms

    interrupted = False
    with progress_display(len(layers), lines=verbose) as show:
        try:
            found = survey_algorithms(
                tuner.backend,
                layers,
                tuner.batch_policy,
                limits or (tuner.workspace_limit,),
                numerics=tuner.numerics,
                progress=LayerProgress(show).surveyed,
            )
        except SurveyInterrupted as e:
            found, interrupted = e.survey, True
    _show(found, json_file)
    if interrupted:
        ctx.exit(ExitCode.INTERRUPTED)


def _show(found: "AlgorithmSurvey", json_file: str | None) -> None:
    from mucudnn.report.algorithm_survey import survey_tables
    from mucudnn.report.text import write_tables

    data: Any = found.to_json()
    emit(json_file, data, lambda: write_tables(survey_tables(found), sys.stdout))
