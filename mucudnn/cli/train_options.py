"""Options and settings of `mucudnn train`, and its log files."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mucudnn.backends import Device
from mucudnn.cli import options as opt
from mucudnn.cli.app import BadInputError, bad_input
from mucudnn.cli.output import STDOUT, output_file, refuse_unwritable
from mucudnn.ir.graph import Graph
from mucudnn.ir.optimizers import (
    DYNAMIC,
    Momentum,
    Optimizer,
    parse_learning_rate,
    parse_optimizer,
)
from mucudnn.ir.sizes import LARGEST, parse_integer

if TYPE_CHECKING:
    from mucudnn.cli.train_data import Work
    from mucudnn.runtime.training.checkpoints import Checkpoint
    from mucudnn.runtime.training.history import LogEntry, OnEntry, Position


def log_file(value: str) -> str:
    """Return a path that a log can be written to."""
    if output_file(value) == STDOUT:
        raise click.BadParameter("a log needs a file, such as FILE.csv or FILE.jsonl")
    from mucudnn.runtime.training.history import LogFile

    opt.parsed(value, LogFile)
    return value


_RATE_WITHOUT_NORM = 0.01  # the rate of AlexNet's and VGG's papers
_MOST_REAL = 1e30  # within float32, with room to multiply


def _check_schedule(text: str) -> str:
    """Return the text of a valid learning-rate schedule."""
    opt.parsed(text, lambda text: parse_learning_rate(text, 0.0))
    return text


AUTO, EQUAL = "auto", "equal"
"""Words for the division of images among processes, besides numbers."""


def parse_shares(text: str) -> str | tuple[int, ...]:
    """Parse `auto`, `equal`, or numbers such as `9,3`."""
    if text in (AUTO, EQUAL):
        return text
    with suppress(ValueError):
        return tuple(parse_integer(word, least=1) for word in text.split(","))
    raise click.BadParameter(
        f"{text!r} is not auto, equal, or numbers of samples such as 9,3"
    )


def _parse_budget(text: str) -> Any:
    """Parse `8GiB`, `device` for all free memory, or several separated by commas."""
    if text == "device":
        return text
    if "," in text:
        return tuple(_parse_budget(word.strip()) for word in text.split(","))
    try:
        return opt.byte_size(text)
    except click.BadParameter as e:
        raise click.BadParameter(
            f"{e.message}; or device, for the memory that is free"
        ) from e


data_options = opt.section(
    "What",
    opt.option(
        "--data NAME = synthetic",
        "digits, mnist:DIR, cifar10:DIR, cifar100:DIR, folder:DIR, arrays:DIR or "
        "synthetic[:length=N,classes=N,noise=X].",
        complete=opt.completing(
            lambda _: importlib.import_module("mucudnn.data").FORMATS
        ),
    ),
    opt.option("--batch N = 32", "Images in a step.", opt.count(1, opt.MOST_IMAGES)),
    opt.image_option,
    opt.option(
        "--classes N", "Number of classes; by default the data set's.", opt.count(2)
    ),
    opt.flag("--augment", "Shift and mirror training images at random."),
    opt.option(
        "--dtype [float32|float64] = float32", "Data type of weights and activations."
    ),
)
"""Options for data and its shape."""

learning_options = opt.section(
    "Learning",
    opt.option("--epochs N = 10", "Passes over the data.", opt.count()),
    opt.option("--steps N", "Stop after so many steps.", opt.count()),
    opt.optimizer_option,
    opt.option(
        "--lr RATE",
        "Highest learning rate; by default the optimizer's usual one, and with "
        "momentum 0.01 for networks without batch norm.",
        opt.real(0, _MOST_REAL, beyond=True),
    ),
    opt.option(
        "--lr-schedule NAME = cosine",
        "Decay of the rate: constant, cosine, or step:30,60,90 at those epochs.",
        _check_schedule,
    ),
    opt.option(
        "--warmup STEPS",
        "Steps of linear warm-up of the rate.",
        opt.count(0),
        default=0,
        show_default=False,
    ),
    opt.option(
        "--momentum SHARE",
        "Momentum of `momentum` and `nesterov`; by default 0.9.",
        opt.real(0, 1),
    ),
    opt.option(
        "--weight-decay SHARE",
        "Multiple of the weights that is added to their gradients.",
        opt.real(0, _MOST_REAL),
    ),
    opt.option(
        "--seed N = 0",
        "Seed of weights, order, dropout and augmentation.",
        opt.count(0, LARGEST),
    ),
)
"""Options for the optimizer and its schedule."""

budget_options = opt.section(
    "Limits",
    opt.workspace_option,
    opt.option(
        "--budget SIZE",
        "Device memory for everything, or `device` for all that is free; tensors that "
        "do not fit are offloaded or recomputed. Under mpiexec, per process: one size "
        "for all, or one for each, such as 96MiB,64MiB.",
        _parse_budget,
    ),
    opt.strategy(
        "--policy",
        "With --budget: what is offloaded or recomputed; see `mucudnn memory`.",
        opt.policies,
        default="planned",
    ),
    opt.strategy("--scheduler", "With --budget: when copies run.", opt.schedulers),
    opt.option(
        "--convolutions [dynamic|fixed|fastest|least] = dynamic",
        "With --budget: plan each convolution for the free workspace (dynamic), as "
        "without a budget, with the same bits (fixed), with the fastest algorithm, or "
        "with the least workspace.",
    ),
    opt.option(
        "--disk DIR",
        "With --budget: offload to a file in DIR instead of host memory.",
        click.Path(exists=True, file_okay=False, writable=True),
    ),
    opt.tier_option,
)

run_options = opt.section(
    "How",
    opt.backend_option("cpu, cuda, or null, which computes nothing"),
    opt.batch_policy_option,
    opt.precision_option,
    opt.option(
        "--loss-scale FACTOR",
        "Factor of the loss for computing gradients, or `dynamic`: as large as "
        "possible; by default 1024 for float16.",
        opt.real(0, _MOST_REAL, beyond=True, word=DYNAMIC),
    ),
    opt.order_option,
    opt.option(
        "--update-when [early|late] = early",
        "Update each weight as early as possible, or all at the end of a step.",
    ),
    opt.placement_option,
    opt.layout_option,
    opt.flag("--no-fuse", "Run each operation as a separate kernel."),
    opt.flag("--replay", "Replay the launches of a step as CUDA graphs."),
    opt.option(
        "--accumulate PARTS = 1",
        "Compute each batch in PARTS parts, and sum their gradients.",
        opt.count(),
    ),
    opt.option(
        "--split PARTS = none",
        "Run a step in micro-batches to need less memory: none, the number of parts "
        "of its largest layers, or, with --budget, auto; or in spatial tiles: "
        "height:4 for four, or, with --budget, height.",
        opt.split_of,
    ),
    opt.option(
        "--shares N,… = auto",
        "Under mpiexec, images per process in each batch, or in each of its parts: "
        "auto, by measured step times; equal; or numbers.",
        parse_shares,
    ),
    opt.option(
        "--batch-norm [per_rank|synchronised] = per_rank",
        "Under mpiexec, use statistics of each process's own images, or of all.",
    ),
    opt.cache_option,
)
"""Options for the execution of a step."""

output_options = opt.section(
    "Output",
    opt.option(
        "--eval-every STEPS",
        "Also test after every so many steps, not only after an epoch.",
        opt.count(),
    ),
    opt.option(
        "--log FILE",
        "Write a line for every step, test and epoch immediately: FILE.csv, or "
        "FILE.jsonl for a line of JSON each.",
        log_file,
    ),
    opt.option(
        "--tensorboard DIR",
        "Write event files for TensorBoard to DIR.",
        click.Path(file_okay=False),
    ),
    opt.option(
        "--checkpoint DIR",
        "Write a checkpoint per epoch to DIR; the last two are kept.",
        click.Path(file_okay=False),
    ),
    opt.option(
        "--checkpoint-every STEPS", "Also write one every so many steps.", opt.count()
    ),
    opt.flag("--resume", "Resume from the last checkpoint."),
    opt.json_option,
)
"""Options for output."""


def step_arguments(settings: Mapping[str, Any], device: Device) -> dict[str, Any]:
    """Return the arguments of `Trainer` that say how a step is planned."""
    from mucudnn.runtime.training.budget import DEVICE, MemoryBudget

    nbytes, disk = settings["budget"], settings["disk"]
    budget = None
    if nbytes is not None:
        budget = MemoryBudget(
            nbytes=device.available_bytes() if nbytes == DEVICE else nbytes,
            disk=None if disk is None else Path(disk),
            **opt.chosen(settings, "policy scheduler convolutions tiers"),
        )
    shared = opt.chosen(settings, "order precision layout split placement")
    return {**shared, "fuse": not settings["no_fuse"], "budget": budget}


def optimizer_of(settings: Mapping[str, Any], graph: Graph) -> Optimizer:
    """Return the optimizer of a network with its settings."""
    rate, momentum = settings["lr"], settings["momentum"]
    with bad_input():
        optimizer = parse_optimizer(
            settings["optimizer"],
            learning_rate=rate,
            weight_decay=settings["weight_decay"],
        )
    # Without batch norm, 0.1 diverges: LeNet's loss is nan after eight steps.
    normalized = any(node.op == "batch_norm" for node in graph.nodes)
    if rate is None and isinstance(optimizer, Momentum) and not normalized:
        optimizer = replace(optimizer, learning_rate=_RATE_WITHOUT_NORM)
    if momentum is None:
        return optimizer
    if not isinstance(optimizer, Momentum):
        raise BadInputError(f"{settings['optimizer']} takes no --momentum")
    return replace(optimizer, momentum=momentum)


def total_steps(work: "Work", settings: Mapping[str, Any]) -> int:
    """Return the number of steps of the whole training."""
    total: int = settings["epochs"] * len(work.batches)
    return min(total, settings["steps"] or total)


def words_of(
    work: "Work", optimizer: Optimizer, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings that a checkpoint must agree with to be resumed.

    Only the last step, on which a cosine schedule depends, may change.
    """
    schedule = settings["lr_schedule"]
    return {
        **work.words,
        "optimizer": repr(optimizer),
        "lr_schedule": schedule,
        "warmup": settings["warmup"],
        **({"loss_scale": DYNAMIC} if settings["loss_scale"] == DYNAMIC else {}),
        **({"steps": total_steps(work, settings)} if schedule == "cosine" else {}),
    }


