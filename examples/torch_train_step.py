"""A PyTorch model trained within a budget: forward, backward and update in one."""

import torch
from torch import nn

import mucudnn.torch as mt

torch.manual_seed(0)
model = nn.Sequential(
    *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
    *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loss_fn = nn.functional.cross_entropy
x, y = torch.randn(64, 1, 16, 16), torch.randint(0, 10, (64,))

# Peak without a budget, and minimum feasible budget. Only single operations run.
study = mt.memory(model, loss_fn, (x, y), optimizer, device="cpu")
budget = (study.least_budget + study.unlimited_bytes) // 2

# The first step and every fifth are compared with eager mode, bit for bit.
step = mt.train_step(model, loss_fn, optimizer, budget=budget, verify=5)
losses = [step(x, y).item() for _ in range(10)]
print(step.plan)
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
assert losses[-1] < losses[0]
assert step.plan.peak_bytes <= budget < study.unlimited_bytes
