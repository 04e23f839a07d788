"""Nodes that cannot be planned, refused with the operation and the user's line."""

from collections.abc import Sequence
from typing import Any

import torch

from mucudnn.errors import UnsupportedError
from mucudnn.torch.places import line_of_stack

__all__ = ["DENSE", "refuse"]

DENSE = (
    "use dense ones (sparse=False, and Adam in place of SparseAdam), or let mt.backend "
    "compile what is behind an embedding and leave the embedding as it is"
)
"""What works in place of sparse tensors."""


def refuse(
    node: torch.fx.Node,
    function: Any,
    outputs: Sequence[tuple[int | None, str, torch.Tensor]],
) -> None:
    """Look at a node and its results.

    Raises:
        UnsupportedError: It is no operation of PyTorch's, changes its operands, or has
            results that are not dense or whose shapes depend on data.
    """
    where = line_of_stack(node.meta.get("stack_trace"))
    schema = getattr(function, "_schema", None)
    if schema is None:
        raise UnsupportedError(
            f"{node.name} calls {function}{where}, which is no operation of PyTorch's; "
            "such calls cannot be planned"
        )
    if schema.is_mutable:
        raise UnsupportedError(
            f"{node.name} calls {function}{where}, which changes its operands; only "
            "what is no view of something outside of the graph may be changed"
        )
    for _, name, value in outputs:
        if value.layout is not torch.strided:
            raise UnsupportedError(
                f"{name} of {function}{where} is {value.layout}; only dense tensors "
                f"are planned: {DENSE}"
            )
        if any(not isinstance(size, int) for size in value.shape):
            raise UnsupportedError(
                f"the shape of {name} of {function}{where} depends on data: "
                f"{tuple(value.shape)}; keep shapes, with torch.where or a mask"
            )
