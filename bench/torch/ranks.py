"""PyTorch's ranks over gloo that really train in step, the last of them slowed.

`run` starts them, and trains the same in one process. Each rank measures its own table
in CPU time, in which the last takes so many times as long; `mucudnn.torch.distribute`
shares out the batches by those. How long a rank waits is counted from the tables.
"""

import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.torch.gloo_rank import environment, run_rank
from bench.torch.rank_networks import NETWORKS
from mucudnn.ir.fleet import StepPoint, StepTable
from mucudnn.passes.load_balancing import equal_shares, measured_table

__all__ = ["available", "run"]

BATCH, STEPS, CLASSES = 12, 3, 5
ROUGHLY = 0.5
"""Of a time, what the tables may be off: a few sizes do to tell ranks apart."""

_SECONDS = 300


def available() -> bool:
    """Whether this Python has PyTorch with gloo."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch.distributed as dist

    return bool(dist.is_available() and dist.is_gloo_available())


def batches(name: str) -> Iterator[tuple[Any, Any]]:
    """Whole batches of random images, the same on every rank."""
    import torch

    generator = torch.Generator().manual_seed(1)
    side = 32 if name == "resnet18" else 48
    shape = (BATCH, side, side) if name == "unet" else (BATCH,)
    for _ in range(STEPS):
        images = torch.randn(
            BATCH, 3, side, side, dtype=torch.float64, generator=generator
        )
        yield images, torch.randint(0, CLASSES, shape, generator=generator)


def model_of(name: str) -> Any:
    """The network in double precision, with the same weights on every rank."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    return NETWORKS[name]().double()


def alone(name: str) -> list[float]:
    """The losses of one process."""
    import torch
    from torch.nn.functional import cross_entropy

    model = model_of(name)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    losses = []
    for images, labels in batches(name):
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def own_table(name: str, factor: float, most: int) -> StepTable:
    """What forward and backward take here, in CPU time, times a factor."""
    from torch.nn.functional import cross_entropy

    model = model_of(name)
    images, labels = next(batches(name))

    def cpu_ms(samples: int) -> float:
        began = time.process_time()
        cross_entropy(model(images[:samples]), labels[:samples]).backward()
        return 1e3 * (time.process_time() - began)

    def measure(samples: int) -> StepPoint:
        return StepPoint(samples, factor * min(cpu_ms(samples) for _ in range(3)))

    return measured_table("cpu", 2, most, measure, tolerance=ROUGHLY)


def trained(name: str, table: StepTable, rank: int) -> dict[str, Any]:
    """What one rank found."""
    import torch
    from torch.nn.functional import cross_entropy

    import mucudnn.torch as mt

    work = mt.distribute(model_of(name), batch=BATCH, table=table)
    optimizer = torch.optim.SGD(work.model.parameters(), 0.05, momentum=0.9)
    first, losses = sum(work.plan.samples[:rank]), []
    for images, labels in batches(name):
        mine = slice(first, first + work.samples)
        optimizer.zero_grad()
        loss = cross_entropy(work.model(images[mine]), labels[mine])
        loss.backward()
        optimizer.step()
        losses.append(work.mean(loss).item())
    before, after = equal_shares(work.fleet, BATCH).idle_ms[0], work.plan.idle_ms[0]
    return {
        "samples": work.plan.samples,
        "idle_planned_ms": after,
        "idle_equal_ms": before,
        "idle_fall": 1 - after / before,
        "losses": losses,
    }


def run(name: str, slow: float, ranks: int = 2) -> dict[str, Any]:
    """Train over gloo and alone; shares, waiting, and how far the losses are apart.

    Raises:
        OSError: A rank failed; says what it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        started = [
            _started(name, slow, rank, ranks, Path(folder)) for rank in range(ranks)
        ]
        try:
            said = [process.communicate(timeout=_SECONDS)[1] for process in started]
        finally:
            for process in started:
                if process.poll() is None:
                    process.kill()
                    process.communicate()
        for process, words in zip(started, said, strict=True):
            if process.returncode:
                raise OSError(f"{name} over gloo: {words.strip()}")
        found: dict[str, Any] = json.loads((Path(folder) / "found.json").read_text())
    losses = alone(name)
    apart = zip(found["losses"], losses, strict=True)
    return {
        "model": name,
        "slow": slow,
        "over": "gloo",
        **found,
        "losses_alone": losses,
        "losses_apart": max(abs(a - b) / abs(b) for a, b in apart),
    }


def _started(
    name: str, slow: float, rank: int, size: int, folder: Path
) -> "subprocess.Popen[str]":
    root = Path(__file__).parent.parent.parent
    words = (sys.executable, "-m", "bench.torch.ranks", name, slow, rank, size, folder)
    return subprocess.Popen(
        list(map(str, words)),
        cwd=root,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )


def main(arguments: Sequence[str]) -> None:
    """One of the ranks."""
    name, slow, folder = arguments[0], float(arguments[1]), Path(arguments[4])
    rank, size = map(int, arguments[2:4])

    def work() -> None:
        factor = slow if rank == size - 1 else 1.0
        table = own_table(name, factor, BATCH - size + 1)
        found = trained(name, table, rank)
        if rank == 0:
            (folder / "found.json").write_text(json.dumps(found))

    run_rank(folder / "store", rank, size, work)


if __name__ == "__main__":
    main(sys.argv[1:])
