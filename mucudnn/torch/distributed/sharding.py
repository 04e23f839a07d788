"""Models that several ranks train together, and the collectives of a captured step.

FSDP2 (`fully_shard`) divides each parameter along its first axis: a rank holds a shard
of it, of its gradient and of its optimizer state. `DistributedDataParallel` keeps all
of them on every rank. In either case a model says in which units its parameters are
gathered and their gradients summed. A captured step has these collectives as ordinary
nodes:

    shards -> all_gather -> wait -> parameters -> forward, backward -> gradients
           -> reduce_scatter -> wait -> gradients of the shards -> update

Shards are always in memory, so a gathered parameter can be released after every use
and gathered again: the planner chooses that like any other recomputation. Sums are
divided among calls as PyTorch divides them, so that they have the same bits.
"""

import math
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial, reduce
from typing import Any, Literal, Protocol, TypeVar

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # registers the operators used here
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from mucudnn.errors import UnsupportedError

Kind = Literal["fsdp", "ddp"]


class _Named(Protocol):
    @property
    def name(self) -> str: ...


N = TypeVar("N", bound=_Named)

WAIT = torch.ops._c10d_functional.wait_tensor.default


def is_collective(op: str) -> bool:
    """Return whether a node of this operation exchanges data between ranks."""
    return op.startswith("_c10d_functional.") and op != str(WAIT)


_COMMUTE = 2
"""Ranks up to which a sum has the same bits in every order."""

_ALONE = 1 << 20
"""Bytes of a parameter from which it is gathered by a call of its own: it then needs
no copy out of the buffer of its unit."""

_TAG = 0x6D75
"""Tag of messages between ranks; those of one pair arrive in the order of calls."""

_RELEASE_S = 1.0
"""Longest wait for gloo to release a tensor."""

_AVERAGED = (torch.float32, torch.bfloat16)
"""Types of which PyTorch computes means at once; it divides others before and after
the sum."""

_ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)
"""Optimizers that update every element by itself, and so shards like parameters."""


