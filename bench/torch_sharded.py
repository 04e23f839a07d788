"""Planned steps over ranks beside FSDP2 alone, in all of its peak and in part of it.

    python -m bench.torch_sharded [--networks llama,gpt,vit] [--ranks 2,4] [--inductor]

Ranks are processes of one thread that meet on the loopback device. Both ways train a
model of their own from the same weights, in turns, each step begun together. Peaks are
those of the rank that needs most, with its shards of parameters and optimizer state.
With `--inductor`, FSDP2's layers are compiled one by one, and the planned step whole.
`bench/results/torch-sharded.json`, or `torch-sharded-compiled.json`, is written after
every network.
"""

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from bench.machine import describe
from bench.table import render
from bench.torch import unkept

__all__ = ["run", "table"]

SHARES = (1.0, 0.75, 0.5)
"""Budgets, of the peak of FSDP2 alone."""

TITLES = {"llama": "Llama, 16 layers", "gpt": "GPT, 8 layers", "vit": "ViT, 6 layers"}
_ROUNDS = 9
_MIB = 1 << 20
_RESULTS = Path(__file__).parent / "results"

_CLOSE = 2e-3
"""Largest difference of losses and weights, relative and absolute, after three steps of
AdamW whose kernels round otherwise."""


def _network(name: str) -> tuple[Any, Sequence[Any]]:
    """Return a network with its batch, and the layers that are sharded one by one."""
    from bench.torch import zoo

    if name == "vit":
        case = zoo.transformer(8, 64, 6, 256, 0.0)
        return case, [*case.model.encoder.layers]
    layers = 16 if name == "llama" else 8
    sizes = zoo.GPTConfig(layers=layers, width=256, heads=4, dropout=0.0)
    case = (zoo.llama if name == "llama" else zoo.gpt)(4, sizes)
    return case, [*case.model][1 : 1 + layers]


