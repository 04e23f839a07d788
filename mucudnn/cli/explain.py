"""`mucudnn explain`: the reasons for a convolution's plan."""

from typing import Any

import click
import cloup

from mucudnn.cli import options as opt
from mucudnn.cli.app import BadInputError
from mucudnn.cli.layers import complete_source, layer_names, layer_options, layers_of
from mucudnn.cli.output import emit
from mucudnn.cli.own_code import import_option
from mucudnn.cli.progress import LayerWords, progress_display
from mucudnn.codecs import encode_fields
from mucudnn.report.text import DIRECTIONS, problem_text
from mucudnn.studies.convolutions import in_directions
from mucudnn.suites import Layer


@cloup.command()
@import_option
@click.argument(
    "source",
    metavar="[SUITE | FILE.csv]",
    required=False,
    shell_complete=complete_source,
)
@click.argument(
    "name",
    metavar="[LAYER]",
    required=False,
    shell_complete=opt.completing(layer_names),
)
@layer_options(default_directions="forward")
@opt.section("Limits", opt.workspace_option, opt.limit_options)
@opt.section("How", opt.measuring_options)
@opt.section("Output", opt.json_option)
def explain(*, source: str | None, name: str | None, **settings: Any) -> None:
    """Plan a layer of a suite (its name or number), or a problem, and explain why."""
    found = layers_of(() if source is None else (source,), settings)
    layers = found if name is None else (_find_layer(found, name),)
    plans = []
    asked = in_directions(layers, settings["directions"])
    # Every convolution gets an equal share of the time limit.
    limit_s = settings["time_limit"]
    share = None if limit_s is None else limit_s / len(asked)
    with progress_display(len(asked), limit_s=limit_s) as display:
        shown = LayerWords(display)
        tuner = opt.make_tuner(settings, progress=shown.measured)
        with tuner.cache:
            for i, layer in enumerate(asked):
                shown.begin(layer, i, len(asked))
                tuner.measure(layer.problem, time_limit_s=share)
                (plan,) = tuner.plan([layer.problem])
                plans.append((layer, plan, tuner.explain(plan)))

    def show() -> None:
        for layer, _, text in plans:
            way = DIRECTIONS[layer.problem.direction]
            click.echo(f"{layer.name}, {way}: {problem_text(layer.problem)}")
            click.echo(f"{text.rstrip()}\n")

    data = {
        "backend": tuner.backend.name,
        "fingerprint": tuner.backend.device.fingerprint,
        "numerics": tuner.numerics.words,
        "workspace_limit": tuner.workspace_limit,
        "layers": [
            {
                "name": layer.name,
                "direction": layer.problem.direction.value,
                "plan": encode_fields(plan),
                "text": text,
            }
            for layer, plan, text in plans
        ],
    }
    emit(settings["json_file"], data, show)


def _find_layer(layers: tuple[Layer, ...], name: str) -> Layer:
    by_number = {str(i): layer for i, layer in enumerate(layers, start=1)}
    by_name = {layer.name: layer for layer in layers}
    layer = by_name.get(name) or by_number.get(name)
    if layer is None:
        raise BadInputError(
            f"no layer {name!r}; choose a number from 1 to {len(layers)} or one of: "
            f"{', '.join(by_name)}"
        )
    return layer
