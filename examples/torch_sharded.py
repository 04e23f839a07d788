"""FSDP2 within a budget: torchrun --standalone --nproc-per-node 2 FILE.

The step of all ranks is planned, collectives included; the budget is that of each rank.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import mucudnn.torch as mt


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


dist.init_process_group("gloo")  # "nccl" between GPUs
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), *(Block(64) for _ in range(4)))
layers = model[1:]
for layer in layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
step = mt.train_step(
    model,
    lambda y, wanted: nn.functional.mse_loss(y.mean(-1), wanted),
    optimizer,
    budget="60%",
    cache=None,
)
torch.manual_seed(dist.get_rank())  # every rank has its own share of the batch
losses = []
for _ in range(3):
    x = torch.randn(1024, 16)
    losses.append(step(x, x.sum(-1)).item())

if dist.get_rank() == 0:
    print(step.plan)
    peak = step.plan.peak_bytes / 2**20
    print(f"a rank within {peak:.1f} MiB, loss {losses[0]:.3f} -> {losses[-1]:.3f}")
dist.destroy_process_group()