def _train(rank: int, size: int, name: str, inductor: bool, folder: str) -> None:
    """Measure one network as one of the ranks; the first writes what was found."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size
    )
    found = _compared(name, size, inductor, Path(folder) / "cache")
    if not rank:
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _compared(name: str, size: int, inductor: bool, cache: Path) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    import mucudnn.torch as mt
    from bench.torch.peak import real_peak

    def most(value: int) -> int:
        values = [0] * size
        dist.all_gather_object(values, value)
        return max(values)

    def peak(step: Callable[[], object]) -> int:
        return min(real_peak(step) for _ in range(3))

    def timed(step: Callable[[], object]) -> float:
        dist.barrier()
        start = perf_counter()
        step()
        dist.barrier()
        return 1e3 * (perf_counter() - start)

    near = dict.fromkeys(("rtol", "atol"), _CLOSE if inductor else 0.0)
    case, optimizer = _sharded(name, inductor)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    order = torch.randperm(len(case.batch[0]), generator=generator)
    batch = [tensor[order] for tensor in case.batch]  # each rank has its own

    def alone() -> torch.Tensor:
        optimizer.zero_grad()
        loss = case.loss_fn(case.model(batch[0]), *batch[1:])
        loss.backward()
        optimizer.step()
        found: torch.Tensor = loss.detach()
        return found

    losses = [alone().item() for _ in range(3)]
    weights = [p.to_local().clone() for p in case.model.parameters()]
    state = [t for held in optimizer.state.values() for t in held.values()]
    resident = sum(
        (t.to_local() if hasattr(t, "to_local") else t).nbytes
        for t in (*case.model.parameters(), *state)
    )
    their_peak = most(resident + peak(alone))
    rows = []
    for share in (None, *SHARES):
        ours, updates = _sharded(name)
        torch._dynamo.reset()
        budget = None if share is None else int(share * their_peak)
        start = perf_counter()
        planned = mt.train_step(
            ours.model,
            ours.loss_fn,
            updates,
            budget=budget,
            cache=cache,
            inductor=inductor,
        )
        step = partial(planned, *batch)
        mine = torch.tensor([step().item() for _ in range(3)])
        same = torch.allclose(mine, torch.tensor(losses), **near)
        prepared = perf_counter() - start
        own = [p.to_local() for p in ours.model.parameters()]
        pairs_of_weights = zip(own, weights, strict=True)
        same = same and all(torch.allclose(a, b, **near) for a, b in pairs_of_weights)
        plan = planned.plan
        real = most(plan.resident_bytes + peak(step))
        pairs = [(timed(alone), timed(step)) for _ in range(_ROUNDS)]
        low, middle, high = quantiles((b / a for a, b in pairs), n=4)
        nodes = plan.plan.schedule.graph.nodes
        rows.append(
            {
                "share": share,
                "budget_bytes": budget,
                "planned_bytes": most(plan.peak_bytes),
                "peak_bytes": real,
                "fsdp2_ms": median(a for a, _ in pairs),
                "ms": median(b for _, b in pairs),
                "cost": middle,
                "low": low,
                "high": high,
                "gathers": sum("all_gather" in node.op for node in nodes),
                "again": sum(plan.recomputed.values()),
                "leaving": len(plan.leaving),
                "prepared_s": prepared,
                "kernels": plan.kernels,
                "same": not most(not same),
            }
        )
    return {
        "model": name,
        "ranks": size,
        "batch": [list(tensor.shape) for tensor in batch],
        "fsdp2_peak_bytes": their_peak,
        "rows": rows,
    }


def _sharded(name: str, compiled: bool = False) -> tuple[Any, Any]:
    import torch
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    case, units = _network(name)
    for unit in units:
        if compiled:
            unit.compile()
        fully_shard(unit)
    fully_shard(case.model)
    return case, torch.optim.AdamW(case.model.parameters())


def run(
    names: Sequence[str] = tuple(TITLES),
    ranks: Sequence[int] = (2, 4),
    inductor: bool = False,
) -> dict[str, Any]:
    """Measure networks one after another. Ready for JSON."""
    *_, result = _measured(names, ranks, inductor)
    return result


def _measured(
    names: Sequence[str], ranks: Sequence[int], inductor: bool
) -> Iterator[dict[str, Any]]:
    """Yield all results so far, after every network and number of ranks."""
    import torch.multiprocessing as mp

    networks: list[dict[str, Any]] = []
    for name, size in product(names, ranks):
        print(f"{name}, {size} ranks", file=sys.stderr, flush=True)
        load = os.getloadavg()[0]
        with TemporaryDirectory() as folder:
            mp.spawn(_train, (size, name, inductor, folder), nprocs=size)
            found = json.loads((Path(folder) / "found.json").read_text())
            networks.append({**found, "load": load})
        failures = [text for network in networks for text in _failures(network)]
        yield {"networks": [*networks], "failures": failures}


def _failures(network: Mapping[str, Any]) -> Iterator[str]:
    """Yield promises that were not kept."""
    for row in network["rows"]:
        what = f"{network['model']}, {network['ranks']} ranks, {_setting(row)}"
        yield from unkept(what, row, row["same"], "the results of FSDP2")


def _setting(row: Mapping[str, Any]) -> str:
    return "no limit" if row["share"] is None else f"{row['share']:.0%}"


def table(result: Mapping[str, Any]) -> str:
    """Return the result of `run` as text."""
    rows = [cells for network in result["networks"] for cells in _rows(network)]
    return "\n".join((render(_HEAD, rows), *result["failures"]))


_HEAD = (
    *("network", "ranks", "FSDP2, MiB", "budget", "planned, MiB", "real, MiB"),
    *("time", "quartiles"),
)


def _rows(network: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for row in network["rows"]:
        yield (
            TITLES[network["model"]],
            str(network["ranks"]),
            f"{network['fsdp2_peak_bytes'] / _MIB:.1f}",
            _setting(row),
            f"{row['planned_bytes'] / _MIB:.1f}",
            f"{row['peak_bytes'] / _MIB:.1f}",
            f"{row['cost']:.2f}",
            f"{row['low']:.2f}–{row['high']:.2f}",
        )


def page_lines(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that the documentation shows of a result."""
    inductor = any(row["kernels"] for net in result["networks"] for row in net["rows"])
    machine = result["machine"]
    processor = machine["fingerprint"].split("/")[1]
    command = f"python -m bench.torch_sharded{' --inductor' * inductor}"
    yield (
        f"Two cores of an {processor}, PyTorch {machine['torch']}, "
        f"{machine['measured_at'][:10]}; `{command}`."
    )
    yield ""
    rows = [cells for network in result["networks"] for cells in _rows(network)]
    for cells in (_HEAD, ["---"] * len(_HEAD), *rows):
        yield f"| {' | '.join(cells)} |"


def main() -> int:
    """Measure networks, and write each result as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--networks", default=",".join(TITLES))
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--inductor", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    names, ranks = options.networks.split(","), map(int, options.ranks.split(","))
    file = f"torch-sharded{'-compiled' * options.inductor}.json"
    out = options.out or _RESULTS / file
    result: dict[str, Any] = {"networks": [], "failures": []}
    for result in _measured(names, [*ranks], options.inductor):
        text = json.dumps({"machine": describe(), **result}, indent=1)
        out.write_text(text + "\n")
    print(table(result))
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
