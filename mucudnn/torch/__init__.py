"""PyTorch programs with our convolutions: the only room that imports PyTorch.

Importing this package imports nothing of PyTorch; its parts do, when they are used.
"""

import importlib
from typing import Any

__all__ = ["convolutions", "cpu_backend"]

_PARTS = {
    "convolutions": "mucudnn.torch.conv_context",
    "cpu_backend": "mucudnn.torch.conv_backend",
}


def __getattr__(name: str) -> Any:
    if name not in _PARTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    part = getattr(importlib.import_module(_PARTS[name]), name)
    globals()[name] = part
    return part
