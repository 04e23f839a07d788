"""What PyTorch has to save memory: forward and backward passes of one case, its way.

* `activation_memory_budget`: the joint graph cut by PyTorch's min-cut partitioner, run
  operation by operation; each value is let go of behind its last use. Inductor's
  decompositions come first where there is batch normalisation: its partitions of other
  graphs save running statistics that have changed when they are read.
* `checkpoint_sequential`: eager.
* `save_on_cpu`: eager. The host and the device are one on a CPU, and both of PyTorch's
  allocator; so the same hooks here, with host memory beside the allocator.
"""

import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch import config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint_sequential

from bench.torch.nodes import NodeTable
from bench.torch.zoo import Case


class WithLoss(nn.Module):  # type: ignore[misc]  # torch has no types here
    """A case as a function of its batch."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.model, self._loss_fn = case.model, case.loss_fn

    def forward(self, x: torch.Tensor, *targets: torch.Tensor) -> torch.Tensor:
        """Its loss."""
        return self._loss_fn(self.model(x), *targets)


@dataclass
class Partitioned:
    """A backend of `torch.compile`: PyTorch's partitions under a budget.

    Attributes:
        budget: Its `activation_memory_budget`, of 1 that is kept.
        table: What nodes cost.
        cost: What its two graphs cost, of every node of the joint graph once.
    """

    budget: float
    table: NodeTable
    decompose: bool
    cost: float = math.nan

    def __call__(self, module: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one graph."""
        lowering = import_module("torch._inductor.lowering")
        table = lowering.decompositions if self.decompose else None
        compiler = aot_autograd(
            fw_compiler=boxed_nop,
            bw_compiler=boxed_nop,
            partition_fn=self._partitioned,
            decompositions=table,
        )
        found: Callable[..., Any] = compiler(module, inputs)
        return found

    def _partitioned(self, joint: Any, inputs: Any, **options: Any) -> Any:
        with _disable_current_modes():
            once = self.table.total_ms(joint)
        with config.patch(activation_memory_budget=self.budget):
            halves = min_cut_rematerialization_partition(joint, inputs, **options)
        with _disable_current_modes():
            self.cost = sum(map(self.table.total_ms, halves)) / once
        return halves


def checkpointed(case: Case, segments: int) -> Callable[[], torch.Tensor]:
    """The loss of a case, its parts checkpointed in so many segments."""
    parts = case.parts
    x, *targets = case.batch

    def run() -> torch.Tensor:
        out = checkpoint_sequential(parts, segments, x, use_reentrant=False)
        return case.loss_fn(out, *targets)

    return run


@dataclass
class HostSaved:
    """The loss of a case with all that autograd saves on the host.

    Attributes:
        out_bytes: Copied out in the last call.
        in_bytes: Copied back since.
    """

    case: Case
    out_bytes: int = 0
    in_bytes: int = 0
    _free: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def __call__(self) -> torch.Tensor:
        """The loss; what is saved is copied out."""
        self.out_bytes = self.in_bytes = 0
        x, *targets = self.case.batch
        with saved_tensors_hooks(self._pack, self._unpack):
            return self.case.loss_fn(self.case.model(x), *targets)

    def _pack(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        nbytes = tensor.numel() * tensor.itemsize
        self.out_bytes += nbytes
        free = self._free.setdefault(nbytes, [])
        flat = free.pop() if free else _host_bytes(nbytes)
        host = flat.view(tensor.dtype).view(tensor.shape)
        host.copy_(tensor)
        return flat, host

    def _unpack(self, packed: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        flat, host = packed
        self.in_bytes += flat.numel()
        self._free[flat.numel()].append(flat)
        return host.clone()


def _host_bytes(nbytes: int) -> torch.Tensor:
    memory = mmap.mmap(-1, max(1, nbytes))
    return torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]
