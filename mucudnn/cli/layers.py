"""Select the convolutions of a command: from suites, files, or options.

`settings` are the values of `layer_options`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from mucudnn.cli import options as opt
from mucudnn.cli.app import BadInputError, bad_input
from mucudnn.ir.conv import LAYOUTS, ConvProblem, Direction
from mucudnn.ir.tensor import ITEMSIZE
from mucudnn.suites import SUITES, Layer, load_suite, parse_problem, read_layers_file

_DIRECTIONS = ("all", *(d.value for d in Direction))


def _parse_directions(text: str) -> tuple[Direction, ...]:
    """Parse `all`, or `forward,backward_data`, into the order of a step."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in _DIRECTIONS:
            valid = ", ".join(_DIRECTIONS)
            raise click.BadParameter(
                f"unknown direction {name!r}; choose some of: {valid}"
            )
    return tuple(d for d in Direction if "all" in names or d.value in names)


def layer_names(ctx: click.Context) -> tuple[str, ...]:
    """Return layers of the suite that is on the line already."""
    source = ctx.params.get("source")
    return tuple(layer.name for layer in load_suite(source)) if source in SUITES else ()


complete_source = opt.completing(lambda _: SUITES, files=True)
"""Completion of a suite or a file."""


def title_of(sources: Sequence[str], settings: Mapping[str, Any]) -> str:
    """Return a short title from the sources of the convolutions."""
    stems = [s if s in SUITES else Path(s).stem for s in sources]
    return ", ".join([*stems, *settings["problems"]])


def layers_of(sources: Sequence[str], settings: Mapping[str, Any]) -> tuple[Layer, ...]:
    """Return all selected layers, forward, with overrides applied."""
    problems = settings["problems"]
    if not sources and not problems:
        raise BadInputError(
            f"nothing to measure: name a suite ({', '.join(SUITES)}), a CSV file "
            'or --problem "n=256,c=64,h=27,w=27,k=192,r=5,s=5,pad=2"'
        )
    with bad_input():
        layers: list[Layer] = []
        for source in sources:
            if source in SUITES:
                layers += load_suite(source)
            elif Path(source).is_file():
                layers += read_layers_file(source)
            else:
                raise BadInputError(
                    f"{source!r} is neither a suite ({', '.join(SUITES)}) nor a file"
                )
        layers += [Layer(text, parse_problem(text)) for text in problems]
        return tuple(
            replace(layer, problem=_override(layer.problem, settings))
            for layer in layers
        )


def _override(problem: ConvProblem, settings: Mapping[str, Any]) -> ConvProblem:
    problem = problem.with_batch(settings["batch"] or problem.batch)
    if problem.batch > opt.MOST_IMAGES:
        raise BadInputError(
            f"a mini-batch of {problem.batch} is too large to plan; the maximum is "
            f"{opt.MOST_IMAGES}, choose another with --batch N"
        )
    dtype, layout = settings["dtype"], settings["layout"]
    return replace(
        problem, dtype=dtype or problem.dtype, layout=layout or problem.layout
    )


def layer_options(default_directions: str) -> opt.Option:
    """Return the options that select convolutions beside suites and files."""
    return opt.section(
        "What",
        opt.option(
            "--problem KEY=N,…",
            "A convolution, e.g. n=256,c=64,h=27,w=27,k=192,r=5,s=5,pad=2. Repeatable.",
            repeatable=True,
            name="problems",
        ),
        opt.option(
            "--directions NAME,…",
            "all, or of: forward, backward_data, backward_filter.",
            _parse_directions,
            complete=opt.completing(lambda _: _DIRECTIONS, several=True),
            default=default_directions,
        ),
        opt.option(
            "--batch N", "Override the mini-batch size.", opt.count(1, opt.MOST_IMAGES)
        ),
        opt.option("--dtype", "Override the data type.", click.Choice(list(ITEMSIZE))),
        opt.option("--layout", "Override the storage order.", click.Choice(LAYOUTS)),
    )
