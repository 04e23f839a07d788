"""torchvision's and timm's networks, beside any build of PyTorch.

torchvision's compiled operators load beside the build of PyTorch that they were made
for only. What it registers for them when it is imported is left out then: networks that
classify call none of them.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

_REGISTRATIONS = (
    "torchvision._autograd_registrations",
    "torchvision._meta_registrations",
)
"""What fails where the operators are missing."""


def torchvision_model(name: str, **options: Any) -> torch.nn.Module:
    """A classifier of torchvision's, its weights drawn at random."""
    _import_torchvision()
    found: torch.nn.Module = import_module("torchvision.models").get_model(
        name, weights=None, **options
    )
    return found


def vision_transformer(**sizes: Any) -> torch.nn.Module:
    """A transformer of torchvision's, of any sizes."""
    _import_torchvision()
    models = import_module("torchvision.models")
    found: torch.nn.Module = models.VisionTransformer(**sizes)
    return found


def timm_model(name: str, **options: Any) -> torch.nn.Module:
    """A classifier of timm's, its weights drawn at random."""
    _import_torchvision()
    found: torch.nn.Module = import_module("timm").create_model(
        name, pretrained=False, **options
    )
    return found


def _import_torchvision() -> None:
    if "torchvision" not in sys.modules:
        sys.modules.update((name, ModuleType(name)) for name in _REGISTRATIONS)
        import_module("torchvision")
