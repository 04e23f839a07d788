"""`python -m bench split height`: one step of one image, in strips, really run.

The budget is a share of the least that the step needs unsplit, by any plan. What the
step would take is said first, with what this machine computes in a second: a large one
takes hours, and what leaves the budget has to fit the host's memory or a disk. Then the
unsplit step is taken on the same image, unbounded, where that fits the machine.
"""

import argparse
import json
import resource
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from bench.machine import describe
from bench.split_distance import distances, exact_step
from bench.split_running import (
    OPTIMIZER,
    Told,
    measured_by,
    steps_of,
    taken,
    without_gradients,
)
from mucudnn.ir.graph import Graph
from mucudnn.ir.sizes import format_bytes
from mucudnn.models import get_model
from mucudnn.models.unet import narrow_unet2d, narrow_unet3d
from mucudnn.passes.estimate import estimate
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.updates import with_updates
from mucudnn.passes.planning.cutting import Cutting
from mucudnn.passes.planning.plan_step import minimum_budget, unbounded
from mucudnn.passes.planning.request import StepRequest
from mucudnn.runtime.functional import conv2d
from mucudnn.runtime.training.budget import MemoryBudget
from mucudnn.runtime.training.trainer import Trainer
from mucudnn.runtime.tuning.tuner import Tuner

__all__ = ["forecast", "main", "really"]

_DEVICE = "h200"
"""Whose estimates are planned with: sizes alone decide the least budget."""

_WORKSPACE = 64 << 20
_TRIAL = (1, 64, 128, 128)
"""Image of a convolution that says what this machine computes in a second."""


_NARROW = {"unet2d": narrow_unet2d, "unet3d": narrow_unet3d}


