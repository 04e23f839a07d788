"""Devices whose peak arithmetic rate depends on the precision of products.

Rates are for dense operands; data sheets often print twice as much, for sparse ones.
Tensors keep the graph's precision whatever the arithmetic: half precision on a graph of
single-precision tensors has fast products but no smaller copies.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["ARITHMETIC", "BY_ARITHMETIC", "TENSORS", "Peaks"]

ARITHMETIC: Mapping[str, str] = MappingProxyType(
    {
        "": "single precision",
        "_tf32": "TF32 on tensor cores, dense",
        "_half": "half precision on tensor cores with sums in single, dense",
    }
)
"""Suffix of a device's name -> description of its arithmetic."""

TENSORS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "": ("float32",),
        "_tf32": ("float32",),
        "_half": ("float32", "float16", "bfloat16"),
    }
)
"""Suffix of a device's name -> tensor types that are multiplied in this arithmetic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """Published peaks of a device; `tflops` maps suffixes of its name to rates.

    The nominal one-way rate of the link to the host is `link_gb_per_s`.
    """

    title: str
    source: str
    tflops: Mapping[str, float]
    gb_per_s: float
    gb: float
    link_gb_per_s: float
    link: str


def _rates(single: float | None, tf32: float, half: float) -> Mapping[str, float]:
    found = {"_tf32": tf32, "_half": half}
    return MappingProxyType(found if single is None else {"": single, **found})


_PCIE4 = "PCIe 4.0 x16"
_PCIE5 = "PCIe 5.0 x16"

BY_ARITHMETIC: Mapping[str, Peaks] = MappingProxyType(
    {
        "a100": Peaks(
            title="NVIDIA A100 80GB SXM",
            source="NVIDIA A100 data sheet",
            tflops=_rates(19.5, 156, 312),
            gb_per_s=2039,
            gb=80,
            link_gb_per_s=32,
            link=f"{_PCIE4}, NVIDIA A100 data sheet",
        ),
        "h100": Peaks(
            title="NVIDIA H100 SXM",
            source="NVIDIA H100 data sheet",
            tflops=_rates(67, 494.5, 989.5),
            gb_per_s=3350,
            gb=80,
            link_gb_per_s=64,
            link=f"{_PCIE5}, NVIDIA H100 data sheet",
        ),
        "h200": Peaks(
            title="NVIDIA H200 SXM",
            source="NVIDIA H200 data sheet",
            tflops=_rates(None, 494.5, 989.5),
            gb_per_s=4800,
            gb=141,
            link_gb_per_s=64,
            link=f"{_PCIE5}, NVIDIA H200 data sheet",
        ),
        "gh200": Peaks(
            title="NVIDIA GH200 96GB",
            source="NVIDIA GH200 data sheet; rates as of its H100, bandwidth "
            "unconfirmed",
            tflops=_rates(67, 494, 990),
            gb_per_s=4000,
            gb=96,
            link_gb_per_s=450,
            link="half of NVLink-C2C's 900 GB/s both ways, NVIDIA GH200 data sheet",
        ),
        "b200": Peaks(
            title="NVIDIA B200 in HGX B200",
            source="an eighth of NVIDIA HGX B200's figures; others quote 75 to 80 "
            "TFLOP/s, 1100 to 1130 in TF32, and 7.7 to 8 TB/s",
            tflops=_rates(75, 1125, 2250),
            gb_per_s=8000,
            gb=180,
            link_gb_per_s=64,
            link=f"{_PCIE5} of DGX B200's hosts",
        ),
        "rtx4090": Peaks(
            title="NVIDIA GeForce RTX 4090",
            source="NVIDIA Ada GPU architecture white paper",
            tflops=_rates(82.6, 82.6, 165.2),
            gb_per_s=1008,
            gb=24 * 1.073741824,
            link_gb_per_s=32,
            link=_PCIE4,
        ),
        "rtx5090": Peaks(
            title="NVIDIA GeForce RTX 5090",
            source="NVIDIA RTX Blackwell GPU architecture white paper; TF32 and half "
            "are derived: an eighth and a quarter of 838 for sparse FP16",
            tflops=_rates(104.8, 104.8, 209.5),
            gb_per_s=1792,
            gb=32 * 1.073741824,
            link_gb_per_s=64,
            link=_PCIE5,
        ),
    }
)
"""Peaks by device name. The H200 in single precision is listed separately."""
