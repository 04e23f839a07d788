"""`mucudnn memory`: memory of a training step, and the cost of using less."""

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import cloup
from click.core import ParameterSource

from mucudnn.cli import options as opt
from mucudnn.cli.app import BadInputError, ExitCode, bad_input
from mucudnn.cli.output import emit, refuse_same, write_files
from mucudnn.cli.own_code import (
    compared_step,
    import_option,
    list_models,
    network,
    torch_step,
)
from mucudnn.cli.progress import Show, progress_display
from mucudnn.ir.devices import DEVICES, get_device
from mucudnn.ir.graph import Graph
from mucudnn.ir.profile import Profile
from mucudnn.ir.schedule import STATIC
from mucudnn.ir.sizes import exact_bytes, format_bytes
from mucudnn.models import FunctionModel
from mucudnn.passes.planning.plan_step import DescribedStep
from mucudnn.passes.registry import ALL
from mucudnn.passes.residency import PLANNED
from mucudnn.report.text import NOTHING, Table as TextTable, bytes_text, write_tables
from mucudnn.runtime.tuning.tuner import Tuner

if TYPE_CHECKING:
    from mucudnn.studies.memory_results import MemoryStudy, StepSpec

_CPU = "cpu"
_BATCH = 32
_CPU_BATCH = 4
MOST_GPUS = 1 << 20

_OF_BEST = ("trace_file", "snapshot_file")
_OF_COMPARISON = ("model", "batch", "compare", "json_file", "imports")
"""Options for files about the best step."""

_CODES = (
    f"Exit code: 0 if a technique fits, {ExitCode.NOTHING_FITS} if none does, 2 on "
    f"invalid input, {ExitCode.INTERRUPTED} after Ctrl-C."
)


def _devices() -> tuple[Iterable[str], Callable[[str], object]]:
    def check(name: str) -> object:
        if name == _CPU:
            return name
        try:
            return get_device(name)
        except ValueError as e:
            raise ValueError(f"{e}, {_CPU}") from e

    return (_CPU, *DEVICES), check


@cloup.command(epilog=_CODES)
@import_option
@opt.model_argument
@opt.section(
    "What",
    opt.option(
        "--batch N",
        f"Images in a step; {_BATCH} by default, {_CPU_BATCH} on the CPU, 1 for "
        "--inference.",
        opt.count(1, opt.MOST_IMAGES),
    ),
    opt.image_option,
    opt.optimizer_option,
    opt.flag("--inference", "Plan the network alone: no backward pass, no updates."),
    opt.strategy(
        "--device",
        "cpu is measured; all others are estimated from published figures.",
        _devices,
        default="h200",
    ),
    opt.option(
        "--gpus N",
        "Plan a PyTorch model that N GPUs train together, and compare 1 to 1,024 GPUs; "
        "all figures and MODEL's batch are those of one GPU.",
        opt.count(1, MOST_GPUS),
    ),
    opt.option(
        "--shard WAY",
        "With --gpus: fsdp2 (default) shards the model; ddp replicates it.",
        click.Choice(("fsdp2", "ddp")),
    ),
    opt.option(
        "--recording FILE",
        "Measurements of that device, as written by `tune --record`, used instead of "
        "estimates for the convolutions they cover. Repeatable.",
        repeatable=True,
        name="recordings",
    ),
)
@opt.section(
    "Limits",
    opt.option(
        "--budget SIZE",
        "Memory for everything; by default that of the device, with a curve of smaller "
        "budgets.",
    ),
    opt.flag("--curve", "Also plan for several smaller budgets when one is given."),
    opt.flag(
        "--max-batch",
        "Find the largest batch within the budget, and the one with the highest "
        "throughput.",
    ),
    opt.flag("--min-budget", "Find the minimum feasible budget of every policy."),
    opt.option(
        "--slowdown FACTOR",
        "Find about the least budget in which a step takes no more than FACTOR times "
        "as long as without one, such as 1.05.",
        opt.real(1.0),
    ),
)
@opt.section(
    "How",
    opt.strategy(
        "--policy policies",
        "Which tensors may be kept, offloaded or recomputed.",
        opt.policies,
        several=ALL,
        default=ALL,
    ),
    opt.strategy(
        "--scheduler schedulers",
        "When copies run; all compares every scheduler; by default the policy's own.",
        opt.schedulers,
        several=ALL,
    ),
    opt.order_option,
    opt.option(
        "--split PARTS",
        "Also plan the step in micro-batches: auto, none, or the number of parts of "
        "its largest layers; or in spatial tiles: height, or height:4 for four; by "
        "default none, auto for --inference.",
        opt.split_of,
    ),
    opt.placement_option,
    opt.tier_option,
    opt.layout_option,
    opt.precision_option,
    opt.cache_option,
)
@opt.section(
    "Output",
    opt.flag(
        "--compare",
        "Instead, run a PyTorch model's step with eager mode, checkpointing, "
        "offloading and torch.compile's memory budget, and compare each with a planned "
        "step in the same memory.",
    ),
    opt.json_option,
    opt.report_option,
    opt.file_option(
        "trace", "Write the best plan's step for Perfetto or chrome://tracing."
    ),
    opt.file_option("snapshot", "Write its memory for PyTorch's memory_viz, a pickle."),
)
@opt.listing_option
@click.pass_context
def memory(
    ctx: click.Context, /, model: str | None, json_file: str | None, **settings: Any
) -> None:
    """Plan a training step under a budget by every technique, and compare them.

    MODEL is the name of a network. FILE.py:FUNCTION is a function of (batch) that
    returns a Graph, or one that returns (model, loss_fn, example, optimizer) of
    PyTorch.
    """
    if settings["listing"]:
        list_models(json_file)
        return
    if model is None:
        raise BadInputError("name a network; --list lists them")
    files = {f"--{f}": settings[f"{f}_file"] for f in ("report", "trace", "snapshot")}
    refuse_same({"--json": json_file, **files})
    if settings["snapshot_file"] == "-":
        raise BadInputError("a snapshot is a pickle: name a file, not -")
    if settings["compare"]:
        _compare(ctx, model, settings, json_file)
        return
    found = _study(ctx, model, settings)
    from mucudnn.report.memory import memory_tables

    def show() -> None:
        write_tables(memory_tables(found), sys.stdout)

    emit(json_file, found.to_json, show, lambda: write_files(found, settings))
    if found.interrupted:
        ctx.exit(ExitCode.INTERRUPTED)
    # No plan within the budget is an error, unless something else was asked for.
    kept = found.for_slowdown is not None and found.for_slowdown.technique
    asked_for_less = settings["min_budget"] or any(found.max_batch.values()) or kept
    if found.best is None and not asked_for_less:
        click.echo(f"mucudnn: error: {_infeasible_message(found, settings)}", err=True)
        ctx.exit(ExitCode.NOTHING_FITS)