def main(arguments: Sequence[str]) -> int:
    """Say what a step would take, run it unless only that is wanted, print JSON.

    A file has what is known so far: a step of a large image takes long.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        image = tuple(int(size) for size in options.image.split("x"))
        model = partial(_network(options.model, options.channels), 1, image=image)
        network = model()
    except ValueError as error:
        parser.error(str(error))
    found = forecast(network, options.strips, options.share)
    print(_words(found), flush=True)
    text = _text(options, found)
    if not options.forecast:
        for results in really(
            network,
            options.strips,
            found["budget"],
            options.steps,
            options.disk,
            beside=not options.alone,
            exact=model(dtype="float64") if options.float64 else None,
        ):
            text = _text(options, found | results)
            if options.json is not None:
                options.json.write_text(text)
    if options.json is None:
        print(text, end="")
    else:
        options.json.write_text(text)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench split height")
    parser.add_argument("--model", default="unet2d", help="a network with a loss")
    parser.add_argument("--channels", type=int, help="of the first level of a U-Net")
    parser.add_argument("--image", default="3x512x512", help="channels and sides")
    parser.add_argument("--strips", type=int, default=8)
    parser.add_argument("--share", type=float, default=0.25, help="of the least budget")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--disk", help="folder for what leaves; host memory if none")
    parser.add_argument("--alone", action="store_true", help="no unsplit step beside")
    parser.add_argument("--float64", action="store_true", help="gradients beside it")
    parser.add_argument("--forecast", action="store_true", help="do not run it")
    parser.add_argument("--json", type=Path, metavar="OUT", help="default: stdout")
    return parser


def _text(options: argparse.Namespace, found: dict[str, Any]) -> str:
    asked = ("model", "channels", "image", "strips", "share")
    about = {name: getattr(options, name) for name in asked}
    return json.dumps({"machine": describe(), **about, **found}, indent=1) + "\n"


def _network(name: str, channels: int | None) -> Callable[..., Graph]:
    if channels is None:
        return get_model(name)
    if name not in _NARROW:
        raise ValueError(f"--channels is of {' or '.join(_NARROW)}, not of {name}")
    return _NARROW[name](channels)


def forecast(network: Graph, strips: int, share: float) -> dict[str, Any]:
    """The least budgets whole and in strips, and what a step computes."""
    gradients = training_graph(network)
    whole = with_updates(gradients, OPTIMIZER)
    cut = with_updates(Cutting(strips, "height").cut(gradients), OPTIMIZER)
    requests = [StepRequest(g, estimate(g, _DEVICE)) for g in (whole, cut)]
    least, in_strips = (minimum_budget(request) for request in requests)
    flops = sum(
        node.attrs["problem"].flops for node in whole.nodes if node.op == "conv"
    )
    return {
        "least_whole": least,
        "least_in_strips": in_strips,
        "budget": int(share * least),
        "unbounded": unbounded(cut, requests[1].profile).peak_bytes,
        "nodes": [len(whole.nodes), len(cut.nodes)],
        "tflop": flops / 1e12,
        "minutes": flops / _flops_per_s() / 60,
    }


def really(
    network: Graph,
    strips: int,
    budget: int,
    steps: int,
    disk: str | None = None,
    *,
    beside: bool = True,
    exact: Graph | None = None,
) -> Iterator[dict[str, Any]]:
    """Train a few steps on noise within a budget, and then without any.

    The memory of the strips is given back before the unsplit step is measured. What is
    known by then is told first: that of a large image takes long.

    Args:
        network: A network with a loss.
        strips: In how many its largest layers run.
        budget: Bytes for everything.
        steps: Of each.
        disk: A folder for what leaves; host memory if None.
        beside: Whether the unsplit step is taken as well.
        exact: The same network in float64, whose gradients both are held against.

    Yields:
        What the strips came to; then the same and what it is beside the unsplit step.
    """
    tell, begun = Told(), perf_counter()
    with measured_by(tell, min(_WORKSPACE, budget // 8)) as tuner:
        with Trainer(
            network,
            tuner=tuner,
            optimizer=OPTIMIZER,
            budget=MemoryBudget(nbytes=budget, disk=disk),
            split=f"height:{strips}",
            progress=tell.node,
        ) as trainer:
            tell(f"in strips: {format_bytes(trainer.peak_bytes)}")
            planned_s = perf_counter() - begun
            rows = list(steps_of(trainer, network, steps, tell))
            found = taken(trainer) | {"planned_s": planned_s}
        found |= {"steps": without_gradients(rows), "resident_bytes": _most_resident()}
        tell(f"resident: {format_bytes(found['resident_bytes'])}")
        yield found
        if not beside:
            return
        with Trainer(network, tuner=tuner, optimizer=OPTIMIZER) as trainer:
            tell(f"unsplit: {format_bytes(trainer.peak_bytes)}")
            start = trainer.state.save()
            whole = list(steps_of(trainer, network, steps, tell))
            found |= {"unsplit_bytes": trainer.peak_bytes}
        precise = exact_step(exact, start, tuner, tell)
        found |= {"unsplit": without_gradients(whole)}
        yield found | distances(whole[0], rows[0], precise)


def _most_resident() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _flops_per_s() -> float:
    """What this machine computes in a second, by one convolution of 3 × 3."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(_TRIAL, dtype="f4")
    w = rng.standard_normal((64, 64, 3, 3), dtype="f4")
    with Tuner(backend="cpu", workspace_limit=_WORKSPACE) as tuner:
        conv2d(x, w, padding=1, tuner=tuner)
        begun = perf_counter()
        y = conv2d(x, w, padding=1, tuner=tuner)
        return float(2 * y.size * w[0].size / (perf_counter() - begun))


def _words(found: dict[str, Any]) -> str:
    sizes = {name: format_bytes(int(found[name])) for name in found if name in _SIZES}
    return (
        f"whole at least {sizes['least_whole']}, in strips {sizes['least_in_strips']}, "
        f"budget {sizes['budget']}; unbounded {sizes['unbounded']}; "
        f"{found['tflop']:.2f} TFLOP a step, {found['minutes']:.1f} minutes as fast as "
        "one convolution runs now, and several times that to measure"
    )


_SIZES = ("least_whole", "least_in_strips", "budget", "unbounded")
