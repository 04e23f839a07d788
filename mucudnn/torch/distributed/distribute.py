"""`mucudnn.torch.distribute`: DistributedDataParallel with shares that end together.

    dist.init_process_group("gloo")                      # torchrun --nproc-per-node 2
    work = mt.distribute(model, loss_fn, (x, y), batch=256)
    loader = DataLoader(data, batch_sampler=work.batches(BatchSampler(...)))
    for x, y in loader:
        loss = loss_fn(work.model(x), y)                 # the rest is as ever
        loss.backward()
        optimizer.step()

Each rank measures itself, all learn all tables, and each plans the same shares.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mucudnn.arguments import a_function, an_integer, of_type, one_of
from mucudnn.ir.fleet import AllReduce, Fleet, Rank, StepTable
from mucudnn.passes.fleet import split_batch
from mucudnn.torch.distributed.batch_norm import has_batch_norm, synchronise
from mucudnn.torch.distributed.clock import StepClock
from mucudnn.torch.distributed.collectives import TorchCollectives
from mucudnn.torch.distributed.distribution import Distribution
from mucudnn.torch.distributed.step_times import (
    device_of,
    measure_steps,
    memory_of,
)
from mucudnn.torch.distributed.weights import (
    Count,
    Reduction,
    SampleWeights,
    samples_of,
    weigh_gradients,
)

__all__ = ["distribute"]

SYNCHRONISED = "synchronised"
PER_RANK = "per_rank"

_PAIR = 2
"""Samples that are measured at the least where batch norm refuses a single one."""


def distribute(
    model: torch.nn.Module,
    loss_fn: Callable[..., Any] | None = None,
    example: Sequence[Any] | None = None,
    *,
    batch: int,
    table: StepTable | None = None,
    memory: int | None = None,
    batch_norm: Literal["synchronised", "per_rank"] = "synchronised",
    reduction: Reduction = "mean",
    count: Count = samples_of,
    at_least: int = 1,
    group: dist.ProcessGroup | None = None,
    wrap: Callable[[torch.nn.Module], DistributedDataParallel] = (
        DistributedDataParallel
    ),
) -> Distribution:
    """Train a model in step on all ranks, each with as much as it can do in the time.

    All ranks call it, with the same arguments but for `table` and `memory`. Losses are
    those of one device up to the order of sums, if batch norm is synchronised and
    nothing is drawn at random. Gradients may be accumulated over whole batches of one
    size, within `model.no_sync()`.

    Args:
        model: On this rank's device. Its batch norms are replaced where they are
            synchronised.
        loss_fn: Of the model's result and the rest of a batch; a mean over samples.
        example: A batch of any size to measure with: the model's input, then the rest.
        batch: Samples of all ranks together.
        table: What steps take on this rank; if given, nothing is measured.
        memory: Bytes that this rank's step may use; by default its device's.
        batch_norm: "synchronised" over all ranks, as one device has it; or "per_rank".
        reduction: Of the loss: "mean" over samples, or their "sum".
        count: What the loss is a mean of, by the arguments of a forward pass: if not
            given, the samples of the first tensor.
        at_least: Samples of every rank.
        group: Of the ranks; None is the default group.
        wrap: Makes the model distributed, where it needs more than its device.

    Raises:
        ValueError: A size or a word is out of range, the ranks ask for different
            things, or the model is wrapped already.
        TypeError: There is neither a table nor something to measure with.
        PlanningError: The batch does not fit on the ranks.
        RuntimeError: No process group was initialised.
        RankLostError: Another rank is gone.
    """
    an_integer("batch", batch, 1)
    an_integer("at_least", at_least, 1)
    one_of("batch_norm", batch_norm, (SYNCHRONISED, PER_RANK))
    one_of("reduction", reduction, ("mean", "sum"))
    of_type("model", model, torch.nn.Module, "a torch.nn.Module")
    for name, function in {"loss_fn": loss_fn, "count": count, "wrap": wrap}.items():
        if function is not None or name != "loss_fn":
            a_function(name, function, "a function")
    if table is not None:
        of_type("table", table, StepTable, "a StepTable or None")
    if memory is not None:
        an_integer("memory", memory, 1)
    if isinstance(model, DistributedDataParallel):
        raise ValueError(  # noqa: TRY004 - the type is right, its state is not
            "the model is distributed already; give the model itself, and "
            "wrap=lambda model: DistributedDataParallel(model, ...)"
        )
    device = device_of(model)
    together = TorchCollectives(group, device)
    if table is None:
        table = _measured(model, loss_fn, example, batch, at_least, together.size)
    joined = batch_norm == SYNCHRONISED and has_batch_norm(model)
    own = Rank(
        f"rank {together.rank}",
        table,
        memory_of(device) if memory is None else memory,
        # Passes of a rank are its own; joint statistics need all ranks in each.
        accumulates=not joined,
    )
    fleet = _fleet(together, own, (batch, at_least, batch_norm, reduction), model)
    plan = split_batch(fleet, batch, at_least=at_least)
    clock = StepClock(device)
    weights = SampleWeights(group, device, clock, reduction, count)
    wrapped = wrap(synchronise(model, weights) if joined else model)
    weigh_gradients(wrapped, weights)
    return Distribution(wrapped, fleet, plan, together, weights, at_least)


def _measured(
    model: torch.nn.Module,
    loss_fn: Callable[..., Any] | None,
    example: Sequence[Any] | None,
    batch: int,
    at_least: int,
    ranks: int,
) -> StepTable:
    if loss_fn is None or example is None:
        raise TypeError(
            "distribute needs a loss function and an example batch to measure this "
            "rank with, or its table"
        )
    most = max(at_least, batch - (ranks - 1) * at_least)
    try:
        return measure_steps(model, loss_fn, example, least=at_least, most=most)
    except ValueError:
        if at_least >= _PAIR or most < _PAIR:
            raise
        return measure_steps(model, loss_fn, example, least=_PAIR, most=most)


def _fleet(
    together: TorchCollectives, own: Rank, asked: object, model: torch.nn.Module
) -> Fleet:
    """All ranks, and what one sum of gradients takes.

    Raises:
        ValueError: They ask for different things.
    """
    found = together.all_gather((own, asked))
    for number, (_, other) in enumerate(found):
        if other != found[0][1]:
            raise ValueError(
                f"rank {number} asks for (batch, at_least, batch_norm, reduction) = "
                f"{other}, rank 0 for {found[0][1]}: all ranks need the same"
            )
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    took = max(together.all_gather(together.time_all_reduce(nbytes)))
    return Fleet(tuple(rank for rank, _ in found), AllReduce(measured_ms=took))
