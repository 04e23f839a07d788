"""Published figures of devices, for estimates where nothing was measured.

Peaks and capacities are the vendors'. The share of a peak that a kernel reaches is not
published; it is assumed, equal for all devices, and labelled as such. Estimates are for
comparing policies with each other; they do not predict the time on a device.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
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


def _make_device(
    title: str,
    source: str,
    *,
    tflops: float,
    gb_per_s: float,
    memory: float,
    link: Figure,
) -> DeviceFigures:
    return DeviceFigures(
        title=title,
        flops=Figure(tflops * 1e12, source),
        bandwidth=Figure(gb_per_s * 1e9, source),
        memory=Figure(memory, source),
        d2h=link,
        h2d=link,
    )


def _nominal_link(gb_per_s: float, what: str) -> Figure:
    share = ASSUMED.link
    return Figure(
        gb_per_s * share * 1e9,
        f"{share:.0%} (assumed) of {gb_per_s:g} GB/s a direction, {what}",
    )


def _make_devices_by_arithmetic() -> dict[str, DeviceFigures]:
    return {
        word + suffix: replace(
            _make_device(
                f"{peaks.title}, {ARITHMETIC[suffix]}" if suffix else peaks.title,
                f"{peaks.source}, {ARITHMETIC[suffix]}",
                tflops=tflops,
                gb_per_s=peaks.gb_per_s,
                memory=peaks.gb * 1e9,
                link=_nominal_link(peaks.link_gb_per_s, peaks.link),
            ),
            dtypes=TENSORS[suffix],
            turns=bool(suffix),
        )
        for word, peaks in BY_ARITHMETIC.items()
        for suffix, tflops in peaks.tflops.items()
    }


_PCIE3 = Figure(12.8e9, "PCIe 3.0 x16, reached in vDNN (MICRO 2016)")


DEVICES: Mapping[str, DeviceFigures] = MappingProxyType(
    {
        "h200": _make_device(
            "NVIDIA H200 SXM",
            "NVIDIA H200 data sheet",
            tflops=67,
            gb_per_s=4800,
            memory=141e9,
            link=_nominal_link(64, "PCIe 5.0 x16, NVIDIA H200 data sheet"),
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
        **_make_devices_by_arithmetic(),
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
