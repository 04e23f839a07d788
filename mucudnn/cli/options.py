"""Option types shared by commands, and options that name a strategy.

Numbers are plain decimal digits of a bounded range. click's own types accept whatever
Python parses (`1_000`, other scripts' digits, infinity), which makes later computations
fail, or never end.
"""

import math
import re
from collections.abc import Callable, Iterable
from functools import reduce
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import click
import cloup

from mucudnn.cli.app import Complete, completing_files, offered
from mucudnn.cli.output import output_file
from mucudnn.ir.channels_last import LAYOUT_CHOICES
from mucudnn.ir.schedule import PLACEMENTS, STATIC
from mucudnn.ir.sizes import parse_bytes, parse_integer

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


F = TypeVar("F", bound=Callable[..., Any])


class Option(Protocol):
    """A decorator that adds options to a command."""

    def __call__(self, fn: F, /) -> F:
        """Return the function with the option."""
        ...


_MOST = 2**31 - 1
"""Largest number of images, steps, layers or sides: libraries store them in 32 bits."""


MOST_IMAGES = 2**20
"""Largest mini-batch: planning considers every size of a part, and would not end."""


_REAL = re.compile(r"\s*[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[-+]?[0-9]+)?\s*", re.I | re.A)


def parsed(text: Any, parse: Callable[[Any], Any]) -> Any:
    """Parse text; errors of the parser become errors of the option's value."""
    try:
        return parse(text)
    except ValueError as e:
        raise click.BadParameter(str(e)) from e


def count(least: int = 1, most: int = _MOST) -> Callable[[str | int], int]:
    """Return an option type: an integer from `least` to `most`."""

    def integer(text: str | int) -> int:
        try:
            return parse_integer(str(text), least=least, most=most)
        except ValueError as e:
            raise click.BadParameter(f"the value is {e}") from None

    return integer


def real(
    least: float = 0.0,
    most: float = math.inf,
    *,
    beyond: bool = False,
    of: str = "",
    word: str = "",
) -> Callable[[str | float], float | str]:
    """Return an option type: a finite number from `least`, or `beyond` it, to `most`.

    Messages call it a number `of` something. A `word` is accepted as it is.
    """

    def number(text: str | float) -> float | str:
        if word and text == word:
            return word
        value = float(text) if _REAL.fullmatch(str(text)) else math.nan
        within = least < value <= most if beyond else least <= value <= most
        if not (within and math.isfinite(value)):
            above = f"above {least:g}" if beyond else f"from {least:g}"
            upto = "" if most == math.inf else f" up to {most:g}"
            unit = of and f" of {of}"
            known = word and f", nor {word!r}"
            raise click.BadParameter(
                f"{text!r} is not a number{unit} {above}{upto}{known}"
            )
        return value

    return number


def byte_size(text: str | int) -> int:
    """Parse `64MiB`."""
    nbytes: int = parsed(text, parse_bytes)
    return nbytes


def budget_size(text: str | int | tuple[int | str, ...]) -> Any:
    """Parse `8GiB`, `device` for all free memory, or several separated by commas."""
    if isinstance(text, tuple) or text == "device":
        return text
    if isinstance(text, str) and "," in text:
        return tuple(budget_size(word.strip()) for word in text.split(","))
    try:
        return byte_size(text)
    except click.BadParameter as e:
        raise click.BadParameter(f"{e.message}; or device, for all that is free") from e


def byte_sizes(text: str | tuple[int, ...]) -> tuple[int, ...]:
    """Parse `8MiB,64MiB` into distinct ascending numbers."""
    if isinstance(text, tuple):
        return text
    return tuple(sorted({byte_size(size) for size in text.split(",")}))


def image_size(text: str | tuple[int, ...]) -> tuple[int, ...]:
    """Parse `224`, `32x48` or `3x32x48`."""
    if isinstance(text, tuple):
        return text
    try:
        return tuple(
            parse_integer(part, least=1, most=_MOST)
            for part in text.lower().replace("×", "x").split("x")
        )
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is no image size; write a side (224), sides (32x48), or "
            "channels and sides (3x32x48)"
        ) from None


def split_of(text: str) -> str | int:
    """Parse `auto`, `none`, a number of parts, `height`, or `height:STRIPS`."""
    number = text.removeprefix("height:")
    if number.isdecimal() and 0 < int(number) <= MOST_IMAGES:
        return text if number != text else int(number)
    if text in ("auto", "none", "height"):
        return text
    raise click.BadParameter(
        f"{text!r} is not auto, none, height, height:STRIPS or a number of parts"
    )


def layout_option() -> Option:
    """Return the option `--layout`."""
    return option(
        "--layout",
        "Storage of images: NCHW; NHWC, with channels last; or auto, the faster of the "
        "two for each.",
        click.Choice(LAYOUT_CHOICES),
        default="NCHW",
    )


def precision_option() -> Option:
    """Return the option `--precision`."""
    return option(
        "--precision",
        "Data type of convolutions and products, if the backend supports it.",
        click.Choice(["float16", "bfloat16"]),
    )


