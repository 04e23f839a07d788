"""Validate the arguments of the training loop before anything runs."""

from collections.abc import Mapping
from typing import Protocol

from mucudnn.arguments import a_function, an_integer, of_type
from mucudnn.runtime.training.checkpoints.checkpoint import Checkpoint, Checkpoints
from mucudnn.runtime.training.evaluation import Epochs, check_batches
from mucudnn.runtime.training.trainer import Trainer

__all__ = ["Batches", "check_arguments"]

_FUNCTIONS = {
    "progress": "a function of (position, report)",
    "log": "a function of a LogEntry, such as a LogFile",
    "between": "a function of nothing",
}


class Batches(Epochs, Protocol):
    """Epochs of labelled images with a length, such as a `mucudnn.data.Loader`."""

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""


def check_arguments(
    trainer: object,
    batches: Batches,
    test: Batches | None,
    counts: Mapping[str, int | None],
    *,
    words: object,
    checkpoints: object,
    resume: object,
    functions: Mapping[str, object],
) -> None:
    """Raise `TypeError` or `ValueError` for invalid arguments of `fit`."""
    of_type("trainer", trainer, Trainer, "a Trainer")
    check_batches("batches", batches)
    if test is not None:
        check_batches("test", test)
    for name, count in counts.items():
        if count is not None or name == "epochs":
            an_integer(name, count, least=1)
    if counts["eval_every"] is not None and test is None:
        raise ValueError("eval_every needs test: images to evaluate on")
    if len(batches) == 0:
        raise ValueError("there is no batch to train on")
    for name, value, kind, wanted in (
        ("words", words, Mapping, "a mapping from names to settings"),
        ("checkpoints", checkpoints, Checkpoints, "Checkpoints(folder)"),
        ("resume", resume, Checkpoint, "a Checkpoint, as Checkpoints.load has"),
    ):
        if value is not None:
            of_type(name, value, kind, wanted)
    for name, function in functions.items():
        if function is not None:
            a_function(name, function, _FUNCTIONS[name])
