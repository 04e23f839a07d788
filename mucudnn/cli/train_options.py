"""What `mucudnn train` can be told."""

from collections.abc import Callable
from functools import reduce
from typing import Any, TypeVar

import click

from mucudnn.cli.numbers import MOST, MOST_IMAGES, count, real
from mucudnn.cli.options import byte_size
from mucudnn.cli.output import emit
from mucudnn.cli.strategy_options import (
    StrategyOption,
    batch_policies,
    optimizers,
    orders,
    policies,
    schedulers,
)
from mucudnn.ir.learning_rate import parse_learning_rate
from mucudnn.ir.sizes import LARGEST, format_bytes, parse_integer

__all__ = [
    "data_options",
    "image_size",
    "learning_options",
    "list_models",
    "run_options",
]

_MOST_REAL = 1e30  # what float32 holds, with room to multiply

F = TypeVar("F", bound=Callable[..., Any])


def image_size(text: str | tuple[int, ...]) -> tuple[int, ...]:
    """`224`, `32x48` or `3x32x48` as numbers."""
    if isinstance(text, tuple):
        return text
    try:
        sizes = tuple(
            parse_integer(part, least=1, most=MOST)
            for part in text.lower().replace("×", "x").split("x")
        )
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is no image size; write a side (224), sides (32x48), or "
            "channels and sides (3x32x48)"
        ) from None
    return sizes


def _schedule(text: str) -> str:
    """The text of a learning-rate schedule, once it is known to be one."""
    try:
        parse_learning_rate(text, 0.0)
    except ValueError as e:
        raise click.BadParameter(str(e)) from e
    return text


def _options(*options: Callable[[F], F]) -> Callable[[F], F]:
    return lambda fn: reduce(lambda f, option: option(f), reversed(options), fn)


data_options = _options(
    click.option(
        "--data",
        default="synthetic",
        show_default=True,
        metavar="NAME",
        help="digits, mnist:DIR, cifar10:DIR, cifar100:DIR, folder:DIR, arrays:DIR or "
        "synthetic[:length=N,classes=N,noise=X].",
    ),
    click.option(
        "--batch",
        type=count(1, MOST_IMAGES),
        default=32,
        show_default=True,
        help="Images in a step.",
    ),
    click.option(
        "--image",
        type=image_size,
        metavar="SIZE",
        help="Size of an image, such as 64 or 3x64x96; by default the network's own.",
    ),
    click.option(
        "--classes",
        type=count(2),
        help="Number of classes; by default the data set's.",
    ),
    click.option(
        "--augment", is_flag=True, help="Move and mirror the images for training."
    ),
    click.option(
        "--dtype",
        type=click.Choice(["float32", "float64"]),
        default="float32",
        show_default=True,
        help="Data type of weights and activations.",
    ),
)
"""Which data, in which shape."""

learning_options = _options(
    click.option(
        "--epochs",
        type=count(),
        default=10,
        show_default=True,
        help="Passes over the data.",
    ),
    click.option("--steps", type=count(), help="End after so many steps."),
    click.option(
        "--optimizer",
        cls=StrategyOption,
        table=optimizers,
        default="momentum",
        show_default=True,
        help="How weights change.",
    ),
    click.option(
        "--lr",
        type=real(0, _MOST_REAL, beyond=True),
        help="Learning rate, at its highest; by default the optimizer's usual one.",
    ),
    click.option(
        "--lr-schedule",
        type=_schedule,
        default="cosine",
        show_default=True,
        metavar="NAME",
        help="How it falls: constant, cosine, or step:30,60,90 at those epochs.",
    ),
    click.option(
        "--warmup",
        type=count(0),
        default=0,
        metavar="STEPS",
        help="Steps over which it rises first.",
    ),
    click.option(
        "--momentum",
        type=real(0, 1),
        help="Of momentum and nesterov; by default 0.9.",
    ),
    click.option(
        "--weight-decay",
        type=real(0, _MOST_REAL),
        help="Share of the weights that is added to their gradients.",
    ),
    click.option(
        "--seed",
        type=count(0, LARGEST),
        default=0,
        show_default=True,
        help="Of weights, order, dropout and augmentation.",
    ),
)
"""How the weights change."""

