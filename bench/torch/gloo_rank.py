"""One rank of several on this machine, over gloo: how it starts and how it ends."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

__all__ = ["environment", "run_rank"]


def environment() -> dict[str, str]:
    """What a rank's process is started with: the loopback device, one thread."""
    return {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parent.parent.parent),
    }


def run_rank(store: Path, rank: int, size: int, work: Callable[[], None]) -> NoReturn:
    """Do something among others, and end the process.

    Args:
        store: A file that all ranks meet at.
        rank: Which of them this is.
        size: How many there are.
        work: What is done.
    """
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size
    )
    work()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may outlive the group, and abort an interpreter's end
