"""PyTorch models as FILE.py:function, for `mucudnn memory`.

The function returns the model, its loss, a batch and an optimizer. PyTorch is looked
for only once there is such a function.
"""

import inspect
import logging
from collections.abc import Callable
from typing import Any

import click

from mucudnn.cli.app import BadInputError
from mucudnn.cli.own_code import located, own_function
from mucudnn.models import Model
from mucudnn.passes.planning.described_step import DescribedStep

__all__ = ["torch_step"]

_WANTED = "(model, loss_fn, example, optimizer)"
_INSTALL = "install PyTorch with: pip install 'mucudnn[torch]'"
_BATCH = 32
_TRACES = "torch._subclasses.fake_tensor"
"""Who would print a traceback of what is told in one line."""

_OTHERS = ("image", "optimizer", "order", "recordings")
"""Options that such a step leaves nothing to say about."""


def torch_step(
    ctx: click.Context, name: str, batch: int | None, device: str
) -> DescribedStep | None:
    """The step of a PyTorch model; None where a name means something else.

    Args:
        ctx: Of the command, whose other options are checked.
        name: What was asked for.
        batch: Samples; as many as the function's example has if not given.
        device: Whose costs it gets.

    Raises:
        BadInputError: The file, the function, or PyTorch is missing, it returns
            something else, or the step cannot be captured.
    """
    try:
        function = own_function(name)
    except BadInputError as e:
        if isinstance(e.__cause__, ImportError) and e.__cause__.name == "torch":
            raise BadInputError(f"{e.message}; {_INSTALL}") from e
        raise
    if function is None or isinstance(function, Model):
        return None
    made = _called(function, name, batch)
    if made is None:
        return None
    _refuse_others(ctx, name)
    try:
        from mucudnn.torch import memory
    except ImportError as e:
        raise BadInputError(f"{name} is a model of PyTorch's; {_INSTALL}") from e
    logging.getLogger(_TRACES).setLevel(logging.CRITICAL)
    try:
        step = memory(*made, device=device).described(batch)
        step.graph()  # captured once, and what goes wrong in it is told here
    except Exception as e:  # a model raises anything
        raise BadInputError(f"{name}: {located(e)}") from e
    return step


def _called(function: Callable[..., Any], name: str, batch: int | None) -> Any | None:
    """What a function returns if it is a PyTorch step; None if it makes a network.

    Raises:
        BadInputError: It returns something else than is wanted of it.
    """
    if _takes(function, 1):
        made = function(batch or _BATCH)
        if not isinstance(made, tuple):
            return None  # a network, which is checked as one
    elif _takes(function, 0):
        made = function()
    else:
        return None  # as which it will be refused
    if not isinstance(made, tuple) or len(made) != len(_WANTED.split(",")):
        found = type(made).__name__
        if isinstance(made, tuple):
            found = f"({', '.join(type(value).__name__ for value in made)})"
        raise BadInputError(
            f"{name} returns {found}; {_WANTED} of PyTorch is wanted, or a Graph from "
            "a function of (batch)"
        )
    return made


def _takes(function: Callable[..., Any], count: int) -> bool:
    """Whether a function can be called with so many arguments."""
    try:
        inspect.signature(function).bind(*range(count))
    except (TypeError, ValueError):  # written in C, perhaps
        return False
    return True


def _refuse_others(ctx: click.Context, name: str) -> None:
    for option in ctx.command.params:
        given = ctx.get_parameter_source(option.name or "")
        if option.name in _OTHERS and given is not click.core.ParameterSource.DEFAULT:
            raise BadInputError(
                f"{option.opts[0]} is for networks of ours; {name} brings its own"
            )
