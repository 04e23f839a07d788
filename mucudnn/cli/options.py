"""What several commands take: sizes, directions, layers, the tuner's settings."""

import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from mucudnn.cli.app import BadInputError, bad_input
from mucudnn.cli.numbers import MOST_IMAGES, count, real
from mucudnn.cli.output import output_file
from mucudnn.cli.strategy_options import StrategyOption, batch_policies, planners
from mucudnn.ir.conv import LAYOUTS, ConvProblem, Direction
from mucudnn.ir.numerics import NUMERICS, Numerics
from mucudnn.ir.sizes import parse_bytes
from mucudnn.ir.tensor import ITEMSIZE
from mucudnn.suites import SUITES, Layer, load_suite, parse_problem, read_layers_file

if TYPE_CHECKING:
    from mucudnn.runtime.database.cache import BenchmarkCache

__all__ = [
    "LayerQuery",
    "byte_size",
    "byte_sizes",
    "cache_option",
    "json_option",
    "layer_options",
    "open_cache",
    "refuse_foreign_file",
    "tuner_options",
]

_SQLITE = b"SQLite format 3\0"

F = TypeVar("F", bound=Callable[..., Any])


def byte_size(text: str | int) -> int:
    """`64MiB` as a number."""
    try:
        return parse_bytes(text)
    except ValueError as e:
        raise click.BadParameter(str(e)) from e


def byte_sizes(text: str | tuple[int, ...]) -> tuple[int, ...]:
    """`8MiB,64MiB` as numbers, ascending, each once."""
    if isinstance(text, tuple):
        return text
    return tuple(sorted({byte_size(size) for size in text.split(",")}))


def _directions(text: str | tuple[Direction, ...]) -> tuple[Direction, ...]:
    """`all`, or `forward,backward_data`; each once, in the order of a step."""
    if isinstance(text, tuple):
        return text
    names = [name.strip() for name in text.split(",")]
    known = [d.value for d in Direction]
    for name in names:
        if name not in ("all", *known):
            valid = ", ".join(("all", *known))
            raise click.BadParameter(f"unknown direction {name!r}; choose of: {valid}")
    return tuple(d for d in Direction if "all" in names or d.value in names)


def _numerics(text: str | Numerics) -> Numerics:
    """`strict,deterministic` as a policy."""
    if isinstance(text, Numerics):
        return text
    try:
        return Numerics.parse(text)
    except ValueError as e:
        raise click.BadParameter(str(e)) from e


@dataclass(frozen=True, slots=True)
class LayerQuery:
    """Which convolutions the command line asks for, and what it changes about them."""

    sources: tuple[str, ...]
    problems: tuple[str, ...]
    directions: tuple[Direction, ...]
    batch: int | None
    dtype: str | None
    layout: str | None

    @property
    def title(self) -> str:
        """Where they come from, in a word or two."""
        stems = [s if s in SUITES else Path(s).stem for s in self.sources]
        return ", ".join([*stems, *self.problems])

    def layers(self) -> tuple[Layer, ...]:
        """Every layer, forward.

        Raises:
            BadInputError: Nothing is named, or what is named does not exist.
        """
        if not self.sources and not self.problems:
            raise BadInputError(
                f"nothing to measure: name a suite ({', '.join(SUITES)}), a CSV file "
                'or --problem "n=256,c=64,h=27,w=27,k=192,r=5,s=5,pad=2"'
            )
        with bad_input():
            layers = [layer for s in self.sources for layer in _source(s)]
            layers += [Layer(text, parse_problem(text)) for text in self.problems]
            return tuple(
                replace(layer, problem=self._changed(layer.problem)) for layer in layers
            )

    def _changed(self, problem: ConvProblem) -> ConvProblem:
        if self.batch is not None:
            problem = problem.with_batch(self.batch)
        if problem.batch > MOST_IMAGES:
            raise BadInputError(
                f"a mini-batch of {problem.batch} is too large to plan; the most is "
                f"{MOST_IMAGES}, --batch N takes another"
            )
        return replace(
            problem,
            dtype=self.dtype or problem.dtype,
            layout=self.layout or problem.layout,
        )


