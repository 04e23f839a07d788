"""Train a small network on handwritten digits (needs scikit-learn for its data)."""

from mucudnn import Trainer, Tuner, fit
from mucudnn.data import Loader, Normalize, open_dataset
from mucudnn.models import digits
from mucudnn.optim import CosineRate, Momentum

BATCH, EPOCHS = 32, 5

train, test = open_dataset("digits"), open_dataset("digits", split="test")
normalize = Normalize.of(train)
batches = Loader(train, BATCH, transform=normalize, drop_last=True)
tests = Loader(test, BATCH, shuffle=False, transform=normalize)

rate = CosineRate(0.05)
trainer = Trainer(
    digits(BATCH),
    digits(BATCH, training=False),
    tuner=Tuner(workspace_limit="1MiB"),
    optimizer=Momentum(),
    learning_rate=lambda step: rate.at(step, EPOCHS * len(batches)),
)
for report in fit(trainer, batches, tests, epochs=EPOCHS):
    print(
        f"epoch {report.epoch + 1}: loss {report.loss:.3f}, "
        f"test accuracy {report.test_accuracy:.1%}"
    )
print(f"{trainer.step_ms:.1f} ms a step in {trainer.peak_bytes / 2**20:.1f} MiB")
