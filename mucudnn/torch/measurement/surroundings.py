"""What measurements depend on beside the graph: machine, versions and settings."""

from collections.abc import Mapping

import torch

from mucudnn.backends.cpu.device import CpuDevice
from mucudnn.torch.lowering.lowered import Lowered

__all__ = ["surroundings_of"]


def surroundings_of(lowered: Lowered) -> Mapping[str, str]:
    """Devices that a graph runs on, and settings that change what its nodes cost."""
    found = {
        "torch": torch.__version__,
        "host": CpuDevice().fingerprint,
        "threads": str(torch.get_num_threads()),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "onednn": str(torch._C._get_mkldnn_enabled()),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "matmul": torch.get_float32_matmul_precision(),
    }
    devices = {layout.device for layout in lowered.layouts.values()}
    for device in sorted(devices, key=str):
        if device.type == "cuda":
            found[str(device)] = _cuda(device)
    return found


def _cuda(device: torch.device) -> str:
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    return "/".join(
        map(
            str,
            (
                torch.cuda.get_device_name(device),
                torch.cuda.get_device_capability(device),
                torch.version.cuda,
                cudnn.version(),
                (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32),
                matmul.allow_tf32,
            ),
        )
    )
