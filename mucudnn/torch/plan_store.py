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
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from mucudnn.arguments import check_path
from mucudnn.backends.cpu.device import CpuDevice
from mucudnn.codecs import (
    LONGEST_MS,
    decode,
    decode_fields,
    encode_fields,
    members_of,
)
from mucudnn.errors import PlanningError
from mucudnn.ir.profile import Profile
from mucudnn.ir.schedule import Residency, Schedule
from mucudnn.ir.tensor import Role
from mucudnn.passes.planning.plan_step import plan_step
from mucudnn.passes.planning.request import StepRequest, plan_residency
from mucudnn.passes.residency import EVERYTHING, PERSISTENTS
from mucudnn.passes.scheduling import SCHEDULERS
from mucudnn.passes.scheduling.step_plan import StepPlan
from mucudnn.plugins import installed_version
from mucudnn.runtime.environment import USERS, Users
from mucudnn.runtime.store.measurements import BenchmarkCache, Entries, default_path
from mucudnn.torch.costs.measure import call_key
from mucudnn.torch.internals import float32_precisions
from mucudnn.torch.lowering.lowered import Lowered

logger = logging.getLogger(__name__)

T = TypeVar("T")

PlanCacheChoice = str | os.PathLike[str] | Users | None

_FILE = "plans.sqlite"
_PROFILE, _PLAN = "profile", "plan"


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
        self, lowered: Lowered, measured: Callable[[Lowered], Profile], settings: str
    ) -> Profile:
        """Return the costs of a graph on this machine and in this configuration.

        `settings` are everything else that the measurements depend on.
        """
        profile: Profile = self._remembered(
            (_PROFILE, f"times, 4 {settings}", lowered, None),
            lambda: measured(lowered),
            encode_fields,
            partial(profile_from, {node.name for node in lowered.graph.nodes}),
        )
        return profile

    def plan(self, lowered: Lowered, request: StepRequest) -> StepPlan:
        """Return the plan of a request for a graph.

        Raises:
            PlanningError: No plan fits the budget.
        """
        plan: StepPlan = self._remembered(
            (_PLAN, _PLAN, lowered, request),
            lambda: plan_step(request),
            partial(decision_to, words_of(lowered)),
            partial(replay_decision, words_of(lowered), request),
        )
        return plan

    def _remembered(
        self,
        of: tuple[str, str, Lowered, StepRequest | None],
        make: Callable[[], T],
        encode: Callable[[T], dict[str, Any]],
        decode: Callable[[object], T],
    ) -> T:
        """Return what is stored of a graph and a request, or else make and store it."""
        key = None if self._entries is None else _key(*of[1:])
        if self._entries is None or key is None:
            return make()
        words = words_of(of[2])
        names = {word: name for name, word in words.items()}
        data = self._entries.get(of[0], key)
        if data is not None:
            try:
                return decode(renamed(data, names))
            except (PlanningError, ValueError) as e:
                self._entries.refuse(of[0], key, str(e))
        made = make()
        try:
            data = encode(made)
            decode(data)  # keep only what can be read, now and later
        except (PlanningError, ValueError) as e:
            logger.debug("a %s is not remembered: %s", of[0], e)
        else:
            self._entries.put(of[0], key, renamed(data, words))
        return made


def _key(kind: str, lowered: Lowered, request: StepRequest | None) -> str | None:
    """Return a hash of all that a measurement, or a plan, depends on.

    Returns None if a part of it has no name that identifies it.
    """
    try:
        parts = [kind, installed_version(), structure_of(lowered)]
    except Unnameable as e:
        logger.info("a graph is not remembered: %s", e)
        return None
    # Measurements depend on the machine, plans on it by their profile only.
    if request is None:
        return digest_of([*parts, surroundings_of(lowered)])
    # Functions and given plans have no name that identifies them.
    if not isinstance(request.policy, str) or request.plans is not None:
        return None
    words = words_of(lowered)
    options = [
        [spec.name for spec in request.graph.with_role(Role.BORROWED)],
        repr(float(request.budget)),
        request.policy,
        str(request.scheduler),
        request.convolutions,
        None if request.hosted is None else sorted(request.hosted),
    ]
    given = [encode_fields(request.profile), options]
    return digest_of([*parts, renamed(given, words)])


# Profiles and decisions as JSON. The store has found that they are as they were
# written; decoders raise a `ValueError` for those of another graph.

_BOUNDS: Mapping[str, tuple[float, float]] = {
    "node_ms": (0.0, LONGEST_MS),
    "network_ms": (0.0, LONGEST_MS),
    "workspaces": (0, 1 << 42),
    "out_bytes_per_ms": (1e-3, 1e15),
    "in_bytes_per_ms": (1e-3, 1e15),
    "copy_share": (0.0, 1e6),
    "copy_overhead_ms": (0.0, LONGEST_MS),
}
"""Bounds that keep sums finite."""


