"""Load PyTorch models given as FILE.py:FUNCTION, for `mucudnn memory`.

The function returns the model, its loss, a batch and an optimizer. PyTorch is imported
only for such a function.
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
"""Logger that would print a traceback of an error reported in one line."""

_OTHERS = ("image", "optimizer", "order", "recordings")
"""Options that do not apply to PyTorch models."""


def torch_step(
    ctx: click.Context, name: str, batch: int | None, device: str
) -> DescribedStep | None:
    """Return the step of a PyTorch model; None if the name means something else."""
    try:
        function = own_function(name)
    except BadInputError as e:
        if isinstance(e.__cause__, ImportError) and e.__cause__.name == "torch":
            raise BadInputError(f"{e.message}; {_INSTALL}") from e
        raise
    if function is None or isinstance(function, Model):
        return None
    made = _call_for_step(function, name, batch)
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
        step.graph()  # capture now, so that its errors are reported here
    except Exception as e:  # models may raise anything
        raise BadInputError(f"{name}: {located(e)}") from e
    return step


def _call_for_step(
    function: Callable[..., Any], name: str, batch: int | None
) -> Any | None:
    """Return the result of a function that describes a PyTorch step, else None."""
    if _accepts(function, 1):
        made = function(batch or _BATCH)
        if not isinstance(made, tuple):
            return None  # a network, which is checked by `network`
    elif _accepts(function, 0):
        made = function()
    else:
        return None  # `network` refuses it
    if not isinstance(made, tuple) or len(made) != len(_WANTED.split(",")):
        found = type(made).__name__
        if isinstance(made, tuple):
            found = f"({', '.join(type(value).__name__ for value in made)})"
        raise BadInputError(
            f"{name} returns {found}; {_WANTED} of PyTorch is wanted, or a Graph from "
            "a function of (batch)"
        )
    return made


def _accepts(function: Callable[..., Any], count: int) -> bool:
    """Return whether a function can be called with `count` arguments."""
    try:
        inspect.signature(function).bind(*range(count))
    except (TypeError, ValueError):  # functions written in C have no signature
        return False
    return True


def _refuse_others(ctx: click.Context, name: str) -> None:
    for option in ctx.command.params:
        given = ctx.get_parameter_source(option.name or "")
        if option.name in _OTHERS and given is not click.core.ParameterSource.DEFAULT:
            raise BadInputError(
                f"{option.opts[0]} is for networks of ours; {name} brings its own"
            )
