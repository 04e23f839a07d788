"""`mucudnn tune`: planned against undivided, for a suite, a file or a problem."""

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from mucudnn.cli.app import bad_input
from mucudnn.cli.options import (
    LayerQuery,
    byte_size,
    byte_sizes,
    json_option,
    layer_options,
    open_cache,
    tuner_options,
)
from mucudnn.cli.output import emit, output_file, write_file
from mucudnn.suites import SUITES, load_suite

if TYPE_CHECKING:
    from mucudnn.runtime.comparison import Comparison
    from mucudnn.runtime.tuner import Tuner

__all__ = ["make_tuner", "tune"]


@click.command()
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
    style: str,
    json_file: str | None,
    report_file: str | None,
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
    query = LayerQuery(sources, problems, directions, batch, dtype, layout)
    layers = query.layers()
    if style == "deepbench":
        from mucudnn.report.deepbench import check_deepbench

        with bad_input():
            check_deepbench(layer.problem for layer in layers)
    from mucudnn.cli.progress import Display
    from mucudnn.runtime.comparison import (
        ComparisonInterrupted,
        compare,
        in_directions,
    )

    interrupted = False
    with Display(verbose=verbose) as display:
        tuner = make_tuner(settings, progress=display.measured)
        try:
            comparison = compare(
                tuner,
                in_directions(layers, directions),
                limits or (tuner.workspace_limit,),
                planner=settings["planner"] or "workspace_reuse",
                total_workspace=total_workspace or tuner.total_workspace,
                time_limit_s=time_limit,
                progress=display.advance,
            )
        except ComparisonInterrupted as e:
            comparison, interrupted = e.comparison, True
        finally:
            tuner.cache.close()
    _show(comparison, style, json_file)
    if report_file is not None:
        from mucudnn.report.html import html_report

        write_file(report_file, html_report(comparison, query.title))
    if interrupted:
        ctx.exit(130)


def make_tuner(settings: Mapping[str, Any], **more: Any) -> "Tuner":
    """A tuner from the options that were given; the environment fills in the rest."""
    from mucudnn.runtime.tuner import Tuner

    names = ("backend", "batch_policy", "planner", "memory_limit", "workspace_limit")
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