def _compare(
    ctx: click.Context, model: str, settings: dict[str, Any], json_file: str | None
) -> None:
    """Run the step of a PyTorch model in PyTorch's ways, and ours beside each."""
    given = [
        option.opts[0]
        for option in ctx.command.params
        if ctx.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE
        and option.name not in _OF_COMPARISON
    ]
    if given:
        raise BadInputError(
            "--compare runs the step as it is and cannot be combined with "
            f"{', '.join(given)}; it takes --batch and --json"
        )
    with progress_display(1) as progress:
        ways = compared_step(ctx, model, settings["batch"], progress)

    def over(slowdown: float | None) -> str:
        return NOTHING if slowdown is None else f"{slowdown:.2f}"

    columns = ("way", ">peak", ">time", ">ours: peak", ">time", "remark")
    rows = tuple(
        (
            *(way.way, bytes_text(way.peak_bytes), over(way.slowdown)),
            *(bytes_text(way.ours_bytes), over(way.ours_slowdown), way.error),
        )
        for way in ways
    )
    note = (
        "measured here in alternation; peaks exclude the batch, times are relative to "
        "eager mode; ours is planned within the peak of each way, and without a limit "
        "beside eager mode"
    )
    emit(
        json_file,
        {"schema": 1, "ways": [asdict(way) for way in ways]},
        lambda: write_tables([TextTable("", columns, rows, notes=(note,))], sys.stdout),
    )


def _infeasible_message(found: "MemoryStudy", settings: dict[str, Any]) -> str:
    """Return that nothing fits, and which budget would."""
    words = f"no policy fits {exact_bytes(found.budget)}"
    memory = math.inf
    if found.spec.device != _CPU:
        memory = get_device(found.spec.device).memory.value
    if found.minimum is not None and found.minimum > memory:
        words += (
            f"; no technique fits the step into the {format_bytes(int(memory))} of "
            f"{found.spec.device}: {_split_hint(found, settings)}take a smaller "
            "--batch or --image"
        )
    elif found.minimum is not None:
        words += f"; {_split_hint(found, settings)}the least budget that works is "
        words += exact_bytes(found.minimum)
    names = [settings[name] for name in _OF_BEST if settings[name] is not None]
    return f"{words}; nothing is written to {', '.join(names)}" if names else words


def _split_hint(found: "MemoryStudy", settings: dict[str, Any]) -> str:
    """Suggest a split if the network could be split and was not."""
    from mucudnn.studies.memory_results import StepSpec

    own = isinstance(found.spec, StepSpec)
    if (own and found.spec.device == _CPU) or settings["split"] not in (None, "none"):
        return ""
    return "--split auto, which runs layers in parts, may; without it "


