"""What normalisations save and read, as PyTorch's kernels really do.

PyTorch's own model of these kernels says another type where a network's parameters are
narrow. Statistics are in the weight's type, new running ones in that of the old. And
the gradient of a batch norm names running statistics that it reads only where they were
what it normalised with: in training they would live on for nothing.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

__all__ = ["corrected", "statistics_types", "without_masked", "without_unread"]

_aten = torch.ops.aten

_NORMS: Mapping[Any, bool] = MappingProxyType(
    {
        _aten._native_batch_norm_legit.default: False,
        _aten._native_batch_norm_legit.no_stats: False,
        _aten._native_batch_norm_legit_functional.default: True,
        _aten.native_batch_norm.default: False,
        _aten.native_group_norm.default: False,
    }
)
"""Operation -> whether new running statistics are results, too."""


def statistics_types(function: Any, args: Sequence[Any]) -> Mapping[int, torch.dtype]:
    """Place of a result -> its type, where PyTorch's model of a kernel may be wrong.

    Args:
        function: What is called.
        args: Its operands, with or without data.
    """
    if function not in _NORMS:
        return {}
    found: dict[int, torch.dtype] = {}
    if isinstance(args[1], torch.Tensor):
        found |= {1: args[1].dtype, 2: args[1].dtype}
    if _NORMS[function]:
        running = ((3, args[3]), (4, args[4]))
        found |= {k: t.dtype for k, t in running if isinstance(t, torch.Tensor)}
    return found


def without_unread(function: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Operands without running statistics that the function does not look at."""
    if function is not _aten.native_batch_norm_backward.default or not args[7]:
        return args
    return (*args[:3], None, None, *args[5:])


def without_masked(
    function: Any, args: Sequence[Any], results: Sequence[Any]
) -> tuple[Any, ...]:
    """Results without gradients that were not asked for.

    PyTorch's model of a batch norm's gradient has all three; its kernel returns none
    for a mask that is off, as behind a layer that is frozen.
    """
    if function is not _aten.native_batch_norm_backward.default:
        return tuple(results)
    return tuple(
        value if on else None for value, on in zip(results, args[9], strict=True)
    )


def corrected(results: Any, types: Mapping[int, torch.dtype]) -> Any:
    """Results without data, some of other types; the same where nothing is wrong."""
    if not types:
        return results
    return tuple(
        value if types.get(k, value.dtype) == value.dtype else value.to(types[k])
        for k, value in enumerate(results)
    )
