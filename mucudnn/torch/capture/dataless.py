"""A model, its optimizer and a batch without data: what planning needs of them.

Copies of them have tensors that only know their shape, type and strides. So nothing of
the model's size is allocated, the optimizer gets no state, and a model that never had
data is as good as any. Tensors without a device (`meta`) stand for ones on the CPU.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from mucudnn.errors import UnsupportedError
from mucudnn.torch.capture.batches import Batch
from mucudnn.torch.capture.optimizers import make_state
from mucudnn.torch.capture.parts import check_parts

__all__ = ["DatalessStep"]


@dataclass(frozen=True)
class DatalessStep:
    """What `capture_step` takes, without data.

    Attributes:
        model: A copy.
        loss_fn: A copy if it is a module.
        example: As a step is called with.
        optimizer: A copy, with its state.
        whole: The optimizer that it is a copy of, which may have data.
    """

    model: torch.nn.Module
    loss_fn: Callable[..., Any]
    example: Batch
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
        """Copies of what there is.

        Raises:
            TypeError: Something is of another type.
            UnsupportedError: The model cannot be copied; says why.
        """
        check_parts(model, loss_fn, optimizer)
        _check(example)
        named = example if isinstance(example, Mapping) else {}
        given = Batch.of(() if named else tuple(example), named)
        modules = [model]
        if isinstance(loss_fn, torch.nn.Module):
            modules.append(loss_fn)
        mode = FakeTensorMode()
        own = [t for m in modules for t in (*m.parameters(), *m.buffers())]
        mine = set(map(id, own))
        # Those of the optimizer alone are parameters that the model had before.
        own += [p for group in optimizer.param_groups for p in group["params"]]
        memo: dict[int, Any] = {id(t): _dataless(mode, t) for t in own}
        try:
            copies = [copy.deepcopy(module, memo) for module in modules]
        except (TypeError, RuntimeError) as e:
            raise UnsupportedError(
                f"{type(model).__name__} cannot be copied, which a study needs: {e}"
            ) from e
        lent = _optimizer(optimizer, memo, mode)
        with mode:
            make_state(lent, {id(memo[at]) for at in mine})
        batch = replace(given, tensors=tuple(_dataless(mode, t) for t in given.tensors))
        loss_fn = copies[1] if len(copies) > 1 else loss_fn
        return cls(copies[0], loss_fn, batch, lent, optimizer)

    def wholes(self, copies: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Of parameters that the optimizer has, those that they are copies of."""
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
        """Size of the first axis that all tensors of the batch share, if they do."""
        tensors = self.example.tensors
        sizes = {tensor.shape[0] if tensor.dim() else None for tensor in tensors}
        return sizes.pop() if len(sizes) == 1 else None

    @property
    def size(self) -> int:
        """Size of the first axis of the first tensor."""
        first = self.example.tensors[0]
        return int(first.shape[0]) if first.dim() else 1

    @property
    def batch(self) -> int:
        """Size of the first axis of every tensor of the batch.

        Raises:
            ValueError: They do not share it.
        """
        if self.size_or_none is None:
            shapes = ", ".join(str(tuple(t.shape)) for t in self.example.tensors)
            raise ValueError(
                f"the example's tensors have the shapes {shapes}; other batches than "
                "it need one first axis that all of them share"
            )
        return self.size_or_none

    @property
    def parameters(self) -> int:
        """Elements of all parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters())


def _check(example: Any) -> None:
    """Refuse what is no batch.

    Raises:
        TypeError: Says what was given and what is wanted.
    """
    several = isinstance(example, Sequence | Mapping)
    if isinstance(example, torch.Tensor | str) or not several:
        raise TypeError(
            "example must be a batch, such as (x, y), or a dict of what the model "
            f"takes by name, got a {type(example).__name__}"
        )
    if not any(isinstance(v, torch.Tensor) for v in pytree.tree_leaves(example)):
        raise TypeError(
            "example must be a batch with tensors, such as (x, y), or a dict of what "
            "the model takes by name, and has no tensor"
        )


def _dataless(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like another, without its data."""
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
    """A copy that works on the copied parameters; its hooks are those of the other.

    PyTorch's own way to copy one would leave its hooks behind.
    """
    lent: torch.optim.Optimizer = object.__new__(type(optimizer))
    vars(lent).update(vars(optimizer))
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
