"""`mucudnn tune`: planned against undivided, or a survey; `explain`: why a plan."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click
import cloup

from mucudnn.cli import options as opt
from mucudnn.cli.app import BadInputError, ExitCode, bad_input
from mucudnn.cli.layers import (
    complete_source,
    layer_names,
    layer_options,
    layers_of,
    title_of,
)
from mucudnn.cli.output import (
    Record,
    emit,
    publish,
    recording,
    recording_file,
    refuse_same,
)
from mucudnn.cli.own_code import import_option
from mucudnn.cli.progress import LayerWords, progress_display
from mucudnn.codecs import encode_fields
from mucudnn.report.text import (
    DIRECTIONS,
    check_deepbench,
    comparison_tables,
    deepbench_tables,
    problem_text,
)
from mucudnn.runtime.tuning.tuner import Tuner
from mucudnn.runtime.tuning.workers import process_pool
from mucudnn.studies.algorithms import survey_algorithms
from mucudnn.studies.convolutions import (
    Comparison,
    StudyInterrupted,
    compare,
    in_directions,
)
from mucudnn.suites import SUITES, Layer, load_suite

_DESCRIBED = "cuda"
"""Backend that can list algorithms from a description of a device."""

_MOST_WORKERS = 256


@cloup.command()
@import_option
@click.argument(
    "sources", metavar="[SUITE | FILE.csv]...", nargs=-1, shell_complete=complete_source
)
@layer_options(default_directions="all")
@opt.section(
    "Limits",
    opt.option(
        "--workspace-limit SIZE,…",
        "Workspace of a convolution; several limits are compared one by one.",
        opt.byte_sizes,
        name="limits",
    ),
    opt.option(
        "--total-workspace SIZE", "Also divide this workspace among all convolutions."
    ),
    opt.limit_options,
)
@opt.section(
    "How",
    opt.measuring_options,
    opt.option(
        "--workers N",
        "Measure in N processes at once. They share this machine's cores, so use this "
        "with other devices or recordings.",
        opt.count(1, _MOST_WORKERS),
    ),
)
@opt.section(
    "Without measuring",
    opt.flag("--plan-only", "Measure nothing: list all algorithms and those that fit."),
    opt.option(
        "--device FILE|NAME",
        "With --plan-only and --backend cuda: use a description of a device.",
    ),
)
@opt.section(
    "Output",
    opt.option(
        "--format [table|deepbench] = table",
        "Format of the printed results.",
        name="style",
    ),
    opt.json_option,
    opt.report_option,
    opt.file_option(
        "record",
        "Write all measurements, for --backend recorded:FILE; .gz is compressed. "
        "Slow algorithms are then measured, too.",
        recording_file,
    ),
    opt.flag("--verbose -v", "Print a line per layer outside a terminal."),
)
@opt.flag("--list listing", "List the suites.")
@click.pass_context
def tune(ctx: click.Context, /, sources: tuple[str, ...], **settings: Any) -> None:
    """Measure convolutions, split their mini-batches, compare with undivided calls.

    Undivided is the fastest single call within the same workspace limit. Both times of
    a speed-up are measured in one run.
    """
    if settings["listing"]:
        _list_suites(settings["json_file"])
        return
    # Refuse what cannot work before anything is measured.
    files = ("json", "report", "record")
    refuse_same({f"--{name}": settings[f"{name}_file"] for name in files})
    found = layers_of(sources, settings)
    layers = in_directions(found, settings["directions"])
    device = settings["device"]
    settings["backend"] = _with_device(settings["backend"], device)
    if settings["plan_only"]:
        asked = {**settings, "style": settings["style"] == "deepbench"}
        given = [option for name, option in _MEASURING.items() if asked[name]]
        if given:
            raise BadInputError(
                "--plan-only measures nothing and cannot be combined with "
                f"{', '.join(given)}"
            )
        alone: Any = {"benchmark_backends": (), "total_workspace": None}
        tuner = opt.make_tuner(settings | {"cache_path": "none"}, **alone)
        take_survey(ctx, tuner, layers, settings, title_of(sources, settings))
        return
    if device is not None:
        raise BadInputError(
            f"--device {device} describes a device and measures nothing: add "
            "--plan-only, or run without --device where the device is"
        )
    from mucudnn.report.comparison import html_report

    if settings["style"] == "deepbench":
        with bad_input():
            check_deepbench(layer.problem for layer in layers)
    comparison, record = _compare(layers, settings)
    # Write results before the exit code reports an interruption.
    title, tables = title_of(sources, settings), comparison_tables
    if settings["style"] == "deepbench":
        tables = deepbench_tables
    publish(settings, comparison, tables, lambda found: html_report(found, title))
    if len(comparison.layers) < comparison.asked:
        if record.complaint is not None:
            click.echo(f"mucudnn: warning: {record.complaint}", err=True)
        ctx.exit(ExitCode.INTERRUPTED)
    if record.complaint is not None:
        raise BadInputError(record.complaint)


def _with_device(backend: str, device: str | None) -> str:
    """Return the backend with a description of a device, if one is given."""
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
    layers: Sequence[Layer], settings: Mapping[str, Any]
) -> tuple[Comparison, Record]:
    """Measure with progress; Ctrl-C ends with the results so far."""
    number = settings["workers"]
    with (
        progress_display(
            len(layers), lines=settings["verbose"], limit_s=settings["time_limit"]
        ) as show,
        nullcontext() if number is None else process_pool(number) as pool,
    ):
        shown = LayerWords(show)
        if settings["record_file"] is not None and settings["batch_policy"] != "all":
            # A replay cannot add algorithms, so measure every one.
            settings = {**settings, "exhaustive": True}
        tuner = opt.make_tuner(settings, progress=shown.measured, executor=pool)
        with tuner.cache, recording(tuner, layers, settings["record_file"]) as record:
            try:
                comparison = compare(
                    tuner,
                    layers,
                    settings["limits"] or (tuner.workspace_limit,),
                    planner=settings["planner"] or "workspace_reuse",
                    total_workspace=(
                        settings["total_workspace"] or tuner.total_workspace
                    ),
                    time_limit_s=settings["time_limit"],
                    progress=shown.advance,
                )
            except StudyInterrupted as e:
                comparison = e.found
            record.tables += [layer.table for layer in comparison.layers]
    return comparison, record


def _list_suites(json_file: str | None) -> None:
    suites = [
        {"name": name, "description": text, "layers": len(load_suite(name))}
        for name, text in SUITES.items()
    ]

    def show() -> None:
        for s in suites:
            click.echo(f"{s['name']:<20} {s['layers']:>4} layers  {s['description']}")

    emit(json_file, {"suites": suites}, show)


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


def take_survey(
    ctx: click.Context,
    tuner: Tuner,
    layers: Sequence[Layer],
    settings: Mapping[str, Any],
    title: str,
) -> None:
    """List all algorithms and print them; Ctrl-C prints those found so far."""
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
        except StudyInterrupted as e:
            found, interrupted = e.found, True
    from mucudnn.report.survey import survey_report, survey_tables

    publish(settings, found, survey_tables, lambda found: survey_report(found, title))
    if interrupted:
        ctx.exit(ExitCode.INTERRUPTED)


# The reasons for a convolution's plan.


@cloup.command()
@import_option
@click.argument(
    "source",
    metavar="[SUITE | FILE.csv]",
    required=False,
    shell_complete=complete_source,
)
@click.argument(
    "name",
    metavar="[LAYER]",
    required=False,
    shell_complete=opt.completing(layer_names),
)
@layer_options(default_directions="forward")
@opt.section("Limits", opt.workspace_option, opt.limit_options)
@opt.section("How", opt.measuring_options)
@opt.section("Output", opt.json_option)
def explain(*, source: str | None, name: str | None, **settings: Any) -> None:
    """Plan a layer of a suite (its name or number), or a problem, and explain why."""
    found = layers_of(() if source is None else (source,), settings)
    layers = found if name is None else (_find_layer(found, name),)
    plans = []
    asked = in_directions(layers, settings["directions"])
    # Every convolution gets an equal share of the time limit.
    limit_s = settings["time_limit"]
    share = None if limit_s is None else limit_s / len(asked)
    with progress_display(len(asked), limit_s=limit_s) as display:
        shown = LayerWords(display)
        tuner = opt.make_tuner(settings, progress=shown.measured)
        with tuner.cache:
            for i, layer in enumerate(asked):
                shown.begin(layer, i, len(asked))
                tuner.measure(layer.problem, time_limit_s=share)
                (plan,) = tuner.plan([layer.problem])
                plans.append((layer, plan, tuner.explain(plan)))

    def show() -> None:
        for layer, _, text in plans:
            way = DIRECTIONS[layer.problem.direction]
            click.echo(f"{layer.name}, {way}: {problem_text(layer.problem)}")
            click.echo(f"{text.rstrip()}\n")

    data = {
        "backend": tuner.backend.name,
        "fingerprint": tuner.backend.device.fingerprint,
        "numerics": tuner.numerics.words,
        "workspace_limit": tuner.workspace_limit,
        "layers": [
            {
                "name": layer.name,
                "direction": layer.problem.direction.value,
                "plan": encode_fields(plan),
                "text": text,
            }
            for layer, plan, text in plans
        ],
    }
    emit(settings["json_file"], data, show)


def _find_layer(layers: tuple[Layer, ...], name: str) -> Layer:
    by_number = {str(i): layer for i, layer in enumerate(layers, start=1)}
    by_name = {layer.name: layer for layer in layers}
    layer = by_name.get(name) or by_number.get(name)
    if layer is None:
        raise BadInputError(
            f"no layer {name!r}; choose a number from 1 to {len(layers)} or one of: "
            f"{', '.join(by_name)}"
        )
    return layer
