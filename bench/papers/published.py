"""The papers' own figures, and ours beside them.

Only figures read in a paper's text stand here ("found"), some of which the paper's own
accounting rules reproduce ("verified"). A verified figure must agree with ours within
0.1 %, or within one unit of its last digit where it was printed more coarsely than
that; a figure that was only found explains its difference instead.

Most are counted by the paper's rules. Times, and what depends on them, have no such
rules: those are estimates of steps in which every byte is counted.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bench.papers.capacity import BASELINE, GIB, needed
from bench.papers.cases import SUPERNEURONS, VDNN, name_of
from bench.papers.networks import BLOCKS, alexnet, resnet
from bench.papers.out_of_core import BATCH, HAYAKAWA, THEIRS
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

RULES, EVERY_BYTE = "the paper's rules", "every byte, estimated times"

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
        counted: By which rules ours is.
        at: The planner's case in that memory, if there is one.
    """

    paper: str
    what: str
    unit: str
    published: float
    ours: float
    mark: str = VERIFIED
    digit: float = 0.0
    reason: str = ""
    counted: str = RULES
    at: str = ""

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
    """All that are counted by the papers' rules."""
    return [*_superneurons(), *_deepest(), *_vdnn()]


def _superneurons() -> list[Figure]:
    counted: Mapping[str, Any] = row(alexnet(), 200)
    base = counted["baseline_mib"]

    def mib(
        what: str, published: float, ours: float, at: str, reason: str = ""
    ) -> Figure:
        at = name_of(SUPERNEURONS, "AlexNet", 200, at)
        return Figure(
            SUPERNEURONS, LIVE + what, "MiB", published, ours, reason=reason, at=at
        )

    def saved(what: str, percent: float, digit: float, mib: float) -> Figure:
        share = 100 * (1 - mib / base)
        return Figure(
            SUPERNEURONS, f"{LIVE}{what} saves", "%", percent, share, digit=digit
        )

    live, offload = counted["liveness_mib"], counted["offload_prefetch_mib"]
    cost = counted["cost_aware"]["peak_mib"]
    unexplained = "0.1 MiB of the paper's sum is not in its tensors"
    made = [
        mib("all tensors", 2189.437, base, BASELINE),
        Figure(SUPERNEURONS, LIVE + "tensors", "", 36, counted["tensors"]),
        mib("liveness", 1489.355, live, "liveness"),
        Figure(
            SUPERNEURONS, LIVE + "live at that peak", "", 17,
            counted["liveness_live_tensors"],
        ),
        saved("liveness", 31.9, 0.1, live),
        mib(
            "offload with prefetch", 1132.155, offload, "offload_prefetch", unexplained
        ),
        saved("offload", 48.29, 0.01, offload),
        mib("cost-aware, in the text", 886.385, cost, "cost_aware", unexplained),
        mib("cost-aware, in the table", 886.23, cost, "cost_aware"),
        saved("cost-aware", 59.5, 0.1, cost),
    ]  # fmt: skip
    printed = {
        "speed": ("speed-centric", 993.018, 14, "speed"),
        "memory": ("memory-centric", 886.23, 23, "cost_aware"),
        "cost_aware": ("cost-aware", 886.23, 17, "cost_aware"),
    }
    for key, (name, peak, extra, at) in printed.items():
        what = f"{name}, extra forward layers"
        again = counted[key]["extra"]
        made.append(mib(f"{name} recomputation", peak, counted[key]["peak_mib"], at))
        made.append(Figure(SUPERNEURONS, LIVE + what, "", extra, again))
    return made


def _deepest() -> list[Figure]:
    network = resnet(BLOCKS["resnet2500"])
    ours = needed(network, "cost_aware", 1) / GIB
    what = "ResNet-2500 (blocks 6, 32, 788, 6), batch 1, cost-aware: trained within"
    reason = "fits; 12 bytes a parameter counted, workspace and allocator not"
    at = name_of(SUPERNEURONS, network.name, 1, "12 GiB")
    return [Figure(SUPERNEURONS, what, "GiB", 12, ours, FOUND, reason=reason, at=at)]


