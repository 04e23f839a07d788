"""A block of your own, built layer by layer, trained on made-up images."""

from mucudnn import Graph, GraphBuilder, Trainer, Tuner, fit
from mucudnn.data import Loader, Normalize, SyntheticDataset
from mucudnn.optim import Adam

BATCH, CLASSES, SHAPE = 16, 4, (3, 16, 16)


def gated(g: GraphBuilder, x: str, channels: int) -> str:
    """Add a residual block that multiplies a convolution by a sigmoid gate."""
    with g.scope("gated"):
        value = g.gelu(g.conv(x, channels, 3, padding=1))
        gate = g.sigmoid(g.conv(x, channels, 1))
        return g.concat((x, g.multiply(value, gate)))


def network(training: bool) -> Graph:
    g = GraphBuilder(training=training)
    x = g.input("image", (BATCH, *SHAPE))
    for channels in (8, 16):
        x = g.max_pool(g.group_norm(gated(g, x, channels), 1), 2)
    logits = g.linear(g.flatten(g.global_avg_pool(x)), CLASSES)
    label = g.input("label", (BATCH,), "int64")
    return g.build(g.softmax_cross_entropy(logits, label), g.accuracy(logits, label))


train = SyntheticDataset(480, CLASSES, SHAPE)
test = SyntheticDataset(100, CLASSES, SHAPE, split="test")
normalize = Normalize.of(train)
trainer = Trainer(
    network(training=True),
    network(training=False),
    tuner=Tuner(batch_policy="undivided"),
    optimizer=Adam(learning_rate=0.01),
)
reports = fit(
    trainer,
    Loader(train, BATCH, transform=normalize, drop_last=True),
    Loader(test, BATCH, transform=normalize),
    epochs=4,
)
for report in reports:
    print(f"loss {report.loss:.3f}, test accuracy {report.test_accuracy:.0%}")
if reports[-1].loss > 0.5 * reports[0].loss:
    raise SystemExit("it has not learned much")
