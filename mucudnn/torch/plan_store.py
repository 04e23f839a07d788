"""Measurements and plans of PyTorch steps, kept from process to process."""

import contextlib
import dataclasses
import enum
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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


def refuse_fronts(profile: Profile) -> None:
    """Raise `ValueError` where convolutions may run in ways nobody looked for."""
    if profile.fronts:
        raise ValueError("fronts: convolutions are PyTorch's here")


# What was measured and decided before, in this process or another.
#
# Measurements of a graph are one entry: they serve every budget. What was decided for
# one request is another: the residencies, and who timed the copies. A schedule follows
# from these in no time, and is taken only if it is, instruction by instruction, the one
# that was decided then. So whatever became of an entry, a plan keeps its promise.


logger = logging.getLogger(__name__)


PlanCacheChoice = str | os.PathLike[str] | Users | None


def default_folder() -> Path:
    """The folder in the user's cache directory, as the platform defines it."""
    return platformdirs.user_cache_path("mucudnn") / "torch-plans-v1"


def open_plans(choice: PlanCacheChoice) -> "PlanStore":
    """What a `cache` argument stands for.

    Raises:
        TypeError: It is none of the things that a cache can be told by.
        ValueError: The path is empty, or has a null character.
    """
    if choice is None:
        return PlanStore()
    if choice is USERS:
        return PlanStore(Entries(default_folder()))
    return PlanStore(Entries(a_path("cache", choice).expanduser()))


