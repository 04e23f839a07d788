"""States of random generators: what is drawn again is what was drawn.

They are kept in memory that is not of PyTorch's allocator: not on the device.
"""

import torch

__all__ = ["get_state", "keep_state", "set_state"]


def get_state() -> torch.Tensor:
    """The generator's state."""
    return torch.get_rng_state()


def set_state(state: torch.Tensor) -> None:
    """Have random numbers drawn from a state on."""
    torch.set_rng_state(state)


def keep_state() -> torch.Tensor:
    """The generator's state, in memory that is not of PyTorch's allocator."""
    return torch.frombuffer(bytearray(torch.get_rng_state().numpy()), dtype=torch.uint8)
