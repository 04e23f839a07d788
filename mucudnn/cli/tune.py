"""`mucudnn tune`: planned against undivided, for a suite, a file or a problem."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mucudnn.cli.app import BadInputError, bad_input
from mucudnn.cli.exit_codes import ExitCode
from mucudnn.cli.options import (
    LayerQuery,
    byte_size,
    byte_sizes,
    json_option,
    layer_options,
    open_cache,
    tuner_options,
)
from mucudnn.cli.output import (
    emit,
    output_file,
    recording_file,
    refuse_same,
    save,
    write_file,
)
from mucudnn.cli.own_code import import_option
from mucudnn.cli.plan_only import refuse_measuring, take_survey
from mucudnn.cli.recording import Record, recording
from mucudnn.suites import SUITES, Layer, load_suite

if TYPE_CHECKING:
    from mucudnn.runtime.tuning.tuner import Tuner
    from mucudnn.studies.conv_comparison import Comparison

__all__ = ["make_tuner", "tune"]

_DESCRIBED = "cuda"
"""The backend that can list algorithms from a description of a device."""


@click.command()
@import_option
@click.argument("sources", metavar="[SUITE | FILE.csv]...", nargs=-1)
@layer_options(default_directions="all")
@click.option(
    "--workspace-limit",
    "limits",
    type=byte_sizes,
    metavar="SIZE,…",
    help="Bytes a convolution may use; several make one comparison each.",
)
@click.option(
    "--total-workspace",
    type=byte_size,
    metavar="SIZE",
    help="Also divide this many bytes among all convolutions.",
)
@tuner_options
@click.option(
    "--plan-only",
    is_flag=True,
    help="Measure nothing: list which algorithms there are and which fit.",
)
@click.option(
    "--device",
    metavar="FILE|NAME",
    help="With --plan-only and --backend cuda: a description of a device instead.",
)
@click.option(
    "--format",
    "style",
    type=click.Choice(["table", "deepbench"]),
    default="table",
    show_default=True,
    help="What to print.",
)
@json_option
@click.option(
    "--report",
    "report_file",
    type=output_file,
    metavar="FILE",
    help="Write one HTML page with charts.",
)
@click.option(
    "--record",
    "record_file",
    type=recording_file,
    metavar="FILE",
    help="Write what was measured, for --backend recorded:FILE; .gz is compressed.",
)
@click.option(
    "--verbose", "-v", is_flag=True, help="A line a layer without a terminal."
)
@click.option("--list", "listing", is_flag=True, help="List the suites.")
@click.pass_context
def tune(
    ctx: click.Context,
    /,
    sources: tuple[str, ...],
    problems: tuple[str, ...],
    directions: tuple[Any, ...],
    batch: int | None,
    dtype: str | None,
    layout: str | None,
    limits: tuple[int, ...] | None,
    total_workspace: int | None,
    time_limit: float | None,
    plan_only: bool,
    device: str | None,
    style: str,
    json_file: str | None,
    report_file: str | None,
    record_file: str | None,
    verbose: bool,
    listing: bool,
    **settings: Any,
) -> None:
    """Measure convolutions, divide their mini-batches, compare with undivided.

    Undivided is the fastest single call within the same workspace limit. Both times of
    a speed-up are measured in one run.
    """
    if listing:
        _list_suites(json_file)
        return
    refuse_same({"--json": json_file, "--report": report_file, "--record": record_file})
    query = LayerQuery(sources, problems, directions, batch, dtype, layout)
    layers = _in_directions(query)
    settings["backend"] = _with_device(settings["backend"], device)
    if plan_only:
        refuse_measuring(
            {
                "--report": report_file,
                "--record": record_file,
                "--format deepbench": style == "deepbench",
                "--total-workspace": total_workspace,
                "--planner": settings["planner"],
                "--memory-limit": settings["memory_limit"],
                "--time-limit": time_limit,
                "--exhaustive": settings["exhaustive"],
            }
        )
        alone: Any = {"benchmark_backends": (), "total_workspace": None}
        tuner = make_tuner(settings | {"cache_path": "none"}, **alone)
        take_survey(
            ctx, tuner, layers, limits or (), json_file=json_file, verbose=verbose
        )
        return
    if device is not None:
        raise BadInputError(
            f"--device {device} describes a device and measures nothing: add "
            "--plan-only, or run without --device where the device is"
        )
    if style == "deepbench":
        from mucudnn.report.deepbench import check_deepbench

        with bad_input():
            check_deepbench(layer.problem for layer in layers)
    comparison, record = _compare(
        layers,
        settings,
        limits,
        total_workspace=total_workspace,
        time_limit=time_limit,
        record_file=record_file,
        verbose=verbose,
    )
    save(
        lambda: _show(comparison, style, json_file),
        lambda: _write_report(report_file, comparison, query.title),
    )
    if len(comparison.layers) < comparison.asked:
        if record.complaint is not None:
            click.echo(f"mucudnn: warning: {record.complaint}", err=True)
        ctx.exit(ExitCode.INTERRUPTED)
    if record.complaint is not None:
        raise BadInputError(record.complaint)


def _in_directions(query: LayerQuery) -> Sequence[Layer]:
    layers = query.layers()
    from mucudnn.studies.conv_comparison import in_directions

    return in_directions(layers, query.directions)


def _with_device(backend: str, device: str | None) -> str:
    """The backend over a description of a device, where one is given.

    Raises:
        BadInputError: The backend takes none, or there is no such file.
    """
    if device is None:
        return backend
    if backend != _DESCRIBED:
        raise BadInputError(
            f"--device {device} needs --backend {_DESCRIBED}, not --backend {backend}"
        )
    named = Path(device).name == device and Path(device).suffix != ".json"
    if not named and not Path(device).is_file():
        raise BadInputError(f"--device {device}: there is no such file")
    return f"{backend}:{device}"


def _compare(
    layers: Sequence[Layer],
    settings: Mapping[str, Any],
    limits: tuple[int, ...] | None,
    *,
    total_workspace: int | None,
    time_limit: float | None,
    record_file: str | None,
    verbose: bool,
) -> tuple["Comparison", Record]:
    """Measure with progress; Ctrl-C ends with what is done."""
    from mucudnn.cli.layer_progress import LayerProgress
    from mucudnn.cli.progress import progress_display
    from mucudnn.studies.conv_comparison import ComparisonInterrupted, compare

    with progress_display(len(layers), lines=verbose) as show:
        shown = LayerProgress(show)
        tuner = make_tuner(settings, progress=shown.measured)
        with tuner.cache, recording(tuner, layers, record_file) as record:
            try:
                comparison = compare(
                    tuner,
                    layers,
                    limits or (tuner.workspace_limit,),
                    planner=settings["planner"] or "workspace_reuse",
                    total_workspace=total_workspace or tuner.total_workspace,
                    time_limit_s=time_limit,
                    progress=shown.advance,
                )
            except ComparisonInterrupted as e:
                comparison = e.comparison
            record.tables += [layer.table for layer in comparison.layers]
    return comparison, record


def make_tuner(settings: Mapping[str, Any], **more: Any) -> "Tuner":
    """A tuner from the options that were given; the environment fills in the rest."""
    from mucudnn.runtime.tuning.tuner import Tuner

    names = (
        *("backend", "batch_policy", "planner", "numerics"),
        *("memory_limit", "workspace_limit"),
    )
    chosen = {name: settings.get(name) for name in names}
    given = {name: value for name, value in chosen.items() if value is not None}
    if settings["exhaustive"]:
        given["prune"] = False
    with bad_input():
        if settings["cache_path"] is not None:
            given["cache"] = open_cache(settings["cache_path"])
        return Tuner.from_env(**given, **more)


def _show(comparison: "Comparison", style: str, json_file: str | None) -> None:
    from mucudnn.report.deepbench import deepbench_tables
    from mucudnn.report.text import comparison_tables, write_tables

    def show() -> None:
        tables = deepbench_tables if style == "deepbench" else comparison_tables
        write_tables(tables(comparison), sys.stdout)

    emit(json_file, comparison.to_json(), show)


def _write_report(file: str | None, comparison: "Comparison", title: str) -> None:
    if file is not None:
        from mucudnn.report.html import html_report

        write_file(file, html_report(comparison, title))


def _list_suites(json_file: str | None) -> None:
    sizes = {name: len(load_suite(name)) for name in SUITES}
    data = {
        "suites": [
            {"name": name, "description": text, "layers": sizes[name]}
            for name, text in SUITES.items()
        ]
    }

    def show() -> None:
        for name, text in SUITES.items():
            click.echo(f"{name:<20} {sizes[name]:>4} layers  {text}")

    emit(json_file, data, show)
