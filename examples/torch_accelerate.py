"""Accelerate's loop over a model that is compiled within a budget."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import mucudnn.torch as mt

torch.manual_seed(0)
x, y = torch.randn(512, 64), torch.randint(0, 10, (512,))
model = nn.Sequential(
    *(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU()),
    nn.Linear(512, 10),
)
backend = mt.backend(budget="6MiB")
compiled = torch.compile(model, backend=backend, dynamic=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

accelerator = Accelerator(cpu=True)
compiled, optimizer, batches = accelerator.prepare(
    compiled, optimizer, DataLoader(TensorDataset(x, y), batch_size=512)
)
losses = []
for _ in range(10):
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(compiled(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())
print(backend.plans[0])
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
assert losses[-1] < losses[0]
assert backend.plans[0].peak_bytes <= 6 << 20
