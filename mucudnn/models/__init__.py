"""Networks of the literature: functions of the batch size that return a graph.

    from mucudnn import models

    training = models.resnet20(128)
    evaluation = models.resnet20(128, training=False)
    wide = models.resnet50(32, image=288, classes=10, dtype="float32", seed=1)
    any_name = models.get_model("resnet:6,32,48,6")(8)

The graph is the forward pass with the loss, as `mucudnn.Trainer` takes it.
`get_model(function)` makes such a network of any function and validates its graphs.
"""

import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType

from mucudnn.ir.graph import IMAGE, LABEL, Graph
from mucudnn.ir.sizes import parse_integer
from mucudnn.models.densenet import densenet40, densenet121
from mucudnn.models.inception import googlenet, googlenet_plain, inception_v4
from mucudnn.models.model import FunctionModel, Model, class_count
from mucudnn.models.plain import (
    alexnet,
    alexnet_owt,
    cifar_quick,
    digits,
    lenet,
    overfeat,
    vgg16,
    vgg19,
    vgg116,
    vgg216,
    vgg316,
    vgg416,
)
from mucudnn.models.resnet import (
    resnet18,
    resnet20,
    resnet32,
    resnet34,
    resnet44,
    resnet50,
    resnet56,
    resnet101,
    resnet110,
    resnet152,
    resnet_superneurons,
)
from mucudnn.models.unet import unet2d, unet2d_bn, unet3d, unet3d_plain
from mucudnn.plugins import PluginWarning, find_plugin, plugin_names

__all__ = [
    "IMAGE",
    "LABEL",
    "MODELS",
    "FunctionModel",
    "Model",
    "alexnet",
    "alexnet_owt",
    "cifar_quick",
    "class_count",
    "densenet40",
    "densenet121",
    "digits",
    "get_model",
    "googlenet",
    "googlenet_plain",
    "inception_v4",
    "lenet",
    "model_names",
    "network_name",
    "overfeat",
    "resnet18",
    "resnet20",
    "resnet32",
    "resnet34",
    "resnet44",
    "resnet50",
    "resnet56",
    "resnet101",
    "resnet110",
    "resnet152",
    "resnet_superneurons",
    "unet2d",
    "unet2d_bn",
    "unet3d",
    "unet3d_plain",
    "vgg16",
    "vgg19",
    "vgg116",
    "vgg216",
    "vgg316",
    "vgg416",
]

_GROUP = "mucudnn.models"

MODELS: Mapping[str, Model] = MappingProxyType(
    {name: value for name in __all__ if isinstance(value := globals().get(name), Model)}
)
"""Name -> network; `get_model` also accepts `resnet:n1,n2,n3,n4`."""

_FAMILY = "resnet:"
_DEEPEST = 10_000


def model_names() -> tuple[str, ...]:
    """Return the names that `get_model` accepts, those of plug-ins included."""
    return tuple(dict.fromkeys([*MODELS, *plugin_names(_GROUP)]))


def network_name(model: str | Callable[..., Graph]) -> str:
    """Return the name of a network for messages."""
    if isinstance(model, str):
        return model
    if isinstance(model, FunctionModel):
        return model.name
    for name, known in MODELS.items():
        if known is model:
            return name
    return str(getattr(model, "__name__", type(model).__name__))


def get_model(name: str | Callable[..., Graph]) -> Model | FunctionModel:
    """Return a network by its name.

    Args:
        name: A key of `MODELS`, `resnet:6,32,48,6` for bottleneck residual networks
            with that many blocks per stage, the name of an installed plug-in
            (entry-point group `mucudnn.models`), or a function of the batch size that
            returns a graph.

    Raises:
        ValueError: The name is unknown; the message lists the known ones.
        TypeError: `name` is neither a text nor a function.
    """
    if not isinstance(name, str):
        return _network(name, network_name(name))
    if name in MODELS:
        return MODELS[name]
    if name.startswith(_FAMILY):
        return _of_family(name)
    if (plugin := find_plugin(_GROUP, name)) is not None:
        try:
            return _network(plugin.load(), name)
        except ImportError as e:
            warnings.warn(f"model {e}", PluginWarning, stacklevel=2)
        except TypeError as e:
            warnings.warn(
                f"model {name!r} of the distribution {plugin.distribution}: {e}",
                PluginWarning,
                stacklevel=2,
            )
    valid = ", ".join(known for known in model_names() if known != name)
    raise ValueError(
        f"unknown model {name!r}; choose one of: {valid}, or {_FAMILY}n1,n2,n3,n4"
    )


def _network(made: object, name: str) -> Model | FunctionModel:
    if isinstance(made, Model | FunctionModel):
        return made
    if not callable(made):
        raise TypeError(
            f"a model is a name or a function of the batch, got {made!r}; names are: "
            f"{', '.join(model_names())}"
        )
    return FunctionModel(made, name)


def _of_family(name: str) -> Model:
    fields = name.removeprefix(_FAMILY).split(",")
    try:
        n1, n2, n3, n4 = (parse_integer(field, most=_DEEPEST) for field in fields)
    except ValueError:
        raise ValueError(
            f"{name!r} is not a residual network; write four numbers of blocks, such "
            f"as {_FAMILY}6,32,48,6, of at most {_DEEPEST} each"
        ) from None
    return resnet_superneurons(n3, n1=n1, n2=n2, n4=n4)