def _source(name: str) -> Sequence[Layer]:
    if name in SUITES:
        return load_suite(name)
    if not Path(name).is_file():
        raise BadInputError(
            f"{name!r} is neither a suite ({', '.join(SUITES)}) nor a file"
        )
    return read_layers_file(name)


def _chain(options: Iterable[Callable[[F], F]]) -> Callable[[F], F]:
    return lambda fn: reduce(lambda f, option: option(f), reversed([*options]), fn)


def layer_options(default_directions: str) -> Callable[[F], F]:
    """Which convolutions, beside the suites and files."""
    return _chain(
        [
            click.option(
                "--problem",
                "problems",
                metavar="KEY=N,…",
                multiple=True,
                help="A convolution, e.g. n=256,c=64,h=27,w=27,k=192,r=5,s=5,pad=2. "
                "Repeatable.",
            ),
            click.option(
                "--directions",
                type=_directions,
                metavar="NAME,…",
                default=default_directions,
                show_default=True,
                help="all, or of: forward, backward_data, backward_filter.",
            ),
            click.option(
                "--batch", type=count(1, MOST_IMAGES), help="Mini-batch size instead."
            ),
            click.option(
                "--dtype", type=click.Choice(list(ITEMSIZE)), help="Data type instead."
            ),
            click.option(
                "--layout", type=click.Choice(LAYOUTS), help="Storage order instead."
            ),
        ]
    )


def tuner_options(fn: F) -> F:
    """The tuner's settings; what is not given comes from the environment."""
    options = [
        click.option(
            "--backend",
            default="cpu",
            show_default=True,
            help="cpu, cuda, null, or recorded:FILE; see `mucudnn info`.",
        ),
        click.option(
            "--policy",
            "batch_policy",
            cls=StrategyOption,
            table=batch_policies,
            help="Micro-batch sizes; powers_of_two by default.",
        ),
        click.option(
            "--planner",
            cls=StrategyOption,
            table=planners,
            help="What divides; workspace_reuse by default.",
        ),
        click.option(
            "--numerics",
            type=_numerics,
            metavar="WORD,…",
            help=f"Ways of computing to accept, of: {', '.join(NUMERICS)}.",
        ),
        click.option(
            "--memory-limit",
            type=byte_size,
            metavar="SIZE",
            help="For operands and workspace while measuring.",
        ),
        click.option(
            "--time-limit",
            type=real(beyond=True, of="seconds"),
            metavar="SECONDS",
            help="For everything together.",
        ),
        click.option(
            "--exhaustive",
            is_flag=True,
            help="Under policy all, measure also what cannot be part of a good plan.",
        ),
    ]
    return cache_option(_chain(options)(fn))


def cache_option(fn: F) -> F:
    """Where measurements are remembered."""
    option = click.option(
        "--cache",
        "cache_path",
        metavar="PATH|none",
        help="Where measurements are remembered; by default your cache directory.",
    )
    return option(fn)


def json_option(fn: F) -> F:
    """Results as data."""
    option = click.option(
        "--json",
        "json_file",
        type=output_file,
        metavar="FILE",
        help="Write the results as JSON; - for standard output.",
    )
    return option(fn)


def open_cache(path: str | None) -> "BenchmarkCache":
    """The cache at `path`, in memory for `none`, else the user's.

    Raises:
        BadInputError: The file that was asked for cannot be used.
    """
    from mucudnn.runtime.database.cache import BenchmarkCache
    from mucudnn.runtime.environment import cache_path

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
        reasons = "; ".join(str(w.message) for w in complaints)
        raise BadInputError(f"cannot keep a cache in {path}: {reasons}")
    for complaint in complaints:
        click.echo(f"mucudnn: warning: {complaint.message}", err=True)
    return cache


def refuse_foreign_file(path: Path) -> None:
    """A mistyped `--cache` must not cost a file: it would be set aside as damaged."""
    with bad_input():
        if not path.is_file():
            return
        with path.open("rb") as file:
            start = file.read(len(_SQLITE))
    if start and start != _SQLITE:
        raise BadInputError(f"{path} is no cache but some other file; name another one")
