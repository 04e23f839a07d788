"""Types of option values, and the options that several commands share.

Numbers are plain decimal digits of a bounded range. click's own types accept whatever
Python parses (`1_000`, other scripts' digits, infinity), which makes later computations
fail, or never end.

Tables of names are read when a value is parsed, completed, or listed in the help, so
that plugins, and modules of `--import`, are included.
"""

import math
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import reduce
from pathlib import Path
from typing import Any

import click
import cloup
from click.shell_completion import CompletionItem

from mucudnn.backends import backend_names
from mucudnn.cli.app import BadInputError, bad_input
from mucudnn.cli.output import output_file
from mucudnn.ir.channels_last import LAYOUT_CHOICES
from mucudnn.ir.numerics import NUMERICS, Numerics
from mucudnn.ir.optimizers import OPTIMIZERS, parse_optimizer
from mucudnn.ir.schedule import PLACEMENTS, STATIC
from mucudnn.ir.sizes import format_bytes, parse_bytes, parse_integer
from mucudnn.models import model_names
from mucudnn.passes.microbatch import BATCH_POLICIES, PLANNERS, candidate_batches
from mucudnn.passes.ordering import ORDERS
from mucudnn.passes.registry import Strategies
from mucudnn.passes.residency import check_policy, policy_names
from mucudnn.passes.scheduling import SCHEDULERS
from mucudnn.runtime.environment import cache_path
from mucudnn.runtime.store.measurements import BenchmarkCache
from mucudnn.runtime.store.sqlite_file import IN_MEMORY_ONLY
from mucudnn.runtime.tuning.tuner import Tuner

Option = Callable[[Any], Any]
"""A decorator that adds options to a command."""

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]
"""(context, parameter, typed text) -> completions."""

Table = Callable[[], tuple[Iterable[str], Callable[[str], object]]]
"""() -> the names in a table, and a check that raises ValueError for other names."""

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


def byte_rate(text: str | int) -> int:
    """Parse `12GiB`, bytes per second."""
    rate = byte_size(text)
    if rate == 0:
        raise click.BadParameter(f"{text!r} bytes per second is not a rate above 0")
    return rate


def byte_sizes(text: str) -> tuple[int, ...]:
    """Parse `8MiB,64MiB` into distinct ascending numbers."""
    return tuple(sorted({byte_size(size) for size in text.split(",")}))


def image_size(text: str) -> tuple[int, ...]:
    """Parse `224`, `32x48` or `3x32x48`."""
    sizes = text.lower().replace("×", "x").split("x")
    try:
        return tuple(parse_integer(size, least=1, most=_MOST) for size in sizes)
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is not an image size; write a side (224), sides (32x48), or "
            "channels and sides (3x32x48)"
        ) from None


def split_of(text: str) -> str | int:
    """Parse `auto`, `none`, a number of parts, `height`, or `height:TILES`."""
    if text in ("auto", "none", "height"):
        return text
    number = text.removeprefix("height:")
    with suppress(ValueError):
        parts = parse_integer(number, least=1, most=MOST_IMAGES)
        return parts if number == text else f"height:{parts}"
    raise click.BadParameter(
        f"{text!r} is not auto, none, height, height:TILES or a number of parts"
    )


def tier(text: str) -> object:
    """Parse an offload target such as `disk:/scratch=10GiB`."""
    from mucudnn.runtime.executor.tiers import TierChoice

    return parsed(text, TierChoice.parse)


# Complete half-typed values in a shell.


def completing(
    names: Callable[[click.Context], Iterable[str]],
    *,
    several: bool = False,
    files: bool = False,
) -> Complete:
    """Return a completion for one of some names, which may depend on the line so far.

    With `several`, the value is a comma list, whose last word is completed with names
    that are not in the list yet; with `files`, it may also be a file.
    """

    def complete(
        ctx: click.Context, parameter: click.Parameter, typed: str
    ) -> list[CompletionItem]:
        before, comma, word = typed.rpartition(",") if several else ("", "", typed)
        given = before.split(",")
        found = [
            CompletionItem(f"{before}{comma}{name}")
            for name in dict.fromkeys(names(ctx))
            if name.startswith(word) and name not in given
        ]
        return completing_files(ctx, parameter, typed) if files and not found else found

    return complete


def completing_files(
    ctx: click.Context, parameter: click.Parameter, typed: str
) -> list[CompletionItem]:
    """Complete a file name by the shell's own means."""
    del ctx, parameter
    return [CompletionItem(typed, type="file")]


# Declare options.


