"""`mucudnn.torch.distribute`: DistributedDataParallel with unequal shares.

    dist.init_process_group("gloo")                      # torchrun --nproc-per-node 2
    work = mt.distribute(model, loss_fn, (x, y), batch=256)
    loader = DataLoader(data, batch_sampler=work.batches(BatchSampler(...)))
    for x, y in loader:
        loss = loss_fn(work.model(x), y)                 # the rest is as ever
        loss.backward()
        optimizer.step()

Each rank measures itself, all learn all tables, and each plans the same shares.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import BatchSampler, Sampler

from mucudnn.arguments import a_function, an_integer, of_type, one_of
from mucudnn.ir.fleet import AllReduce, Fleet, Rank, StepTable
from mucudnn.passes.load_balancing import (
    FleetPlan,
    drifted,
    plan_of,
    replanned,
    share_times,
    split_batch,
)
from mucudnn.plugins import installed_version
from mucudnn.runtime.distributed.collectives import check_alike, ending_together
from mucudnn.torch.distributed.batch_norm import has_batch_norm, synchronise
from mucudnn.torch.distributed.collectives import (
    Count,
    Reduction,
    SampleWeights,
    TorchCollectives,
    lost_rank,
    samples_of,
    weigh_gradients,
)
from mucudnn.torch.distributed.step_times import (
    StepClock,
    device_of,
    measure_steps,
    memory_of,
)

SYNCHRONISED = "synchronised"

PER_RANK = "per_rank"


_OF_A_RANK = ("model", "example", "table", "memory", "group")
"""Arguments in which ranks may differ, and the model, which is compared in parts."""


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
) -> "Distribution":
    """Train a model in step on all ranks, each with as much as it can do in the time.

    All ranks call it, with the same arguments but for `table` and `memory`. They
    compare these, the model, the libraries, each optimizer at its first step, and at
    each epoch the first batch; an error of one rank in here ends all. Losses are
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
        RankLostError: Another rank is gone, or was refused.
    """
    settings = {name: v for name, v in locals().items() if name not in _OF_A_RANK}
    with contextlib.ExitStack() as stack:
        if dist.is_initialized():
            stack.enter_context(ending_together(TorchCollectives(group)))
        an_integer("batch", batch, 1)
        an_integer("at_least", at_least, 1)
        one_of("batch_norm", batch_norm, (SYNCHRONISED, PER_RANK))
        one_of("reduction", reduction, ("mean", "sum"))
        of_type("model", model, torch.nn.Module, "a torch.nn.Module")
        functions = {"loss_fn": loss_fn, "count": count, "wrap": wrap}
        for name, function in functions.items():
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
        settings |= _described(model)
    together = TorchCollectives(group, device)
    check_alike(together, settings)
    with ending_together(together):
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
    fleet = _fleet(together, own, model)
    plan = split_batch(fleet, batch, at_least=at_least)
    clock = StepClock(device)
    weights = SampleWeights(group, device, clock, reduction, count)
    wrapped = wrap(synchronise(model, weights) if joined else model)
    weigh_gradients(wrapped, weights)
    _compare_optimizers(wrapped, together)
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


def _described(model: torch.nn.Module) -> dict[str, object]:
    """What all ranks must have alike beside the arguments: model, libraries, modes."""
    found: dict[str, object] = {
        "the version of mucudnn": installed_version(),
        "the version of PyTorch": torch.__version__,
        "the default dtype": torch.get_default_dtype(),
        "the precision of products": torch.get_float32_matmul_precision(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
    }
    for name, module in model.named_modules():
        words = f"{type(module).__name__}({module.extra_repr()})"
        mode = "training" if module.training else "evaluating"
        found[f"module {name or 'of all'}"] = f"{words}, {mode}"
    for name, weight in model.named_parameters():
        trained = "trained" if weight.requires_grad else "fixed"
        found[f"parameter {name}"] = f"{weight.dtype} {tuple(weight.shape)}, {trained}"
    return found


def _compare_optimizers(
    model: DistributedDataParallel, together: TorchCollectives
) -> None:
    """Have ranks compare each optimizer of a model when it first makes a step.

    Optimizers are made after the model is distributed, and differ in silence: the
    gradients are the same on all ranks, the weights are then not.
    """
    seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
    held = weakref.ref(model)

    def compare(optimizer: torch.optim.Optimizer, *_: object) -> None:
        model = held()
        if model is not None and optimizer not in seen:
            seen.add(optimizer)
            groups = optimizer.param_groups
            own = {id(weight) for weight in model.parameters()}
            if own.isdisjoint(id(p) for group in groups for p in group["params"]):
                return
            settings: dict[str, object] = {"optimizer": type(optimizer).__name__}
            for number, group in enumerate(groups):
                for name, value in group.items():
                    if name != "params":
                        settings[f"{name} of group {number}"] = value
            check_alike(together, settings)

    register_optimizer_step_pre_hook(compare)  # cannot be removed while one runs


def _fleet(together: TorchCollectives, own: Rank, model: torch.nn.Module) -> Fleet:
    """All ranks, and what one sum of gradients takes."""
    found = together.all_gather(own)
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    took = max(together.all_gather(together.time_all_reduce(nbytes)))
    return Fleet(tuple(found), AllReduce(measured_ms=took))


# A model trained in step on unequal devices: what `distribute` returns.


_SHOWN = 8
"""Samples that batches are told apart by."""


def _check_last(batches: Iterable[Sequence[int]], least: int) -> None:
    """Refuse what is known to fail at the end of an epoch.

    Raises:
        ValueError: It would.
    """
    if not isinstance(batches, BatchSampler) or batches.drop_last:
        return
    last = len(batches.sampler) % batches.batch_size
    if 0 < last < least:
        raise ValueError(
            f"the last batch of an epoch has {last} samples, of which the ranks take "
            f"{least} at the least: drop_last=True leaves it out, or choose another "
            "batch size"
        )


class Distribution:
    """A model whose mini-batches are shared out as its ranks can end together.

    As a context manager it says in one line when another rank is gone.

    Args:
        model: Wrapped, its gradients weighted.
        fleet: The ranks as they were measured.
        plan: How a whole mini-batch is shared out.
        together: What the ranks do together.
        weights: How much each rank's gradients count.
        at_least: Samples of every rank.

    Attributes:
        model: What to call; a `DistributedDataParallel`.
        plan: How a mini-batch is shared out now.
        fleet: The ranks as they were measured.
        rank: The number of this one.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        fleet: Fleet,
        plan: FleetPlan,
        together: TorchCollectives,
        weights: SampleWeights,
        at_least: int,
    ) -> None:
        self.model = model
        self.fleet = fleet
        self.plan = plan
        self.rank = together.rank
        self._together = together
        self._weights = weights
        self._now = fleet
        self._at_least = at_least
        self._splits: dict[int, tuple[int, ...]] = {plan.batch: plan.samples}

    @property
    def samples(self) -> int:
        """This rank's share of a mini-batch."""
        return self.plan.samples[self.rank]

    def batches(
        self,
        of_one_device: Iterable[Sequence[int]],
        *,
        skip: int = 0,
        keep_up: bool = True,
    ) -> "ShareSampler":
        """This rank's share of each batch of one device's batch sampler.

            order = RandomSampler(data, generator=torch.Generator().manual_seed(0))
            batches = work.batches(BatchSampler(order, 256, drop_last=False))
            loader = DataLoader(data, batch_sampler=batches)

        Args:
            of_one_device: Made and seeded alike on every rank.
            skip: Batches to leave out in the first epoch, of one that is resumed.
            keep_up: Whether the ranks see before each epoch if their times are still
                as planned, and share out anew where that pays; and if its first batch
                is the same on all of them.

        Raises:
            ValueError: The last batch of an epoch has fewer samples than the ranks
                together take at the least.
        """
        _check_last(of_one_device, len(self.fleet.ranks) * self._at_least)
        before = (self.replan,) if keep_up else ()
        first = (self._check_batch,) if keep_up else ()
        return ShareSampler(
            *(of_one_device, self.shares, self.rank),
            skip=skip,
            before=before,
            first=first,
        )

    def _check_batch(self, batch: Sequence[int]) -> None:
        words = ", ".join(map(str, batch[:_SHOWN]))
        check_alike(self._together, {"the first batch": f"{len(batch)} from {words}"})

    def shares(self, samples: int) -> tuple[int, ...]:
        """How a batch is shared out, of any size that every rank has a part of.

        Raises:
            ValueError: It has fewer samples than there are ranks.
        """
        if samples not in self._splits:
            found = split_batch(self._now, samples, at_least=self._at_least)
            self._splits[samples] = found.samples
        return self._splits[samples]

    def backward(self, loss_fn: Callable[..., Any], inputs: Any, *targets: Any) -> Any:
        """Forward and backward of this rank's share, in as many passes as it needs.

        Args:
            loss_fn: Of the model's result and the targets; a mean over samples.
            inputs: The model's input, a tensor.
            targets: Tensors with the same first axis.

        Returns:
            The mean loss of the share, without a graph.
        """
        at_once = self.fleet.ranks[self.rank].most_at_once
        passes = -(-inputs.shape[0] // max(1, at_once))
        parts = [torch.tensor_split(t, passes) for t in (inputs, *targets)]
        losses = []
        for number, (x, *rest) in enumerate(zip(*parts, strict=True), start=1):
            apart = number < len(parts[0])
            with self.model.no_sync() if apart else contextlib.nullcontext():
                loss = loss_fn(self.model(x), *rest) * (x.shape[0] / inputs.shape[0])
                loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def mean(self, loss: torch.Tensor) -> torch.Tensor:
        """The mean over all samples of a batch, from each rank's mean over its own."""
        own = torch.tensor(self._weights.counted, device=loss.device)
        both = torch.stack([loss.detach().double() * own, own.double()])
        self._together.all_reduce(both).wait()
        if self._weights.reduction == "sum":
            return both[0].to(loss.dtype)
        return (both[0] / both[1]).to(loss.dtype)

    def replan(self) -> bool:
        """Share out anew if ranks have left their tables and it pays; all call it.

        Returns:
            Whether anything changed.
        """
        times = share_times(self.fleet.ranks[self.rank], self.plan.batch)
        factor = self._weights.clock.factor(lambda n: times.time_ms(min(n, times.most)))
        factors = self._together.all_gather(factor)
        found = replanned(
            self.fleet, self.plan.samples, factors, at_least=self._at_least
        )
        if found is None:
            return False
        self._now = drifted(self.fleet, factors)
        self.plan = plan_of(self._now, found.samples)
        self._splits = {found.batch: found.samples}
        return True

    def __enter__(self) -> "Distribution":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None and (lost := lost_rank(error)) is not None:
            raise lost from error


class ShareSampler(Sampler[list[int]]):  # type: ignore[misc]
    """A batch sampler that takes one rank's part of each batch of another.

    The other one is what a single device would use, made and seeded alike on every
    rank: so the batches are the same as there, and in the same order. It serves as the
    `batch_sampler` of a `DataLoader`.

    Args:
        batches: Of one device, the same on every rank.
        shares: Samples of a batch -> samples of every rank.
        rank: Whose part is taken.
        skip: Batches to leave out the first time, of an epoch that is resumed.
        before: Called before each epoch.
        first: Called with the first whole batch of each.
    """

    def __init__(
        self,
        batches: Iterable[Sequence[int]],
        shares: Callable[[int], Sequence[int]],
        rank: int,
        *,
        skip: int = 0,
        before: Sequence[Callable[[], object]] = (),
        first: Sequence[Callable[[Sequence[int]], object]] = (),
    ) -> None:
        self._batches = batches
        self._shares = shares
        self._rank = rank
        self._skip = skip
        self._before = before
        self._first = first

    def __iter__(self) -> Iterator[list[int]]:
        """One epoch.

        Raises:
            ValueError: A batch has fewer samples than there are ranks.
        """
        for call in self._before:
            call()
        skip, self._skip = self._skip, 0
        for number, batch in enumerate(self._batches):
            if number < skip:
                continue
            if number == skip:
                for check in self._first:
                    check(batch)
            samples = self._shares(len(batch))
            start = sum(samples[: self._rank])
            yield list(batch[start : start + samples[self._rank]])

    def __len__(self) -> int:
        """Batches of an epoch, as many as on one device."""
        return len(self._batches)  # type: ignore[arg-type]
