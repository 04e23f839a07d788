"""Copies of models, optimizers and batches with fake tensors, for planning.

Fake tensors only have a shape, a type and strides. Nothing of the model's size is
allocated, the user's optimizer gets no state, and models without data (on `meta`) can
be planned as well. Tensors on `meta` represent tensors on the CPU.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from mucudnn.errors import UnsupportedError
from mucudnn.torch.capture.op_overrides import ctc_results
from mucudnn.torch.capture.optimizers import make_state
from mucudnn.torch.capture.step_tensors import Batch, check_parts
from mucudnn.torch.costs.measure import WrongResultsError
from mucudnn.torch.distributed.sharding import groups_of
from mucudnn.torch.lowering.lowered import Layout, leaves_of
from mucudnn.torch.lowering.overloads import corrected
from mucudnn.torch.source_lines import storage_of


@dataclass(frozen=True)
class DatalessStep:
    """The arguments of `capture_step` with fake tensors.

    Attributes:
        model: A copy of the model.
        loss_fn: The loss function; a copy if it is a module.
        example: The arguments of a step.
        values: Tensors of the example and buffers as they were given, which may have
            data, by the identity of what stands for each.
        optimizer: A copy of the optimizer, with its state.
        whole: The original optimizer, which may have data.
    """

    model: torch.nn.Module
    loss_fn: Callable[..., Any]
    example: Batch
    values: Mapping[int, torch.Tensor]
    optimizer: torch.optim.Optimizer
    whole: torch.optim.Optimizer

    @classmethod
    def of(
        cls,
        model: torch.nn.Module,
        loss_fn: Callable[..., Any],
        example: Sequence[Any] | Mapping[str, Any],
        optimizer: torch.optim.Optimizer,
    ) -> "DatalessStep":
        """Copy a step's parts with fake tensors.

        Raises:
            TypeError: A part has a wrong type.
            UnsupportedError: The model cannot be copied, or is sharded.
        """
        check_parts(model, loss_fn, optimizer)
        if groups_of(model):
            raise UnsupportedError(
                "the model is sharded by fully_shard; study the original model, with "
                "mesh=(8,) for eight devices and shard='fsdp2'"
            )
        _check(example)
        named = example if isinstance(example, Mapping) else {}
        given = Batch.of(() if named else tuple(example), named)
        modules = [model]
        if isinstance(loss_fn, torch.nn.Module):
            modules.append(loss_fn)
        mode = FakeTensorMode()
        own = [t for m in modules for t in (*m.parameters(), *m.buffers())]
        mine = set(map(id, own))
        # The optimizer may have parameters that the model no longer has.
        own += [p for group in optimizer.param_groups for p in group["params"]]
        memo: dict[int, Any] = {id(t): _dataless(mode, t) for t in own}
        try:
            copies = [copy.deepcopy(module, memo) for module in modules]
        except (TypeError, RuntimeError) as e:
            raise UnsupportedError(
                f"{type(model).__name__} cannot be copied, which the study requires: "
                f"{e}"
            ) from e
        lent = _optimizer(optimizer, memo, mode)
        with mode:
            make_state(lent, {id(memo[at]) for at in mine})
        batch = replace(given, tensors=tuple(_dataless(mode, t) for t in given.tensors))
        buffers = [buffer for module in modules for buffer in module.buffers()]
        values = {id(memo[id(buffer)]): buffer for buffer in buffers}
        values |= zip(map(id, batch.tensors), given.tensors, strict=True)
        loss_fn = copies[1] if len(copies) > 1 else loss_fn
        return cls(copies[0], loss_fn, batch, values, lent, optimizer)

    def wholes(self, copies: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Map copies of the optimizer's parameters to the original parameters."""
        of_copy = {
            id(lent): parameter
            for mine, group in zip(
                self.optimizer.param_groups, self.whole.param_groups, strict=True
            )
            for lent, parameter in zip(mine["params"], group["params"], strict=True)
        }
        return {
            name: of_copy[id(copy)]
            for name, copy in copies.items()
            if id(copy) in of_copy
        }

    @property
    def size_or_none(self) -> int | None:
        """Size of axis 0 that all tensors of the batch share; None if they do not."""
        tensors = self.example.tensors
        sizes = {tensor.shape[0] if tensor.dim() else None for tensor in tensors}
        return sizes.pop() if len(sizes) == 1 else None

    @property
    def size(self) -> int:
        """Size of axis 0 of the first tensor."""
        first = self.example.tensors[0]
        return int(first.shape[0]) if first.dim() else 1

    @property
    def batch(self) -> int:
        """Size of axis 0 of every tensor of the batch.

        Raises:
            ValueError: The tensors differ in it.
        """
        if self.size_or_none is None:
            shapes = ", ".join(str(tuple(t.shape)) for t in self.example.tensors)
            raise ValueError(
                f"the example's tensors have the shapes {shapes}; other batch sizes "
                "can be studied only if all first axes have the same length"
            )
        return self.size_or_none

    @property
    def parameters(self) -> int:
        """Number of elements of all parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters())


def _check(example: Any) -> None:
    """Refuse values that are no batch."""
    several = isinstance(example, Sequence | Mapping)
    if isinstance(example, torch.Tensor | str) or not several:
        raise TypeError(
            "example must be a batch, such as (x, y), or a dict of the model's "
            f"keyword arguments, got a {type(example).__name__}"
        )
    if not any(isinstance(v, torch.Tensor) for v in pytree.tree_leaves(example)):
        raise TypeError(
            "example must be a batch with tensors, such as (x, y), or a dict of the "
            "model's keyword arguments, but it has no tensor"
        )


def _dataless(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor like a given one."""
    if not tensor.is_meta:
        return mode.from_tensor(tensor, static_shapes=True)
    with mode:
        made = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
        )
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made