def option(
    flag: str,
    text: str,
    kind: Any = None,
    *,
    name: str | None = None,
    repeatable: bool = False,
    complete: Complete | None = None,
    **default: Any,
) -> Option:
    """Declare an option with a help text.

    `flag` includes the placeholder of the value, or its choices, and then a default:
    `--epochs N = 10`, `--dtype [float32|float64] = float32`. A `click.Choice` brings
    its own placeholder; without a `kind`, SIZE is a number of bytes. `name` is that of
    the parameter if it differs from the flag. The help shows a default unless
    `show_default=False`.
    """
    spelled, _, usual = flag.partition(" = ")
    long, _, metavar = spelled.partition(" ")
    if usual:
        default["default"] = usual
    if metavar.startswith("["):
        kind, metavar = click.Choice(metavar.strip("[]").split("|")), ""
    if kind is None and metavar == "SIZE":
        kind = byte_size
    if complete is None and metavar.startswith("FILE"):
        complete = completing_files
    return click.option(
        *filter(None, (long, name)),
        help=text,
        type=kind,
        metavar=metavar or None,
        multiple=repeatable,
        shell_complete=complete,
        **({"show_default": True} | default if default else {}),
    )


def flag(flags: str, text: str) -> Option:
    """Declare an option without a value: its spellings, then its help."""
    return click.option(*flags.split(), is_flag=True, help=text)


def file_option(name: str, text: str, kind: Any = output_file) -> Option:
    """Declare an option that names a file to write; the parameter is `<name>_file`."""
    return option(f"--{name} FILE", text, kind, name=f"{name}_file")


def group(*options: Option) -> Option:
    """Combine several options into one decorator, in this order."""
    return lambda fn: reduce(lambda f, option: option(f), reversed(options), fn)


section = cloup.option_group
"""(title, *options): combine options under a title of their own in `--help`."""


