"""Functions that were written as Python, and what one leaves to the next."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mucudnn.passes.scheduling.costs import origin
from mucudnn.torch.lowering.lowered import Layout

__all__ = ["Kept", "Segment", "compiled"]


@dataclass(frozen=True)
class Segment:
    """Part of a program as a function of what is there at its start.

    Attributes:
        source: Python.
        run: Takes a list, which it empties, and returns a list.
    """

    source: str
    run: Callable[[list[Any]], list[Any]]


@dataclass(frozen=True)
class Kept:
    """What one segment leaves to the next, as a tensor.

    Attributes:
        variable: That has it in both.
        value: What the first returns of it.
        tensor: Whose it is; of a storage on the host, the storage; else None.
        host_bytes: Its size on the host; 0 if it is a tensor on the device.
    """

    variable: str
    value: str
    tensor: str | None = None
    host_bytes: int = 0

    def like(self, layouts: Mapping[str, Layout]) -> torch.Tensor:
        """A tensor of its kind."""
        if self.host_bytes or self.tensor is None:
            return torch.empty(self.host_bytes, dtype=torch.uint8)
        layout = layouts[origin(self.tensor)]
        return torch.empty_strided(
            layout.shape, layout.stride, dtype=layout.dtype, device=layout.device
        )


def compiled(
    given: Sequence[str],
    lines: Sequence[str],
    results: Sequence[str],
    space: Mapping[str, Any],
    failed: str | None = None,
) -> Segment:
    """A function of these variables with these lines.

    Args:
        given: Variables, in the order of their values; `_` for a value of no use.
        lines: Statements.
        results: What it returns, as text.
        space: Name -> what it stands for.
        failed: What is done if it raises, while its variables are still there.
    """
    head = ["def run(given):"]
    if given:
        head.append(f"    {', '.join(given)}, = given")
    head.append("    given.clear()")
    if "_" in given:
        head.append("    _ = None")
    body = [f"    {line}" for line in (*lines, f"return [{', '.join(results)}]")]
    if failed is not None:
        body = ["    try:", *(f"    {line}" for line in body)]
        body += ["    except BaseException:", f"        {failed}", "        raise"]
    source = "\n".join([*head, *body, ""])
    found = dict(space)
    exec(compile(source, "<planned step>", "exec"), found)
    return Segment(source, found["run"])