def _optimizer(
    optimizer: torch.optim.Optimizer, memo: Mapping[int, Any], mode: FakeTensorMode
) -> torch.optim.Optimizer:
    """Copy an optimizer to the copied parameters, with its hooks.

    `copy.deepcopy` of an optimizer would lose the hooks. A scheduler's wrapper of
    `step` updates the optimizer that it was made for, so the copy has none.
    """
    lent: torch.optim.Optimizer = object.__new__(type(optimizer))
    vars(lent).update({k: v for k, v in vars(optimizer).items() if k != "step"})
    lent.param_groups = []
    lent.state = defaultdict(dict)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            lent.state[memo[id(parameter)]] = {
                key: _dataless(mode, value)
                if isinstance(value, torch.Tensor)
                else copy.copy(value)
                for key, value in optimizer.state.get(parameter, {}).items()
            }
        mine = [memo[id(parameter)] for parameter in group["params"]]
        lent.param_groups.append({**group, "params": mine})
    return lent


_aten = torch.ops.aten


_CONTIGUOUS = frozenset(
    {
        _aten.huber_loss_backward.default,
        _aten.mse_loss_backward.default,
        _aten.smooth_l1_loss_backward.default,
    }
)
"""Operations with contiguous results, for which PyTorch's model has other strides."""