run_options = _options(
    click.option(
        "--backend",
        default="cpu",
        show_default=True,
        help="cpu, cuda, or null, which only counts; see `mucudnn info`.",
    ),
    click.option(
        "--workspace-limit",
        type=byte_size,
        metavar="SIZE",
        help=f"Bytes a convolution may use; by default {format_bytes(64 << 20)}.",
    ),
    click.option(
        "--batch-policy",
        cls=StrategyOption,
        table=batch_policies,
        help="Micro-batch sizes; powers_of_two by default.",
    ),
    click.option(
        "--precision",
        type=click.Choice(["float16", "bfloat16"]),
        help="Of convolutions and products, where the backend has it.",
    ),
    click.option(
        "--loss-scale",
        type=real(0, _MOST_REAL, beyond=True),
        metavar="FACTOR",
        help="Of the loss while its gradients are computed; 1024 for float16.",
    ),
    click.option(
        "--budget",
        type=byte_size,
        metavar="SIZE",
        help="Device memory for everything; what has no room leaves or is computed "
        "again.",
    ),
    click.option(
        "--policy",
        cls=StrategyOption,
        table=policies,
        default="planned",
        show_default=True,
        help="With --budget: what leaves and what is computed again; see `mucudnn "
        "memory`.",
    ),
    click.option(
        "--scheduler",
        cls=StrategyOption,
        table=schedulers,
        help="With --budget: when copies run.",
    ),
    click.option(
        "--convolutions",
        type=click.Choice(["dynamic", "fixed", "fastest", "least"]),
        default="dynamic",
        show_default=True,
        help="With --budget: workspace is what is free, as without a budget (same "
        "bits), …",
    ),
    click.option(
        "--disk",
        type=click.Path(exists=True, file_okay=False, writable=True),
        metavar="DIR",
        help="With --budget: what leaves goes to a file here, not to host memory.",
    ),
    click.option(
        "--order",
        cls=StrategyOption,
        table=orders,
        default="builder",
        show_default=True,
        help="Order of a step's operations.",
    ),
    click.option(
        "--update-when",
        type=click.Choice(["early", "late"]),
        default="early",
        show_default=True,
        help="Update a weight at once, or all at the end of a step.",
    ),
    click.option(
        "--accumulate",
        type=count(),
        default=1,
        show_default=True,
        help="Compute a step's gradient in so many parts.",
    ),
    click.option(
        "--checkpoint",
        type=click.Path(file_okay=False),
        metavar="DIR",
        help="Keep the last two checkpoints there, one an epoch.",
    ),
    click.option(
        "--checkpoint-every",
        type=count(),
        metavar="STEPS",
        help="Also write one after so many steps.",
    ),
    click.option("--resume", is_flag=True, help="Go on from the last checkpoint."),
)
"""How a step is run, and what is kept of it."""


def list_models(json_file: str | None) -> None:
    """Every network with its size."""
    from mucudnn.cli.own_code import networks

    rows: list[dict[str, Any]] = []
    for name, model in networks():
        graph = model(1)
        rows.append(
            {
                "name": name,
                "image": list(model.image),
                "classes": model.classes,
                "parameters": graph.parameter_count,
            }
        )

    def show() -> None:
        for row in rows:
            image = "x".join(map(str, row["image"]))
            click.echo(
                f"{row['name']:<18} {image:>12}  {row['classes']:>5} classes  "
                f"{row['parameters']:>12,} parameters"
            )
        click.echo(f"{'resnet:n1,n2,n3,n4':<18} bottlenecks, so many a stage")

    emit(json_file, {"models": rows}, show)
