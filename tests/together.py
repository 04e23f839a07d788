"""Networks trained by several ranks together, which are threads here."""

import threading

from bench import fleet_ranks
from bench.fleet_ranks import BATCH, CASES, CLASSES, Case, trainer_of, tuner_of
from mucudnn.models import Model

__all__ = ["BATCH", "Threads", "network", "trained", "trainer_of", "tuner_of"]

SECONDS = 300


def residual(g, x, classes):
    """A convolution, a block with a shortcut as a ResNet's, the classes."""
    x = g.relu(g.batch_norm(g.conv(x, 6, 3, padding=1)))
    y = g.relu(g.batch_norm(g.conv(x, 6, 3, padding=1)))
    y = g.batch_norm(g.conv(y, 6, 3, padding=1))
    x = g.relu(g.add(y, x))
    return (g.linear(g.flatten(g.global_avg_pool(x)), classes),)


def plain(g, x, classes):
    """Convolutions, a dropout, the classes; no sample knows of another."""
    x = g.dropout(g.relu(g.conv(x, 6, 3, padding=1)), 0.25)
    x = g.max_pool(g.relu(g.conv(x, 8, 3, padding=1)), 2)
    return (g.linear(g.flatten(x), classes),)


def wider(g, x, classes):
    """As `plain`, but for its width."""
    x = g.dropout(g.relu(g.conv(x, 8, 3, padding=1)), 0.25)
    x = g.max_pool(g.relu(g.conv(x, 8, 3, padding=1)), 2)
    return (g.linear(g.flatten(x), classes),)


def calmer(g, x, classes):
    """As `plain`, but for its dropout."""
    x = g.dropout(g.relu(g.conv(x, 6, 3, padding=1)), 0.5)
    x = g.max_pool(g.relu(g.conv(x, 8, 3, padding=1)), 2)
    return (g.linear(g.flatten(x), classes),)


def branches(g, x, classes):
    """Two normalised branches."""
    x = g.relu(g.conv(x, 4, 3, padding=1))
    one, other = (g.batch_norm(g.conv(x, 4, 3, padding=1)) for _ in range(2))
    return (g.linear(g.flatten(g.global_avg_pool(g.add(one, other))), classes),)


NETWORKS = CASES | {
    name: Case(Model(body, (3, 8, 8), CLASSES), 8)
    for name, body in (
        ("branches", branches),
        ("calmer", calmer),
        ("plain", plain),
        ("residual", residual),
        ("unet", fleet_ranks.unet),
        ("wider", wider),
    )
}


def network(name, batch, dtype="float64"):
    return NETWORKS[name].graph(batch, dtype)


def trained(name, *shares_and_ranks, **options):
    """Losses and right answers of the steps, and the state at the end."""
    steps, state = fleet_ranks.trained(NETWORKS[name], *shares_and_ranks, **options)
    return [(step.loss, step.correct) for step in steps], state


class Threads:
    """Ranks that are threads of this process; none waits for another for ever."""

    def __init__(self, size):
        self.size = size
        self._barrier = threading.Barrier(size, timeout=SECONDS)
        self._values = [None] * size

    def run(self, work):
        """What each rank's work returns; the first error ends all."""
        found, errors = [None] * self.size, []

        def ranked(rank):
            try:
                found[rank] = work(ThreadRank(self, rank))
            except threading.BrokenBarrierError:
                pass
            except Exception as e:  # handed on
                errors.append(e)
                self._barrier.abort()

        threads = [threading.Thread(target=ranked, args=(r,)) for r in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return found

    def gathered(self, rank, value):
        self._values[rank] = value
        self._barrier.wait()
        found = list(self._values)
        self._barrier.wait()
        return found


class ThreadRank:
    """One of them."""

    def __init__(self, threads, rank):
        self._threads, self.rank, self.size = threads, rank, threads.size

    def all_gather(self, value):
        return self._threads.gathered(self.rank, value)

    def all_reduce(self, array):
        arrays = self.all_gather(array.copy())
        array[...] = sum(arrays[1:], arrays[0])
        return self

    def wait(self):
        pass
