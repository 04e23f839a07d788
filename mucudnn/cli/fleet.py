"""`mucudnn fleet`: division of a mini-batch among heterogeneous devices."""

import re
from typing import Any

import click
import cloup

from mucudnn.cli import options as opt
from mucudnn.cli.app import ExitCode, bad_input
from mucudnn.cli.output import publish, refuse_same
from mucudnn.cli.own_code import import_option, network
from mucudnn.cli.progress import progress_display
from mucudnn.errors import PlanningError
from mucudnn.ir.devices import DEVICES
from mucudnn.models import FunctionModel

_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")


def _parse_batches(text: str) -> tuple[int, int | None]:
    """Parse `256`, or `128-512` for the best of a range."""
    found = _RANGE.fullmatch(text.strip())
    if found is None:
        raise click.BadParameter(f"{text!r} is neither a number nor a range: 128-512")
    integer = opt.count(1, opt.MOST_IMAGES)
    least, most = integer(found[1]), found[2] and integer(found[2])
    if most and most < least:
        raise click.BadParameter(f"the range {text!r} ends before it begins")
    return least, most or None


@cloup.command(
    epilog=f"Exit code: 0 if the batch fits, {ExitCode.NOTHING_FITS} if it does not, "
    "2 on invalid input."
)
@import_option
@opt.model_argument
@opt.section(
    "What",
    opt.option(
        "--batch N = 256",
        "Samples of a step on all devices together; 128-512 finds the best of a range.",
        _parse_batches,
    ),
    opt.option(
        "--devices NAME,…",
        "Devices, such as 2xh100,p100: NAME is estimated from published figures, "
        "NAME=RECORDING uses recorded convolutions, FILE.json is a table of steps.",
        complete=opt.completing(lambda _: DEVICES, several=True),
    ),
    opt.image_option,
    opt.optimizer_option,
)
@opt.section(
    "How",
    opt.option(
        "--at-least N = 0",
        "Minimum samples of each device; with 0, slow devices may be left out.",
        opt.count(0, opt.MOST_IMAGES),
    ),
    opt.option(
        "--link SIZE",
        "One-way bytes per second of the slowest link; by default that of the slowest "
        "device to its host.",
        opt.byte_rate,
    ),
    opt.option("--all-reduce MS", "Time of the all-reduce of gradients.", opt.real()),
    opt.option(
        "--memory SIZE", "Memory of a step on each device, if less than the device has."
    ),
    opt.flag(
        "--planned",
        "Also plan shares that need more memory by offload and recomputation, if that "
        "is faster than several smaller steps.",
    ),
)
@opt.section("Output", opt.json_option, opt.report_option)
@click.pass_context
def fleet(ctx: click.Context, /, model: str | None, **settings: Any) -> None:
    """Divide a mini-batch among unequal devices, and predict the speed-up."""
    words = (settings["devices"] or "").split(",")
    devices = [device for word in words if (device := word.strip())]
    if not devices:
        raise click.UsageError("give the devices, such as --devices k80,p100")
    if model is None:
        raise click.UsageError("name a network, such as resnet18")
    refuse_same({"--json": settings["json_file"], "--report": settings["report_file"]})
    from mucudnn.report.fleet import fleet_report, fleet_tables
    from mucudnn.studies.fleet import Link, study_fleet
    from mucudnn.studies.memory_results import StepSpec

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
                devices,
                most=most,
                link=Link(settings["link"], settings["all_reduce"]),
                progress=show,
                **opt.chosen(settings, "at_least memory planned"),
            )
    except PlanningError as e:
        click.echo(f"mucudnn: error: {e}", err=True)
        ctx.exit(ExitCode.NOTHING_FITS)

    publish(settings, found, fleet_tables, fleet_report)
