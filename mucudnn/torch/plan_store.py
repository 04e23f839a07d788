"""Measurements and plans of PyTorch steps, remembered across processes.

The measurements of a graph are one entry of the store; they serve every budget. The
decision for one request is another entry: the residency of each tensor and the
scheduler. The schedule is computed again from the decision, and used only if it equals,
instruction by instruction, the schedule that was computed first. So a plan keeps its
budget even if an entry was damaged.

Nodes and tensors are identified by their position in the graph, not by name.
"""

import dataclasses
import enum
import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from mucudnn.arguments import check_path
from mucudnn.backends.cpu.device import CpuDevice
from mucudnn.codecs import (
    LONGEST_MS,
    decode,
    decode_fields,
    encode_fields,
    list_of,
    members_of,
)
from mucudnn.errors import PlanningError
from mucudnn.ir.conv import ConvPlan
from mucudnn.ir.profile import Profile
from mucudnn.ir.schedule import Compute, Residency, Schedule
from mucudnn.ir.tensor import Role
from mucudnn.passes.planning.plan_step import plan_step
from mucudnn.passes.planning.request import StepRequest, plan_residency
from mucudnn.passes.residency import EVERYTHING, PERSISTENTS
from mucudnn.passes.scheduling import SCHEDULERS
from mucudnn.passes.scheduling.step_plan import StepPlan
from mucudnn.plugins import installed_version
from mucudnn.runtime.environment import USERS, Users
from mucudnn.runtime.store.measurements import BenchmarkCache, Entries, default_path
from mucudnn.torch.internals import float32_precisions
from mucudnn.torch.lowering.lowered import Lowered

logger = logging.getLogger(__name__)

PlanCacheChoice = str | os.PathLike[str] | Users | None

_FILE = "plans.sqlite"
_PROFILE, _PLAN = "profile", "plan"


def refuse_fronts(profile: Profile) -> None:
    """Raise `ValueError` for a profile with divisions of convolutions."""
    if profile.fronts:
        raise ValueError("fronts: convolutions are PyTorch's here")


def open_plans(choice: PlanCacheChoice) -> "PlanStore":
    """Open the store that a `cache` argument selects: a folder, or the user's cache.

    Raises:
        TypeError: `choice` is neither a path nor None.
        ValueError: The path is empty, or has a null character.
    """
    if choice is None:
        return PlanStore()
    if choice is USERS:
        return PlanStore(BenchmarkCache(default_path()).entries)
    folder = check_path("cache", choice).expanduser()
    return PlanStore(BenchmarkCache(folder / _FILE).entries)


