"""The papers' own figures, and ours beside them.

Only figures read in a paper's text stand here ("found"), some of which the paper's own
accounting rules reproduce ("verified"). A verified figure must agree with ours within
0.1 %, or within one unit of its last digit where it was printed more coarsely than
that; a figure that was only found explains its difference instead.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bench.papers.capacity import GIB, needed
from bench.papers.networks import BLOCKS, alexnet, resnet
from bench.papers.superneurons import row
from bench.papers.vdnn import (
    Account,
    account,
    alexnet_one_tower,
    googlenet,
    overfeat,
    vgg,
)

FOUND, VERIFIED = "F", "V"
TOLERANCE = 1e-3

SUPERNEURONS, VDNN = "SuperNeurons", "vDNN"

WORKSPACE = "the fastest algorithms' workspace is not counted here"
UNEXPLAINED = f"{WORKSPACE}; whether that is all of it was not verified"
READING = "that the paper averages feature extraction alone is our reading"
LIVE = "AlexNet, batch 200: "


@dataclass(frozen=True, slots=True)
class Figure:
    """One published figure.

    Attributes:
        paper: Whose.
        what: It is.
        unit: Of both numbers.
        published: As printed.
        ours: By the paper's accounting rules.
        mark: "V" (verified) or "F" (found).
        digit: One unit of the last digit printed.
        reason: Why ours differs, or how it was counted.
    """

    paper: str
    what: str
    unit: str
    published: float
    ours: float
    mark: str = VERIFIED
    digit: float = 0.0
    reason: str = ""

    def __post_init__(self) -> None:
        if self.mark not in {FOUND, VERIFIED}:
            raise ValueError(f"{self.what}: mark {self.mark!r} is neither 'F' nor 'V'")

    @property
    def difference(self) -> float:
        """Ours against theirs, relative."""
        return self.ours / self.published - 1

    @property
    def near(self) -> bool:
        """Within 0.1 %."""
        return abs(self.difference) <= TOLERANCE

    @property
    def agrees(self) -> bool:
        """Within 0.1 %, or within one unit of the last digit printed."""
        return self.near or abs(self.ours - self.published) < self.digit

    @property
    def wrong(self) -> bool:
        """It must agree, and does not."""
        return self.mark == VERIFIED and not self.agrees


def figures() -> list[Figure]:
    """All of them."""
    return [*_superneurons(), *_deepest(), *_vdnn()]


def _superneurons() -> list[Figure]:
    counted: Mapping[str, Any] = row(alexnet(), 200)
    base = counted["baseline_mib"]

    def mib(what: str, published: float, ours: float, reason: str = "") -> Figure:
        return Figure(SUPERNEURONS, LIVE + what, "MiB", published, ours, reason=reason)

    def saved(what: str, percent: float, digit: float, mib: float) -> Figure:
        share = 100 * (1 - mib / base)
        return Figure(
            SUPERNEURONS, f"{LIVE}{what} saves", "%", percent, share, digit=digit
        )

    live, offload = counted["liveness_mib"], counted["offload_prefetch_mib"]
    cost = counted["cost_aware"]["peak_mib"]
    unexplained = "0.1 MiB of the paper's sum is not in its tensors"
    made = [
        mib("all tensors", 2189.437, base),
        Figure(SUPERNEURONS, LIVE + "tensors", "", 36, counted["tensors"]),
        mib("liveness", 1489.355, live),
        Figure(
            SUPERNEURONS, LIVE + "live at that peak", "", 17,
            counted["liveness_live_tensors"],
        ),
        saved("liveness", 31.9, 0.1, live),
        mib("offload with prefetch", 1132.155, offload, unexplained),
        saved("offload", 48.29, 0.01, offload),
        mib("cost-aware, in the text", 886.385, cost, unexplained),
        mib("cost-aware, in the table", 886.23, cost),
        saved("cost-aware", 59.5, 0.1, cost),
    ]  # fmt: skip
    printed = {
        "speed": ("speed-centric", 993.018, 14),
        "memory": ("memory-centric", 886.23, 23),
        "cost_aware": ("cost-aware", 886.23, 17),
    }
    for key, (name, peak, extra) in printed.items():
        what = f"{name}, extra forward layers"
        again = counted[key]["extra"]
        made.append(mib(f"{name} recomputation", peak, counted[key]["peak_mib"]))
        made.append(Figure(SUPERNEURONS, LIVE + what, "", extra, again))
    return made


def _deepest() -> list[Figure]:
    network = resnet(BLOCKS["resnet2500"])
    ours = needed(network, "cost_aware", 1) / GIB
    what = "ResNet-2500 (blocks 6, 32, 788, 6), batch 1, cost-aware: trained within"
    reason = "fits; 12 bytes a parameter counted, workspace and allocator not"
    return [Figure(SUPERNEURONS, what, "GiB", 12, ours, FOUND, reason=reason)]


def _vdnn() -> list[Figure]:
    alex, over = account(alexnet_one_tower(), 128), account(overfeat(), 128)
    goog = account(googlenet(), 128)
    vggs = {batch: account(vgg(), batch) for batch in (64, 128, 256)}
    big = vggs[256]
    every = [alex, over, goog, *vggs.values()]
    saved = [100 * one.feature_saving for one in every]
    which = "six chosen here: AlexNet, OverFeat, GoogLeNet, VGG-16 (64, 128, 256)"
    return [
        _saving("AlexNet (128)", 89, alex),
        _saving("OverFeat (128)", 91, over),
        _saving("GoogLeNet (128)", 95, goog),
        _found("least average saving of six networks", "%", 73, min(saved), which),
        _found("greatest average saving of six networks", "%", 98, max(saved), which),
        _found("VGG-16 (256), baseline", "GB", 28, big.baseline / 1e9, UNEXPLAINED),
        _found(
            "VGG-16 (256), vDNN: trained within", "GiB", 12, big.all.most / GIB,
            "fits, as the memory-optimal algorithms need no workspace",
        ),
        Figure(
            VDNN, "VGG-16 (256), vDNN_all: offloaded a step", "GB", 16,
            big.all.offloaded / 1e9, digit=1,
        ),
        _features("AlexNet (128)", 81, alex),
        _features("VGG-16 (256)", 96, big),
    ]  # fmt: skip


def _found(what: str, unit: str, published: float, ours: float, reason: str) -> Figure:
    return Figure(VDNN, what, unit, published, ours, FOUND, reason=reason)


def _saving(name: str, percent: float, ours: Account) -> Figure:
    whole = f"of the whole network {ours.saving:.0%}"
    what = f"{name}: average saving, feature extraction"
    reason = f"{whole}; {READING}; {WORKSPACE}"
    return _found(what, "%", percent, 100 * ours.feature_saving, reason)


def _features(name: str, percent: float, ours: Account) -> Figure:
    what = f"{name}: feature extraction's share of the baseline"
    return _found(what, "%", percent, 100 * ours.feature_share, UNEXPLAINED)
