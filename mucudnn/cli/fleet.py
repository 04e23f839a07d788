"""`mucudnn fleet`: how a mini-batch is shared out among unequal devices."""

import re
from typing import Any

import click
import cloup

from mucudnn.cli.app import ExitCode, bad_input
from mucudnn.cli.completion import completing
from mucudnn.cli.options import (
    MOST_IMAGES,
    byte_size,
    count,
    flag,
    json_option,
    option,
    real,
    report_option,
    section,
)
from mucudnn.cli.output import publish, refuse_same
from mucudnn.cli.own_code import import_option, network
from mucudnn.cli.training.options import image_option, model_argument, optimizer_option
from mucudnn.errors import PlanningError
from mucudnn.ir.devices import DEVICES
from mucudnn.models import FunctionModel

__all__ = ["fleet"]

_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")


def _batches(text: str | tuple[int, int | None]) -> tuple[int, int | None]:
    """`256`, or `128-512`: the best of a range."""
    if isinstance(text, tuple):
        return text
    found = _RANGE.fullmatch(text.strip())
    if found is None:
        raise click.BadParameter(f"{text!r} is neither a number nor a range: 128-512")
    integer = count(1, MOST_IMAGES)
    least, most = integer(found[1]), found[2] and integer(found[2])
    if most and most < least:
        raise click.BadParameter(f"the range {text!r} ends before it begins")
    return least, most or None


def _names(text: str | tuple[str, ...]) -> tuple[str, ...]:
    if isinstance(text, tuple):
        return text
    return tuple(word.strip() for word in text.split(",") if word.strip())


@cloup.command(
    epilog=f"Ends with 0 where the batch fits, {ExitCode.NOTHING_FITS} where it does "
    "not, 2 where what is asked for cannot be had."
)
@import_option
@model_argument
@section(
    "What",
    option(
        "--batch N",
        "Samples of a step on all devices together; 128-512: the best of a range.",
        _batches,
        default="256",
    ),
    option(
        "--devices NAME,…",
        "Devices, such as 2xh100,p100: a name estimates from published figures, "
        "NAME=RECORDING takes convolutions from there, FILE.json is a table of steps.",
        _names,
        complete=completing(lambda _: DEVICES, several=True),
    ),
    image_option,
    optimizer_option,
)
@section(
    "How",
    option(
        "--at-least N",
        "Samples of every device; with 0 a slow one may be left out.",
        count(0, MOST_IMAGES),
        default=0,
    ),
    option(
        "--link SIZE",
        "Bytes a second of the slowest link, one direction; by default the slowest "
        "device's to its host.",
        byte_size,
    ),
    option("--all-reduce MS", "What summing the gradients takes.", real()),
    option(
        "--memory SIZE",
        "What a step may use on each device, if less than the device has.",
        byte_size,
    ),
    flag(
        "--planned",
        "Shares that need more are also planned within that memory, and kept so where "
        "that is faster than several smaller steps.",
    ),
)
@section("Output", json_option, report_option)
@click.pass_context
def fleet(ctx: click.Context, /, model: str | None, **settings: Any) -> None:
    """Share out a mini-batch among unequal devices, and forecast what that brings."""
    if not settings["devices"]:
        raise click.UsageError("name the devices: --devices k80,p100")
    if model is None:
        raise click.UsageError("name a network, such as resnet18")
    refuse_same({"--json": settings["json_file"], "--report": settings["report_file"]})
    from mucudnn.cli.progress import progress_display
    from mucudnn.report.fleet_text import fleet_tables
    from mucudnn.studies.fleet import Link, study_fleet
    from mucudnn.studies.memory_findings import StepSpec

    least, most = settings["batch"]
    image = settings["image"]
    try:
        with progress_display(1) as show, bad_input():
            made = network(model)
            spec = StepSpec(
                model=made if isinstance(made, FunctionModel) else model,
                batch=least,
                image=image[0] if image is not None and len(image) == 1 else image,
                optimizer=settings["optimizer"],
            )
            found = study_fleet(
                spec,
                settings["devices"],
                most=most,
                link=Link(settings["link"] or None, settings["all_reduce"]),
                at_least=settings["at_least"],
                memory=settings["memory"],
                planned=settings["planned"],
                progress=show,
            )
    except PlanningError as e:
        click.echo(f"mucudnn: error: {e}", err=True)
        ctx.exit(ExitCode.NOTHING_FITS)

    def page() -> str:
        from mucudnn.report.pages.fleet import fleet_report

        return fleet_report(found)

    publish(settings, found.to_json, lambda: fleet_tables(found), page)
