"""Measurements and plans of PyTorch steps, remembered from process to process.

Measurements of a graph are one entry: they serve every budget. The decision for one
request is another: residencies, and the scheduler of the copies. A schedule follows
from a decision in no time, and is used only if it is, instruction by instruction, the
one that was planned. So a wrong entry never breaks a plan's promise.
"""

import contextlib
import dataclasses
import enum
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import platformdirs
import torch

from mucudnn.arguments import a_path
from mucudnn.backends.cpu.device import CpuDevice
from mucudnn.codecs import (
    LONGEST_MS,
    decode,
    list_of,
    load_json,
    members_of,
    plan_from_dict,
    plan_to_dict,
)
from mucudnn.errors import PlanningError
from mucudnn.files import read_whole, write_whole
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
from mucudnn.runtime.store.sqlite_file import warn
from mucudnn.torch.lowering.lowered import Lowered

_log = logging.getLogger(__name__)

PlanCacheChoice = str | os.PathLike[str] | Users | None
"""What a `cache` argument may be."""


def default_folder() -> Path:
    """Return the folder in the user's cache directory, as the platform defines it."""
    return platformdirs.user_cache_path("mucudnn") / "torch-plans-v1"


def open_plans(choice: PlanCacheChoice) -> "PlanStore":
    """Open what a `cache` argument names: a folder, the user's, or none.

    Raises:
        TypeError: It names none of these.
        ValueError: The path is empty, or has a null character.
    """
    if choice is None:
        return PlanStore()
    if choice is USERS:
        return PlanStore(Entries(default_folder()))
    return PlanStore(Entries(a_path("cache", choice).expanduser()))


def refuse_fronts(profile: Profile) -> None:
    """Raise `ValueError` for ways to run convolutions where there is no tuner."""
    if profile.fronts:
        raise ValueError("fronts: convolutions are PyTorch's here")


class PlanStore:
    """Remembered measurements and plans; what is missing is measured and planned.

    Args:
        entries: Where they are; None remembers nothing.
    """

    def __init__(self, entries: "Entries | None" = None) -> None:
        self._entries = entries

    def profile(
        self,
        lowered: Lowered,
        measured: Callable[[Lowered], Profile],
        settings: str = "",
        check: Callable[[Profile], None] = refuse_fronts,
    ) -> Profile:
        """Return a graph's costs on this machine, with PyTorch's present settings.

        Args:
            lowered: The graph.
            measured: Measures it if it is not remembered.
            settings: Other settings of the measurement.
            check: Raises `ValueError` for remembered ways to run convolutions that the
                graph or its backend does not have.
        """
        places = Places(lowered)
        key = self._key(f"times, 2 {settings}", lowered, places)
        if self._entries is None or key is None:
            return measured(lowered)
        data = self._entries.get(key)
        if data is not None:
            try:
                profile = profile_from(data, places)
                check(profile)
            except ValueError as e:
                self._entries.refused(key, str(e))
            else:
                return profile
        profile = measured(lowered)
        self._entries.put(key, profile_to(profile, places))
        return profile

    def plan(self, lowered: Lowered, request: StepRequest) -> StepPlan:
        """Return the plan of a request about a graph.

        Raises:
            PlanningError: It cannot fit.
        """
        places = Places(lowered)
        key = self._key("plan", lowered, places, request)
        if self._entries is None or key is None:
            return plan_step(request)
        data = self._entries.get(key)
        if data is not None:
            try:
                return replay_decision(data, request, places)
            except (PlanningError, ValueError) as e:
                self._entries.refused(key, str(e))
        plan = plan_step(request)
        try:
            data = decision_to(plan, places)
            replay_decision(data, request, places)
        except (PlanningError, ValueError) as e:
            _log.debug("a plan is not remembered: %s", e)
        else:
            self._entries.put(key, data)
        return plan

    def _key(
        self,
        kind: str,
        lowered: Lowered,
        places: "Places",
        request: StepRequest | None = None,
    ) -> str | None:
        """Return a hash of all that a measurement, or a plan, depends on."""
        if self._entries is None:
            return None
        try:
            structure = structure_of(lowered, places)
        except Unnameable as e:
            _log.info("a graph is not remembered: %s", e)
            return None
        parts = [kind, installed_version(), structure]
        if request is None:
            return digest_of([*parts, surroundings_of(lowered)])
        if not isinstance(request.policy, str) or request.plans is not None:
            return None
        hosted = request.hosted
        lent = request.graph.with_role(Role.BORROWED)
        asked = [
            [places.tensor(spec.name) for spec in lent],
            repr(float(request.budget)),
            request.policy,
            str(request.scheduler),
            request.convolutions,
            None if hosted is None else sorted(str(places.tensor(n)) for n in hosted),
        ]
        return digest_of([*parts, profile_to(request.profile, places), asked])


