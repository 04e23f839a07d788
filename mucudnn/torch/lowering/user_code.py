"""Where in the user's code a node of a captured graph comes from."""

import re
from pathlib import Path

import torch

__all__ = ["user_line"]

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_PYTORCH = str(Path(torch.__file__).parent)


def user_line(node: torch.fx.Node) -> str:
    """The innermost line that is not PyTorch's own, as "net.py:12"; "" if not known."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    for file, line in reversed(frames):
        if not file.startswith(_PYTORCH):
            return f"{file}:{line}"
    return ""
