"""The command group: exit codes, and how errors are reported.

Every function of the command line raises `BadInputError` on invalid input.

A reader that closes the pipe early ends the command silently.
"""

import contextlib
import difflib
import io
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import Any, NoReturn

import click

from mucudnn.errors import MucudnnError
from mucudnn.plugins import PluginWarning, module_files
from mucudnn.processes import Interrupts

_CHOICES = re.compile(
    r"'(?P<word>[^']+)'(?:; choose [^:;]*of:| is neither a \w+ \() ?(?P<names>[^();]+)"
)

_LONG_WORD, _SHOWN = 256, 40
_OWN_FILES = "mucudnn.own_files"

_GROUPS = tuple(
    f"mucudnn.{kind}"
    for kind in ("policies", "schedulers", "planners", "models", "backends")
)
"""Entry-point groups whose modules are the user's own code, too."""


class ExitCode(IntEnum):
    """Exit code of a command; that of a signal is 128 plus its number, as in shells."""

    DONE = 0
    """The command succeeded."""
    CLOSED_PIPE = 1
    """The reader of the output closed the pipe."""
    BAD_INPUT = 2
    """Invalid input or a missing resource; one line on the error stream says why."""
    FAILED = 3
    """The command succeeded, with the result that something does not work."""
    NOTHING_FITS = 4
    """The command succeeded, with the result that nothing fits."""
    HUNG_UP = 129
    """The terminal is gone (SIGHUP); partial results are written."""
    INTERRUPTED = 130
    """Ctrl-C (SIGINT); partial results are written."""
    TERMINATED = 143
    """Terminated from outside (SIGTERM); partial results are written."""


def suggesting(message: str) -> str:
    """Append the closest valid name to a message that lists valid names."""
    found = _CHOICES.search(message)
    if found is None or "did you mean" in message:
        return message
    names = [re.split(r"[:\[ ]", name.strip())[0] for name in found["names"].split(",")]
    word = found["word"].partition(":")[0]
    by_lower = {name.lower(): name for name in names}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1)
    return f"{message}; did you mean {by_lower[close[0]]!r}?" if close else message


class BadInputError(click.ClickException):
    """A failure caused by the user's input or environment."""

    exit_code = ExitCode.BAD_INPUT


class Commands(click.Group):
    """A command group that lists its commands on missing or unknown names."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or list the valid ones."""
        if args[0] not in self.commands and not args[0].startswith("-"):
            valid = ", ".join(self.list_commands(ctx))
            raise BadInputError(f"unknown command {args[0]!r}; choose one of: {valid}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; without one, print the help."""
        result = super().invoke(ctx)
        if ctx.invoked_subcommand is None:
            click.echo(ctx.get_help())
        return result


class _RootGroup(Commands):
    """The outermost group: commands fail with one line, without a traceback."""

    def main(self, *args: Any, **options: Any) -> NoReturn:
        """Run and exit; see `ExitCode`."""
        options["standalone_mode"] = False
        interrupts: Interrupts = options.setdefault("obj", Interrupts())
        logging.getLogger("mucudnn").addHandler(logging.NullHandler())
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        try:
            with warnings.catch_warnings(), interrupts:
                warnings.showwarning = _warn
                warnings.simplefilter("always", PluginWarning)  # never a crash
                code = super().main(*args, **options)
        except (click.ClickException, OSError) as e:
            if isinstance(e, OSError):  # of --help and --version, before `invoke`
                _discard_output()
                e = BadInputError(str(e))
            message = one_line(suggesting(e.format_message()))
            with contextlib.suppress(OSError):
                click.echo(f"mucudnn: error: {message}", err=True)
            code = e.exit_code if isinstance(e, BadInputError) else ExitCode.BAD_INPUT
        except click.Abort:
            code = ExitCode.INTERRUPTED
        if interrupts.number is not None:
            sys.exit(128 + interrupts.number)
        sys.exit(code if isinstance(code, int) else ExitCode.DONE)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command and flush its output."""
        try:
            try:
                return super().invoke(ctx)
            finally:
                sys.stdout.flush()
        except BrokenPipeError:
            _discard_output()
            ctx.exit(ExitCode.CLOSED_PIPE)
        except OSError as e:
            _discard_output()
            raise BadInputError(str(e)) from e
        except (MucudnnError, MemoryError, EOFError, UnicodeEncodeError) as e:
            raise BadInputError(str(e) or type(e).__name__) from e


def one_line(message: str) -> str:
    """Return a message as one printable line, with long words abbreviated."""
    words = (
        word if len(word) <= _LONG_WORD else f"{word[:_SHOWN]}…{word[-_SHOWN:]}"
        for word in message.split()
    )
    return "".join(c if c.isprintable() else "?" for c in " ".join(words))


def _warn(message: Warning | str, *_: object, **__: object) -> None:
    click.echo(f"mucudnn: warning: {one_line(str(message))}", err=True)


def _discard_output() -> None:
    """Redirect buffered output to nowhere, or the interpreter fails at exit."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@click.group(
    cls=_RootGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="mucudnn", message="%(package)s %(version)s")
def main() -> None:
    """Training steps within a memory budget, convolutions within a workspace limit."""


# Report errors in the user's input and code in one line, with the user's file and line.


@contextlib.contextmanager
def bad_input() -> Iterator[None]:
    """Turn errors of code that interprets user input into `BadInputError`."""
    try:
        yield
    except (ValueError, TypeError, OSError) as e:
        raise BadInputError(located(e)) from e


@contextlib.contextmanager
def located_errors(name: str | None = None) -> Iterator[None]:
    """Turn errors that pass through user files into one line that names the file.

    All errors within the import of module `name` are attributed to it.
    """
    try:
        yield
    except (click.ClickException, click.exceptions.Exit, click.Abort):
        raise
    except (Exception, SystemExit) as e:
        where = _find_user_line(e)
        if where is None and name is None:
            raise
        raise BadInputError(f"{where or name}: {error_text(e)}") from e


def located(error: BaseException) -> str:
    """Return an error's message, with the line of the user's file that it passed."""
    where = _find_user_line(error)
    return str(error) if where is None else f"{where}: {error_text(error)}"


def _find_user_line(error: BaseException) -> str | None:
    """Return the innermost line in the user's own files, if any."""
    ctx = click.get_current_context(silent=True)
    own = set() if ctx is None else set(own_files(ctx))
    own |= set(module_files(*_GROUPS))
    if isinstance(error, SyntaxError) and error.filename in own:
        return f"{_relative(error.filename)}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    mine = [f for f in frames if str(Path(f.filename).resolve()) in own]
    if mine:
        return f"{_relative(mine[-1].filename)}, line {mine[-1].lineno}"
    cause = error.__cause__
    return None if cause is None else _find_user_line(cause)


def _relative(filename: str) -> str:
    path, here = Path(filename), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else filename


def error_text(error: BaseException) -> str:
    """Return the type and the message of an error."""
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def own_files(ctx: click.Context) -> set[str]:
    """Return the files that the command has imported for the user."""
    files: set[str] = ctx.meta.setdefault(_OWN_FILES, set())
    return files