class StepFakes(FakeTensorMode):  # type: ignore[misc]  # PyTorch has no types here
    """PyTorch's fake mode, with corrections of missing or wrong models of kernels.

    Args:
        shape_env: Environment of symbols.
        results: Layouts that kernels were seen to return.
    """

    def __init__(self, shape_env: Any, results: "KernelResults") -> None:
        super().__init__(shape_env=shape_env, allow_non_fake_inputs=True)
        self._results = results
        self.allow_scalar_outputs = True

    def dispatch(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Return the fake result of an operation."""
        if func is _aten.bernoulli.p:
            with self:  # from `bernoulli_`, which keeps the strides of its tensor
                return torch.empty_like(args[0])
        with self:
            found = ctc_results(func, args)
        if found is not None:
            return found
        if func is _aten._grouped_mm.default and args[0].dtype is not torch.bfloat16:
            with self:  # PyTorch's model refuses what its kernel for the CPU takes
                return _grouped_product(*args, **(kwargs or {}))
        args, kwargs = _without_symbols_of_complex(args, kwargs or {})
        found = super().dispatch(func, types, args, kwargs)
        if func in _CONTIGUOUS and not found.is_contiguous():
            with self:
                return torch.empty(found.shape, dtype=found.dtype, device=found.device)
        return self._results.corrected(self, func, (args, kwargs), found)


def _grouped_product(
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return an empty result of `torch.nn.functional.grouped_mm`.

    If both operands have as many axes, the result has one product for each group along
    its first axis; otherwise `offsets` divide an axis of the result into groups.
    """
    shape = [a.shape[-2], b.shape[-1]]
    if a.dim() == b.dim():
        groups = a if offsets is None else offsets
        shape.insert(0, groups.shape[0])
    width = 16 // (out_dtype or a.dtype).itemsize  # rows begin at 16 bytes
    row = -(-shape[-1] // width) * width
    stride = [shape[-2] * row, row, 1][-len(shape) :]
    return torch.empty_strided(
        shape, stride, dtype=out_dtype or a.dtype, device=a.device
    )


def _without_symbols_of_complex(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Replace symbolic numbers beside complex tensors, such as learning rates, by 1.0.

    PyTorch's models of kernels convert them to complex, which a symbol cannot be. The
    layout of a result does not depend on them.
    """
    leaves = leaves_of(args, kwargs)
    if not any(isinstance(v, torch.Tensor) and v.is_complex() for v in leaves):
        return args, kwargs
    found: tuple[Any, Any] = pytree.tree_map_only(
        torch.SymFloat, lambda _: 1.0, (args, kwargs)
    )
    return found


# Layouts of results for which PyTorch's own model of a kernel is wrong.
#
# A graph is captured on fake tensors, by PyTorch's model of every kernel. Some models
# are wrong: under autocast in the types of normalizations' results, elsewhere in
# strides. Later operations are then captured wrongly too: casts that autograd inserts
# by type are missing. Measuring runs every kernel and finds the difference. The layouts
# found are kept, and the step is captured again until no kernel differs.


Results = Mapping[int | None, Layout]


ResultT = TypeVar("ResultT")


class KernelResults:
    """Layouts of results by operation and layouts of its operands."""

    def __init__(self) -> None:
        self._seen: dict[Any, dict[str, Results]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._seen.values()))

    def settled(
        self, capture: Callable[[], Any], use: Callable[[Any], ResultT]
    ) -> ResultT:
        """Capture a graph again until measurements agree with it; return its use.

        Raises:
            UnsupportedError: An operation's results differ in every capture.
        """
        while True:
            captured = capture()
            try:
                return use(captured)
            except WrongResultsError as e:
                if not self.learn(captured.module, e):
                    raise

    def learn(self, module: torch.fx.GraphModule, wrong: WrongResultsError) -> bool:
        """Keep the layouts that a measurement found; return whether any is new."""
        before = len(self)
        for node in module.graph.nodes:
            if (found := wrong.found.get(node.name)) is not None:
                seen = self._seen.setdefault(node.target, {})
                key = _key(node.args, node.kwargs)
                seen[key] = {**seen.get(key, {}), **found}
        return len(self) > before

    def corrected(
        self,
        mode: FakeTensorMode,
        function: Any,
        given: tuple[Any, Mapping[str, Any]],
        results: Any,
    ) -> Any:
        """Return fake results with the layouts that the kernel really returns.

        `given` are the operation's arguments, by position and by name.
        """
        with mode:
            results = corrected(function, given[0], results)
            if function is torch.ops.aten.mkldnn_rnn_layer_backward.default:
                # The model returns both gradients of biases as one tensor.
                places = list(map(storage_of, results))
                results = tuple(
                    torch.empty_like(t) if place in places[:i] else t
                    for i, (t, place) in enumerate(zip(results, places, strict=True))
                )
        seen = self._seen.get(function)
        if seen is None or (layouts := seen.get(_key(*given))) is None:
            return results
        with mode:
            if isinstance(results, torch.Tensor):
                return layouts[None].empty()
            return type(results)(
                [
                    layouts[k].empty() if k in layouts else value
                    for k, value in enumerate(results)
                ]
            )


def _key(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return a key of a call's operands: types, shapes and strides."""
    return repr([_said(leaf) for leaf in pytree.tree_leaves((tuple(args), kwargs))])


def _said(leaf: Any) -> Any:
    value = leaf.meta.get("val") if isinstance(leaf, torch.fx.Node) else leaf
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.stride()
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return type(value)
    return value
