"""Train ResNet-20 on CIFAR-10: `python train_resnet20.py DIR [STEPS]`.

DIR holds the files of the binary version, `data_batch_1.bin` and so on. It can be
stopped with Ctrl-C and started again: it resumes from its last checkpoint.
"""

import sys
from pathlib import Path

from mucudnn import Checkpoints, Trainer, Tuner, fit, plans_of
from mucudnn.data import (
    Compose,
    Loader,
    Normalize,
    RandomCrop,
    RandomFlip,
    open_cifar10,
)
from mucudnn.models import resnet20
from mucudnn.optim import Momentum, StepRate

folder = Path(sys.argv[1])
steps = int(sys.argv[2]) if len(sys.argv) > 2 else 64_000
batch = 128 if steps > 1000 else 16

rows = (folder / "test_batch.bin").stat().st_size // (1 + 3 * 32 * 32)
train, test = (open_cifar10(folder, part, rows=rows) for part in ("train", "test"))
normalize = Normalize.of(train)
augment = Compose((RandomCrop(4), RandomFlip(), normalize))
batches = Loader(train, batch, transform=augment, drop_last=True)
tests = Loader(test, batch, shuffle=False, transform=normalize)

tuner = Tuner.from_env()
checkpoints = Checkpoints(folder / "checkpoints")
last = checkpoints.load()
rate = StepRate(0.1, milestones=(32_000, 48_000))
trainer = Trainer(
    resnet20(batch),
    resnet20(batch, training=False),
    tuner=tuner,
    optimizer=Momentum(weight_decay=1e-4),
    learning_rate=lambda step: rate.at(step, steps),
    plans=plans_of(last, tuner.backend) if last else None,
)
reports = fit(
    trainer,
    batches,
    tests,
    epochs=-(-steps // len(batches)),
    max_steps=steps,
    checkpoints=checkpoints,
    resume=last,
)
print(f"after {trainer.steps} steps: test accuracy {reports[-1].test_accuracy:.1%}")