def _vdnn() -> list[Figure]:
    alex, over = account(alexnet_one_tower(), 128), account(overfeat(), 128)
    goog = account(googlenet(), 128)
    vggs = {batch: account(vgg(), batch) for batch in (64, 128, 256)}
    big = vggs[256]
    every = [alex, over, goog, *vggs.values()]
    saved = [100 * one.feature_saving for one in every]
    which = "six chosen here: AlexNet, OverFeat, GoogLeNet, VGG-16 (64, 128, 256)"
    return [
        _saving("AlexNet (128)", 89, alex, "AlexNet-OWT"),
        _saving("OverFeat (128)", 91, over, "OverFeat"),
        _saving("GoogLeNet (128)", 95, goog, "GoogLeNet"),
        _found("least average saving of six networks", "%", 73, min(saved), which),
        _found("greatest average saving of six networks", "%", 98, max(saved), which),
        _found("VGG-16 (256), baseline", "GB", 28, big.baseline / 1e9, UNEXPLAINED),
        _found(
            "VGG-16 (256), vDNN: trained within", "GiB", 12, big.all.most / GIB,
            "fits, as the memory-optimal algorithms need no workspace",
            at=name_of(VDNN, "VGG-16", 256, "12 GiB"),
        ),
        Figure(
            VDNN, "VGG-16 (256), vDNN_all: offloaded a step", "GB", 16,
            big.all.offloaded / 1e9, digit=1,
        ),
        _features("AlexNet (128)", 81, alex),
        _features("VGG-16 (256)", 96, big),
    ]  # fmt: skip


def _found(
    what: str, unit: str, published: float, ours: float, reason: str, at: str = ""
) -> Figure:
    return Figure(VDNN, what, unit, published, ours, FOUND, reason=reason, at=at)


def _saving(name: str, percent: float, ours: Account, network: str) -> Figure:
    whole = f"of the whole network {ours.saving:.0%}"
    what = f"{name}: average saving, feature extraction"
    reason = f"{whole}; {READING}; {WORKSPACE}"
    at = name_of(VDNN, network, 128, "vdnn_all")
    return _found(what, "%", percent, 100 * ours.feature_saving, reason, at)


def _features(name: str, percent: float, ours: Account) -> Figure:
    what = f"{name}: feature extraction's share of the baseline"
    return _found(what, "%", percent, 100 * ours.feature_share, UNEXPLAINED)


_VGG = name_of(VDNN, "VGG-16", 256, "12 GiB")
_ROOFLINE = (
    "estimated from data sheets: the shares of peaks that kernels reach are assumed, "
    "and so are the algorithms that stand for cuDNN 4's"
)
_DEVICE = "the paper's device, link and precision were not verified"


def speeds(
    planner: Iterable[Mapping[str, Any]], out_of_core: Iterable[Mapping[str, Any]]
) -> list[Figure]:
    """All of them, by the papers' own techniques as the library has them.

    Args:
        planner: Of `planner.plan_all`.
        out_of_core: Of `out_of_core.windows_on`, one a device.
    """
    made = [
        _loss(row) for row in planner if row["name"] == _VGG and row["theirs"]["fits"]
    ]
    rows = list(out_of_core)
    made += [_times_in_core(row) for row in rows[:1]]
    return made + [_speed(row) for row in rows]


def _loss(row: Mapping[str, Any]) -> Figure:
    slowdown = row["theirs"]["slowdown"]
    return Figure(
        VDNN, "VGG-16 (256), vDNN_dyn in 12 GiB: speed lost against an oracle", "%", 18,
        100 * (1 - 1 / slowdown), FOUND, reason=_ROOFLINE, counted=EVERY_BYTE, at=_VGG,
    )  # fmt: skip


def _times_in_core(row: Mapping[str, Any]) -> Figure:
    return Figure(
        HAYAKAWA, f"ResNet-50, batch {BATCH}: times the largest in core", "", 7.5,
        row["times_in_core"], FOUND,
        reason=f"{row['in_core_batch']} images fit 16 GiB, in single precision; "
        f"{_DEVICE}",
        counted=EVERY_BYTE, at=row["name"],
    )  # fmt: skip


def _speed(row: Mapping[str, Any]) -> Figure:
    """By windows that know no times; 0 where that does not fit."""
    (theirs,) = (
        one for one in row["techniques"] if (one["policy"], one["asked"]) == THEIRS
    )
    return Figure(
        HAYAKAWA, f"ResNet-50, batch {BATCH}: of the speed in core, {row['title']}",
        "%", 55, 100 * theirs["speed"], FOUND,
        reason=f"{row['planned']['speed']:.0%} by our planner; estimated, at "
        f"{row['link_gb_per_s']:g} GB/s a direction; {_DEVICE}",
        counted=EVERY_BYTE, at=row["name"],
    )  # fmt: skip