def _step(
    ctx: click.Context, model: str, settings: dict[str, Any]
) -> "StepSpec | DescribedStep":
    """Return the requested step: a network of ours, or a PyTorch model."""
    from mucudnn.studies.memory_results import StepSpec

    device, batch, image = (settings[n] for n in ("device", "batch", "image"))
    inference = settings["inference"]
    usual = 1 if inference else _CPU_BATCH if device == _CPU else _BATCH
    with bad_input():
        gpus, shard = settings["gpus"], settings["shard"]
        if shard is not None and gpus is None:
            raise BadInputError("--shard applies to several GPUs: add --gpus")
        step = torch_step(ctx, model, batch, device, gpus, shard or "fsdp2")
        made = network(model) if step is None else model
    if step is not None:
        if inference:
            raise BadInputError(f"--inference is for built-in networks, not {model}")
        # A PyTorch model decides itself what these options would change.
        for name, usual_value, why in (
            ("placement", STATIC, "whose tensors PyTorch's allocator places"),
            ("layout", "NCHW", "which choose their own memory format"),
            ("precision", None, "which choose their own data types"),
        ):
            if settings[name] != usual_value:
                raise BadInputError(f"--{name} does not apply to PyTorch models, {why}")
        return step
    if gpus is not None:
        raise BadInputError(
            f"--gpus is for PyTorch models, not {model}; `mucudnn fleet` divides the "
            "batches of built-in networks among devices"
        )
    return StepSpec(
        model=made if isinstance(made, FunctionModel) else model,
        batch=batch or usual,
        image=image[0] if image is not None and len(image) == 1 else image,
        device=device,
        **opt.chosen(settings, "optimizer order inference placement layout precision"),
    )


def _study(ctx: click.Context, model: str, settings: dict[str, Any]) -> "MemoryStudy":
    from mucudnn.studies.memory import study_memory
    from mucudnn.studies.memory_results import StepSpec

    device, budget = settings["device"], settings["budget"]
    if settings["cache_path"] not in (None, "none"):
        opt.refuse_foreign_file(Path(settings["cache_path"]))
    if device == _CPU and settings["recordings"]:
        raise BadInputError(
            f"--recording {settings['recordings'][0]} is for estimated devices, and "
            f"--device {_CPU} is measured"
        )
    asked_more = any(opt.chosen(settings, "max_batch min_budget slowdown").values())
    spec = _step(ctx, model, settings)
    measured = device == _CPU and isinstance(spec, StepSpec)
    if settings["cache_path"] not in (None, "none") and not measured:
        words = f"--cache is used only for built-in networks with --device {_CPU}"
        click.echo(f"mucudnn: warning: {words}", err=True)
    # Images larger than the device are refused before their step is planned for long.
    if device != _CPU and (image := settings["image"]) is not None:
        sides = image * 2 if len(image) == 1 else image
        nbytes = 4 * spec.batch * math.prod(sides)
        if nbytes > (most := int(get_device(device).memory.value)):
            click.echo(
                "mucudnn: error: no technique fits the step, as its images alone take "
                f"more than the {format_bytes(most)} of {device}: take a smaller "
                "--batch or --image",
                err=True,
            )
            ctx.exit(ExitCode.NOTHING_FITS)
    # By default only inference on estimated devices may be split.
    split = settings["split"]
    if split is None:
        split = "auto" if settings["inference"] and device != _CPU else "none"
    if split != "none" and device == _CPU and isinstance(spec, StepSpec):
        raise BadInputError(
            f"--split {split} is for estimated devices, and --device {_CPU} is "
            f"measured; use `mucudnn train --split {split}`"
        )
    # The search takes longest: run it last, so that Ctrl-C keeps the other results.
    names = _expand_all(settings["policies"], opt.policies)
    if ALL in settings["policies"]:
        names = tuple(sorted(names, key=lambda name: name == PLANNED))
    with (
        bad_input(),
        progress_display(1) as show,
        _measuring(spec, settings["cache_path"], show) as measured,
    ):
        return study_memory(
            spec,
            policies=names,
            schedulers=_expand_all(settings["schedulers"] or (), opt.schedulers),
            budget=budget,
            curve=settings["curve"] or (budget is None and not asked_more),
            profile=measured,
            progress=show,
            split=split,
            **opt.chosen(settings, "max_batch min_budget slowdown recordings tiers"),
        )


def _expand_all(asked: tuple[str, ...], table: opt.Table) -> tuple[str, ...]:
    """Return the requested names; for `all`, every usable one.

    Broken ones cause a warning.
    """
    if ALL not in asked:
        return asked
    names, check = table()
    found = []
    for name in names:
        with suppress(ValueError):
            check(name)
            found.append(name)
    return tuple(found)


@contextmanager
def _measuring(
    spec: "StepSpec | DescribedStep", cache_path: str | None, progress: Show
) -> Iterator[Callable[[Graph], Profile] | None]:
    """Yield a function that measures a step on the CPU; None for other costs."""
    if spec.device != _CPU or isinstance(spec, DescribedStep):
        yield None
        return
    from mucudnn.runtime.profiling.links import mapping_costs
    from mucudnn.runtime.profiling.profiler import profile

    given: Any = {} if cache_path is None else {"cache": opt.open_cache(cache_path)}

    def measuring(name: str, done: int, total: int) -> None:
        progress(f"measuring {name}", done, total)

    with Tuner.from_env(backend=_CPU, **given) as tuner, tuner.cache:
        chunks = None
        if spec.placement != STATIC:
            chunks = mapping_costs(tuner.backend)

        def measured(graph: Graph) -> Profile:
            costs = profile(tuner, graph, progress=measuring)
            return replace(costs, mapping_costs=chunks)

        yield measured
