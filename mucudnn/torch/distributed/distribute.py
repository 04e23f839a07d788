"""`mucudnn.torch.distribute`: DistributedDataParallel with unequal shares.

    dist.init_process_group("gloo")                      # torchrun --nproc-per-node 2
    work = mt.distribute(model, loss_fn, (x, y), batch=256)
    loader = DataLoader(data, batch_sampler=work.batches(BatchSampler(...)))
    for x, y in loader:
        loss = loss_fn(work.model(x), y)                 # the rest is unchanged
        loss.backward()
        optimizer.step()

Each rank measures its steps, all ranks gather all tables, and each computes the same
shares.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import BatchSampler, Sampler

from mucudnn.arguments import check_choice, check_function, check_integer, check_type
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
    sum_weighted,
)
from mucudnn.torch.distributed.step_times import (
    StepClock,
    device_of,
    measure_steps,
    memory_of,
)

_OF_A_RANK = ("model", "example", "table", "memory", "group")
"""Arguments that may differ between ranks, and the model, compared in parts."""

_PAIR = 2
"""Smallest batch to measure if batch norm refuses a single sample."""

_SHOWN = 8
"""Samples by which ranks compare their first batches."""


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
    """Train a model on all ranks, with shares of the batch that balance their times.

    All ranks call it, with the same arguments except `table` and `memory`. They compare
    the arguments, the model, the libraries, each optimizer at its first step, and the
    first batch of each epoch. An error of one rank in this function ends all ranks.
    Losses equal those of one device up to the order of sums, if batch norm is
    synchronised and the model draws no random numbers. Gradients may be accumulated
    over whole batches of one size, within `model.no_sync()`.

    Args:
        model: The model, on this rank's device. Synchronised batch norms replace its
            own.
        loss_fn: Takes the model's result and the rest of a batch; returns the mean over
            samples.
        example: A batch of any size to measure with: the model's input, then the rest.
        batch: Samples of all ranks together.
        table: Step times of this rank; if given, nothing is measured.
        memory: Bytes that this rank's step may use; by default its device's.
        batch_norm: "synchronised" over all ranks, as on one device; or "per_rank".
        reduction: Reduction of the loss: "mean" over samples, or their "sum".
        count: Returns the number of terms in the mean loss, given the arguments of a
            forward pass; by default the samples of the first tensor.
        at_least: Minimum samples of every rank.
        group: The process group; None is the default group.
        wrap: Wraps the model; by default in `DistributedDataParallel(model)`.

    Raises:
        ValueError: A size or a word is out of range, the ranks' arguments differ, or
            the model is wrapped already.
        TypeError: There is neither a table nor something to measure with.
        PlanningError: The batch does not fit on the ranks.
        RuntimeError: No process group was initialised.
        RankLostError: Another rank is gone, or was refused.
    """
    # `locals()` has the arguments only, as nothing else is assigned yet.
    settings = {name: v for name, v in locals().items() if name not in _OF_A_RANK}
    # A rank that fails here must end the others, which wait for its settings.
    with contextlib.ExitStack() as stack:
        if dist.is_initialized():
            stack.enter_context(ending_together(TorchCollectives(group)))
        check_integer("batch", batch, 1)
        check_integer("at_least", at_least, 1)
        check_choice("batch_norm", batch_norm, ("synchronised", "per_rank"))
        check_choice("reduction", reduction, ("mean", "sum"))
        check_type("model", model, torch.nn.Module, "a torch.nn.Module")
        functions = {"loss_fn": loss_fn, "count": count, "wrap": wrap}
        for name, function in functions.items():
            if function is not None or name != "loss_fn":
                check_function(name, function, "a function")
        if table is not None:
            check_type("table", table, StepTable, "a StepTable or None")
        if memory is not None:
            check_integer("memory", memory, 1)
        if isinstance(model, DistributedDataParallel):
            raise ValueError(  # noqa: TRY004 - the type is right, its state is not
                "the model is distributed already; pass the original model, and "
                "wrap=lambda model: DistributedDataParallel(model, ...)"
            )
        device = device_of(model)
        settings |= described(model)
    together = TorchCollectives(group, device)
    check_alike(together, settings)
    with ending_together(together):
        if table is None:
            table = _measured(model, loss_fn, example, batch, at_least, together.size)
    joined = batch_norm == "synchronised" and has_batch_norm(model)
    own = Rank(
        f"rank {together.rank}",
        table,
        memory_of(device) if memory is None else memory,
        # With synchronised statistics all ranks run the same number of passes.
        accumulates=not joined,
    )
    ranks = tuple(together.all_gather(own))
    # The measured time of one sum of gradients.
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    took = max(together.all_gather(together.time_all_reduce(nbytes)))
    fleet = Fleet(ranks, AllReduce(measured_ms=took))
    plan = split_batch(fleet, batch, at_least=at_least)
    weights = SampleWeights(group, device, StepClock(device), reduction, count)
    wrapped = wrap(synchronise(model, weights) if joined else model)
    wrapped.register_forward_pre_hook(weights.before_forward, with_kwargs=True)
    wrapped.register_comm_hook(weights, sum_weighted)
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
            "distribute needs a loss function and an example batch, to measure this "
            "rank, or the table of this rank"
        )
    most = max(at_least, batch - (ranks - 1) * at_least)
    try:
        return measure_steps(model, loss_fn, example, least=at_least, most=most)
    except ValueError:
        if at_least >= _PAIR or most < _PAIR:
            raise
        return measure_steps(model, loss_fn, example, least=_PAIR, most=most)


def described(model: torch.nn.Module) -> dict[str, object]:
    """Return what has to be equal on all ranks beside the arguments."""
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
    """Let ranks compare the settings of each optimizer of a model at its first step.

    Optimizers are created after the model is distributed. A difference would go
    unnoticed: gradients are equal on all ranks, but weights are then not.
    """
    seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
    held = weakref.ref(model)

    def compare(optimizer: torch.optim.Optimizer, *_: object) -> None:
        model = held()
        if model is not None and optimizer not in seen:
            seen.add(optimizer)
            groups = optimizer.param_groups
            # The hook is called for every optimizer: only those of this model count.
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


class Distribution:
    """A distributed model, and each rank's share of a mini-batch.

    As a context manager it raises `RankLostError` when another rank is gone.

    Attributes:
        model: The model to call; a `DistributedDataParallel`.
        plan: The current shares of a mini-batch.
        fleet: The ranks as measured.
        rank: Number of this rank.
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
        """Return this rank's share of each batch of a single-device batch sampler.

            order = RandomSampler(data, generator=torch.Generator().manual_seed(0))
            batches = work.batches(BatchSampler(order, 256, drop_last=False))
            loader = DataLoader(data, batch_sampler=batches)

        Args:
            of_one_device: The batch sampler, created and seeded alike on every rank.
            skip: Batches to skip in the first epoch, to resume it.
            keep_up: Whether to call `replan` before each epoch, and to compare the
                epoch's first batch between ranks.

        Raises:
            ValueError: The last batch of an epoch has fewer samples than the minimum of
                all ranks together.
        """
        if isinstance(of_one_device, BatchSampler) and not of_one_device.drop_last:
            last = len(of_one_device.sampler) % of_one_device.batch_size
            least = len(self.fleet.ranks) * self._at_least
            if 0 < last < least:
                raise ValueError(
                    f"the last batch of an epoch has {last} samples, and the ranks "
                    f"need at least {least}; pass drop_last=True, or choose another "
                    "batch size"
                )
        return ShareSampler(
            *(of_one_device, self.shares, self.rank),
            skip=skip,
            before=(self.replan,) if keep_up else (),
            first=(self._check_batch,) if keep_up else (),
        )

    def _check_batch(self, batch: Sequence[int]) -> None:
        words = ", ".join(map(str, batch[:_SHOWN]))
        check_alike(self._together, {"the first batch": f"{len(batch)} from {words}"})

    def shares(self, samples: int) -> tuple[int, ...]:
        """Return every rank's share of a batch of any size.

        Raises:
            ValueError: The batch has fewer samples than there are ranks.
        """
        if samples not in self._splits:
            found = split_batch(self._now, samples, at_least=self._at_least)
            self._splits[samples] = found.samples
        return self._splits[samples]

    def backward(self, loss_fn: Callable[..., Any], inputs: Any, *targets: Any) -> Any:
        """Run forward and backward on this rank's share, in passes that fit in memory.

        Args:
            loss_fn: Takes the model's result and the targets; returns the mean over
                samples.
            inputs: The model's input, a tensor with samples along axis 0.
            targets: Tensors with samples along axis 0.

        Returns:
            The mean loss of the share, detached.
        """
        at_once = self.fleet.ranks[self.rank].most_at_once
        passes = -(-inputs.shape[0] // max(1, at_once))
        parts = [torch.tensor_split(t, passes) for t in (inputs, *targets)]
        losses = []
        for number, (x, *rest) in enumerate(zip(*parts, strict=True), start=1):
            more = number < len(parts[0])
            with self.model.no_sync() if more else contextlib.nullcontext():
                loss = loss_fn(self.model(x), *rest) * (x.shape[0] / inputs.shape[0])
                loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def mean(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of a batch, from the mean over each rank's samples."""
        own = torch.tensor(self._weights.counted, device=loss.device)
        both = torch.stack([loss.detach().double() * own, own.double()])
        self._together.all_reduce(both).wait()
        if self._weights.reduction == "sum":
            return both[0].to(loss.dtype)
        return (both[0] / both[1]).to(loss.dtype)

    def replan(self) -> bool:
        """Recompute the shares if measured times differ from the tables and it pays.

        All ranks call it.

        Returns:
            Whether the shares changed.
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
        self, kind: object, error: BaseException | None, traceback: object
    ) -> None:
        if error is not None and (lost := lost_rank(error)) is not None:
            raise lost from error


class ShareSampler(Sampler[list[int]]):  # type: ignore[misc]
    """A batch sampler that yields one rank's share of each batch of another sampler.

    The other sampler is what a single device would use, created and seeded alike on
    every rank, so that batches are the same, in the same order. It serves as the
    `batch_sampler` of a `DataLoader`.

    Args:
        batches: The sampler of a single device.
        shares: Returns the samples of every rank, given those of a batch.
        rank: The rank whose share is taken.
        skip: Batches to skip in the first epoch, to resume it.
        before: Functions called before each epoch.
        first: Functions called with the first whole batch of each epoch.
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
        """Yield the shares of one epoch.

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
        """Return the batches of an epoch, as many as on one device."""
        return len(self._batches)  # type: ignore[arg-type]
