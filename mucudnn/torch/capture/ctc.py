"""CTC's loss in graphs whose shapes are known: its table is as wide as targets may be.

PyTorch's kernel makes its table as wide as the longest target is. Lengths that are
numbers tell that; lengths that are tensors tell it when the kernel runs. Then the table
has room for the longest that there could be, and what is not there is of probability
zero.
"""

import math
from typing import Any

import torch

__all__ = ["ctc_results", "padded_ctc"]

_aten = torch.ops.aten

_FORWARD = frozenset({_aten._ctc_loss.default, _aten._ctc_loss.Tensor})
_BACKWARD = frozenset(
    {_aten._ctc_loss_backward.default, _aten._ctc_loss_backward.Tensor}
)


def ctc_results(func: Any, args: tuple[Any, ...]) -> Any:
    """What one of CTC's operations returns, without data; None of any other.

    Args:
        func: The operation.
        args: Its arguments, tensors without data.
    """
    if func in _BACKWARD:
        return torch.empty_like(args[1], memory_format=torch.contiguous_format)
    if func not in _FORWARD:
        return None
    probabilities, targets, _, lengths = args[:4]
    time, batch, _ = probabilities.shape
    if isinstance(lengths, torch.Tensor):
        longest = targets.shape[-1]
    else:
        longest = max(lengths, default=0)
    table = probabilities.new_empty((batch, time, 2 * longest + 1))
    return probabilities.new_empty((batch,)), table


def padded_ctc(
    probabilities: torch.Tensor,
    targets: torch.Tensor,
    times: torch.Tensor,
    lengths: torch.Tensor,
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`aten::_ctc_loss` with a table for the longest target that there is room for.

    It has the same bytes in use whatever the lengths are.
    """
    rows = _rows(targets, lengths)
    loss, table = _aten._ctc_loss.Tensor(
        probabilities, rows, times, lengths, blank, zero_infinity
    )
    batch, time, narrow = table.shape
    width = 2 * targets.shape[-1] + 1
    spare = table.new_empty((batch, time, width - narrow))
    whole = table.new_full((batch, time, width), -math.inf)
    whole[..., :narrow] = table
    del spare
    return loss, whole


def _rows(targets: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """A row for each target, of those that lie one behind the other."""
    if targets.dim() == 2:
        return targets
    ends = lengths.to(targets.device, torch.long).cumsum(0)
    size = len(targets)
    starts = torch.cat((ends.new_zeros(1), ends[:-1]))
    places = starts[:, None] + torch.arange(size, device=targets.device)
    return targets[places.clamp_(max=size - 1)]
