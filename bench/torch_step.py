"""What a planned PyTorch step costs the processor beyond PyTorch's own operations.

A decoder whose operations compute next to nothing is trained eagerly and by a planned
step where nothing has to move: what is left is calling. A third runner makes the very
calls of the planned program from a list, with everything made ahead. All take turns in
one process, and the processor's time is taken, since others may be at work beside.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from bench.overhead import no_collection
from bench.table import render
from mucudnn.torch.execution.program import bind

_LAYERS = (1, 6, 12)
_WIDTH = 16
_LENGTH = 16
_ROUNDS = 40
_BAR_NODE_US = 5.0
_BAR_EAGER = 1.05
_BAR_TENSOR_US = 1.0
_COLUMNS = {
    "layers": "layers",
    "nodes": "nodes",
    "eager_ms": "eager ms",
    "planned_ms": "planned ms",
    "ratio": "planned/eager",
    "calls_ms": "calls ms",
    "node_us": "beyond µs a node",
    "tensor_us": "µs a tensor given",
}


def run() -> dict[str, Any]:
    """One row for each number of layers."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = [_one(layers) for layers in _LAYERS]
    finally:
        torch.set_num_threads(threads)
    return {
        "torch": torch.__version__,
        "rounds": _ROUNDS,
        "bar_node_us": _BAR_NODE_US,
        "bar_eager": _BAR_EAGER,
        "bar_tensor_us": _BAR_TENSOR_US,
        "rows": rows,
    }


def table(result: dict[str, Any]) -> str:
    """Processor time: of a step in ms, of a node and a tensor in µs."""
    rows = [[row[name] for name in _COLUMNS] for row in result["rows"]]
    header = list(_COLUMNS.values())
    return (
        f"{render(header, rows)}\n"
        f"the least of {result['rounds']} steps, taking turns; bars: "
        f"{result['bar_eager']:.2f} of eager, {result['bar_node_us']:.0f} µs a node, "
        f"{result['bar_tensor_us']:.0f} µs a tensor"
    )


def _one(layers: int) -> dict[str, Any]:
    import torch

    import mucudnn.torch as mt

    def loss_fn(logits: Any, targets: Any) -> Any:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets)

    batch = torch.arange(_LENGTH)[None] % 7, torch.arange(_LENGTH) % 5
    model, other = (_decoder(layers) for _ in range(2))
    optimizer, mine = (
        torch.optim.SGD(m.parameters(), 1e-3, momentum=0.9) for m in (model, other)
    )
    watched = _Watched()
    with patch("mucudnn.torch.execution.bound_step.bind", watched.bind):
        step = mt.train_step(other, loss_fn, mine, cache=None)
        plan = step.prepare(*batch)
    step(*batch)

    def eager() -> None:
        optimizer.zero_grad()
        loss_fn(model(batch[0]), batch[1]).backward()
        optimizer.step()

    calls = _calls(watched.segment, watched.given)

    def direct() -> None:
        with torch.no_grad():
            for function, args, kwargs in calls:
                function(*args, **kwargs)

    def program() -> None:
        with torch.no_grad():
            watched.segment.run(list(watched.given))

    def collecting() -> None:
        watched.idle = True
        step(*batch)
        watched.idle = False

    runners = {
        "eager": eager,
        "planned": lambda: step(*batch),
        "calls": direct,
        "program": program,
        "collecting": collecting,
    }
    ms = _least_ms(runners)
    return {
        "layers": layers,
        "nodes": len(plan.plan.schedule.graph.nodes),
        "tensors": len(watched.given),
        "eager_ms": round(ms["eager"], 3),
        "planned_ms": round(ms["planned"], 3),
        "ratio": round(ms["planned"] / ms["eager"], 3),
        "calls_ms": round(ms["calls"], 3),
        "node_us": round(1e3 * (ms["program"] - ms["calls"]) / len(calls), 3),
        "tensor_us": round(1e3 * ms["collecting"] / len(watched.given), 3),
    }


class _Watched:
    """Stands before a step's program, which it can leave out."""

    def __init__(self) -> None:
        self.idle = False
        self.given: list[Any] = []
        self.segment: Any = None
        self._results: list[Any] = []

    def bind(self, *args: Any, **options: Any) -> Any:
        """The program, watched."""
        self.segment = bind(*args, **options)
        return replace(self.segment, run=self._run)

    def _run(self, given: list[Any]) -> list[Any]:
        if not self.idle:
            self.given = list(given)
            self._results = list(self.segment.run(given))
        return list(self._results)


def _calls(segment: Any, given: list[Any]) -> list[tuple[Any, Any, Any]]:
    """The calls that a program makes, with what it makes them on."""
    import torch

    found = []

    def recorded(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            found.append((function, args, kwargs))
            return function(*args, **kwargs)

        return call

    space = {
        name: recorded(value) if name.startswith("k") and callable(value) else value
        for name, value in segment.run.__globals__.items()
    }
    exec(compile(segment.source, "<recorded step>", "exec"), space)
    with torch.no_grad():
        space["run"](list(given))
    return found


def _least_ms(runners: dict[str, Callable[[], object]]) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in runners}
    with no_collection():
        for _ in range(_ROUNDS):
            for name, runner in runners.items():
                runner()  # caches as its own last step leaves them
                start = time.process_time()
                runner()
                times[name].append(time.process_time() - start)
    return {name: 1e3 * min(found) for name, found in times.items()}


def _decoder(layers: int) -> Any:
    """A decoder of narrow layers with the same numbers every time."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(
        _WIDTH, 2, 4 * _WIDTH, 0.1, "gelu", batch_first=True, norm_first=True
    )
    blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(64, _WIDTH), blocks, nn.Linear(_WIDTH, 64))