class PlanStore:
    """Measures and plans what is not in a store, if there is one."""

    def __init__(self, entries: Entries | None = None) -> None:
        self._entries = entries

    def profile(
        self,
        lowered: Lowered,
        measured: Callable[[Lowered], Profile],
        settings: str = "",
        check: Callable[[Profile], None] = refuse_fronts,
    ) -> Profile:
        """Return the costs of a graph on this machine and in this configuration.

        `settings` are everything else that the measurements depend on. `check` raises
        `ValueError` for a remembered profile with divisions of convolutions that the
        graph or its backend does not have.
        """
        places = Places(lowered)
        key = self._key(f"times, 3 {settings}", lowered, places)
        if self._entries is None or key is None:
            return measured(lowered)
        data = self._entries.get(_PROFILE, key)
        if data is not None:
            try:
                profile = profile_from(data, places)
                check(profile)
            except ValueError as e:
                self._entries.refuse(_PROFILE, key, str(e))
            else:
                return profile
        profile = measured(lowered)
        self._entries.put(_PROFILE, key, profile_to(profile, places))
        return profile

    def plan(self, lowered: Lowered, request: StepRequest) -> StepPlan:
        """Return the plan of a request for a graph.

        Raises:
            PlanningError: No plan fits the budget.
        """
        places = Places(lowered)
        key = self._key(_PLAN, lowered, places, request)
        if self._entries is None or key is None:
            return plan_step(request)
        data = self._entries.get(_PLAN, key)
        if data is not None:
            try:
                return replay_decision(data, request, places)
            except (PlanningError, ValueError) as e:
                self._entries.refuse(_PLAN, key, str(e))
        plan = plan_step(request)
        try:
            data = decision_to(plan, places)
            # Keep only what replays to the same schedule, now and later.
            replay_decision(data, request, places)
        except (PlanningError, ValueError) as e:
            logger.debug("a plan is not remembered: %s", e)
        else:
            self._entries.put(_PLAN, key, data)
        return plan

    def _key(
        self,
        kind: str,
        lowered: Lowered,
        places: "Places",
        request: StepRequest | None = None,
    ) -> str | None:
        """Return a hash of all that a measurement, or a plan, depends on.

        Returns None if a part of it has no name that identifies it.
        """
        if self._entries is None:
            return None
        try:
            structure = structure_of(lowered, places)
        except Unnameable as e:
            logger.info("a graph is not remembered: %s", e)
            return None
        parts = [kind, installed_version(), structure]
        # Measurements depend on the machine, plans on it by their profile only.
        if request is None:
            return digest_of([*parts, surroundings_of(lowered)])
        # Functions and given plans have no name that identifies them.
        if not isinstance(request.policy, str) or request.plans is not None:
            return None
        hosted = request.hosted
        lent = request.graph.with_role(Role.BORROWED)
        options = [
            [places.tensor(spec.name) for spec in lent],
            repr(float(request.budget)),
            request.policy,
            str(request.scheduler),
            request.convolutions,
            None if hosted is None else sorted(str(places.tensor(n)) for n in hosted),
        ]
        return digest_of([*parts, profile_to(request.profile, places), options])


# Profiles and decisions as JSON. Decoders raise a `ValueError` for members that are
# missing, unknown or out of bounds.

_PROFILE_MEMBERS = (
    *("node_ms", "network_ms", "workspaces", "fronts"),
    *("out_bytes_per_ms", "in_bytes_per_ms", "copy_share", "copy_overhead_ms"),
)
_DECISION_MEMBERS = ("residency", "scheduler", "schedule")

# Bounds that keep sums finite; rates of copies are in bytes per millisecond.
_SLOWEST, _FASTEST = 1e-3, 1e15
_LARGEST_SHARE = 1e6
_MOST_BYTES = 1 << 42


def profile_to(profile: Profile, places: "Places") -> dict[str, Any]:
    """Encode a profile as JSON values."""
    index = {name: i for i, name in enumerate(places.nodes)}
    return {
        "node_ms": [profile.node_ms[name] for name in places.nodes],
        "network_ms": [profile.network_ms.get(name) for name in places.nodes],
        "workspaces": [profile.workspaces.get(name) for name in places.nodes],
        "fronts": [
            [index[name], [encode_fields(plan) for plan in front]]
            for name, front in profile.fronts.items()
        ],
        "out_bytes_per_ms": profile.out_bytes_per_ms,
        "in_bytes_per_ms": profile.in_bytes_per_ms,
        "copy_share": profile.copy_share,
        "copy_overhead_ms": profile.copy_overhead_ms,
    }


