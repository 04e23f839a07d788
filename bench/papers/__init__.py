"""Published figures of SuperNeurons and vDNN, computed again by the papers' own rules.

Nothing is measured: memory by these rules is arithmetic over the papers' networks. What
the same techniques and ours do where every byte counts is in `bench.front`.
"""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from bench.papers.capacity import GIB, bytes_an_image, deepest, largest_batch
from bench.papers.networks import MODELS
from bench.papers.published import Figure, figures
from bench.papers.report import table
from bench.papers.superneurons import MIB, row
from bench.papers.vdnn import (
    Usage,
    account,
    alexnet_one_tower,
    alexnet_wide,
    googlenet,
    overfeat,
    vgg,
)

__all__ = ["compared", "run", "table"]

MEMORY = 12 * GIB
"""Of the papers' K40c and Titan X."""

BATCHES = (
    ("alexnet", 227, (128, 200, 256, 512)),
    ("vgg16", 227, (16, 32)),
    ("vgg16", 224, (32,)),
    ("resnet50", 227, (32,)),
    ("resnet101", 227, (32,)),
    ("resnet152", 227, (32,)),
    ("inception_v4", 299, (32,)),
)
NETWORKS = tuple(name for name in MODELS if "2500" not in name)
"""Whose largest batches are looked for."""

DEPTHS = (("baseline", 16), ("liveness", 16), ("cost_aware", 16), ("cost_aware", 1))
TECHNIQUES = ("baseline", "liveness", "cost_aware", "cost_aware_prefetch")


def run() -> dict[str, Any]:
    """Reproduce the papers. Ready for JSON; `failures` are figures that must agree."""
    return {
        **compared(figures()),
        "superneurons": [
            row(MODELS[name](image), batch)
            for name, image, batches in BATCHES
            for batch in batches
        ],
        "vdnn": _vdnn(),
        "capacity": [_capacity(name) for name in NETWORKS],
        "depths": [
            {"technique": name, "batch": batch, "depth": deepest(name, batch, MEMORY)}
            for name, batch in DEPTHS
        ],
    }


def compared(published: Iterable[Figure]) -> dict[str, Any]:
    """Return figures beside ours, and those that are wrong."""
    made = [
        {
            **asdict(one),
            "difference": one.difference,
            "near": one.near,
            "agrees": one.agrees,
            "wrong": one.wrong,
        }
        for one in published
    ]
    wrong = [one["what"] for one in made if one["wrong"]]
    return {"figures": made, "failures": wrong}


def _capacity(name: str) -> dict[str, Any]:
    network = MODELS[name]()
    return {
        "model": network.name,
        "techniques": {
            technique: {
                "mib_an_image": bytes_an_image(network, technique) / MIB,
                "batch": largest_batch(network, technique, MEMORY),
            }
            for technique in TECHNIQUES
        },
    }


def _vdnn() -> list[dict[str, Any]]:
    cases = [(make(), 128) for make in (alexnet_one_tower, alexnet_wide)]
    cases += [(make(), 128) for make in (overfeat, googlenet)]
    cases += [(vgg(), batch) for batch in (64, 128, 256)]
    cases += [(vgg(extra), 32) for extra in (20, 40, 60, 80)]
    rows = []
    for network, batch in cases:
        ours = account(network, batch)
        rows.append(
            {
                "network": network.name,
                "batch": batch,
                "maps_gb": ours.maps / 1e9,
                "weights_gb": ours.weights / 1e9,
                "baseline_gb": ours.baseline / 1e9,
                "conv": _gigabytes(ours.conv),
                "all": _gigabytes(ours.all),
                "saving": ours.saving,
                "feature_saving": ours.feature_saving,
            }
        )
    return rows


def _gigabytes(usage: Usage) -> dict[str, float]:
    return {
        "most_gb": usage.most / 1e9,
        "average_gb": usage.average / 1e9,
        "offloaded_gb": usage.offloaded / 1e9,
    }
