"""Our plan of a step as a policy of PyTorch's selective checkpoints, in eager mode.

    study = mt.memory(model, loss_fn, (x, y), optimizer)
    contexts = mt.checkpoint_contexts(study, budget="8GiB")

    out = checkpoint(model, x, use_reentrant=False, context_fn=contexts)

What the plan keeps for the backward pass is saved, all else is computed again. That is
all: no peak is promised. The backward pass begins with running the whole forward pass
again, but for what was saved, so that everything in it is there at once; and there is
no host to send anything to. `train_step` keeps a budget.
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
"""Operations whose result is filled in place: it is saved as what it is filled with."""

Key = tuple[str, int]
"""An operation by its name, and which of its calls."""


def checkpoint_contexts(
    study: MemoryStudy, *, budget: float | str | None = None
) -> Callable[[], tuple[Any, Any]]:
    """The `context_fn` of `torch.utils.checkpoint.checkpoint`, for a whole model.

    It promises no peak; see `mucudnn.torch.train_step` for one that is kept. Random
    numbers and running statistics are never computed again, nor is what the study has
    not seen.

    Args:
        study: Of the model, with batches like those that it is called with.
        budget: Bytes for the step, as `train_step` counts them; None saves all that
            the backward pass reads.

    Raises:
        PlanningError: The step does not fit; says the least budget that works.
        BackendUnavailableError: PyTorch's selective checkpoints show no results.
    """
    if "op_output" not in inspect.signature(SelectiveCheckpointContext).parameters:
        raise BackendUnavailableError(
            "checkpoint_contexts needs PyTorch 2.12 or newer and found "
            f"{torch.__version__}, whose selective checkpoints do not show what "
            "operations give"
        )
    program, captured = study.hint(budget, without_copies)
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
    """Says of each call in turn whether its result is saved.

    A tensor that is computed again is changed in place again, too. One that is saved
    is saved as it is in the end, which nothing that is computed again may have read.
    PyTorch 2.12 asks again as it computes again, and shows no results: it is told what
    it was told.

    Args:
        policies: Of the calls that are known.
    """

    def __init__(self, policies: Mapping[Key, CheckpointPolicy]) -> None:
        self._policies = policies
        self._calls: Counter[str] = Counter()
        self._told: dict[str, deque[CheckpointPolicy]] = defaultdict(deque)
        self._again: set[int] = set()
        self._read: set[int] = set()

    def __call__(
        self,
        context: SelectiveCheckpointContext,
        function: Any,
        *args: Any,
        **kwargs: Any,
    ) -> CheckpointPolicy:
        """The policy of a call that has just been made.

        Raises:
            UnsupportedError: It changes what will not be there as it was.
        """
        name = str(function)
        told = self._told[name]
        if context.is_recompute:
            return told.popleft() if told else CheckpointPolicy.MUST_SAVE
        policy = self._decided(context, function, args, kwargs)
        told.append(policy)
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
                f"{function} changes a tensor in place that is computed again or read "
                "by what is; use a function that returns another tensor"
            )
        return CheckpointPolicy.MUST_SAVE


def _storages(tree: Any) -> set[int]:
    leaves = pytree.tree_leaves(tree)
    return {storage_of(t) for t in leaves if isinstance(t, torch.Tensor)}


def _by_call(
    module: torch.fx.GraphModule, forward: frozenset[str], again: frozenset[str]
) -> Mapping[Key, CheckpointPolicy]:
    """The calls of a forward pass that are made again.

    Those are of views, and of what is not saved; one with several results only if none
    of them is.
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
    """Whether a call only gives another name to bytes that are there."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or schema.is_mutable:
        return False
    returns = [result.alias_info for result in schema.returns]
    return bool(returns) and all(alias is not None for alias in returns)