class _StrategyOption(click.Option):
    """An option whose help lists the current names of a table."""

    def __init__(self, *declarations: Any, table: Table, **settings: Any) -> None:
        super().__init__(*declarations, **settings)
        self._table = table
        self._text = settings["help"]

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the help with the current names."""
        names, _ = self._table()
        self.help = f"{self._text} One of: {', '.join(names)}."
        return super().get_help_record(ctx)


def strategy(
    flags: str, text: str, table: Table, *, several: str | None = None, **default: Any
) -> Option:
    """Declare an option whose value is a name in a table.

    If `several` is given, the value is a comma list, or that word for the whole table.
    `default` is as for `option`.
    """

    def read(given: str) -> str | tuple[str, ...]:
        words: tuple[str, ...] = (given,)
        if several is not None:
            words = tuple(dict.fromkeys(word.strip() for word in given.split(",")))
        _, check = table()
        for word in words:
            try:
                if word != several:
                    check(word)
            except ValueError as e:
                more = "" if several is None else f", or {several}"
                raise click.BadParameter(f"{e}{more}") from e
        return given if several is None else words

    return click.option(
        *flags.split(),
        cls=_StrategyOption,
        table=table,
        help=text,
        type=read,
        metavar="NAME" if several is None else "NAME,…",
        shell_complete=completing(
            lambda _: (*table()[0], *filter(None, [several])),
            several=several is not None,
        ),
        **({"show_default": True} if default else {}),
        **default,
    )


def table(registry: Strategies[Any]) -> Table:
    """Return the table of a registry."""
    return lambda: (registry.names, registry.resolve)


def policies() -> tuple[Iterable[str], Callable[[str], object]]:
    """Return the table of residency policies."""
    return policy_names(), check_policy


orders = table(ORDERS)
schedulers = table(SCHEDULERS)


# Options that several commands share.


model_argument = click.argument(
    "model",
    metavar="[MODEL | FILE.py:FUNCTION]",
    required=False,
    shell_complete=completing(lambda _: model_names(), files=True),
)
json_option = file_option("json", "Write the results as JSON; - for standard output.")
report_option = file_option("report", "Write one HTML page with charts.")
listing_option = flag("--list listing", "List the networks.")
cache_option = option(
    "--cache PATH|none",
    "Where measurements are stored; by default your cache directory.",
    name="cache_path",
)
image_option = option(
    "--image SIZE",
    "Size of an image, such as 224 or 3x64x96; by default the network's own.",
    image_size,
)
optimizer_option = strategy(
    "--optimizer",
    "Optimizer.",
    lambda: (OPTIMIZERS, parse_optimizer),
    default="momentum",
)
order_option = strategy(
    "--order", "Execution order of the nodes.", orders, default="builder"
)
layout_option = option(
    "--layout",
    "Memory format of images: NCHW, NHWC (channels last), or auto: the faster of the "
    "two for each.",
    click.Choice(LAYOUT_CHOICES),
    default="NCHW",
)
precision_option = option(
    "--precision [float16|bfloat16]",
    "Data type of convolutions and matrix products, if the backend supports it.",
)
placement_option = option(
    "--placement",
    "Placement of tensors: static, each contiguous; or virtual, also in pages mapped "
    "to consecutive addresses.",
    click.Choice(PLACEMENTS),
    default=STATIC,
)
tier_option = option(
    "--tier TIER",
    "Offload target: host, disk:DIR or peer:DEVICE, optionally with =SIZE to limit it "
    "and @RATE in bytes per second instead of the measured or published rate; several "
    "are filled fastest first.",
    tier,
    name="tiers",
    repeatable=True,
)
workspace_option = option(
    "--workspace-limit SIZE",
    f"Workspace of a convolution; by default {format_bytes(64 << 20)}.",
)


def backend_option(text: str) -> Option:
    """Return the option `--backend`; `text` lists the backends."""
    return option(
        "--backend NAME = cpu",
        f"{text}; see `mucudnn info`.",
        complete=completing(lambda _: backend_names()),
    )


batch_policy_option = strategy(
    "--batch-policy",
    "Micro-batch sizes; powers_of_two by default.",
    lambda: (BATCH_POLICIES.table, lambda name: candidate_batches(1, name)),
)


# Options of a tuner, and the tuner and the cache that they describe.


_SQLITE = b"SQLite format 3\0"


def _parse_numerics(text: str) -> Any:
    return parsed(text, Numerics.parse)


def _apply_old_policy(
    ctx: click.Context, parameter: click.Parameter, value: str | None
) -> None:
    """Apply the old spelling unless the new one is given, too."""
    del parameter
    if value is not None and not ctx.resilient_parsing:
        click.echo(
            "mucudnn: warning: --policy is a residency policy elsewhere; micro-batch "
            f"sizes are chosen by --batch-policy {value}",
            err=True,
        )
        ctx.default_map = {**(ctx.default_map or {}), "batch_policy": value}


limit_options = group(
    option("--memory-limit SIZE", "Memory for operands and workspace while measuring."),
    option(
        "--time-limit SECONDS",
        "Time limit of the whole command.",
        real(beyond=True, of="seconds"),
    ),
)
"""Limits on measuring."""

measuring_options = group(
    backend_option("cpu, cuda, null, or recorded:FILE"),
    batch_policy_option,
    click.option(
        "--policy",
        "old_batch_policy",
        metavar="NAME",
        hidden=True,
        is_eager=True,
        expose_value=False,
        callback=_apply_old_policy,
    ),
    strategy(
        "--planner", "Micro-batch planner; workspace_reuse by default.", table(PLANNERS)
    ),
    option(
        "--numerics WORD,…",
        f"Allowed numerics, of: {', '.join(NUMERICS)}.",
        _parse_numerics,
        complete=completing(lambda _: NUMERICS, several=True),
    ),
    flag(
        "--exhaustive",
        "With batch policy all, also measure sizes that cannot be part of a good plan.",
    ),
    cache_option,
)
"""Options of a tuner; defaults come from the environment."""


def chosen(settings: Mapping[str, Any], names: str) -> dict[str, Any]:
    """Return some settings, which are passed on under their own names."""
    return {name: settings[name] for name in names.split()}


def make_tuner(settings: Mapping[str, Any], **more: Any) -> Tuner:
    """Return a tuner from the given options and the environment."""
    names = "backend batch_policy planner numerics memory_limit workspace_limit"
    found = {name: settings.get(name) for name in names.split()}
    given = {name: value for name, value in found.items() if value is not None}
    if settings.get("exhaustive"):
        given["prune"] = False
    with bad_input():
        if settings["cache_path"] is not None:
            given["cache"] = open_cache(settings["cache_path"])
        return Tuner.from_env(**given, **more)


def open_cache(path: str | None) -> BenchmarkCache:
    """Open the cache at `path`, in memory for `none`, else the user's."""
    if path is None:
        return BenchmarkCache(cache_path(os.environ))
    if path == "none":
        return BenchmarkCache()
    refuse_foreign_file(Path(path))
    with warnings.catch_warnings(record=True) as complaints:
        warnings.simplefilter("always")
        cache = BenchmarkCache(Path(path))
    if cache.path is None:
        cache.close()
        reasons = (str(w.message).removeprefix(IN_MEMORY_ONLY) for w in complaints)
        raise BadInputError(f"cannot keep a cache in {path}: {'; '.join(reasons)}")
    for complaint in complaints:
        click.echo(f"mucudnn: warning: {complaint.message}", err=True)
    return cache


def refuse_foreign_file(path: Path) -> None:
    """Refuse a file that is not a cache: it would be replaced as damaged."""
    with bad_input():
        if not path.is_file():
            return
        with path.open("rb") as file:
            start = file.read(len(_SQLITE))
    if start and start != _SQLITE:
        raise BadInputError(f"{path} is not a mucudnn cache; name another file")
