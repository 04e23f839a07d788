"""Published figures of devices, for estimates where nothing was measured.

Peaks and capacities are the vendors'. The share of a peak that a kernel reaches is not
published; it is assumed, equal for all devices, and labelled as such. Estimates are for
comparing policies with each other; they do not predict the time on a device.
"""

import difflib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from mucudnn.arguments import of_type
from mucudnn.ir.profile import ChunkCosts

_GIB = 1024**3

_CHUNKS = ChunkCosts(2 << 20, map_ms=0.069, unmap_ms=0.034)

TF32 = "tf32"
"""Name of the rate of float32 products on tensor cores."""


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
        flops: Peak operations per second in single precision, without tensor cores.
        bandwidth: Peak bytes per second of device memory.
        memory: Bytes of device memory.
        d2h: Bytes per second to the host in large copies.
        h2d: Bytes per second from the host in large copies.
        tensor_cores: Peak operations per second on tensor cores without sparsity, by
            the operands' type, `tf32` for float32 ones. Their kernels want channels
            last: channels-first images are transposed on their way in and out.
    """

    title: str
    flops: Figure
    bandwidth: Figure
    memory: Figure
    d2h: Figure
    h2d: Figure
    tensor_cores: Mapping[str, float] = field(default_factory=dict)

    def rates(self, dtype: str, *, tf32: bool = False) -> Mapping[bool, float]:
        """Return the peaks for products of a type: on tensor cores or not -> rate.

        Args:
            dtype: Type of the operands.
            tf32: Whether float32 operands may be rounded to TF32.
        """
        found = {False: self.flops.value} if dtype == "float32" else {}
        kind = TF32 if tf32 and dtype == "float32" else dtype
        if kind in self.tensor_cores:
            found[True] = self.tensor_cores[kind]
        return found

    def peak(self, dtype: str, *, tf32: bool = False) -> float:
        """Return the highest peak for products of a type; single precision if none."""
        return max(self.rates(dtype, tf32=tf32).values(), default=self.flops.value)

    def sources(self) -> Mapping[str, str]:
        """Describe each figure and its source in words."""
        several: dict[float, list[str]] = {}
        for kind, rate in self.tensor_cores.items():
            several.setdefault(rate, []).append(kind)
        dense = "".join(
            f"; {rate / 1e12:g} in {' and '.join(kinds)}"
            for rate, kinds in several.items()
        )
        cores = f"{dense} on tensor cores, dense" if dense else ""
        return {
            "arithmetic": f"{self.flops.value / 1e12:g} TFLOP/s{cores}, "
            f"{self.flops.source}",
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


def _make_device(
    title: str,
    source: str,
    *,
    tflops: float,
    gb_per_s: float,
    memory: float,
    link: Figure,
    tf32: float | None = None,
    half: float | None = None,
    float8: float | None = None,
) -> DeviceFigures:
    rates = {
        TF32: tf32,
        "float16": half,
        "bfloat16": half,
        "float8_e4m3fn": float8,
        "float8_e5m2": float8,
    }
    return DeviceFigures(
        title=title,
        flops=Figure(tflops * 1e12, source),
        bandwidth=Figure(gb_per_s * 1e9, source),
        memory=Figure(memory, source),
        d2h=link,
        h2d=link,
        tensor_cores=MappingProxyType(
            {kind: rate * 1e12 for kind, rate in rates.items() if rate is not None}
        ),
    )


def _nominal_link(gb_per_s: float, what: str) -> Figure:
    share = ASSUMED.link
    return Figure(
        gb_per_s * share * 1e9,
        f"{share:.0%} (assumed) of {gb_per_s:g} GB/s a direction, {what}",
    )


_PCIE3 = Figure(12.8e9, "PCIe 3.0 x16, reached in vDNN (MICRO 2016)")

_PCIE4 = "PCIe 4.0 x16"

_PCIE5 = "PCIe 5.0 x16"


DEVICES: Mapping[str, DeviceFigures] = MappingProxyType(
    {
        "h200": _make_device(
            "NVIDIA H200 SXM",
            "NVIDIA H200 data sheet",
            tflops=67,
            tf32=494.5,
            half=989.5,
            float8=1979,
            gb_per_s=4800,
            memory=141e9,
            link=_nominal_link(64, f"{_PCIE5}, NVIDIA H200 data sheet"),
        ),
        "p100": _make_device(
            "NVIDIA Tesla P100 SXM2",
            "NVIDIA Tesla P100 data sheet",
            tflops=10.6,
            gb_per_s=732,
            memory=16 * _GIB,
            link=_PCIE3,
        ),
        "v100_pcie": _make_device(
            "NVIDIA Tesla V100 PCIe",
            "NVIDIA Tesla V100 data sheet",
            tflops=14,
            gb_per_s=900,
            memory=16 * _GIB,
            link=_PCIE3,
        ),
        "v100_nvlink": _make_device(
            "NVIDIA Tesla V100 SXM2 in IBM Power AC922",
            "NVIDIA Tesla V100 data sheet",
            tflops=15.7,
            gb_per_s=900,
            memory=16 * _GIB,
            link=_nominal_link(
                75, "half of the 150 GB/s both ways of IBM's four-GPU server"
            ),
        ),
        "k80": _make_device(
            "NVIDIA Tesla K80, one of its two GPUs",
            "half of NVIDIA Tesla K80 data sheet",
            tflops=4.37,
            gb_per_s=240,
            memory=12 * _GIB,
            link=_PCIE3,
        ),
        "k40c": _make_device(
            "NVIDIA Tesla K40c",
            "NVIDIA Tesla K40 data sheet",
            tflops=4.29,
            gb_per_s=288,
            memory=12 * _GIB,
            link=Figure(10.0e9, "PCIe 3.0 x16, measured by Microway on a K40m"),
        ),
        "titan_x": _make_device(
            "NVIDIA Titan X (Maxwell)",
            "vDNN (MICRO 2016)",
            tflops=7,
            gb_per_s=336,
            memory=12 * _GIB,
            link=_PCIE3,
        ),
        "a100": _make_device(
            "NVIDIA A100 80GB SXM",
            "NVIDIA A100 data sheet",
            tflops=19.5,
            tf32=156,
            half=312,
            gb_per_s=2039,
            memory=80e9,
            link=_nominal_link(32, f"{_PCIE4}, NVIDIA A100 data sheet"),
        ),
        "h100": _make_device(
            "NVIDIA H100 SXM",
            "NVIDIA H100 data sheet",
            tflops=67,
            tf32=494.5,
            half=989.5,
            float8=1979,
            gb_per_s=3350,
            memory=80e9,
            link=_nominal_link(64, f"{_PCIE5}, NVIDIA H100 data sheet"),
        ),
        "gh200": _make_device(
            "NVIDIA GH200 96GB",
            "NVIDIA GH200 data sheet; rates as of its H100, bandwidth unconfirmed",
            tflops=67,
            tf32=494,
            half=990,
            float8=1979,
            gb_per_s=4000,
            memory=96e9,
            link=_nominal_link(
                450, "half of NVLink-C2C's 900 GB/s both ways, NVIDIA GH200 data sheet"
            ),
        ),
        "b200": _make_device(
            "NVIDIA B200 in HGX B200",
            "an eighth of NVIDIA HGX B200's figures; others quote 75 to 80 TFLOP/s, "
            "1100 to 1130 in TF32, and 7.7 to 8 TB/s",
            tflops=75,
            tf32=1125,
            half=2250,
            float8=4500,
            gb_per_s=8000,
            memory=180e9,
            link=_nominal_link(64, f"{_PCIE5} of DGX B200's hosts"),
        ),
        "rtx4090": _make_device(
            "NVIDIA GeForce RTX 4090",
            "NVIDIA Ada GPU architecture white paper",
            tflops=82.6,
            tf32=82.6,
            half=165.2,
            float8=330.3,
            gb_per_s=1008,
            memory=24 * _GIB,
            link=_nominal_link(32, _PCIE4),
        ),
        "rtx5090": _make_device(
            "NVIDIA GeForce RTX 5090",
            "NVIDIA RTX Blackwell GPU architecture white paper; TF32 and half are "
            "derived: an eighth and a quarter of 838 for sparse FP16",
            tflops=104.8,
            tf32=104.8,
            half=209.5,
            gb_per_s=1792,
            memory=32 * _GIB,
            link=_nominal_link(64, _PCIE5),
        ),
        "null": _make_device(
            "no device",
            "made up",
            tflops=10,
            gb_per_s=1000,
            memory=16 * _GIB,
            link=Figure(10e9, "made up"),
        ),
    }
)
"""Devices by name. `null` is not a real device: round numbers for experiments."""

_DEPRECATED = ("_tf32", "_half")
"""Endings of names that once chose an arithmetic; operands' types do so now."""


def device_name(name: str) -> str:
    """Return the key in `DEVICES` for a name in any case, or for a deprecated name.

    Raises:
        ValueError: The device is not known; suggests the closest.
        TypeError: The name is no text.
    """
    of_type("device", name, str, "a device's name")
    found = name.strip().lower()
    for ending in _DEPRECATED:
        if found.endswith(ending) and found.removesuffix(ending) in DEVICES:
            found = found.removesuffix(ending)
            warnings.warn(
                f"device {name!r} is deprecated: {found!r} takes each operation's "
                "figures by its types",
                DeprecationWarning,
                stacklevel=3,
            )
    if found not in DEVICES:
        close = difflib.get_close_matches(found, DEVICES, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"unknown device {name!r}{hint}; choose one of: {', '.join(DEVICES)}"
        )
    return found


def get_device(name: str) -> DeviceFigures:
    """Return the figures of a device; the error for an unknown one lists all."""
    return DEVICES[device_name(name)]
