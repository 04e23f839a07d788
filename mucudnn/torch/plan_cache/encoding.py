"""Profiles and decisions as JSON, nodes and tensors by their places; and back.

Reading is strict: what is missing, unknown or out of bounds is a `ValueError`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mucudnn.codecs.values import (
    decode,
    list_of,
    members_of,
    plan_from_dict,
    plan_to_dict,
)
from mucudnn.ir.profile import Profile
from mucudnn.ir.residency import Residency
from mucudnn.ir.schedule import Compute, Schedule
from mucudnn.torch.plan_cache.structure import Places, digest_of

__all__ = [
    "Decision",
    "decision_from",
    "decision_to",
    "profile_from",
    "profile_to",
    "schedule_digest",
]

_PROFILE = (
    *("node_ms", "workspaces", "fronts"),
    *("out_bytes_per_ms", "in_bytes_per_ms", "copy_share", "copy_overhead_ms"),
)
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
        "workspaces": [[index[n], size] for n, size in profile.workspaces.items()],
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
    node_ms = [_amount("node_ms", float, t) for t in list_of("node_ms", times)]
    if len(node_ms) != len(places.nodes):
        raise ValueError(f"node_ms: {len(node_ms)} times for {len(places.nodes)} nodes")
    sizes = _by_place("workspaces", workspaces, places.nodes)
    plans = _by_place("fronts", fronts, places.nodes)
    return Profile(
        node_ms=dict(zip(places.nodes, node_ms, strict=True)),
        workspaces={n: _amount("workspaces", int, size) for n, size in sizes.items()},
        fronts={
            name: tuple(plan_from_dict(plan) for plan in list_of("fronts", front))
            for name, front in plans.items()
        },
        out_bytes_per_ms=_amount("out_bytes_per_ms", float, out),
        in_bytes_per_ms=_amount("in_bytes_per_ms", float, back),
        copy_share=_amount("copy_share", float, share),
        copy_overhead_ms=_amount("copy_overhead_ms", float, overhead),
    )


def decision_to(decision: Decision, places: Places) -> dict[str, Any]:
    """A decision as JSON; special names of residencies stay names."""
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
        name = (
            place if isinstance(place, str) else _at("residency", place, places.tensors)
        )
        residency[name] = decode("residency", Residency, value)
    return Decision(
        residency,
        decode("scheduler", str, scheduler),
        decode("schedule", str, schedule),
    )


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
    pairs = (_pair(where, row) for row in list_of(where, rows))
    return {_at(where, place, names): value for place, value in pairs}


def _pair(where: str, row: object) -> tuple[Any, Any]:
    found = list_of(where, row)
    if len(found) != 2:
        raise ValueError(f"{where}: {len(found)} values where a pair is wanted")
    return found[0], found[1]


def _at(where: str, place: Any, names: Sequence[str]) -> str:
    if type(place) is not int or not 0 <= place < len(names):
        raise ValueError(f"{where}: there is no place {place!r}")
    return names[place]


def _amount(where: str, kind: Any, value: object) -> Any:
    found = decode(where, kind, value)
    if found < 0:
        raise ValueError(f"{where}: {found} is negative")
    return found