class PlanStore:
    """Measures and plans what is not remembered.

    Args:
        entries: What is; None remembers nothing.
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
        """What a graph costs on this machine, as it is set up.

        Args:
            lowered: The graph.
            measured: What measures it.
            settings: What else it measures by.
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
        """The plan of a request about a graph.

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
                return _replayed(decision_from(data, places), request, places)
            except (PlanningError, ValueError) as e:
                self._entries.refused(key, str(e))
        plan = plan_step(request)
        digest = schedule_digest(plan.schedule, places)
        decision = Decision(plan.residency, plan.scheduler, digest)
        try:
            data = decision_to(decision, places)
            _replayed(decision_from(data, places), request, places)
        except (PlanningError, ValueError) as e:
            logger.debug("a plan is not remembered: %s", e)
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
        """A hash of all that a measurement, or a plan, depends on."""
        if self._entries is None:
            return None
        try:
            structure = structure_of(lowered, places)
        except Unnameable as e:
            logger.info("a graph is not remembered: %s", e)
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


def _replayed(decision: Decision, request: StepRequest, places: "Places") -> StepPlan:
    """The schedule that follows from a decision.

    Raises:
        ValueError: It is another one than then.
        PlanningError: It does not fit.
    """
    plan = plan_residency(request.scheduled(decision.scheduler), decision.residency)
    if schedule_digest(plan.schedule, places) != decision.schedule:
        raise ValueError("another schedule follows from it than was decided")
    return plan


# A folder of remembered values, one file each.
#
# Remembering never stops work. An entry that cannot be read, or is not what was
# written, counts as none, with one warning, and is written anew; where nothing can be
# written, as on a full disk, nothing is remembered. Files appear whole, so processes
# may share the folder: of two that write the same entry the later wins, and both are
# right. What was not asked for the longest goes when the folder has grown beyond its
# size.


_SCHEMA = 2

_MEMBERS = ("schema", "key", "sha256", "value")

_LARGEST = 16 << 20

_MOST = 64 << 20

_NAME = re.compile(r"[0-9a-f]{64}\.json")


class Entries:
    """Values by key.

    Args:
        folder: Where; made when it is first written to.
        most: Bytes that it may have.
    """

    def __init__(self, folder: Path, most: int = _MOST) -> None:
        self._folder = folder
        self._most = most
        self._refused: set[str] = set()
        self._unwritable = False

    def get(self, key: str) -> Any | None:
        """The value of a key, which is a hash; None if there is none."""
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
        """Delete what was not asked for the longest; others may do so, too."""
        found = sorted(self._files())
        total = sum(size for _, size, _ in found)
        for _, size, path in found:
            if total <= self._most:
                return
            with contextlib.suppress(OSError):
                path.unlink()
            total -= size

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        """When it was asked for, bytes, and path of every entry."""
        with contextlib.suppress(OSError), os.scandir(self._folder) as rows:
            for row in rows:
                if _NAME.fullmatch(row.name):
                    with contextlib.suppress(OSError):
                        status = row.stat(follow_symlinks=False)
                        yield status.st_mtime, status.st_size, Path(row.path)


def _checked(key: str, text: str) -> Any:
    schema, whose, sha256, value = members_of("entry", load_json(text), _MEMBERS)
    if decode("schema", int, schema) != _SCHEMA:
        raise ValueError(f"schema is {schema}, this version reads {_SCHEMA}")
    if whose != key:
        raise ValueError("it is the entry of something else")
    if digest_of(value) != sha256:
        raise ValueError("its contents are not what was written")
    return value


# Profiles and decisions as JSON, nodes and tensors by their places; and back.
#
# Reading is strict: what is missing, unknown or out of bounds is a `ValueError`.


_PROFILE = (
    *("node_ms", "workspaces", "fronts"),
    *("out_bytes_per_ms", "in_bytes_per_ms", "copy_share", "copy_overhead_ms"),
)

_SLOWEST, _FASTEST = 1e-3, 1e15
"""Bytes in a millisecond that a copy may move; all bounds keep sums finite."""


_LARGEST_SHARE = 1e6

_MOST_BYTES = 1 << 42

_DECISION = ("residency", "scheduler", "schedule")


def profile_to(profile: Profile, places: "Places") -> dict[str, Any]:
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


def profile_from(data: object, places: "Places") -> Profile:
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


def decision_to(decision: Decision, places: "Places") -> dict[str, Any]:
    """A decision as JSON."""
    return {
        "residency": [
            [places.tensor(name), residency.value]
            for name, residency in decision.residency.items()
        ],
        "scheduler": decision.scheduler,
        "schedule": decision.schedule,
    }


def decision_from(data: object, places: "Places") -> Decision:
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


def schedule_digest(schedule: Schedule, places: "Places") -> str:
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


# What makes two lowered graphs the same to whoever measures and plans them.
#
# Names do not: tensors and nodes are their places. Layouts, attributes, traits and the
# functions that are called do, and all that may be said of a function is its name.
# Where a name does not tell what runs, the graph is remembered by nobody.


_TORCH = (
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)

_NAMESPACES = frozenset({"aten", "mucudnn", "prim", "prims"})
"""Of operations that the versions of PyTorch and of ours tell all about."""


class Unnameable(ValueError):  # noqa: N818  (it is a finding, not a mistake)
    """Something in a graph is not told by its name."""


class Places:
    """Names of a graph as numbers, and back.

    Args:
        lowered: Whose graph.
    """

    def __init__(self, lowered: Lowered) -> None:
        self.tensors = tuple(lowered.graph.tensors)
        self.nodes = tuple(node.name for node in lowered.graph.nodes)
        self._tensor = {name: i for i, name in enumerate(self.tensors)}
        self._node = {name: i for i, name in enumerate(self.nodes)}

    def tensor(self, name: str) -> int | str:
        """The place of a tensor; of a copy, with what is added to it; else the name."""
        return _place(self._tensor, name)

    def node(self, name: str) -> int | str:
        """The same of a node."""
        return _place(self._node, name)


def _place(places: Mapping[str, int], name: str) -> int | str:
    first, mark, rest = name.partition("~")
    place = places.get(first)
    if place is None:
        return name
    return f"{place}~{rest}" if mark else place


def digest_of(value: Any) -> str:
    """A hash of what can be written as JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def structure_of(lowered: Lowered, places: Places) -> str:
    """A hash of everything but names.

    Raises:
        Unnameable: A function or an argument is not told by its name.
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
    """A value as one that JSON can write, other for other values.

    Raises:
        Unnameable: A function is not told by its name.
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
    """Devices that a graph runs on, and settings that change what its nodes cost."""
    found = {
        "torch": torch.__version__,
        "host": CpuDevice().fingerprint,
        "threads": str(torch.get_num_threads()),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "onednn": str(torch._C._get_mkldnn_enabled()),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "matmul": torch.get_float32_matmul_precision(),
    }
    devices = {layout.device for layout in lowered.layouts.values()}
    for device in sorted(devices, key=str):
        if device.type == "cuda":
            found[str(device)] = _cuda(device)
    return found


def _cuda(device: torch.device) -> str:
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    return "/".join(
        map(
            str,
            (
                torch.cuda.get_device_name(device),
                torch.cuda.get_device_capability(device),
                torch.version.cuda,
                cudnn.version(),
                (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32),
                matmul.allow_tf32,
            ),
        )
    )
