"""`mucudnn memory`: what a training step needs, and what it costs to need less."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mucudnn.cli.app import BadInputError, bad_input
from mucudnn.cli.exit_codes import ExitCode
from mucudnn.cli.numbers import MOST_IMAGES, count
from mucudnn.cli.options import (
    byte_size,
    cache_option,
    json_option,
    open_cache,
    refuse_foreign_file,
)
from mucudnn.cli.output import emit, output_file, refuse_same, save, write_file
from mucudnn.cli.own_code import import_option, network
from mucudnn.cli.strategy_options import (
    StrategyOption,
    Table,
    names_of_all,
    optimizers,
    orders,
    policies,
    schedulers,
)
from mucudnn.cli.train_options import image_size, list_models
from mucudnn.ir.devices import DEVICES
from mucudnn.ir.sizes import exact_bytes
from mucudnn.models import FunctionModel

if TYPE_CHECKING:
    from mucudnn.cli.progress import Show
    from mucudnn.ir.profile import Profile
    from mucudnn.passes.planning.evaluate import StepPlan
    from mucudnn.passes.planning.place_step import PlacedStep
    from mucudnn.studies.memory_study import MemoryStudy, StepSpec

__all__ = ["memory"]

_CPU = "cpu"
_BATCH = 32
_CPU_BATCH = 4
_ALL = "all"

_OF_BEST = ("trace_file", "snapshot_file")
"""Options that name files for the best step."""

_CODES = (
    f"Ends with 0 where a technique fits, {ExitCode.NOTHING_FITS} where none does, 2 "
    f"where what is asked for cannot be had, {ExitCode.INTERRUPTED} after Ctrl-C."
)


@click.command(epilog=_CODES)
@import_option
@click.argument("model", metavar="[MODEL | FILE.py:FUNCTION]", required=False)
@click.option(
    "--batch",
    type=count(1, MOST_IMAGES),
    help=f"Images in a step; {_BATCH} by default, {_CPU_BATCH} on the CPU.",
)
@click.option(
    "--image",
    type=image_size,
    metavar="SIZE",
    help="Size of an image, such as 224 or 3x64x96; by default the network's own.",
)
@click.option(
    "--budget",
    type=byte_size,
    metavar="SIZE",
    help="Memory for everything; by default what the device has, and a curve of "
    "smaller budgets.",
)
@click.option(
    "--policy",
    "policies",
    cls=StrategyOption,
    table=policies,
    several=_ALL,
    default=_ALL,
    show_default=True,
    help="What may be kept, offloaded or computed again.",
)
@click.option(
    "--scheduler",
    "schedulers",
    cls=StrategyOption,
    table=schedulers,
    several=_ALL,
    default=(),
    help="When copies run, or all; by default the policy's own.",
)
@click.option(
    "--device",
    type=click.Choice([_CPU, *DEVICES]),
    default="h200",
    show_default=True,
    help="cpu is measured; all others are estimated from published figures.",
)
@click.option(
    "--recording",
    "recordings",
    multiple=True,
    metavar="FILE",
    help="Measurements of that device, as `tune --record` writes them: convolutions "
    "that they know are not estimated. Repeatable.",
)
@click.option(
    "--optimizer",
    cls=StrategyOption,
    table=optimizers,
    default="momentum",
    show_default=True,
    help="How weights change.",
)
@click.option(
    "--order",
    cls=StrategyOption,
    table=orders,
    default="builder",
    show_default=True,
    help="In which order nodes run.",
)
@click.option(
    "--curve", is_flag=True, help="Also plan for several budgets, when one is given."
)
@click.option(
    "--max-batch", is_flag=True, help="Look for the largest batch within the budget."
)
@click.option(
    "--min-budget", is_flag=True, help="Look for the least budget of every policy."
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
    "--trace",
    "trace_file",
    type=output_file,
    metavar="FILE",
    help="Write the best plan's step for Perfetto or chrome://tracing.",
)
@click.option(
    "--snapshot",
    "snapshot_file",
    type=output_file,
    metavar="FILE",
    help="Write its memory for PyTorch's memory_viz, a pickle.",
)
@cache_option
@click.option("--list", "listing", is_flag=True, help="List the networks.")
@click.pass_context
def memory(
    ctx: click.Context,
    /,
    model: str | None,
    *,
    json_file: str | None,
    listing: bool,
    **settings: Any,
) -> None:
    """Plan a training step under a budget by every technique, and compare them."""
    if listing:
        list_models(json_file)
        return
    if model is None:
        raise BadInputError("name a network; --list lists them")
    files = ("report", "trace", "snapshot")
    refuse_same(
        {"--json": json_file, **{f"--{f}": settings[f"{f}_file"] for f in files}}
    )
    if settings["snapshot_file"] == "-":
        raise BadInputError("a snapshot is a pickle: name a file, not -")
    found = _study(model, settings)
    from mucudnn.report.memory_text import memory_tables
    from mucudnn.report.text import write_tables

    save(
        lambda: emit(
            json_file,
            found.to_json(),
            lambda: write_tables(memory_tables(found), sys.stdout),
        ),
        lambda: _write_files(found, settings),
    )
    if found.interrupted:
        ctx.exit(ExitCode.INTERRUPTED)
    asked_for_less = settings["min_budget"] or any(found.max_batch.values())
    if found.best is None and not asked_for_less:
        click.echo(f"mucudnn: error: {_refusal(found, settings)}", err=True)
        ctx.exit(ExitCode.NOTHING_FITS)


def _refusal(found: "MemoryStudy", settings: dict[str, Any]) -> str:
    """That nothing fits, and what would work."""
    words = f"no policy fits {exact_bytes(found.budget)}"
    if found.minimum is not None:
        words += f"; the least budget that works is {exact_bytes(found.minimum)}"
    names = [settings[option] for option in _OF_BEST if settings[option] is not None]
    return f"{words}; nothing is written to {', '.join(names)}" if names else words


def _study(model: str, settings: dict[str, Any]) -> "MemoryStudy":
    from mucudnn.cli.progress import progress_display
    from mucudnn.passes.planning.plan_step import PLANNED
    from mucudnn.studies.memory_study import StepSpec, study_memory

    device, budget, image = (settings[n] for n in ("device", "budget", "image"))
    if settings["cache_path"] not in (None, "none"):
        refuse_foreign_file(Path(settings["cache_path"]))
    if device == _CPU and settings["recordings"]:
        raise BadInputError(
            f"--recording {settings['recordings'][0]} is for a device that is "
            f"estimated, and --device {_CPU} is measured"
        )
    asked_more = settings["max_batch"] or settings["min_budget"]
    with bad_input():
        made = network(model)
    spec = StepSpec(
        model=made if isinstance(made, FunctionModel) else model,
        batch=settings["batch"] or (_CPU_BATCH if device == _CPU else _BATCH),
        image=image[0] if image is not None and len(image) == 1 else image,
        optimizer=settings["optimizer"],
        order=settings["order"],
        device=device,
    )
    # The search takes longest: what Ctrl-C keeps comes before it.
    names = _chosen(settings["policies"], policies)
    if _ALL in settings["policies"]:
        names = tuple(sorted(names, key=lambda name: name == PLANNED))
    with progress_display(1) as show, bad_input():
        return study_memory(
            spec,
            policies=names,
            schedulers=_chosen(settings["schedulers"], schedulers),
            budget=budget,
            curve=settings["curve"] or (budget is None and not asked_more),
            max_batch=settings["max_batch"],
            min_budget=settings["min_budget"],
            profile=_measured(spec, settings["cache_path"], show),
            recordings=settings["recordings"],
            progress=show,
        )


def _chosen(asked: tuple[str, ...], table: Table) -> tuple[str, ...]:
    """The names that were asked for, all that are of use for `all`."""
    return names_of_all(table) if _ALL in asked else asked


def _measured(
    spec: "StepSpec", cache_path: str | None, progress: "Show"
) -> "Profile | None":
    """A profile of the step on the CPU; None for a device that is estimated."""
    if spec.device != _CPU:
        return None
    from mucudnn.runtime.training.profiler import profile
    from mucudnn.runtime.tuning.tuner import Tuner

    cache: dict[str, Any] = {}
    if cache_path is not None:
        cache["cache"] = open_cache(cache_path)
    graph = spec.graph()
    tuner = Tuner.from_env(backend=_CPU, **cache)
    with tuner.cache:
        try:
            return profile(
                tuner,
                graph,
                progress=lambda name, done, total: progress(
                    f"measuring {name}", done, total
                ),
            )
        finally:
            tuner.close()


def _write_files(found: "MemoryStudy", settings: dict[str, Any]) -> None:
    """The report, the trace and the snapshot, where asked for.

    Raises:
        BadInputError: There are no places for the step to show.
    """
    if settings["report_file"] is not None:
        from mucudnn.report.memory_html import memory_report

        write_file(settings["report_file"], memory_report(found))
    if found.best is None or found.best.plan is None:
        return
    if settings["trace_file"] is not None:
        _write_trace(settings["trace_file"], found.best.plan)
    path = settings["snapshot_file"]
    if path is not None:
        if found.placed is None:
            why = found.unplaced or "interrupted before places were looked for"
            raise BadInputError(f"--snapshot {path}: {why}")
        _write_snapshot(path, found.placed)


def _write_trace(path: str, plan: "StepPlan") -> None:
    from mucudnn.report.trace import trace_json

    write_file(path, trace_json(plan))


def _write_snapshot(path: str, placed: "PlacedStep") -> None:
    from mucudnn.report.snapshot import snapshot_bytes

    write_file(path, snapshot_bytes(placed))
