"""FSDP2 within a budget: torchrun --standalone --nproc-per-node 2 FILE.

Every layer is sharded and compiled; on each rank all layers share one budget.
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
planned = mt.compile_layers(layers, budget="8MiB", cache=None)

optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
torch.manual_seed(dist.get_rank())  # every rank has its own share of the batch
losses = []
for _ in range(3):
    x = torch.randn(1024, 16)
    loss = nn.functional.mse_loss(model(x).mean(-1), x.sum(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

if dist.get_rank() == 0:
    peak = planned.peak_bytes / 2**20
    print(f"4 layers within {peak:.1f} MiB, loss {losses[0]:.3f} -> {losses[-1]:.3f}")
dist.destroy_process_group()