# A folder of remembered values, one file each.
#
# Remembering never stops work. An entry that cannot be read, or is not what was
# written, counts as none, with one warning, and is written anew; where nothing can be
# written, as on a full disk, nothing is remembered. Files appear whole, so processes
# may share the folder: of two that write the same entry the later wins, and both are
# right. The least recently used entries are deleted when the folder exceeds its size.


_SCHEMA = 2
_MEMBERS = ("schema", "key", "sha256", "value")
_LARGEST, _MOST = 16 << 20, 64 << 20
"""Bytes of an entry, and of all, at most."""
_NAME = re.compile(r"[0-9a-f]{64}\.json")


class Entries:
    """Values by key, in files.

    Args:
        folder: Made when it is first written to.
        most: Bytes of all files.
    """

    def __init__(self, folder: Path, most: int = _MOST) -> None:
        self._folder = folder
        self._most = most
        self._refused: set[str] = set()
        self._unwritable = False

    def get(self, key: str) -> Any | None:
        """Return the value of a key, which is a hash; None if there is none."""
        path = self._path(key)
        try:
            text = read_whole(path, most=_LARGEST).decode()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, UnicodeDecodeError) as e:
            why = e.strerror if isinstance(e, OSError) else None
            self.refused(key, why or str(e))
            return None
        try:
            value = _checked(key, text)
        except ValueError as e:
            self.refused(key, str(e))
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return value

    def put(self, key: str, value: Any) -> None:
        """Remember a value."""
        members = (_SCHEMA, key, digest_of(value), value)
        whole = dict(zip(_MEMBERS, members, strict=True))
        data = json.dumps(whole, separators=(",", ":")).encode()
        if len(data) > _LARGEST or self._unwritable:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_whole(self._path(key), data)
        except OSError as e:
            if key not in self._refused:  # else it was said
                self._unwritable = True
                warn(
                    f"plans are not remembered, {self._folder} cannot be written: "
                    f"{e.strerror or e}"
                )
            return
        self._shrink()

    def refused(self, key: str, why: str) -> None:
        """Warn that an entry is not used."""
        self._refused.add(key)
        warn(f"passing over {self._path(key)}, which will be made anew: {why}")

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.json"

    def _shrink(self) -> None:
        """Delete the least recently used entries; other processes may do so, too."""
        found: list[tuple[float, int, Path]] = []
        with contextlib.suppress(OSError), os.scandir(self._folder) as rows:
            for row in rows:
                if _NAME.fullmatch(row.name):
                    with contextlib.suppress(OSError):
                        status = row.stat(follow_symlinks=False)
                        entry = status.st_mtime, status.st_size, Path(row.path)
                        found.append(entry)
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self._most:
                return
            with contextlib.suppress(OSError):
                path.unlink()
            total -= size


def _checked(key: str, text: str) -> Any:
    schema, whose, sha256, value = members_of("entry", load_json(text), _MEMBERS)
    if decode("schema", int, schema) != _SCHEMA:
        raise ValueError(f"schema is {schema}, this version reads {_SCHEMA}")
    if whose != key:
        raise ValueError("it is the entry of something else")
    if digest_of(value) != sha256:
        raise ValueError("its contents are not what was written")
    return value


# Profiles and decisions as JSON, with the places of nodes and tensors for their names.
#
# Reading is strict: a missing, unknown or out-of-bounds value is a `ValueError`.


_PROFILE = (
    *("node_ms", "workspaces", "fronts"),
    *("out_bytes_per_ms", "in_bytes_per_ms", "copy_share", "copy_overhead_ms"),
)
_SLOWEST, _FASTEST = 1e-3, 1e15
"""Bytes that a copy may move in a millisecond; all bounds keep sums finite."""
_LARGEST_SHARE = 1e6
_MOST_BYTES = 1 << 42
_DECISION = ("residency", "scheduler", "schedule")


def profile_to(profile: Profile, places: "Places") -> dict[str, Any]:
    """Return a profile as JSON."""
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


def profile_from(data: object, places: "Places") -> Profile:
    """Read a profile of `profile_to`.

    Raises:
        ValueError: It is no profile, or of another graph; says what is wrong.
    """
    found = members_of("profile", data, _PROFILE)
    times, workspaces, fronts, out, back, share, overhead = found
    node_ms = [_amount("node_ms", t, LONGEST_MS) for t in list_of("node_ms", times)]
    if len(node_ms) != len(places.nodes):
        raise ValueError(f"node_ms: {len(node_ms)} times for {len(places.nodes)} nodes")
    sizes = list_of("workspaces", workspaces)
    if len(sizes) != len(places.nodes):
        raise ValueError(f"workspaces: {len(sizes)} for {len(places.nodes)} nodes")
    pairs = [_pair("fronts", row) for row in list_of("fronts", fronts)]
    plans = {_at("fronts", place, places.nodes): front for place, front in pairs}
    if len(plans) < len(pairs):
        raise ValueError("fronts: a place is named twice")
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
    """Read plans, each with more workspace and less time than the one before."""
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


