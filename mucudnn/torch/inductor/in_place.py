"""Decide which operand a kernel's result may overwrite.

A kernel was compiled to write its results to memory of their own. A result may take the
place of an operand if each element of the operand is read at the address at which the
result is written, which the source shows. Then the kernel is tried: it runs out of
place and in place on the same values, and the pair is dropped unless all bits are
equal. The compiler may use other instructions, which round differently, where pointers
alias, and a later loop of the kernel may read the operand again. Of Triton's kernels
only pointwise ones are tried: in a reduction, one thread may read what another writes.
"""

import re
from collections.abc import Sequence
from typing import Any

import torch

from mucudnn.torch.inductor.wrapper_text import KernelLine
from mucudnn.torch.lowering.lowered import Layout

_SMALLEST = 1 << 12
"""Bytes of a result from which on it is worth a try."""

_INDEX = r"\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)"
"""An index in parentheses, which may have more of them within."""


def candidates(
    line: KernelLine, result: str, layouts: dict[str, Layout], sizes: dict[str, int]
) -> list[str]:
    """Return operands of a line that have the result's size, type and addresses."""
    if line.kernel is None or result not in line.layouts or line.changes:
        return []
    if line.kernel.triton and "@triton_heuristics.pointwise(" not in line.kernel.source:
        return []
    made = line.layouts[result]
    if sizes[result] < _SMALLEST:
        return []
    written = _addresses(line, result)
    if len(written) != 1:
        return []
    return [
        operand
        for operand in line.operands
        if layouts[operand].dtype == made.dtype
        and sizes[operand] == sizes[result]
        and layouts[operand].offset == 0
        and _addresses(line, operand) == written
    ]


def keeps_bits(line: KernelLine, operand: str, given: Sequence[torch.Tensor]) -> bool:
    """Return whether a line has the same results with the first one in place.

    The given operands are not changed.
    """
    assert line.into is not None
    expected = _as_tuple(line.function(*given))
    at = line.operands.index(operand)
    mine = [*given]
    mine[at] = given[at].clone(memory_format=torch.preserve_format)
    found = _as_tuple(line.into(*mine, out=mine[at]))
    return all(
        torch.equal(_bits(a), _bits(b)) for a, b in zip(expected, found, strict=True)
    )


def _addresses(line: KernelLine, value: str) -> set[str]:
    """Return the addresses at which a kernel uses a value; empty if not all are known.

    Vectorized loops and their scalar tails use one address under two names.
    """
    assert line.kernel is not None
    places = [i for i, pointer in enumerate(line.pointers) if pointer == value]
    if len(places) != 1:
        return set()
    name = line.kernel.parameters[places[0]][0]
    if line.kernel.triton:
        body = line.kernel.source.partition("\ndef ")[2].partition("):\n")[2]
        address = rf"\b{name} \+ {_INDEX}"
    else:
        body = line.kernel.source.partition("{")[2]
        address = rf"\b{name}(?: \+ |\[)static_cast<int64_t>{_INDEX}"
    uses = len(re.findall(rf"\b{name}\b", body))
    plain = re.findall(address, body)
    if uses != len(plain):
        return set()
    return {address.replace("_tail", "") for address in plain}


def _as_tuple(found: Any) -> tuple[torch.Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
