"""The user's own code: `--import`, FILE.py:function, and PyTorch models.

A file is imported once, however often it is named. Its errors are reported in one line
with file and line number.
"""

import functools
import importlib
import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import click

from mucudnn.cli.app import (
    BadInputError,
    error_text,
    located,
    located_errors,
    own_files,
)
from mucudnn.cli.output import emit
from mucudnn.models import FunctionModel, Model, get_model, model_names
from mucudnn.passes.planning.plan_step import DescribedStep

if TYPE_CHECKING:
    from mucudnn.torch.comparison import ComparedWay

F = TypeVar("F", bound=Callable[..., Any])
_SUFFIX = ".py"


def import_option(fn: F) -> F:
    """Add the option `--import` to a command that takes names of strategies."""

    @functools.wraps(fn)
    def guarded(*args: Any, **options: Any) -> Any:
        with located_errors():
            return fn(*args, **options)

    option = click.option(
        "--import",
        "imports",
        metavar="MODULE|FILE.py",
        multiple=True,
        is_eager=True,
        expose_value=False,
        callback=_import_all,
        help="Module to import first; it may register policies, schedulers, planners, "
        "orders. Repeatable.",
    )
    return option(guarded)  # type: ignore[return-value]


def network(name: str) -> Model | FunctionModel:
    """Return a network by its name, or by a function of a file: FILE.py:FUNCTION."""
    made = own_function(name)
    if made is None:
        return get_model(name)
    if isinstance(made, Model):
        return made
    try:
        return FunctionModel(made, name)
    except TypeError as e:
        raise BadInputError(str(e)) from e


def own_function(name: str) -> Any | None:
    """Return the function named by FILE.py:FUNCTION; None for other names."""
    file, colon, function = name.rpartition(":")
    if name.endswith(_SUFFIX):
        file, function = name, ""
    elif not (colon and file.endswith(_SUFFIX)):
        return None
    module = _import_file(Path(file))
    made = getattr(module, function, None) if function else None
    if not isinstance(made, Model) and not callable(made):
        own = [
            key
            for key, value in vars(module).items()
            if callable(value) and not key.startswith("_")
            if getattr(value, "__module__", None) == module.__name__
        ]
        what = f"there is no function {function!r} in {file}"
        if not function:
            what = f"{file} is a file; name a function in it: {file}:FUNCTION"
        raise BadInputError(f"{what}; it has: {', '.join(own) or 'none'}")
    return made


def list_models(json_file: str | None) -> None:
    """Print every network with its size; broken plug-ins cause a warning."""
    rows: list[dict[str, Any]] = []
    for name in model_names():
        try:
            model = get_model(name)
        except ValueError:
            continue  # the warning has named the distribution
        rows.append(
            {
                "name": name,
                "image": list(model.image),
                "classes": model.classes,
                "parameters": model(1).parameter_count,
            }
        )

    def show() -> None:
        for row in rows:
            image = "x".join(map(str, row["image"]))
            click.echo(
                f"{row['name']:<18} {image:>12}  {row['classes']:>5} classes  "
                f"{row['parameters']:>12,} parameters"
            )
        click.echo(f"{'resnet:n1,n2,n3,n4':<18} bottleneck blocks, n1 to n4 per stage")

    emit(json_file, {"models": rows}, show)


def _import_all(
    ctx: click.Context, parameter: click.Parameter, names: tuple[str, ...]
) -> None:
    del parameter
    for name in names:
        if name.endswith(_SUFFIX):
            _import_file(Path(name), ctx)
        else:
            _import_module(name, ctx)


def _import_module(name: str, ctx: click.Context) -> None:
    if not all(part.isidentifier() for part in name.split(".")):
        raise BadInputError(
            f"--import {name}: neither a module (package.module) nor a file (FILE.py)"
        )
    _add_to_path(Path.cwd())
    importlib.invalidate_caches()
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # the parent package is missing
        spec = None
    except (Exception, SystemExit) as e:
        raise BadInputError(f"--import {name}: {error_text(e)}") from e
    if spec is None:
        raise BadInputError(
            f"--import {name}: no such module is in this folder or installed; a file "
            "is given as FILE.py"
        )
    if spec.origin is not None:
        own_files(ctx).add(spec.origin)
    with located_errors(name):
        importlib.import_module(name)


def _import_file(path: Path, ctx: click.Context | None = None) -> ModuleType:
    """Import a file as a module, once."""
    if not path.is_file():
        found = "is a folder" if path.is_dir() else "does not exist"
        raise BadInputError(f"{path} {found}; expected a file FILE.py")
    full = path.resolve()
    own_files(ctx or click.get_current_context()).add(str(full))
    key = f"mucudnn_own:{full}"
    if key in sys.modules:
        return sys.modules[key]
    spec = importlib.util.spec_from_file_location(key, full)
    if spec is None or spec.loader is None:
        raise BadInputError(f"{path} cannot be imported")
    _add_to_path(full.parent)
    module = importlib.util.module_from_spec(spec)
    sys.modules[key] = module
    try:
        with located_errors(str(path)):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[key]
        raise
    return module


def _add_to_path(folder: Path) -> None:
    """Make modules beside an imported file importable, as in a script."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


# Load PyTorch models given as FILE.py:FUNCTION, for `mucudnn memory`.
#
# The function returns the model, its loss, a batch and an optimizer. PyTorch is
# imported only for such a function.


_WANTED = "(model, loss_fn, example, optimizer)"
_INSTALL = "install PyTorch with: pip install '.[torch]'"
_BATCH = 32

_TRACES = "torch._subclasses.fake_tensor"
"""Logger that would print a traceback of an error reported in one line."""

_OTHERS = ("image", "optimizer", "order", "recordings")
"""Options that do not apply to PyTorch models."""


def torch_step(
    ctx: click.Context,
    name: str,
    batch: int | None,
    device: str,
    gpus: int | None = None,
    shard: Any = "fsdp2",
) -> DescribedStep | None:
    """Return the step of a PyTorch model; None if the name means something else."""
    made = _torch_parts(ctx, name, batch)
    if made is None:
        return None
    from mucudnn.torch import memory

    logging.getLogger(_TRACES).setLevel(logging.CRITICAL)
    try:
        mesh = () if gpus is None else (gpus,)
        step = memory(*made, device=device, mesh=mesh, shard=shard).described(batch)
        step.graph()  # capture now, so that its errors are reported here
    except Exception as e:  # models may raise anything
        raise BadInputError(f"{name}: {located(e)}") from e
    return step


def compared_step(
    ctx: click.Context,
    name: str,
    batch: int | None,
    progress: Callable[[str, int, int], None],
) -> "tuple[ComparedWay, ...]":
    """Run the step of a PyTorch model in PyTorch's ways and ours."""
    made = _torch_parts(ctx, name, batch)
    if made is None:
        raise BadInputError(f"--compare is for PyTorch models, not {name}")
    from mucudnn.torch.comparison import compare_step

    try:
        return compare_step(*made, progress=progress)
    except Exception as e:  # models may raise anything
        raise BadInputError(f"{name}: {located(e)}") from e


def _torch_parts(ctx: click.Context, name: str, batch: int | None) -> Any | None:
    """Return model, loss, example and optimizer; None if the name means another."""
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
        import_module("mucudnn.torch.memory_study")
    except ImportError as e:
        raise BadInputError(f"{name} is a PyTorch model; {_INSTALL}") from e
    return made


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
            f"{name} returned {found}; it must return {_WANTED} of PyTorch, or be a "
            "function of (batch) that returns a Graph"
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
                f"{option.opts[0]} is for built-in networks; {name} has its own"
            )
