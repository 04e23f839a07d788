"""Ranks that plan and run one training step together.

Their collectives must run in one order on all ranks, so all ranks follow one plan:

- before a step, they vote whether all of them have a plan for it, and the same one;
- a step is captured by all of them, and its collectives are measured by all together;
- rank 0, whose shards are the largest, measures everything else and decides; the
  others take its plan, or its error.

If one rank fails on the way, all of them do, with the same message.
"""

import copyreg
import hashlib
import io
import pickle
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mucudnn.errors import UnsupportedError
from mucudnn.runtime.distributed.collectives import check_alike, ending_together
from mucudnn.torch.capture.step_tensors import root_of
from mucudnn.torch.costs.measure import KnownCosts, call_key, evaluate, operands_of
from mucudnn.torch.distributed.collectives import TorchCollectives, lost_ranks_told
from mucudnn.torch.distributed.sharding import (
    WAIT,
    Sharding,
    distributed_data_parallel,
    finished,
    is_collective,
    sharding_of,
)
from mucudnn.torch.lowering.lowered import Lowered, NotCompiledError

T = TypeVar("T")

_REPEATS = 5

_DIVISOR = 64
"""Bytes of the number that a mean is divided by."""

_NONE = -1
"""Vote of a rank that has no plan for a step."""


def inner_model(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model within `DistributedDataParallel`; any other as it is."""
    if isinstance(model, DistributedDataParallel):
        inner: torch.nn.Module = model.module
        return inner
    return model


def sharding_of_step(model: torch.nn.Module, loss_fn: Any) -> Sharding | None:
    """Return how ranks share a model; None for a model of one rank.

    Raises:
        UnsupportedError: They do so in a way that a step does not capture.
    """
    found = sharding_of(root_of(inner_model(model), loss_fn))
    if not isinstance(model, DistributedDataParallel):
        return found
    if found is not None:
        raise UnsupportedError(
            "the model is in DistributedDataParallel and sharded by fully_shard; use "
            "one of them"
        )
    return distributed_data_parallel(model, "model.")


class StepRanks:
    """The ranks of one `train_step`."""

    def __init__(self, sharding: Sharding, device: torch.device) -> None:
        group = dist.distributed_c10d._resolve_process_group(sharding.group)
        self._together = TorchCollectives(group, device)

    def agree(self, number: int | None) -> bool:
        """Return whether all ranks have a plan for their next step, of one number.

        Raises:
            RankLostError: Another rank is gone.
        """
        own = _NONE if number is None else number
        votes = torch.tensor([own, -own], device=self._together.device)
        with lost_ranks_told():
            dist.all_reduce(votes, dist.ReduceOp.MIN, group=self._together.group)
        least, most = votes.tolist()
        return bool(least == -most != _NONE)

    def compiled(self, compile_own: Callable[[], Lowered]) -> Lowered:
        """Return this rank's step with compiled passes, if all ranks can compile them.

        Raises:
            NotCompiledError: This rank, or another one, cannot.
            RankLostError: Another rank has failed.
        """
        found, error = None, NotCompiledError("another rank cannot compile it")
        with ending_together(self._together):
            try:
                found = compile_own()
            except NotCompiledError as e:
                error = e
        if self.agree(None if found is None else 0) and found is not None:
            return found
        raise error

    def measure(self, lowered: Lowered, known: KnownCosts) -> None:
        """Measure a step's collectives, the same on all ranks, on all of them at once.

        Raises:
            RanksDifferError: The ranks have captured different steps.
            RankLostError: Another rank is gone.
        """
        nodes = [node for node in lowered.graph.nodes if is_collective(node.op)]
        operations = "\n".join(f"{n.name} {n.op}" for n in lowered.graph.nodes)
        sizes = [
            lowered.graph.tensors[name].nbytes for n in nodes for name in n.outputs
        ]
        # Ranks with different steps would wait for each other forever.
        check_alike(
            self._together,
            {
                "the number of operations of a step": len(lowered.graph.nodes),
                "the captured step": hashlib.sha256(operations.encode()).hexdigest(),
                "the sizes of its collectives": sizes,
            },
        )
        for node in nodes:
            key = call_key(lowered, node)
            if key in known.times:
                continue
            call, operands = lowered.calls[node.name], operands_of(lowered, node)
            cuda = operands[0].is_cuda
            times = []
            with torch.no_grad(), lost_ranks_told():
                for _ in range(_REPEATS):
                    self._together.barrier()
                    began = time.perf_counter()
                    (result,) = evaluate(call, operands)
                    issued = time.perf_counter()
                    (WAIT if cuda else finished)(result)
                    if cuda:
                        torch.cuda.synchronize(operands[0].device)
                    whole_ms = 1e3 * (time.perf_counter() - began)
                    times.append((whole_ms, 1e3 * (issued - began)))
            every = self._together.all_gather(min(times))
            whole_ms, issue_ms = map(statistics.median, zip(*every, strict=True))
            # One that is awaited later holds up other operations while it is issued.
            if node.traits.collective:
                known.times[key] = issue_ms
                known.network[key] = max(0.0, whole_ms - issue_ms)
            else:
                known.times[key] = whole_ms
            # NCCL's buffers are its own.
            known.scratch[key] = 0 if cuda else _DIVISOR

    @contextmanager
    def capturing(self, settings: Mapping[str, object]) -> Iterator[None]:
        """Wrap the capture of a step: an error of one rank ends it on all of them.

        The settings have to be equal on all ranks.
        """
        check_alike(self._together, settings)
        with ending_together(self._together):
            yield

    def decided(self, decide: Callable[[], T]) -> T:
        """Return what rank 0 decides, on all ranks.

        Raises:
            Exception: Rank 0 has raised it.
            RankLostError: Another rank is gone.
        """
        outcome: tuple[Any, Exception | None] = None, None
        sent: list[Any] = [None]
        if self._together.rank == 0:
            try:
                outcome = decide(), None
                sent = [pickled(outcome)]
            except Exception as e:
                outcome = None, e
                sent = [pickled(outcome)]
        with lost_ranks_told():
            dist.broadcast_object_list(sent, group=self._together.group, group_src=0)
        found, error = outcome if self._together.rank == 0 else pickle.loads(sent[0])
        if error is not None:
            raise error
        return found  # type: ignore[no-any-return]


def _read_only(value: dict[Any, Any]) -> MappingProxyType[Any, Any]:
    # Pickle finds a function by its name; it does not find the class `mappingproxy`.
    return MappingProxyType(value)


def pickled(value: object) -> bytes:
    """Return a plan, or an error, as bytes for the other ranks."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file)
    pickler.dispatch_table = copyreg.dispatch_table | {
        MappingProxyType: lambda mapping: (_read_only, (dict(mapping),))
    }
    pickler.dump(value)
    return file.getvalue()
