"""States of random generators: what is drawn again is what was drawn.

They are kept in memory that is not of PyTorch's allocator: not on the device. A CUDA
generator is a seed and an offset, which PyTorch has on the host.
"""

import torch

from mucudnn.torch.lowering.lowered import Lowered

__all__ = ["generator_of", "get_state", "keep_state", "set_state"]


def generator_of(lowered: Lowered, node: str) -> torch.device | None:
    """The device whose generator a random node draws from; None is the CPU."""
    names = lowered.graph.by_name[node].tensors
    devices = {lowered.layouts[name].device for name in names}
    return next((device for device in devices if device.type != "cpu"), None)


def get_state(device: torch.device | None = None) -> torch.Tensor:
    """The state of a device's generator; None is the CPU's."""
    if device is None:
        return torch.get_rng_state()
    found: torch.Tensor = torch.cuda.get_rng_state(device)
    return found


def set_state(state: torch.Tensor, device: torch.device | None = None) -> None:
    """Have random numbers drawn from a state on."""
    if device is None:
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, device)


def keep_state(device: torch.device | None = None) -> torch.Tensor:
    """The generator's state, in memory that is not of PyTorch's allocator."""
    state = get_state(device)
    return torch.frombuffer(bytearray(state.numpy()), dtype=torch.uint8)