def profile_from(data: object, places: "Places") -> Profile:
    """Decode `profile_to`.

    Raises:
        ValueError: The data is no profile, or of another graph; names the member.
    """
    found = members_of("profile", data, _PROFILE_MEMBERS)
    times, exchanges, workspaces, fronts, out, back, share, overhead = found

    def of_nodes(
        where: str, values: object, read: Callable[[str, object], Any]
    ) -> dict[str, Any]:
        """Decode a value for each node; None stands for no value."""
        rows = list_of(where, values)
        if len(rows) != len(places.nodes):
            raise ValueError(f"{where}: {len(rows)} for {len(places.nodes)} nodes")
        pairs = zip(places.nodes, rows, strict=True)
        return {name: read(where, row) for name, row in pairs if row is not None}

    node_ms = of_nodes("node_ms", times, _time)
    if len(node_ms) < len(places.nodes):
        raise ValueError("node_ms: a node has no time")
    pairs = [_pair("fronts", row) for row in list_of("fronts", fronts)]
    plans = {_at("fronts", i, places.nodes): front for i, front in pairs}
    if len(plans) < len(pairs):
        raise ValueError("fronts: a place is named twice")
    return Profile(
        node_ms=node_ms,
        network_ms=of_nodes("network_ms", exchanges, _time),
        workspaces=of_nodes("workspaces", workspaces, _bytes),
        fronts={name: _front(front) for name, front in plans.items()},
        out_bytes_per_ms=_amount("out_bytes_per_ms", out, _FASTEST, _SLOWEST),
        in_bytes_per_ms=_amount("in_bytes_per_ms", back, _FASTEST, _SLOWEST),
        copy_share=_amount("copy_share", share, _LARGEST_SHARE),
        copy_overhead_ms=_time("copy_overhead_ms", overhead),
    )


def _front(rows: object) -> tuple[ConvPlan, ...]:
    """Decode plans of which each takes more workspace than the last, and less time."""
    front = tuple(
        decode_fields("plan", ConvPlan, plan) for plan in list_of("fronts", rows)
    )
    for plan in front:
        _time("fronts", plan.time_ms)
        _bytes("fronts", plan.workspace)
    for less, more in pairwise(front):
        if less.workspace >= more.workspace or less.time_ms <= more.time_ms:
            raise ValueError("fronts: a plan is no better than another")
    if not front:
        raise ValueError("fronts: a convolution has no plan")
    return front


def decision_to(plan: StepPlan, places: "Places") -> dict[str, Any]:
    """Encode what a plan's schedule is computed from as JSON values."""
    return {
        "residency": [
            [places.tensor(name), residency.value]
            for name, residency in plan.residency.items()
        ],
        "scheduler": plan.scheduler,
        "schedule": schedule_digest(plan.schedule, places),
    }


def replay_decision(data: object, request: StepRequest, places: "Places") -> StepPlan:
    """Compute the plan that `decision_to` encoded.

    Raises:
        ValueError: The data is no decision, or of another graph, or another schedule
            was stored with it.
        PlanningError: The schedule does not fit.
    """
    rows, scheduler, schedule = members_of("decision", data, _DECISION_MEMBERS)
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
    digest = decode("schedule", str, schedule)
    plan = plan_residency(request.scheduled(named), residency)
    if schedule_digest(plan.schedule, places) != digest:
        raise ValueError("another schedule follows from it than was decided")
    return plan


def schedule_digest(schedule: Schedule, places: "Places") -> str:
    """Return a hash of a schedule that does not depend on names."""
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


_time = partial(_amount, most=LONGEST_MS)


def _bytes(where: str, value: object) -> int:
    _amount(where, found := decode(where, int, value), _MOST_BYTES)
    return int(found)


# Keys of graphs. Layouts, attributes, traits and called functions are part of a key,
# names are not. A function is identified by its qualified name; a graph with a function
# that its name does not identify, such as a closure, is not remembered.

_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)

_NAMESPACES = frozenset({"aten", "mucudnn", "prim", "prims"})
"""Namespaces of operations that are determined by the versions of PyTorch and ours."""


class Unnameable(ValueError):  # noqa: N818  (it is a finding, not a mistake)
    """A graph has a function or an argument that its name does not identify."""


class Places:
    """Positions of the tensors and nodes of a graph.

    Attributes:
        tensors: Names of all tensors.
        nodes: Names of all nodes.
        tensor: Returns the position of a tensor; of a copy, with its suffix. It returns
            the name itself if there is no such tensor.
        node: Returns the position of a node in the same way.
    """

    def __init__(self, lowered: Lowered) -> None:
        self.tensors = tuple(lowered.graph.tensors)
        self.nodes = tuple(node.name for node in lowered.graph.nodes)
        self.tensor = partial(_place, {n: i for i, n in enumerate(self.tensors)})
        self.node = partial(_place, {n: i for i, n in enumerate(self.nodes)})