def profile_from(nodes: Collection[str], data: object) -> Profile:
    """Decode the profile of a graph with these nodes.

    Raises:
        ValueError: The data is no profile, or of another graph; names the member.
    """
    profile = decode_fields("profile", Profile, data)
    if profile.node_ms.keys() != set(nodes):
        raise ValueError("node_ms: it has other nodes than the graph")
    for member, (least, most) in _BOUNDS.items():
        value = getattr(profile, member)
        for number in value.values() if isinstance(value, Mapping) else [value]:
            if not least <= number <= most:
                raise ValueError(f"{member}: {number} is not within its bounds")
    return profile


def decision_to(words: Mapping[str, str], plan: StepPlan) -> dict[str, Any]:
    """Encode what a plan's schedule is computed from as JSON values."""
    return {
        "residency": [[name, where.value] for name, where in plan.residency.items()],
        "scheduler": plan.scheduler,
        "schedule": schedule_digest(plan.schedule, words),
    }


def replay_decision(
    words: Mapping[str, str], request: StepRequest, data: object
) -> StepPlan:
    """Compute the plan that `decision_to` encoded.

    Raises:
        ValueError: The data is no decision, or of another graph, or another schedule
            was stored with it.
        PlanningError: The schedule does not fit.
    """
    members = "residency", "scheduler", "schedule"
    rows, scheduler, digest = members_of("decision", data, members)
    pairs = decode("residency", tuple[tuple[str, ...], ...], rows)
    residency = {name: decode("residency", Residency, to) for name, to in pairs}
    known = {*request.graph.tensors, EVERYTHING, PERSISTENTS}
    if not known.issuperset(name.partition("~")[0] for name in residency):
        raise ValueError("residency: it has other tensors than the graph")
    SCHEDULERS.resolve(decode("scheduler", str, scheduler))
    plan = plan_residency(request.scheduled(scheduler), residency)
    if schedule_digest(plan.schedule, words) != digest:
        raise ValueError("another schedule follows from it than was decided")
    return plan


def schedule_digest(schedule: Schedule, words: Mapping[str, str]) -> str:
    """Return a hash of a schedule that does not depend on names."""
    parts = schedule.instructions, schedule.workspaces, schedule.peak_bytes
    ends = schedule.hosted, schedule.live_across
    return digest_of(renamed(described([*parts, *ends]), words))


# Keys of graphs. A function is identified by its qualified name; a graph with a
# function that its name does not identify, such as a closure, is not remembered.

_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)

_NAMESPACES = frozenset({"aten", "mucudnn", "prim", "prims"})
"""Namespaces of operations that are determined by the versions of PyTorch and ours."""


class Unnameable(ValueError):  # noqa: N818  (it is a finding, not a mistake)
    """A graph has a function or an argument that its name does not identify."""


def words_of(lowered: Lowered) -> Mapping[str, str]:
    """Return words for the names of tensors and nodes, by their positions."""
    graph = lowered.graph
    names = dict.fromkeys([*graph.tensors, *(node.name for node in graph.nodes)])
    return {name: f"%{i}" for i, name in enumerate(names)}


def renamed(data: Any, words: Mapping[str, str]) -> Any:
    """Return JSON values with words in the place of names, also of copies."""
    match data:
        case str():
            first, mark, rest = data.partition("~")
            return words.get(first, first) + mark + rest
        case list() | tuple():
            return [renamed(value, words) for value in data]
        case dict():
            return {renamed(k, words): renamed(v, words) for k, v in data.items()}
    return data


def digest_of(value: Any) -> str:
    """Return a hash of a value that can be written as JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def graph_key(lowered: Lowered) -> Hashable:
    """Return what is equal for graphs of this process that one plan serves.

    Equal constants are the same tensors, and equal functions the same objects.
    """
    graph, layouts = lowered.graph, lowered.layouts
    places = {name: i for i, name in enumerate(graph.tensors)}

    def placed(names: Iterable[str | None]) -> Hashable:
        return tuple([None if name is None else places[name] for name in names])

    return (
        placed(spec.alias for spec in graph.tensors.values()),
        tuple([(t.nbytes, t.role, layouts[n]) for n, t in graph.tensors.items()]),
        tuple([(n.op, n.phase, call_key(lowered, n)) for n in graph.nodes]),
        tuple([placed((*node.tensors, None, *node.mutates)) for node in graph.nodes]),
        placed(lowered.inputs),
        tuple([places[r] if isinstance(r, str) else repr(r) for r in lowered.results]),
        tuple((places[n], id(value)) for n, value in lowered.constants.items()),
        tuple(surroundings_of(lowered).items()),
    )


def structure_of(lowered: Lowered) -> str:
    """Return a hash of everything in a graph but names and the values of constants.

    Raises:
        Unnameable: A function or an argument is not identified by its name.
    """
    graph = lowered.graph
    parts = (
        [[spec, lowered.layouts[name]] for name, spec in graph.tensors.items()],
        [[node, lowered.calls[node.name]] for node in graph.nodes],
        [r if isinstance(r, str) else None for r in lowered.results],
        (lowered.inputs, list(lowered.constants), graph.outputs),
    )
    return digest_of(renamed(described(parts), words_of(lowered)))


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
