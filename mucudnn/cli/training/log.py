"""`mucudnn train --log FILE --tensorboard DIR`: write logs during training."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from mucudnn.cli.app import BadInputError
from mucudnn.cli.options import parsed
from mucudnn.cli.output import STDOUT, output_file, refuse_unwritable

if TYPE_CHECKING:
    from mucudnn.runtime.training.checkpoints.checkpoint import Checkpoint
    from mucudnn.runtime.training.checkpoints.history import Position
    from mucudnn.runtime.training.log import LogEntry, OnEntry

__all__ = ["log_file", "train_log"]

_TITLES = {"step": "train", "evaluation": "test", "epoch": "epoch"}
_PLACES = ("kind", "step", "epoch")
_INSTALL = "pip install 'mucudnn[tensorboard]'"


def log_file(value: str) -> str:
    """Return a path that a log can be written to."""
    if value == STDOUT or output_file(value) == STDOUT:
        raise click.BadParameter("a log needs a file, such as FILE.csv or FILE.jsonl")
    from mucudnn.runtime.training.log import LogFile

    parsed(value, LogFile)
    return value


@contextmanager
def train_log(
    settings: Mapping[str, Any], resume: "Checkpoint | None"
) -> Iterator["OnEntry"]:
    """Return a function that logs an entry; files are closed at the end."""
    from mucudnn.runtime.training.checkpoints.history import read_resumption
    from mucudnn.runtime.training.log import LogFile

    since = None if resume is None else read_resumption(resume).position
    listeners: list[Callable[[LogEntry], None]] = []
    with ExitStack() as stack:
        if settings["log"] is not None:
            file = LogFile(settings["log"], since=since)
            stack.callback(file.close)
            listeners.append(file)
        if settings["tensorboard"] is not None:
            listeners.append(stack.enter_context(_event_writer(settings, since)))

        def tell(entry: "LogEntry") -> None:
            for listener in listeners:
                listener(entry)

        yield tell


@contextmanager
def _event_writer(
    settings: Mapping[str, Any], since: "Position | None"
) -> Iterator[Callable[["LogEntry"], None]]:
    """Write event files for TensorBoard, flushed with every entry."""
    folder = settings["tensorboard"]
    made = _writer_class()
    refuse_unwritable(folder)
    writer = made(folder, purge_step=None if since is None else since.steps + 1)

    def tell(entry: "LogEntry") -> None:
        title = _TITLES[entry.kind]
        for name, value in asdict(entry).items():
            if name not in _PLACES and value is not None:
                writer.add_scalar(f"{title}/{name}", value, entry.step)
        writer.flush()

    try:
        yield tell
    finally:
        writer.close()


def _writer_class() -> Any:
    """Return an installed writer of event files."""
    for module in ("tensorboardX", "torch.utils.tensorboard"):
        try:
            return importlib.import_module(module).SummaryWriter
        except ImportError:
            continue
    raise BadInputError(f"--tensorboard needs tensorboardX: {_INSTALL}")
