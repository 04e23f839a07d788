"""Published figures of devices, for estimates where nothing was measured.

Peaks and capacities are the vendors'. The share of a peak that a kernel reaches is not
published; it is assumed, equal for all devices, and labelled as such. Estimates are for
comparing policies with each other; they do not predict the time on a device.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from types import MappingProxyType

from mucudnn.arguments import check_choice
from mucudnn.ir.profile import ChunkCosts

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


_GIB = 1024**3

_CHUNKS = ChunkCosts(2 << 20, map_ms=0.069, unmap_ms=0.034)


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with its source."""

    value: float
    source: str


@dataclass(frozen=True, slots=True)
class AssumedEfficiency:
    """Assumed shares of peaks; none of them is measured.

    Attributes:
        matmul: Share of the arithmetic peak in a large matrix product.
        direct: Share of the arithmetic peak in a convolution without workspace.
        memory: Share of the memory bandwidth in bandwidth-bound kernels.
        link: Share of a link's nominal one-way rate in large copies.
        launch_ms: Overhead of every kernel launch.
        chunks: Costs of mapping memory in the granularity of today's GPUs, each chunk
            with a driver call of its own to set access.
    """

    matmul: float = 0.70
    direct: float = 0.40
    memory: float = 0.75
    link: float = 0.80
    launch_ms: float = 0.005
    chunks: ChunkCosts = _CHUNKS


ASSUMED = AssumedEfficiency()
"""Shares used by every estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFigures:
    """Published figures of a device.

    Attributes:
        title: The vendor's name.
        flops: Peak operations per second in the arithmetic that its source names;
            single precision by default.
        bandwidth: Peak bytes per second of device memory.
        memory: Bytes of device memory.
        d2h: Bytes per second to the host in large copies.
        h2d: Bytes per second from the host in large copies.
        dtypes: Tensor types whose products reach `flops`.
        turns: Whether products run on tensor cores, whose kernels want channels last:
            channels-first images are transposed on their way in and out.
    """

    title: str
    flops: Figure
    bandwidth: Figure
    memory: Figure
    d2h: Figure
    h2d: Figure
    dtypes: tuple[str, ...] = ("float32",)
    turns: bool = False

    def sources(self) -> Mapping[str, str]:
        """Describe each figure and its source in words."""
        return {
            "arithmetic": f"{self.flops.value / 1e12:g} TFLOP/s, {self.flops.source}",
            "bandwidth": f"{self.bandwidth.value / 1e9:g} GB/s, "
            f"{self.bandwidth.source}",
            "memory": f"{self.memory.value / _GIB:.4g} GiB, {self.memory.source}",
            "link": f"{self.d2h.value / 1e9:g} GB/s out, {self.d2h.source}; "
            f"{self.h2d.value / 1e9:g} GB/s back, {self.h2d.source}",
            "shares of peaks": f"assumed: {ASSUMED.matmul:.0%} in matrix products, "
            f"{ASSUMED.direct:.0%} in convolutions without workspace, "
            f"{ASSUMED.memory:.0%} of the bandwidth, {1e3 * ASSUMED.launch_ms:g} µs a "
            "launch",
            "mapping": f"assumed: {1e3 * ASSUMED.chunks.map_ms:g} µs for a chunk of "
            f"{ASSUMED.chunks.nbytes >> 20} MiB, once, where memory is mapped",
        }


def _read_devices() -> Mapping[str, DeviceFigures]:
    text = files("mucudnn.ir").joinpath("devices.toml").read_text("utf-8")
    found: dict[str, DeviceFigures] = {}
    for row in tomllib.loads(text)["device"]:
        title, source, link = row["title"], row["source"], row["link"]
        if (gb_per_s := link.get("nominal_gb_per_s")) is None:
            rate = Figure(link["gb_per_s"] * 1e9, link["source"])
        else:
            what = f"(assumed) of {gb_per_s:g} GB/s a direction, {link['source']}"
            reached = gb_per_s * ASSUMED.link * 1e9
            rate = Figure(reached, f"{ASSUMED.link:.0%} {what}")
        by_suffix = isinstance(row["tflops"], dict)
        for suffix, tflops in (
            row["tflops"] if by_suffix else {"": row["tflops"]}
        ).items():
            words = f"{source}, {ARITHMETIC[suffix]}" if by_suffix else source
            nbytes = row["gib"] * _GIB if "gib" in row else row["gb"] * 1e9
            found[row["name"] + suffix] = DeviceFigures(
                title=f"{title}, {ARITHMETIC[suffix]}" if suffix else title,
                flops=Figure(tflops * 1e12, words),
                bandwidth=Figure(row["gb_per_s"] * 1e9, words),
                memory=Figure(nbytes, words),
                d2h=rate,
                h2d=rate,
                dtypes=TENSORS[suffix],
                turns=bool(suffix),
            )
    return MappingProxyType(found)


DEVICES = _read_devices()
"""Devices by name. `null` is not a real device: round numbers for experiments.

`h200`, `h100` and the like compute in single precision, without tensor cores. With the
suffix `_tf32` or `_half` they use tensor cores, as most training does.
"""


def get_device(name: str) -> DeviceFigures:
    """Return the figures of a device; the error for an unknown one lists all."""
    return DEVICES[check_choice("device", name, DEVICES)]


def name_computing(name: str, dtype: str) -> str:
    """Return the device variant that computes in a type: `h200_half`."""
    half = f"{name}_half"
    known = half in DEVICES and dtype in DEVICES[half].dtypes
    return half if dtype not in get_device(name).dtypes and known else name