def placement_option(text: str) -> Option:
    """Return the option `--placement`; `text` begins its help."""
    return option(
        "--placement",
        f"{text}: static, each tensor contiguous; or virtual, also in pages mapped to "
        "consecutive addresses.",
        click.Choice(PLACEMENTS),
        default=STATIC,
    )


def option(
    flag: str,
    text: str,
    kind: Any = None,
    *,
    name: str | None = None,
    default: Any = None,
    shown: bool = True,
    repeatable: bool = False,
    complete: Complete | None = None,
) -> Option:
    """Declare an option.

    Args:
        flag: Flag and placeholder of its value, such as `--workspace-limit SIZE`; a
            `click.Choice` brings its own placeholder.
        text: Help text.
        kind: Type of the value; text if not given.
        name: Name of the parameter if not that of the flag.
        default: Default value.
        shown: Whether the help shows the default.
        repeatable: Whether the option may be repeated.
        complete: Completion in a shell.
    """
    long, _, metavar = flag.partition(" ")
    return click.option(
        *filter(None, (long, name)),
        help=text,
        type=kind,
        metavar=metavar or None,
        multiple=repeatable,
        shell_complete=complete,
        **defaulting(default, shown=shown),
    )


def tier_option(text: str) -> Option:
    """Return the option `--tier`."""
    return option("--tier TIER", text, tier, name="tiers", repeatable=True)


def tier(text: object) -> object:
    """Parse an offload target such as `disk:/scratch=10GiB`."""
    from mucudnn.runtime.executor.tiers import TierChoice

    return parsed(text, TierChoice.parse) if isinstance(text, str) else text


def flag(flags: str, text: str) -> Option:
    """Declare an option without a value: its spellings, then its help."""
    return click.option(*flags.split(), is_flag=True, help=text)


def defaulting(default: Any, *, shown: bool = True) -> dict[str, Any]:
    """Return click's arguments for a default, if there is one."""
    return {} if default is None else {"default": default, "show_default": shown}


def group(*options: Option) -> Option:
    """Combine several options into one decorator, in this order."""

    def decorated(fn: F) -> F:
        return reduce(lambda f, option: option(f), reversed(options), fn)

    return decorated


def section(title: str, *options: Option) -> Option:
    """Combine several options under a title of their own in `--help`."""
    return cloup.option_group(title, *options)


def file_option(name: str, text: str, kind: Any = output_file) -> Option:
    """Declare an option that names a file to write; the parameter is `<name>_file`."""
    return option(
        f"--{name} FILE", text, kind, name=f"{name}_file", complete=completing_files
    )


json_option = file_option("json", "Write the results as JSON; - for standard output.")

report_option = file_option("report", "Write one HTML page with charts.")


# Options whose values are names in a table: of strategies or devices.
#
# Tables are read when a value is parsed, completed, or listed in the help, so that
# plugins and modules of `--import` are included.


Table = Callable[[], tuple[Iterable[str], Callable[[str], object]]]
"""() -> the names in a table, and a check that raises ValueError for other names."""


def table(module: str, name: str) -> Table:
    """Return a table of strategies whose module is imported on first use."""

    def found() -> tuple[Iterable[str], Callable[[str], object]]:
        registry = getattr(import_module(f"mucudnn.passes.{module}"), name)
        return registry.names, registry.resolve

    return found


def names_of_all(table: Table) -> tuple[str, ...]:
    """Return every usable name in a table; broken ones cause a warning."""
    names, check = table()
    found = []
    for name in names:
        try:
            check(name)
        except ValueError:
            continue
        found.append(name)
    return tuple(found)


class StrategyOption(click.Option):
    """An option that takes a name in a table.

    If `several` is given, it takes a comma list, or that word for the whole table.
    """

    def __init__(
        self,
        declarations: list[str],
        *,
        table: Table,
        several: str | None = None,
        **settings: Any,
    ) -> None:
        self._table = table
        self._several = several
        self._text = settings.get("help", "")
        metavar = "NAME" if several is None else "NAME,…"
        super().__init__(declarations, type=self._read, metavar=metavar, **settings)

    def _read(self, text: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if isinstance(text, tuple):
            return text
        if self._several is None:
            self._check(text)
            return text
        words = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
        for word in words:
            if word != self._several:
                self._check(word, f", or {self._several}")
        return words

    def _check(self, name: str, more: str = "") -> None:
        _, check = self._table()
        try:
            check(name)
        except ValueError as e:
            raise click.BadParameter(f"{e}{more}") from e

    def shell_complete(
        self, ctx: click.Context, incomplete: str
    ) -> "list[CompletionItem]":
        """Complete with the current names."""
        names, _ = self._table()
        if self._several is None:
            return offered(names, incomplete)
        return offered((*names, self._several), incomplete, several=True)

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the help with the current names."""
        names, _ = self._table()
        self.help = f"{self._text} One of: {', '.join(names)}."
        return super().get_help_record(ctx)


def strategy(
    flag: str,
    text: str,
    table: Table,
    *,
    name: str | None = None,
    default: Any = None,
    several: str | None = None,
) -> Option:
    """Declare an option whose value is a name in a table; see `StrategyOption`."""
    return click.option(
        *filter(None, (flag, name)),
        cls=StrategyOption,
        table=table,
        several=several,
        help=text,
        **defaulting(default),
    )
