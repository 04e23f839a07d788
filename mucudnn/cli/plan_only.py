"""`mucudnn tune --plan-only`: list a library's algorithms without measuring."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from mucudnn.cli.app import BadInputError, ExitCode
from mucudnn.cli.output import publish
from mucudnn.suites import Layer

if TYPE_CHECKING:
    from mucudnn.runtime.tuning.tuner import Tuner

__all__ = ["refuse_measuring", "take_survey"]

_MEASURING = {
    "record_file": "--record",
    "style": "--format deepbench",
    "total_workspace": "--total-workspace",
    "planner": "--planner",
    "memory_limit": "--memory-limit",
    "time_limit": "--time-limit",
    "exhaustive": "--exhaustive",
    "workers": "--workers",
}
"""Options that require measurements: parameter -> spelling."""


def refuse_measuring(settings: Mapping[str, Any]) -> None:
    """Refuse options that require measurements."""
    asked = {**settings, "style": settings["style"] == "deepbench"}
    given = [option for name, option in _MEASURING.items() if asked[name]]
    if given:
        raise BadInputError(
            f"--plan-only measures nothing and so takes no {', no '.join(given)}"
        )


def take_survey(
    ctx: click.Context,
    tuner: "Tuner",
    layers: Sequence[Layer],
    settings: Mapping[str, Any],
    title: str,
) -> None:
    """List all algorithms and print them; Ctrl-C prints those found so far."""
    from mucudnn.cli.progress import progress_display
    from mucudnn.cli.progress_words import LayerWords
    from mucudnn.studies.algorithm_survey import SurveyInterrupted, survey_algorithms

    interrupted = False
    with progress_display(len(layers), lines=settings["verbose"]) as show:
        try:
            found = survey_algorithms(
                tuner.backend,
                layers,
                tuner.batch_policy,
                settings["limits"] or (tuner.workspace_limit,),
                numerics=tuner.numerics,
                progress=LayerWords(show).surveyed,
            )
        except SurveyInterrupted as e:
            found, interrupted = e.survey, True
    from mucudnn.report.algorithm_survey import survey_tables

    def page() -> str:
        from mucudnn.report.pages.survey import survey_report

        return survey_report(found, title)

    publish(settings, found.to_json, lambda: survey_tables(found), page)
    if interrupted:
        ctx.exit(ExitCode.INTERRUPTED)
