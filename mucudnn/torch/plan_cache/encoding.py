"""Profiles and decisions as JSON, nodes and tensors by their places; and back.

Reading is strict: what is missing, unknown or out of bounds is a `ValueError`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from mucudnn.codecs.rows import LONGEST_MS
from mucudnn.codecs.values import (
    decode,
    list_of,
    members_of,
    plan_from_dict,
    plan_to_dict,
)
from mucudnn.ir.conv import ConvPlan
from mucudnn.ir.profile import Profile
from mucudnn.ir.residency import Residency
from mucudnn.ir.schedule import Compute, Schedule
from mucudnn.passes.residency import EVERYTHING, PERSISTENTS
from mucudnn.passes.scheduling import SCHEDULERS
from mucudnn.torch.plan_cache.structure import Places, digest_of

_PROFILE = (
    *("node_ms", "workspaces", "fronts"),
    *("out_bytes_per_ms", "in_bytes_per_ms", "copy_share", "copy_overhead_ms"),
)
_SLOWEST, _FASTEST = 1e-3, 1e15
"""Bytes in a millisecond that a copy may move; all bounds keep sums finite."""

_LARGEST_SHARE = 1e6
_MOST_BYTES = 1 << 42
_DECISION = ("residency", "scheduler", "schedule")


@dataclass(frozen=True)
class Decision:
    """What a schedule follows from.

    Attributes:
        residency: Of tensors.
        scheduler: Who times the copies.
        schedule: A hash of what comes of it.
    """

    residency: Mapping[str, Residency]
    scheduler: str
    schedule: str


def profile_to(profile: Profile, places: Places) -> dict[str, Any]:
    """A profile as JSON."""
    index = {name: i for i, name in enumerate(places.nodes)}
    return {
        "node_ms": [profile.node_ms[name] for name in places.nodes],
        "workspaces": [profile.workspaces.get(name) for name in places.nodes],
        "fronts": [
            [index[name], [plan_to_dict(plan) for plan in front]]
            for name, front in profile.fronts.items()
        ],
        "out_bytes_per_ms": profile.out_bytes_per_ms,
        "in_bytes_per_ms": profile.in_bytes_per_ms,
        "copy_share": profile.copy_share,
        "copy_overhead_ms": profile.copy_overhead_ms,
    }


def profile_from(data: object, places: Places) -> Profile:
    """The inverse of `profile_to`.

    Raises:
        ValueError: It is none, or of another graph; says what is wrong.
    """
    found = members_of("profile", data, _PROFILE)
    times, workspaces, fronts, out, back, share, overhead = found
    node_ms = [_amount("node_ms", t, LONGEST_MS) for t in list_of("node_ms", times)]
    if len(node_ms) != len(places.nodes):
        raise ValueError(f"node_ms: {len(node_ms)} times for {len(places.nodes)} nodes")
    sizes = list_of("workspaces", workspaces)
    if len(sizes) != len(places.nodes):
        raise ValueError(f"workspaces: {len(sizes)} for {len(places.nodes)} nodes")
    plans = _by_place("fronts", fronts, places.nodes)
    return Profile(
        node_ms=dict(zip(places.nodes, node_ms, strict=True)),
        workspaces={
            name: _bytes("workspaces", size)
            for name, size in zip(places.nodes, sizes, strict=True)
            if size is not None
        },
        fronts={name: _front(front) for name, front in plans.items()},
        out_bytes_per_ms=_amount("out_bytes_per_ms", out, _FASTEST, _SLOWEST),
        in_bytes_per_ms=_amount("in_bytes_per_ms", back, _FASTEST, _SLOWEST),
        copy_share=_amount("copy_share", share, _LARGEST_SHARE),
        copy_overhead_ms=_amount("copy_overhead_ms", overhead, LONGEST_MS),
    )


def _front(rows: object) -> tuple[ConvPlan, ...]:
    """Plans of which each takes more workspace than the one before, and less time."""
    front = tuple(plan_from_dict(plan) for plan in list_of("fronts", rows))
    for plan in front:
        _amount("fronts", plan.time_ms, LONGEST_MS)
        _bytes("fronts", plan.workspace)
    for less, more in pairwise(front):
        if less.workspace >= more.workspace or less.time_ms <= more.time_ms:
            raise ValueError("fronts: a plan is no better than another")
    if not front:
        raise ValueError("fronts: a convolution has no plan")
    return front


def refuse_fronts(profile: Profile) -> None:
    """Raise `ValueError` where convolutions may run in ways nobody looked for."""
    if profile.fronts:
        raise ValueError("fronts: convolutions are PyTorch's here")


def decision_to(decision: Decision, places: Places) -> dict[str, Any]:
    """A decision as JSON."""
    return {
        "residency": [
            [places.tensor(name), residency.value]
            for name, residency in decision.residency.items()
        ],
        "scheduler": decision.scheduler,
        "schedule": decision.schedule,
    }


def decision_from(data: object, places: Places) -> Decision:
    """The inverse of `decision_to`.

    Raises:
        ValueError: It is none, or of another graph; says what is wrong.
    """
    rows, scheduler, schedule = members_of("decision", data, _DECISION)
    residency = {}
    for row in list_of("residency", rows):
        place, value = _pair("residency", row)
        name = str(place)
        if name not in (EVERYTHING, PERSISTENTS):
            first, mark, rest = name.partition("~")
            number = int(first) if mark and first.isdecimal() else place
            name = _at("residency", number, places.tensors) + mark + rest
        residency[name] = decode("residency", Residency, value)
    named = decode("scheduler", str, scheduler)
    SCHEDULERS.resolve(named)
    return Decision(residency, named, decode("schedule", str, schedule))


def schedule_digest(schedule: Schedule, places: Places) -> str:
    """A hash of a schedule, without names."""
    instructions = [
        [
            type(step).__name__,
            places.node(step.node)
            if isinstance(step, Compute)
            else places.tensor(step.tensor),
        ]
        for step in schedule.instructions
    ]
    workspaces = {str(places.node(n)): size for n, size in schedule.workspaces.items()}
    hosted = [places.tensor(name) for name in schedule.hosted]
    across = [places.tensor(name) for name in schedule.live_across]
    return digest_of([instructions, workspaces, schedule.peak_bytes, hosted, across])


def _by_place(where: str, rows: object, names: Sequence[str]) -> dict[str, Any]:
    pairs = [_pair(where, row) for row in list_of(where, rows)]
    found = {_at(where, place, names): value for place, value in pairs}
    if len(found) < len(pairs):
        raise ValueError(f"{where}: a place is named twice")
    return found


def _pair(where: str, row: object) -> tuple[Any, Any]:
    found = list_of(where, row)
    if len(found) != 2:
        raise ValueError(f"{where}: {len(found)} values where a pair is wanted")
    return found[0], found[1]


def _at(where: str, place: Any, names: Sequence[str]) -> str:
    if type(place) is not int or not 0 <= place < len(names):
        raise ValueError(f"{where}: there is no place {place!r}")
    return names[place]


def _amount(where: str, value: object, most: float, least: float = 0.0) -> float:
    found: float = decode(where, float, value)
    if not least <= found <= most:
        raise ValueError(f"{where}: {found} is not from {least:g} to {most:g}")
    return found


def _bytes(where: str, value: object) -> int:
    _amount(where, found := decode(where, int, value), _MOST_BYTES)
    return int(found)
