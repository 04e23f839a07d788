"""Bytes and launches of planned steps on CUDA, with no GPU: `make bench-fakecuda`.

PyTorch's CUDA build runs over `tests/fakecuda`. Its allocator, dispatcher and streams
are the real ones, and no kernel is executed: bytes, launches and synchronizations are
measured, times are not. Convolutions run without cuDNN, whose engines the stand-in
lacks: PyTorch's own launch kernels for every image.

Each network is measured in a process of its own, with an allocator that is empty.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from bench.machine import describe

TITLES = {
    "gpt2": "GPT-2 124M, N=8, AdamW",
    "resnet50": "ResNet-50, N=64, SGD",
    "bert": "BERT-base, N=16, AdamW",
    "vit": "ViT-B/16, N=64, AdamW",
    "llama": "Llama 367M, N=4, AdamW",
    "unet": "U-Net 31M, N=16, SGD",
}
"""Networks. Images have 224 x 224 pixels, U-Net's 256 x 256; tokens are 1,024, BERT's
512 for each of N."""

_WAITS = "stream_sync", "event_sync", "device_sync", "copy_sync"
_RESULT = Path(__file__).parent / "results/torch-cuda.json"


def _network(name: str) -> tuple[Any, Callable[..., Any], Sequence[Any]]:
    """Return a network, its loss and a batch, on the default device."""
    import torch

    from bench.torch import networks, vision, zoo

    cases: Mapping[str, Callable[[], zoo.Case]] = {
        "gpt2": lambda: zoo.gpt(8, zoo.GPTConfig(12, 768, 12, 1024, 50257, 0.0)),
        "bert": lambda: zoo.bert(16, zoo.GPTConfig(12, 768, 12, 512, 30522)),
        "llama": lambda: zoo.llama(4, zoo.GPTConfig(24, 1024, 16, 1024, 32000)),
        "unet": lambda: zoo.unet(16, 256, 64, 5),
    }
    if name in cases:
        case = cases[name]()
        return case.model, case.loss_fn, case.batch
    images = torch.zeros(64, 3, 224, 224), torch.zeros(64, dtype=torch.long)
    if name == "vit":
        model = vision.torchvision_model("vit_b_16")
    else:
        model = networks.resnet50()
    return model, torch.nn.functional.cross_entropy, images


def measured(name: str) -> dict[str, Any]:
    """Measure one network in eager mode and planned within three budgets."""
    import gc

    import torch

    from bench.gpu.pytorch_steps import Training
    from tests.fakecuda.device import counted

    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cudnn.enabled = False
    with torch.device("cuda"):
        model, loss, batch = _network(name)
    optimizers: Mapping[str, Callable[[Any], Any]] = {
        "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
        "AdamW": partial(torch.optim.AdamW, lr=1e-4, foreach=True),
    }
    optimizer = optimizers[TITLES[name].rpartition(" ")[2]]
    case = Training(
        model.train(), loss, tuple(batch), lambda m: optimizer(m.parameters())
    )
    given = sum(tensor.nbytes for tensor in batch)

    def run(step: Callable[[], Any]) -> dict[str, int]:
        """Return the bytes of three steps, and the calls of the third one."""
        step(), step()
        with counted() as calls:
            step()
        stats = torch.cuda.memory_stats()
        bytes_of = {
            f"{kind}_bytes": stats[f"{kind}_bytes.all.peak"] - given
            for kind in ("requested", "reserved")
        }
        return {
            **bytes_of,
            "launches": calls["launch"] + calls["product"],
            "synchronizations": sum(calls[wait] for wait in _WAITS),
            "allocations": calls["malloc"] + calls["free"] + calls["host_alloc"],
        }

    def emptied() -> None:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    emptied()
    found: dict[str, Any] = {"model": name, "eager": run(case.eager()), "budgets": []}
    model.zero_grad()
    for budget in case.budgets().values():
        emptied()
        step = case.planned(budget)
        row = run(step)
        sizes = {
            "budget_bytes": budget,
            "planned_bytes": step.plan.peak_bytes,
            "foreseen_bytes": step.plan.reserved_bytes,
            "warned_bytes": step.plan.reservable_budget,
        }
        found["budgets"].append({**sizes, **row, "slowdown": step.plan.slowdown})
        del step
    return found


def failures(network: Mapping[str, Any]) -> Iterator[str]:
    """Yield promises that were not kept."""
    for row in network["budgets"]:
        at = f"{network['model']} in {row['budget_bytes']}"
        # What is reserved is within the budget, or the user was warned.
        within = "warned" if row["warned_bytes"] else "budget"
        for low, high in (
            ("requested", "planned"),
            ("planned", "budget"),
            ("reserved", "foreseen"),
            ("foreseen", within),
        ):
            if (less := row[f"{low}_bytes"]) > (more := row[f"{high}_bytes"]):
                yield f"{at}: {low} {less}, {high} {more}"
        for kind in ("synchronizations", "allocations"):
            if row[kind]:
                yield f"{at}: {row[kind]} {kind} in a step"


_HEAD = (
    *("network", "budget", "planned", "requested", "reserved", "reserved / planned"),
    *("launches", "synchronizations"),
)


def page_lines(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that the documentation shows of a result."""
    machine = result["machine"]
    yield (
        f"PyTorch's allocator, no kernels executed: PyTorch {machine['torch']} over "
        f"`tests/fakecuda`, {machine['measured_at'][:10]}; `make bench-fakecuda`. GB."
    )
    yield ""
    yield f"| {' | '.join(_HEAD)} |"
    yield f"|{'---|' * len(_HEAD)}"
    for network in result["networks"]:
        eager, title = network["eager"], TITLES[network["model"]]
        sizes = (f"{eager[f'{k}_bytes'] / 1e9:.2f}" for k in ("requested", "reserved"))
        counts = f"{eager['launches']:,} | {eager['synchronizations']}"
        yield f"| {title} | eager | – | {' | '.join(sizes)} | – | {counts} |"
        for row in network["budgets"]:
            kinds = "budget", "planned", "requested", "reserved"
            sizes = (f"{row[f'{kind}_bytes'] / 1e9:.2f}" for kind in kinds)
            of = row["reserved_bytes"] / row["planned_bytes"]
            counts = f"{row['launches']:,} | {row['synchronizations']}"
            yield f"| | {' | '.join(sizes)} | {of:.2f} | {counts} |"


def main() -> int:
    """Measure networks, two at a time; write the file after each of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--networks", default=",".join(TITLES))
    parser.add_argument("--out", type=Path, default=_RESULT)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measured(options.one)))
        return 0

    def apart(name: str) -> dict[str, Any]:
        command = sys.executable, "-m", "bench.torch_cuda", "--one", name
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    names = options.networks.split(",")
    networks: list[dict[str, Any]] = []
    wrong: list[str] = []
    with ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        for found in pool.map(apart, names):
            networks.append(found)
            wrong += failures(found)
            result = {"machine": describe(), "networks": networks, "failures": wrong}
            options.out.write_text(json.dumps(result, indent=1) + "\n")
    print("\n".join((*page_lines(result), *wrong)))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
