"""An unchanged training loop over a model that is compiled within a budget."""

import torch
from torch import nn

import mucudnn.torch as mt

torch.manual_seed(0)
model = nn.Sequential(
    *(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU()),
    nn.Linear(512, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
x, y = torch.randn(512, 64), torch.randint(0, 10, (512,))

backend = mt.backend(budget="6MiB")
compiled = torch.compile(model, backend=backend, dynamic=False)

losses = []
for _ in range(10):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(compiled(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(backend.plans[0])
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
assert losses[-1] < losses[0]
assert backend.plans[0].peak_bytes <= 6 << 20