def decision_to(plan: StepPlan, places: "Places") -> dict[str, Any]:
    """Return as JSON the decisions that a plan's schedule follows from."""
    return {
        "residency": [
            [places.tensor(name), residency.value]
            for name, residency in plan.residency.items()
        ],
        "scheduler": plan.scheduler,
        "schedule": schedule_digest(plan.schedule, places),
    }


def replay_decision(data: object, request: StepRequest, places: "Places") -> StepPlan:
    """Return the plan that follows from the decisions of `decision_to`.

    Raises:
        ValueError: They are none, of another graph, or lead to another schedule.
        PlanningError: It does not fit.
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
    digest = decode("schedule", str, schedule)
    plan = plan_residency(request.scheduled(named), residency)
    if schedule_digest(plan.schedule, places) != digest:
        raise ValueError("another schedule follows from it than was decided")
    return plan


def schedule_digest(schedule: Schedule, places: "Places") -> str:
    """Return a hash of a schedule, without names."""
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


def _bytes(where: str, value: object) -> int:
    _amount(where, found := decode(where, int, value), _MOST_BYTES)
    return int(found)


# The identity of a lowered graph: equal graphs share measurements and plans.
#
# Names do not count: tensors and nodes are known by their places. Layouts, attributes,
# traits and the called functions do, and a function is known by its name. A graph with
# a function whose name does not tell what runs is not remembered.


_TORCH = torch.dtype, torch.device, torch.layout, torch.memory_format

_NAMESPACES = frozenset({"aten", "mucudnn", "prim", "prims"})
"""Namespaces of operations that the versions of PyTorch and mucudnn determine."""


class Unnameable(ValueError):  # noqa: N818  (it is a finding, not a mistake)
    """A function of a graph whose name does not tell what runs."""


class Places:
    """The names of a graph's tensors and nodes as numbers."""

    def __init__(self, lowered: Lowered) -> None:
        self.tensors = tuple(lowered.graph.tensors)
        self.nodes = tuple(node.name for node in lowered.graph.nodes)
        self._tensor = {name: i for i, name in enumerate(self.tensors)}
        self._node = {name: i for i, name in enumerate(self.nodes)}

    def tensor(self, name: str) -> int | str:
        """Return the place of a tensor; of a copy, with its suffix; else the name."""
        return _place(self._tensor, name)

    def node(self, name: str) -> int | str:
        """Return the place of a node; of a copy, with its suffix; else the name."""
        return _place(self._node, name)


def _place(places: Mapping[str, int], name: str) -> int | str:
    first, mark, rest = name.partition("~")
    place = places.get(first)
    if place is None:
        return name
    return f"{place}~{rest}" if mark else place


def digest_of(value: Any) -> str:
    """Return a hash of a value that JSON can write."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def structure_of(lowered: Lowered, places: Places) -> str:
    """Return a hash of everything but names.

    Raises:
        Unnameable: The name of a function does not tell what runs.
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
    """Return what JSON can write of a value, different for different values.

    Raises:
        Unnameable: The name of a function does not tell what runs.
    """
    match value:
        case enum.Enum():
            return [type(value).__name__, value.name]
        case bool() | int() | str() | None:
            return value
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
        case _:
            return ["function", _named(value)]


def _named(function: Any) -> str:
    if isinstance(function, torch._ops.OpOverload):
        if function.namespace in _NAMESPACES:
            return str(function)
        raise Unnameable(f"{function} is no operation of PyTorch's own")
    name = getattr(function, "__qualname__", None)
    if not callable(function) or name is None or "<" in name:
        raise Unnameable(f"{function!r} is not told by a name")
    owner = getattr(function, "__module__", None) or type(function).__name__
    return f"{owner}.{name}"


def surroundings_of(lowered: Lowered) -> Mapping[str, str]:
    """Return a graph's devices and the settings that change what its nodes cost."""
    found = {
        "torch": torch.__version__,
        "host": CpuDevice().fingerprint,
        "threads": str(torch.get_num_threads()),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "onednn": str(torch._C._get_mkldnn_enabled()),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "matmul": torch.get_float32_matmul_precision(),
    }
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    devices = {layout.device for layout in lowered.layouts.values()}
    for device in sorted(devices, key=str):
        if device.type == "cuda":
            facts = (
                torch.cuda.get_device_name(device),
                torch.cuda.get_device_capability(device),
                torch.version.cuda,
                cudnn.version(),
                (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32),
                matmul.allow_tf32,
            )
            found[str(device)] = "/".join(map(str, facts))
    return found