@dataclass(frozen=True)
class Part:
    """The rows of a sharded parameter that one rank holds.

    Attributes:
        shape: Shape of the whole parameter.
        rows: Number of rows held.
        dtype: Type of the parameter.
    """

    shape: tuple[int, ...]
    rows: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered together, and whose gradients are summed together.

    Attributes:
        names: Of the parameters, as the step names them.
        computes: Type that they are gathered and used in; None for their own.
        sums: Type that gradients are summed in; None for their own.
    """

    names: tuple[str, ...]
    computes: torch.dtype | None = None
    sums: torch.dtype | None = None


@dataclass(frozen=True)
class Sharding:
    """Division of a model and its gradients among the ranks of a process group.

    Attributes:
        kind: "fsdp" if parameters are sharded, "ddp" if every rank has them.
        group: Name of the process group.
        size: Number of ranks.
        units: Parameters that are gathered together, for "fsdp".
        parts: The part of each sharded parameter that this rank has.
        buckets: Parameters whose gradients are summed by one call, for "ddp"; empty
            to fill buckets in the order in which the backward pass has gradients.
        bucket_bytes: Sizes of the first and of every other such bucket.
        broadcast: Buffers that rank 0 sends to all ranks at the begin of a step.
        rebuilds: Whether buckets are filled anew after the first step.
    """

    kind: Kind
    group: str
    size: int
    units: tuple[Unit, ...] = ()
    parts: Mapping[str, Part] = field(default_factory=dict)
    buckets: tuple[tuple[str, ...], ...] = ()
    bucket_bytes: tuple[int, int] = (0, 0)
    broadcast: tuple[str, ...] = ()
    rebuilds: bool = False

    @property
    def after_first(self) -> "Sharding":
        """The sharding from the second step on.

        `DistributedDataParallel` rebuilds its buckets behind its first step. Sums of
        more than two ranks depend on the place of a gradient in its bucket.
        """
        if not self.rebuilds or self.size <= _COMMUTE:
            return self
        return replace(self, buckets=(), rebuilds=False)

    @property
    def is_even(self) -> bool:
        """True if all ranks have parts of the same shapes."""
        return all(part.shape[0] % self.size == 0 for part in self.parts.values())

    def rows(self, name: str) -> int:
        """Return the rows of the largest part of a parameter, that of rank 0."""
        return -(-self.parts[name].shape[0] // self.size)

    # -- recorded as operations of a step

    def gathered(self, own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return whole parameters, given those of this rank."""
        found = dict(own)
        for unit in self.units:
            padded = {name: self._padded(name, own[name]) for name in unit.names}
            if unit.computes is not None:
                padded = {n: t.to(unit.computes) for n, t in padded.items()}
            # Small parameters share a collective, as each has a latency.
            small = {n: t for n, t in padded.items() if self.size * t.nbytes < _ALONE}
            if len(small) > 1:
                flat = torch.cat([shard.reshape(-1) for shard in small.values()])
                rows = self._all_gather(flat).view(self.size, -1)
                begin = 0
                for name, shard in small.items():
                    column = rows.narrow(1, begin, shard.numel())
                    found[name] = self._whole(name, column.reshape(-1))
                    begin += shard.numel()
                padded = {n: t for n, t in padded.items() if n not in small}
            for name, shard in padded.items():
                found[name] = self._whole(name, self._all_gather(shard.reshape(-1)))
        return found

    def _padded(self, name: str, own: torch.Tensor) -> torch.Tensor:
        """Return a shard with as many rows as the largest one has."""
        if self.parts[name].shape[0] % self.size == 0:
            return own
        missing = self.rows(name) - own.shape[0]
        return torch.constant_pad_nd(own, [0, 0] * (own.dim() - 1) + [0, missing])

    def _whole(self, name: str, flat: torch.Tensor) -> torch.Tensor:
        shape = self.parts[name].shape
        padded = flat.view(self.size * self.rows(name), *shape[1:])
        return padded.narrow(0, 0, shape[0])

    def _all_gather(self, flat: torch.Tensor) -> torch.Tensor:
        if self.size == 1:
            return flat
        return _done("all_gather_into_tensor", flat, self.size, self.group)

    def sent(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Overwrite the buffers that rank 0 sends by its own."""
        for name in self.broadcast:
            buffers[name].copy_(_done("broadcast", buffers[name], 0, self.group))

    def reduced(
        self,
        gradients: Mapping[str, torch.Tensor | None],
        order: Sequence[str],
        whole: Mapping[str, torch.Tensor],
    ) -> dict[str, torch.Tensor | None]:
        """Return means of gradients over the ranks: of sharded ones this rank's part.

        `order` is that in which the backward pass has gradients.
        """
        found = dict(gradients)
        given = {n: gradients[n] for n in order if gradients.get(n) is not None}
        if self.kind == "ddp":
            for bucket in self._buckets(given, whole):
                summed = self._summed(bucket)
                found.update({name: summed[name] for name in bucket if name in given})
        for unit in self.units:
            mine = {name: given[name] for name in unit.names if name in given}
            if mine:
                found.update(self._scattered(unit, mine))
        return found

    def _scattered(
        self, unit: Unit, given: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        dtype = unit.sums or next(iter(given.values())).dtype
        flat = torch._chunk_cat([g.to(dtype) for g in given.values()], 0, self.size)
        before, after = self._divisors(dtype)
        flat = flat.view(-1) / before if before != 1 else flat.view(-1)
        if self.size > 1:
            how = "avg" if dtype in _AVERAGED else "sum"
            flat = _done("reduce_scatter_tensor", flat, how, self.size, self.group)
        flat = flat / after if after != 1 else flat
        found, begin = {}, 0
        for name in given:
            part = self.parts[name]
            shape = (self.rows(name), *part.shape[1:])
            mine = flat.narrow(0, begin, math.prod(shape)).view(shape)
            found[name] = mine.narrow(0, 0, part.rows).to(part.dtype)
            begin += math.prod(shape)
        return found

    def _divisors(self, dtype: torch.dtype) -> tuple[float, float]:
        """Return what is divided by before and after a sum, against overflow."""
        if dtype in _AVERAGED:
            return 1.0, 1.0
        before = 1
        while self.size % before == 0 and self.size / before > before:
            before *= 2
        return float(before), self.size / before

    def _buckets(
        self, given: Mapping[str, torch.Tensor], whole: Mapping[str, torch.Tensor]
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Yield gradients that are summed by one call, as the reducer's buckets.

        Parameters without a gradient have zeros in buckets that are made before.
        """
        if self.buckets:
            for names in self.buckets:
                yield {
                    n: given[n] if n in given else torch.zeros_like(whole[n])
                    for n in names
                }
            return
        open_: dict[torch.dtype, dict[str, torch.Tensor]] = {}
        closed: Counter[torch.dtype] = Counter()
        for name, gradient in given.items():
            bucket = open_.setdefault(gradient.dtype, {})
            bucket[name] = gradient
            # DDP's first bucket is smaller, so that the first sum starts early.
            most = self.bucket_bytes[min(1, closed[gradient.dtype])]
            if sum(g.nbytes for g in bucket.values()) >= most:
                closed[gradient.dtype] += 1
                yield open_.pop(gradient.dtype)
        yield from open_.values()

    def _summed(self, bucket: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        parts = [(g * (1.0 / self.size)).reshape(-1) for g in bucket.values()]
        flat = torch.cat(parts) if len(parts) > 1 else parts[0]
        if self.size > 1:
            flat = _done("all_reduce", flat, "sum", self.group)
        sizes = [gradient.numel() for gradient in bucket.values()]
        return {
            name: piece.view(gradient.shape)
            for (name, gradient), piece in zip(
                bucket.items(), flat.split(sizes), strict=True
            )
        }

    def norms(self, own: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the norms of whole gradients, given those of this rank's parts."""
        norms = torch.stack([torch.linalg.vector_norm(g) for g in own.values()])
        sharded = [name in self.parts for name in own]
        if self.size == 1 or not any(sharded):
            return norms
        sums = _done("all_reduce", norms * norms, "sum", self.group)
        if all(sharded):
            return sums.sqrt()
        mask = torch.tensor(sharded, device=norms.device)
        return torch.where(mask, sums.sqrt(), norms)

    def any_rank(self, found: torch.Tensor) -> torch.Tensor:
        """Return whether a flag is set on any rank."""
        if self.size == 1 or self.kind == "ddp":
            return found
        return _done("all_reduce", found.float(), "max", self.group) > 0


_recording = threading.local()


def is_own_collective() -> bool:
    """Return whether a collective is called by this file, and not by a user's code."""
    return getattr(_recording, "on", False)


def _done(name: str, *args: Any) -> torch.Tensor:
    """Call one of PyTorch's functional collectives, and wait for its result."""
    _recording.on = True
    try:
        return WAIT(getattr(torch.ops._c10d_functional, name).default(*args))
    finally:
        _recording.on = False


# What a model says about its ranks.


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a sharded tensor; any other tensor as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def as_sharded(own: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a rank's part as a tensor that is sharded like another one."""
    if not isinstance(like, DTensor) or own.shape != like._local_tensor.shape:
        return own
    return DTensor.from_local(
        own,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def _states_of(model: torch.nn.Module) -> list[Any]:
    """Return FSDP2's states of modules, in the model's order; modules may share one."""
    sharded = (m for m in model.modules() if isinstance(m, FSDPModule))
    return list(dict.fromkeys(module._get_fsdp_state() for module in sharded))


def groups_of(model: torch.nn.Module) -> list[Any]:
    """Return FSDP2's groups of parameters in a model, in the order of its modules.

    Raises:
        UnsupportedError: This version of PyTorch keeps them elsewhere.
    """
    states = _states_of(model)
    if not all(hasattr(state, "_fsdp_param_groups") for state in states):
        raise UnsupportedError(
            "a step under fully_shard is planned with PyTorch 2.13 or newer, "
            f"and this is {torch.__version__}"
        )
    return [group for state in states for group in state._fsdp_param_groups]


def release(groups: Sequence[Any]) -> None:
    """Release parameters that a forward pass in eager mode has left gathered.

    A root's are, as its backward pass would begin with them.
    """
    for group in groups:
        if not group.is_sharded:
            group._to_sharded()


def sharding_of(root: torch.nn.Module) -> Sharding | None:
    """Return how FSDP2 shards the modules within a root; None if it does not.

    Raises:
        UnsupportedError: It does so in a way that a step does not capture.
    """
    groups = groups_of(root)
    if not groups:
        return None
    names = {id(tensor): name for name, tensor in root.named_parameters()}
    units, parts = [], {}
    process_groups = {group._all_gather_process_group for group in groups}
    if len(process_groups) > 1:
        raise UnsupportedError(
            "the model is sharded over several process groups; a planned step has one"
        )
    for group in groups:
        _check_group(group)
        mine = []
        for parameter in group.fsdp_params:
            name = names[id(parameter.sharded_param)]
            mine.append(name)
            local = parameter.sharded_param._local_tensor
            parts[name] = Part(
                tuple(parameter.sharded_param.shape), local.shape[0], local.dtype
            )
        computes, sums = _types_of(group.fsdp_params[0].mp_policy)
        if sums is None and hasattr(group, "_get_reduce_dtype"):
            # From PyTorch 2.15 on, sums have the type of the parameters, not that of
            # the gradients.
            sums = reduce(torch.promote_types, (parts[name].dtype for name in mine))
        units.append(Unit(tuple(mine), computes, sums))
    (process_group,) = process_groups
    return Sharding(
        "fsdp", process_group.group_name, process_group.size(), tuple(units), parts
    )


def _types_of(policy: Any) -> tuple[torch.dtype | None, torch.dtype | None]:
    """Return the types that a policy computes in, and sums gradients in."""
    return policy.param_dtype, policy.reduce_dtype


def _check_group(group: Any) -> None:
    """Refuse settings of FSDP2 under which a captured step would differ."""
    parameters = group.fsdp_params
    settings = {
        "a mesh of two dimensions (hybrid sharding)": group._is_hsdp,
        "CPUOffloadPolicy": any(p.offload_to_cpu for p in parameters),
        "set_gradient_divide_factor": group.gradient_divide_factor is not None,
        "an all-reduce hook": group._all_reduce_hook is not None,
        "set_requires_gradient_sync(False)": not group.reduce_grads,
        "set_reshard_after_backward(False)": not group.reshard_after_backward,
        "collectives of your own": any(
            not type(comm).__module__.startswith("torch.")
            for comm in (group._all_gather_comm, group._reduce_scatter_comm)
        ),
        "a shard_placement_fn": any(p.fsdp_placement != Shard(0) for p in parameters),
        "parameters with all-gather extensions": any(
            hasattr(p._sharded_local_tensor, "fsdp_pre_all_gather") for p in parameters
        ),
        "parameters that were sharded before (tensor parallelism)": any(
            p.is_dtensor for p in parameters
        ),
        "parameters of one unit that are cast to several types": (
            len({_types_of(p.mp_policy) for p in parameters}) > 1
        ),
    }
    found = next((name for name, given in settings.items() if given), "")
    if found:
        raise UnsupportedError(
            f"the model uses fully_shard with {found}, which a planned step does not "
            "capture; shard it by fully_shard(module) over a mesh of one dimension"
        )


def distributed_data_parallel(model: DistributedDataParallel, prefix: str) -> Sharding:
    """Return how `DistributedDataParallel` sums a model's gradients.

    Names of its parameters and buffers in a step begin with `prefix`.

    Raises:
        UnsupportedError: It has a setting under which a captured step would differ.
    """
    found = ""
    if model._comm_hooks:
        found = "a communication hook"
    elif getattr(model, "mixed_precision", None) is not None:
        found = "mixed_precision"
    elif not model.require_backward_grad_sync:
        found = "no_sync()"
    if found:
        raise UnsupportedError(
            f"the model is in DistributedDataParallel with {found}, which a planned "
            "step does not capture"
        )
    buffers = ()
    if model.broadcast_buffers:
        ignored = model.parameters_to_ignore
        buffers = tuple(
            prefix + name
            for name, _ in model.module.named_buffers()
            if name not in ignored
        )
    limits = dist._DEFAULT_FIRST_BUCKET_BYTES, model.bucket_bytes_cap
    found_order = Sharding(
        "ddp",
        model.process_group.group_name,
        model.process_group.size(),
        bucket_bytes=limits,
        broadcast=buffers,
    )
    # DDP rebuilds its buckets in the order of gradients, after its first backward pass;
    # before, they are in the order of parameters.
    rebuilds = model.static_graph or not model.find_unused_parameters
    if rebuilds and model._get_ddp_logging_data().get("has_rebuilt_buckets"):
        return found_order
    parameters, sparse = model._build_params_for_reducer()
    names = {id(p): prefix + name for name, p in model.module.named_parameters()}
    places, _ = dist._compute_bucket_assignment_by_size(
        parameters, [sys.maxsize] if rebuilds else [*limits], sparse
    )
    buckets = tuple(
        tuple(names[id(parameters[i])] for i in bucket) for bucket in reversed(places)
    )
    return replace(found_order, buckets=buckets, rebuilds=rebuilds)


@contextmanager
def without_collectives(root: torch.nn.Module) -> Iterator[None]:
    """Have FSDP2's hooks leave parameters as they are: these are gathered already.

    Inputs and results are cast, and gradients of inputs are summed in FSDP2's order.
    """
    states = _states_of(root)
    kept = [(s, s._training_state, s._fsdp_param_groups) for s in states]
    try:
        for state, training, groups in kept:
            # In this state hooks only cast.
            state._training_state = type(training).PRE_BACKWARD
            state._fsdp_param_groups = []
            state._cast_forward_inputs = partial(_cast_and_join, state, groups)
        yield
    finally:
        for state, training, groups in kept:
            vars(state).pop("_cast_forward_inputs", None)
            state._training_state = training
            state._fsdp_param_groups = groups


class _Gathered:
    """Stand-in for one of FSDP2's groups of parameters, which is gathered already."""

    def post_backward(self) -> None:
        """Leave gradients as they are."""


def _cast_and_join(
    state: Any, groups: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Cast a module's inputs, and join their gradients at one place, as FSDP2 does.

    FSDP2 learns at that place when the backward pass of the module is over. What the
    module contributes to a gradient is thereby summed before what others contribute.
    """
    args, kwargs = type(state)._cast_forward_inputs(state, args, kwargs)
    # Of several modules with one state, this is done for the first that runs.
    if len(state._modules_to_run_forward) in (0, len(state._modules)):
        for group in groups:
            join = type(group)._register_post_backward_hook
            args, kwargs = join(_Gathered(), args, kwargs)
    return args, kwargs


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse optimizers that need whole parameters to update a part of them.

    Raises:
        UnsupportedError: The optimizer is none of those known to work by elements.
    """
    if type(optimizer) not in _ELEMENTWISE:
        known = ", ".join(kind.__name__ for kind in _ELEMENTWISE)
        raise UnsupportedError(
            f"{type(optimizer).__name__} may need whole parameters, of which each rank "
            f"has a part; a planned step under fully_shard works with {known}"
        )


# Collectives between CPUs. PyTorch's would hold memory that no plan knows: gloo gathers
# into a copy of the result, scatters sums by summing in a copy of the operand, and may
# hold tensors for a while after a wait.

_FINISH = "_mucudnn_finish"
"""Attribute of a result: completes the collective."""


@cache  # costs are remembered by function
def started(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a collective between CPUs that runs on until `finished` gets its result.

    Until then it uses its operand and its result, and afterwards no memory.
    """
    name = str(function)
    if "all_gather" in name:
        return _start_gather
    if "reduce_scatter" in name:
        return _start_scattered_sum
    return _start_sum if "all_reduce" in name else partial(_released, function)


def finished(result: torch.Tensor) -> torch.Tensor:
    """Return the result of a collective when that is complete."""
    finish = vars(result).pop(_FINISH, None)
    if finish is not None:
        finish()
    return result


def _start_gather(operand: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """Send a shard to all ranks, and receive theirs in their places of the result."""
    ranks = dist.distributed_c10d._resolve_process_group(group)
    rank = ranks.rank()
    result = operand.new_empty((size * operand.shape[0], *operand.shape[1:]))
    parts = result.chunk(size)
    works = []
    for other in ((rank + i) % size for i in range(1, size)):
        works.append(ranks.recv([parts[other]], other, _TAG))
        works.append(ranks.send([operand], other, _TAG))
    parts[rank].copy_(operand)

    def finish() -> None:
        for work in works:
            work.wait()
        works.clear()

    setattr(result, _FINISH, finish)
    return result


def _start_sum(operand: torch.Tensor, how: str, group: str) -> torch.Tensor:
    result = operand.clone()
    setattr(result, _FINISH, _start_sum_in_place(result, how, group))
    return result


def _start_scattered_sum(
    operand: torch.Tensor, how: str, size: int, group: str
) -> torch.Tensor:
    """Start a sum in the operand, which a step uses only once."""
    rank = dist.distributed_c10d._resolve_process_group(group).rank()
    own = operand.chunk(size)[rank]
    result = torch.empty_like(own)
    complete = _start_sum_in_place(operand, how, group)

    def finish() -> None:
        complete()
        result.copy_(own)

    setattr(result, _FINISH, finish)
    return result


def _start_sum_in_place(
    tensor: torch.Tensor, how: str, group: str
) -> Callable[[], None]:
    """Start a sum over the ranks; return a function that waits for its end."""
    view = tensor.view_as(tensor)  # nothing else refers to this object
    holders = view._use_count()
    torch.ops._c10d_functional.all_reduce_(view, how, group)

    def finish() -> None:
        WAIT(view)
        wait_for_release(view, holders)

    return finish


def _released(
    function: Callable[..., torch.Tensor], operand: torch.Tensor, *args: Any
) -> torch.Tensor:
    holders = operand._use_count()
    result = WAIT(function(operand, *args))
    wait_for_release(operand, holders)
    return result


def wait_for_release(tensor: torch.Tensor, holders: int) -> None:
    """Wait until gloo has released a tensor, a second at most.

    `holders` are its references before the collective, which is complete.
    """
    deadline = time.monotonic() + _RELEASE_S
    while tensor._use_count() > holders and time.monotonic() < deadline:
        time.sleep(0)


# The order of a captured step.


def reordered(
    graph: torch.fx.Graph, gathers: frozenset[str], sums: frozenset[str]
) -> None:
    """Move gathers right before their first readers, and sums behind their gradients.

    A capture has all gathers before the forward pass, and all sums behind the backward
    pass: all parameters and gradients would be in memory at once.
    """
    nodes = list(graph.nodes)
    (output,) = graph.find_nodes(op="output")
    edges = ((given.name, n.name) for n in nodes for given in n.all_input_nodes)
    for node in in_use_order(nodes, edges, gathers, sums):
        if node is not output:
            output.prepend(node)


def in_use_order(
    nodes: Sequence[N],
    edges: Iterable[tuple[str, str]],
    gathers: Container[str],
    sums: Container[str],
) -> list[N]:
    """Return nodes, gathers right before their readers, sums right behind their inputs.

    Args:
        nodes: Nodes in a valid order, but for gathers and sums.
        edges: Names of nodes and of a node that reads each.
        gathers: Names of nodes that move.
        sums: Names of others that move.
    """
    readers, producers = defaultdict(list), defaultdict(list)
    for given, reader in edges:
        readers[given].append(reader)
        producers[reader].append(given)
    place = {node.name: i for i, node in enumerate(nodes)}
    key = {name: (i, 1, i) for name, i in place.items()}
    for name in reversed(place):
        if name in gathers and readers[name]:
            at = min(key[reader][0] for reader in readers[name])
            key[name] = (at, 0, place[name])
    for name in place:
        if name in sums and producers[name]:
            at = max(key[given][0] for given in producers[name])
            key[name] = (at, 2, place[name])
    return sorted(nodes, key=lambda node: key[node.name])
