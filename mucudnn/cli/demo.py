"""`mucudnn demo`: three demonstrations in a minute, and a page of their results."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from mucudnn.backends import get_backend
from mucudnn.cli.app import ExitCode, bad_input
from mucudnn.cli.options import option
from mucudnn.cli.output import output_file, write_file
from mucudnn.cli.progress import Show, progress_display
from mucudnn.runtime.tuning.tables import Measured
from mucudnn.runtime.tuning.tuner import Tuner

if TYPE_CHECKING:
    from mucudnn.studies.demo import LayerAct, StepAct


class _ActProgress:
    """Progress of an act: its current stage and measurement."""

    def __init__(self, show: Show) -> None:
        self._show = show
        self._at = ""

    def say(self, text: str) -> None:
        self._at = text
        self._show(text, 0, 1)

    def measured(self, at: Measured) -> None:
        self._show(f"{self._at}: {at.algo}({at.batch})", at.done, at.total)


@click.command()
@option(
    "--report FILE = mucudnn-demo.html",
    "Page to write.",
    output_file,
    name="report_file",
)
@click.pass_context
def demo(ctx: click.Context, report_file: str) -> None:
    """Demonstrate mucudnn: a convolution, a training step, a PyTorch model.

    Everything is measured on the spot, in about a minute; nothing is stored.
    """
    from mucudnn.report.notebook import demo_page

    acts: list[LayerAct | StepAct] = []
    interrupted = False
    try:
        for act in _play_acts():
            click.echo(f"   {act.sentence}")
            acts.append(act)
    except KeyboardInterrupt:
        interrupted = True
        click.echo(f"interrupted: {len(acts)} of 3 parts are finished", err=True)
    if acts:
        write_file(report_file, demo_page(acts, get_backend("cpu").device.fingerprint))
        click.echo(f"Report: {report_file}")
    if interrupted:
        ctx.exit(ExitCode.INTERRUPTED)


def _play_acts() -> "Iterator[LayerAct | StepAct]":
    from mucudnn.studies.demo import slow_layer, small_step

    for title, play in (
        ("1. A convolution whose fast algorithms do not fit a limit.", slow_layer),
        ("2. A training step in a third of its memory.", small_step),
    ):
        click.echo(title)
        with progress_display(1) as show, bad_input():
            line = _ActProgress(show)
            tuner = Tuner(cache=None, workspace_limit="8MiB", progress=line.measured)
            act = play(tuner, line.say)
        yield act
    click.echo("3. The same for a PyTorch model.")
    yield from _play_torch_act()


def _play_torch_act() -> "Iterator[StepAct]":
    try:
        from mucudnn.torch.demo import small_torch_step
    except ImportError:
        click.echo(
            "   PyTorch is not installed; with it, a PyTorch model is trained within a "
            "budget, too: pip install '.[torch]'"
        )
        return
    from mucudnn.studies.demo import StepAct

    with progress_display(1) as show, bad_input():
        found = small_torch_step(_ActProgress(show).say)
    yield StepAct(**found)
