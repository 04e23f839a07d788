"""What a step is called with: tensors, and how they lie in its arguments."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from mucudnn.errors import UnsupportedError

__all__ = ["Batch", "called"]

_DECIDED = (bool, str, type(None))
"""Types whose values are part of a plan."""


@dataclass(frozen=True)
class Batch:
    """The arguments of a step.

    Attributes:
        tensors: All tensors among them, in order.
        form: What lies around the tensors.
        leaves: Every leaf of the form: None for a tensor, else a value in a tuple.
    """

    tensors: tuple[torch.Tensor, ...]
    form: Any
    leaves: tuple[tuple[Any] | None, ...]

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> "Batch":
        """Take the arguments of a call apart.

        Raises:
            TypeError: One of them is neither a tensor nor a switch.
            UnsupportedError: This is within `torch.inference_mode()`.
        """
        if torch.is_inference_mode_enabled():
            raise UnsupportedError(
                "a step is called within torch.inference_mode(), where PyTorch keeps "
                "no gradients; call it outside"
            )
        if not args and not kwargs:
            raise TypeError("a step is called with a batch, such as step(x, y)")
        plain = tuple(dict(a) if isinstance(a, Mapping) else a for a in args)
        flat, form = pytree.tree_flatten((plain, dict(kwargs)))
        for leaf in flat:
            if not isinstance(leaf, (torch.Tensor, *_DECIDED)):
                raise TypeError(
                    f"a batch has a {type(leaf).__name__}; tensors are wanted, such as "
                    "step(x, y), step((x1, x2), y) or step(**batch): a number that "
                    "changes from step to step as torch.tensor(number)"
                )
        tensors = tuple(leaf for leaf in flat if isinstance(leaf, torch.Tensor))
        leaves = tuple(None if isinstance(v, torch.Tensor) else (v,) for v in flat)
        return cls(tensors, form, leaves)

    @property
    def signature(self) -> str:
        """The shapes and types of the tensors, as a message shows them."""
        shown = [
            f"{t.dtype} {list(t.shape)}".removeprefix("torch.") for t in self.tensors
        ]
        return f"a batch of {', '.join(shown)}" if shown else "a batch without tensors"

    def arguments(
        self, tensors: Sequence[torch.Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, positional and by name, with other tensors in their places."""
        given = iter(tensors)
        flat = [next(given) if leaf is None else leaf[0] for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(flat, self.form)
        return tuple(args), kwargs

    def parts(
        self, tensors: Sequence[torch.Tensor], count: int
    ) -> list[tuple[list[torch.Tensor], float]]:
        """Tensors cut along their first axes, and what each part's loss is divided by.

        Raises:
            ValueError: They do not have one first axis.
        """
        if count == 1:
            return [(list(tensors), 1)]
        sizes = {t.shape[0] if t.dim() else None for t in tensors}
        size = sizes.pop()
        if sizes or size is None:
            shapes = ", ".join(str(tuple(t.shape)) for t in tensors)
            raise ValueError(
                f"accumulate={count} cuts every tensor of a batch along its first "
                f"axis, which must be the batch's; the tensors are {shapes}"
            )
        count = min(count, int(size))
        cut = [t.tensor_split(count) for t in tensors]
        rows = [list(row) for row in zip(*cut, strict=True)]
        even = size % count == 0
        return [(row, count if even else size / row[0].shape[0]) for row in rows]


def called(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a model makes of the first argument of a step and of those by name.

    A tuple is its positional arguments, a dict its arguments by name.
    """
    match args[0] if args else ():
        case Mapping() as named:
            return model(**named, **kwargs)
        case tuple() | list() as several:
            return model(*several, **kwargs)
        case one:
            return model(one, **kwargs)