def _place(places: Mapping[str, int], name: str) -> int | str:
    first, mark, rest = name.partition("~")
    place = places.get(first)
    if place is None:
        return name
    return f"{place}~{rest}" if mark else place


def digest_of(value: Any) -> str:
    """Return a hash of a value that can be written as JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def structure_of(lowered: Lowered, places: Places) -> str:
    """Return a hash of everything in a graph but names.

    Raises:
        Unnameable: A function or an argument is not identified by its name.
    """
    graph = lowered.graph
    tensors = [
        [
            spec.nbytes,
            spec.role.value,
            None if spec.alias is None else places.tensor(spec.alias),
            described(lowered.layouts[name]),
        ]
        for name, spec in graph.tensors.items()
    ]
    nodes = [
        [
            node.op,
            [places.tensor(name) for name in node.inputs],
            [places.tensor(name) for name in node.outputs],
            [places.tensor(name) for name in node.mutates],
            node.phase.value,
            described(node.attrs),
            described(node.traits),
            described(lowered.calls[node.name]),
        ]
        for node in graph.nodes
    ]
    ends = [
        [None if name is None else places.tensor(name) for name in lowered.inputs],
        [places.tensor(r) if isinstance(r, str) else None for r in lowered.results],
        [places.tensor(name) for name in lowered.constants],
        [places.tensor(name) for name in graph.outputs],
    ]
    return digest_of([tensors, nodes, ends])


def described(value: Any) -> Any:
    """Return JSON values that differ for different values.

    Raises:
        Unnameable: A function is not identified by its name.
    """
    match value:
        # First, as members of some enumerations are integers or strings, too.
        case enum.Enum():
            return [type(value).__name__, value.name]
        case bool() | int() | str() | None:
            return value
        # JSON has no infinities, and readers may round numbers.
        case float() | complex():
            return ["number", repr(value)]
        case list() | tuple():
            return [type(value).__name__, *map(described, value)]
        case dict() | MappingProxyType():
            return {str(key): described(item) for key, item in value.items()}
        case _ if isinstance(value, _TORCH):
            return ["torch", str(value)]
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = (getattr(value, f.name) for f in dataclasses.fields(value))
            return [type(value).__name__, *map(described, fields)]
    if isinstance(value, torch._ops.OpOverload):
        if value.namespace not in _NAMESPACES:
            raise Unnameable(f"{value} is no operation of PyTorch's own")
        return ["function", str(value)]
    name = getattr(value, "__qualname__", None)
    # Names of lambdas and of nested functions have a "<", and are not unique.
    if not callable(value) or name is None or "<" in name:
        raise Unnameable(f"{value!r} is not told by a name")
    owner = getattr(value, "__module__", None) or type(value).__name__
    return ["function", f"{owner}.{name}"]


def surroundings_of(lowered: Lowered) -> Mapping[str, str]:
    """Return the devices of a graph, and settings that change what its nodes cost."""
    found = {
        "torch": torch.__version__,
        "host": CpuDevice().fingerprint,
        "threads": str(torch.get_num_threads()),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "onednn": str(torch._C._get_mkldnn_enabled()),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "precisions": float32_precisions(),
    }
    cudnn = torch.backends.cudnn
    devices = {layout.device for layout in lowered.layouts.values()}
    for device in sorted(devices, key=str):
        if device.type == "cuda":
            values = (
                torch.cuda.get_device_name(device),
                torch.cuda.get_device_capability(device),
                torch.version.cuda,
                _driver(),
                cudnn.version(),
                (cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
                # With `benchmark` a process searches algorithms of its own.
                os.getpid() if cudnn.benchmark else 0,
            )
            found[str(device)] = "/".join(map(str, values))
    return found


def _driver() -> str:
    """Return NVIDIA's line about its driver; PyTorch has no way to ask for it."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text("utf-8", "replace")
    except OSError:
        return ""
    return text.partition("\n")[0]
