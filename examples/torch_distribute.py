"""Train on unequal devices: torchrun --standalone --nproc-per-node 2 FILE.

Each process measures its device; all shares of a batch take equally long.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import mucudnn.torch as mt

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(
    *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
    *(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 10)),
)
data = TensorDataset(torch.randn(256, 1, 16, 16), torch.randint(0, 10, (256,)))
loss_fn = nn.functional.cross_entropy

with mt.distribute(model, loss_fn, data[:8], batch=64) as work:
    optimizer = torch.optim.SGD(work.model.parameters(), 0.1)
    order = RandomSampler(data, generator=torch.Generator().manual_seed(0))
    batches = work.batches(BatchSampler(order, 64, drop_last=False))
    losses = []
    for _ in range(3):
        for x, y in DataLoader(data, batch_sampler=batches):
            optimizer.zero_grad()
            loss = loss_fn(work.model(x), y)  # of this rank's share
            loss.backward()
            optimizer.step()
            losses.append(work.mean(loss).item())  # of the whole batch

if work.rank == 0:
    print(f"shares {work.plan.samples}, loss {losses[0]:.3f} -> {losses[-1]:.3f}")
dist.destroy_process_group()
