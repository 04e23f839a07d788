"""Code of the user's own: `--import`, and networks as FILE.py:function.

A file is imported once, however often it is named. What goes wrong in it is told in one
line with the file and the line in it.
"""

import functools
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import click

from mucudnn.cli.app import BadInputError
from mucudnn.models import FunctionModel, Model, get_model, model_names
from mucudnn.plugins import module_files

__all__ = ["import_option", "located", "network", "networks", "own_function"]

F = TypeVar("F", bound=Callable[..., Any])

_SUFFIX = ".py"
_KEY = "mucudnn.own_files"
_GROUPS = tuple(
    f"mucudnn.{kind}"
    for kind in ("policies", "schedulers", "planners", "models", "backends")
)


def import_option(fn: F) -> F:
    """`--import`, for a command that takes names of strategies."""

    @functools.wraps(fn)
    def guarded(*args: Any, **options: Any) -> Any:
        with _told_where():
            return fn(*args, **options)

    option = click.option(
        "--import",
        "imports",
        metavar="MODULE|FILE.py",
        multiple=True,
        is_eager=True,
        expose_value=False,
        callback=_import_all,
        help="Import this first: it may register policies, schedulers, planners, "
        "orders. Repeatable.",
    )
    return option(guarded)  # type: ignore[return-value]


def network(name: str) -> Model | FunctionModel:
    """A network by its name, or a function of a file: FILE.py:function.

    Raises:
        BadInputError: There is no such file, or no such function in it.
        ValueError: No network has that name.
    """
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
    """What can be called as FILE.py:function; None where a name is no such thing.

    Raises:
        BadInputError: There is no such file, or no such function in it.
    """
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
            what = f"{file} is a file; name a function of it, {file}:FUNCTION"
        raise BadInputError(f"{what}; it has: {', '.join(own) or 'none'}")
    return made


def networks() -> Iterator[tuple[str, Model | FunctionModel]]:
    """Every network that can be had by name; what is broken is left out, and told."""
    for name in model_names():
        try:
            yield name, get_model(name)
        except ValueError:
            continue  # the warning has named the distribution


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
    _search(Path.cwd())
    importlib.invalidate_caches()
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # its package is not there
        spec = None
    except (Exception, SystemExit) as e:
        raise BadInputError(f"--import {name}: {_said(e)}") from e
    if spec is None:
        raise BadInputError(
            f"--import {name}: there is no such module here or among what is "
            "installed; a file is written FILE.py"
        )
    if spec.origin is not None:
        _own_files(ctx).add(spec.origin)
    with _told_where(name):
        importlib.import_module(name)


def _import_file(path: Path, ctx: click.Context | None = None) -> ModuleType:
    """A file as a module, imported now or before.

    Raises:
        BadInputError: There is none, or it fails.
    """
    if not path.is_file():
        found = "a folder" if path.is_dir() else "not there"
        raise BadInputError(f"{path} is {found}; a file FILE.py is wanted")
    full = path.resolve()
    _own_files(ctx or click.get_current_context()).add(str(full))
    key = f"mucudnn_own:{full}"
    if key in sys.modules:
        return sys.modules[key]
    spec = importlib.util.spec_from_file_location(key, full)
    if spec is None or spec.loader is None:
        raise BadInputError(f"{path} cannot be imported")
    _search(full.parent)
    module = importlib.util.module_from_spec(spec)
    sys.modules[key] = module
    try:
        with _told_where(str(path)):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[key]
        raise
    return module


def _search(folder: Path) -> None:
    """Modules beside what is imported can be imported from it, as in a script."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _own_files(ctx: click.Context) -> set[str]:
    files: set[str] = ctx.meta.setdefault(_KEY, set())
    return files


@contextmanager
def _told_where(name: str | None = None) -> Iterator[None]:
    """Whatever passes through a file of the user's own is one line that names it.

    Args:
        name: What is being imported: then everything that goes wrong is its fault.
    """
    try:
        yield
    except (click.ClickException, click.exceptions.Exit, click.Abort):
        raise
    except (Exception, SystemExit) as e:
        where = _where(e)
        if where is None and name is None:
            raise
        raise BadInputError(f"{where or name}: {_said(e)}") from e


def located(error: BaseException) -> str:
    """What an error says, and where in a file of the user's own it came through."""
    where = _where(error)
    return str(error) if where is None else f"{where}: {_said(error)}"


def _where(error: BaseException) -> str | None:
    """The last place in the user's own files on an error's way, if there is any."""
    ctx = click.get_current_context(silent=True)
    own = set() if ctx is None else set(_own_files(ctx))
    own |= set(module_files(*_GROUPS))
    if isinstance(error, SyntaxError) and error.filename in own:
        return f"{_short(error.filename)}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    mine = [f for f in frames if str(Path(f.filename).resolve()) in own]
    if mine:
        return f"{_short(mine[-1].filename)}, line {mine[-1].lineno}"
    cause = error.__cause__
    return None if cause is None else _where(cause)


def _short(filename: str) -> str:
    """A path as short as it can be written from here."""
    path, here = Path(filename), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else filename


def _said(error: BaseException) -> str:
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