def check_resumable(
    folder: str, found: "Checkpoint", words: Mapping[str, Any], *, quiet: bool
) -> None:
    """Refuse a checkpoint of another training; only its last step may differ."""
    from mucudnn.runtime.training.checkpoints import check_words

    last, was = words.get("steps"), found.words.get("steps")
    changed = last is not None and was not in (None, last)
    check_words(Path(folder), found, {**words, "steps": was} if changed else words)
    if changed and not quiet:
        notice = f"the cosine schedule now ends at step {last} instead of {was}"
        click.echo(f"mucudnn: {notice}", err=True)


_TITLES = {"step": "train", "evaluation": "test", "epoch": "epoch"}


@contextmanager
def train_log(
    settings: Mapping[str, Any], resume: "Checkpoint | None", *listeners: "OnEntry"
) -> Iterator["OnEntry"]:
    """Return a function that logs an entry and passes it to `listeners`."""
    from mucudnn.runtime.training.history import LogFile, read_resumption

    since = None if resume is None else read_resumption(resume).position
    writers: list[Callable[[LogEntry], None]] = []
    with ExitStack() as stack:
        if settings["log"] is not None:
            file = LogFile(settings["log"], since=since)
            writers.append(stack.enter_context(closing(file)))
        if settings["tensorboard"] is not None:
            writers.append(stack.enter_context(_event_writer(settings, since)))

        def tell(entry: "LogEntry") -> None:
            for listener in (*writers, *listeners):
                listener(entry)

        yield tell


@contextmanager
def _event_writer(
    settings: Mapping[str, Any], since: "Position | None"
) -> Iterator[Callable[["LogEntry"], None]]:
    """Write event files for TensorBoard, flushed with every entry."""
    folder = settings["tensorboard"]
    for module in ("tensorboardX", "torch.utils.tensorboard"):
        with suppress(ImportError):
            writer_class = importlib.import_module(module).SummaryWriter
            break
    else:
        raise BadInputError(
            "--tensorboard needs tensorboardX: pip install tensorboardX"
        )
    refuse_unwritable(folder)
    # Events behind the checkpoint are purged: their steps are taken again.
    writer = writer_class(folder, purge_step=None if since is None else since.steps + 1)

    def tell(entry: "LogEntry") -> None:
        title = _TITLES[entry.kind]
        for name, value in asdict(entry).items():
            if name not in ("kind", "step", "epoch") and value is not None:
                writer.add_scalar(f"{title}/{name}", value, entry.step)
        writer.flush()

    with closing(writer):
        yield tell
