"""The papers' networks, batches and memories that our planner is given, too.

The papers leave parameters out of their peaks, or count them without the optimizer's
momentum; a planner that counts every byte needs room for those as well. So a case's
budget is the paper's peak, and what the paper's rules leave out of it but for
workspaces: 12 bytes a parameter (value, gradient, momentum) in all, and the batch.
"""

from collections.abc import Callable
from dataclasses import dataclass

from bench.papers.capacity import BASELINE, GIB, needed
from bench.papers.layers import FLOAT, Network
from bench.papers.networks import MODELS, of_library
from bench.papers.vdnn import account, alexnet_one_tower, googlenet, overfeat, vgg

SUPERNEURONS = "SuperNeurons"
VDNN = "vDNN"

MEMORY = 12 * GIB
"""Of the papers' K40c and Titan X."""

_DEVICES = {SUPERNEURONS: "k40c", VDNN: "titan_x"}
_POLICIES = {SUPERNEURONS: "superneurons", VDNN: "vdnn_dyn"}
_ALEXNET = (BASELINE, "liveness", "offload_prefetch", "speed", "cost_aware")
_OTHERS = ("vgg16", "resnet50", "resnet101", "resnet152", "inception_v4")


@dataclass(frozen=True, slots=True)
class Case:
    """One network at one batch size in some memory.

    Attributes:
        paper: Whose.
        network: As the paper has it.
        model: What the library calls the same network.
        batch: Images in a step.
        at: Which memory that is: a technique's peak, or a device's.
        budget: Bytes.
    """

    paper: str
    network: Network
    model: str
    batch: int
    at: str
    budget: int

    @property
    def name(self) -> str:
        """Unique."""
        return name_of(self.paper, self.network.name, self.batch, self.at)

    @property
    def device(self) -> str:
        """The paper's, a name in `DEVICES`."""
        return _DEVICES[self.paper]

    @property
    def policy(self) -> str:
        """The paper's, as the library has it."""
        return _POLICIES[self.paper]


def name_of(paper: str, network: str, batch: int, at: str) -> str:
    """A case's name."""
    return f"{paper}, {network} ({batch}), {at}"


def cases() -> list[Case]:
    """All of them."""
    made = [_superneurons("alexnet", 200, at) for at in _ALEXNET]
    made += [_superneurons(name, 32, "cost_aware") for name in _OTHERS]
    deepest = MODELS["resnet2500"]()
    model = of_library("resnet2500")
    made.append(Case(SUPERNEURONS, deepest, model, 1, "12 GiB", MEMORY))
    made += [_vdnn(*one, 128) for one in (
        (alexnet_one_tower, "alexnet_owt"), (overfeat, "overfeat"),
        (googlenet, "googlenet_plain"),
    )]  # fmt: skip
    made += [_vdnn(vgg, "vgg16", batch) for batch in (64, 128, 256)]
    made += [
        Case(VDNN, vgg(), "vgg16", 256, "12 GiB", MEMORY),
        Case(VDNN, vgg(80), "vgg416", 32, "12 GiB", MEMORY),
    ]
    return made


def _superneurons(name: str, batch: int, technique: str) -> Case:
    network = MODELS[name]()
    budget = needed(network, technique, batch)
    return Case(SUPERNEURONS, network, of_library(name), batch, technique, budget)


def _vdnn(make: Callable[[], Network], model: str, batch: int) -> Case:
    """Its peaks hold the batch, values and gradients; momentum is missing."""
    network = make()
    budget = account(network, batch).all.most + FLOAT * network.parameters
    return Case(VDNN, network, model, batch, "vdnn_all", budget)
