"""Which convolutions a command is about: of suites, of files, or written out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from mucudnn.cli.app import BadInputError, bad_input
from mucudnn.cli.options import MOST_IMAGES, Option, count, group, option
from mucudnn.ir.conv import LAYOUTS, ConvProblem, Direction
from mucudnn.ir.tensor import ITEMSIZE
from mucudnn.suites import SUITES, Layer, load_suite, parse_problem, read_layers_file

__all__ = ["LayerQuery", "layer_options", "query_of"]


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


def query_of(sources: tuple[str, ...], settings: Mapping[str, Any]) -> LayerQuery:
    """What `layer_options` and the sources beside them ask for."""
    names = ("problems", "directions", "batch", "dtype", "layout")
    return LayerQuery(sources, **{name: settings[name] for name in names})


def layer_options(default_directions: str) -> Option:
    """Which convolutions, beside the suites and files."""
    return group(
        option(
            "--problem KEY=N,…",
            "A convolution, e.g. n=256,c=64,h=27,w=27,k=192,r=5,s=5,pad=2. Repeatable.",
            repeatable=True,
            name="problems",
        ),
        option(
            "--directions NAME,…",
            "all, or of: forward, backward_data, backward_filter.",
            _directions,
            default=default_directions,
        ),
        option("--batch", "Mini-batch size instead.", count(1, MOST_IMAGES)),
        option("--dtype", "Data type instead.", click.Choice(list(ITEMSIZE))),
        option("--layout", "Storage order instead.", click.Choice(LAYOUTS)),
    )
