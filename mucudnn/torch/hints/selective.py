"""`checkpoint_contexts`: our plan as a policy of PyTorch's selective checkpoints.

    study = mt.memory(model, loss_fn, (x, y), optimizer)
    contexts = mt.checkpoint_contexts(study, budget="8GiB")

    out = checkpoint(model, x, use_reentrant=False, context_fn=contexts)

The tensors that the plan saves or offloads for the backward pass are saved, all others
are recomputed. No peak is promised: the backward pass begins by running the whole
forward pass again, but for what was saved, so that all of it is in memory at once; and
nothing is offloaded. `train_step` keeps a budget.
"""

import inspect
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

from mucudnn.errors import BackendUnavailableError, UnsupportedError
from mucudnn.torch.hints.policies import policies_of, without_copies
from mucudnn.torch.memory_study import MemoryStudy
from mucudnn.torch.source_lines import storage_of

_BARE = frozenset({"empty", "empty_like", "empty_strided", "new_empty"})
"""Operations whose result is filled in place, and saved with these values."""

Key = tuple[str, int]
"""The name of an operation, and the number of a call of it."""


def checkpoint_contexts(
    study: MemoryStudy, *, budget: float | str | None = None
) -> Callable[[], tuple[Any, Any]]:
    """Make the `context_fn` of `torch.utils.checkpoint.checkpoint` for a whole model.

    It guarantees no peak, unlike `mucudnn.torch.train_step`. Random
    numbers, running statistics and operations that the study has not captured are never
    recomputed.

    Args:
        study: A study of the model, with batches like those of its calls.
        budget: Bytes for the step, as `train_step` counts them; None saves all that
            the backward pass reads.

    Raises:
        PlanningError: The step does not fit; the message names the minimum budget.
        BackendUnavailableError: PyTorch's selective checkpoints show no results.
    """
    if "op_output" not in inspect.signature(SelectiveCheckpointContext).parameters:
        raise BackendUnavailableError(
            "checkpoint_contexts needs PyTorch 2.12 or newer and found "
            f"{torch.__version__}, whose selective checkpointing does not expose "
            "results of operations"
        )
    program, captured = study.hinted(budget, without_copies)
    found = policies_of(program)
    again = frozenset(found.of) - found.saved
    policies = _by_call(captured.module, captured.forward, again)

    def contexts() -> tuple[Any, Any]:
        first, second = create_selective_checkpoint_contexts(
            _Policy(policies), allow_cache_entry_mutation=True
        )
        return first, second

    return contexts


class _Policy:
    """A policy function that decides of each call in turn whether its result is saved.

    A recomputed tensor is changed in place again, too. A saved tensor is saved with its
    last value, which nothing recomputed may have read before. PyTorch 2.12 asks again
    while it recomputes, without results: it gets the same answers.

    Args:
        policies: Policies of captured calls.
    """

    def __init__(self, policies: Mapping[Key, CheckpointPolicy]) -> None:
        self._policies = policies
        self._calls: Counter[str] = Counter()
        self._answers: dict[str, deque[CheckpointPolicy]] = defaultdict(deque)
        self._again: set[int] = set()
        self._read: set[int] = set()

    def __call__(
        self,
        context: SelectiveCheckpointContext,
        function: Any,
        *args: Any,
        **kwargs: Any,
    ) -> CheckpointPolicy:
        """Return the policy of a call that has just been made.

        Raises:
            UnsupportedError: It changes a tensor that a recomputed one needs unchanged.
        """
        name = str(function)
        answers = self._answers[name]
        if context.is_recompute:
            return answers.popleft() if answers else CheckpointPolicy.MUST_SAVE
        policy = self._decided(context, function, args, kwargs)
        answers.append(policy)
        return policy

    def _decided(
        self,
        context: SelectiveCheckpointContext,
        function: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> CheckpointPolicy:
        name = str(function)
        key = name, self._calls[name]
        self._calls[name] += 1
        given = _storages((args, kwargs))
        if function._schema.is_mutable:
            return self._changing(function, given & _storages(context.op_output))
        policy = self._policies.get(key, CheckpointPolicy.MUST_SAVE)
        made = _storages(context.op_output) - given
        self._again -= made
        self._read -= made
        if policy is CheckpointPolicy.MUST_RECOMPUTE:
            self._again |= made
            if made:  # views read nothing
                self._read |= given
        return policy

    def _changing(self, function: Any, changed: set[int]) -> CheckpointPolicy:
        random = torch.Tag.nondeterministic_seeded in function.tags
        if changed and changed <= self._again and not random:
            return CheckpointPolicy.MUST_RECOMPUTE
        if changed & (self._again | self._read):
            raise UnsupportedError(
                f"{function} modifies a tensor in place that is recomputed, or read "
                "by a recomputed operation; use an out-of-place function"
            )
        return CheckpointPolicy.MUST_SAVE


def _storages(tree: Any) -> set[int]:
    leaves = pytree.tree_leaves(tree)
    return {storage_of(t) for t in leaves if isinstance(t, torch.Tensor)}


def _by_call(
    module: torch.fx.GraphModule, forward: frozenset[str], again: frozenset[str]
) -> Mapping[Key, CheckpointPolicy]:
    """Return the calls of a forward pass that are made again.

    These are views, and calls of which no result is saved.
    """
    calls: Counter[str] = Counter()
    found: dict[Key, CheckpointPolicy] = {}
    for node in module.graph.nodes:
        if not isinstance(node.target, OpOverload) or node.name not in forward:
            continue
        name = str(node.target)
        key = name, calls[name]
        calls[name] += 1
        value = node.meta.get("val")
        several = isinstance(value, tuple | list)
        results = (
            [f"{node.name}.{k}" for k, v in enumerate(value) if v is not None]
            if several
            else [node.name]
        )
        if node.target.overloadpacket.__name__ in _BARE:
            continue
        if all(result in again for result in results) or _is_view(node):
            found[key] = CheckpointPolicy.MUST_RECOMPUTE
    return MappingProxyType(found)


def _is_view(node: torch.fx.Node) -> bool:
    """Return whether a call only makes a view."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or schema.is_mutable:
        return False
    returns = [result.alias_info for result in schema.returns]
    return bool(returns) and all(alias is not None for alias in returns)
