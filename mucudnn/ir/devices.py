"""Published figures of devices, for estimates where nothing was measured.

Peaks and capacities are the vendors'. The share of a peak that a kernel reaches is not
published; it is assumed, equal for all devices, and labelled as such. Estimates are for
comparing policies with each other; they do not predict the time on a device.
"""

import difflib
import math
import tomllib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from mucudnn.arguments import check_type
from mucudnn.ir.profile import ChunkCosts

_GIB = 1024**3

_CHUNKS = ChunkCosts(2 << 20, map_ms=0.069, unmap_ms=0.034)

_TF32 = "tf32"

_OPERANDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        _TF32: (_TF32,),
        "half": ("float16", "bfloat16"),
        "float8": ("float8_e4m3fn", "float8_e5m2"),
    }
)
"""Rate of tensor cores -> types of operands; float32 ones as TF32 where allowed."""


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
        latency_ms: Latency of a message between devices.
        chunks: Costs of mapping memory in the granularity of today's GPUs, each chunk
            with a driver call of its own to set access.
    """

    matmul: float = 0.70
    direct: float = 0.40
    memory: float = 0.75
    link: float = 0.80
    launch_ms: float = 0.005
    latency_ms: float = 0.005
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
        peers: Bytes per second to another device of the node, in one direction.
        network: Bytes per second to other nodes, in one direction, for each device.
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
    peers: Figure
    network: Figure
    tensor_cores: Mapping[str, float] = field(default_factory=dict)

    def rates(self, dtype: str, *, tf32: bool = False) -> Mapping[bool, float]:
        """Return the peaks for products of a type: on tensor cores or not -> rate.

        With `tf32`, float32 operands may be rounded to TF32.
        """
        found = {False: self.flops.value} if dtype == "float32" else {}
        kind = _TF32 if tf32 and dtype == "float32" else dtype
        if kind in self.tensor_cores:
            found[True] = self.tensor_cores[kind]
        return found

    def peak(self, dtype: str, *, tf32: bool = False) -> float:
        """Return the highest peak for products of a type; single precision if none."""
        return max(self.rates(dtype, tf32=tf32).values(), default=self.flops.value)

    def gather_ms(self, nbytes: int, ranks: int) -> float:
        """Return the time in which devices gather, or reduce and scatter, these bytes.

        Each passes on all but its own share around a ring (Patarasuk and Yuan, 2009).
        Between nodes, rings leave a node by all of its ports at once. Latencies are
        those of a tree.

        Args:
            nbytes: Bytes of all devices together.
            ranks: Number of devices, eight in a node.
        """
        rate = self.peers.value
        if ranks > _PER_NODE:
            rate = min(rate, _PER_NODE * self.network.value)
        moved = nbytes * (ranks - 1) / ranks
        return 1e3 * moved / rate + ASSUMED.latency_ms * math.ceil(math.log2(ranks))

    def exchange_sources(self) -> Mapping[str, str]:
        """Describe the links between devices and their sources in words."""
        return {
            "to its peers": f"{self.peers.value / 1e9:g} GB/s, {self.peers.source}",
            "to other nodes": f"{self.network.value / 1e9:g} GB/s for each of "
            f"{_PER_NODE} in a node, {self.network.source}",
            "messages": f"assumed: {1e3 * ASSUMED.latency_ms:g} µs",
        }

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


_PER_NODE = 8
"""Devices in a node."""

_EDR = {"nominal_gb_per_s": 12.5, "source": "InfiniBand EDR, 100 Gb/s a device"}


def _rate(link: Mapping[str, Any]) -> Figure:
    """Return the rate of a link, of a nominal one the assumed share."""
    if (gb_per_s := link.get("nominal_gb_per_s")) is None:
        return Figure(link["gb_per_s"] * 1e9, link["source"])
    what = f"(assumed) of {gb_per_s:g} GB/s a direction, {link['source']}"
    return Figure(gb_per_s * ASSUMED.link * 1e9, f"{ASSUMED.link:.0%} {what}")


def _read_devices() -> Mapping[str, DeviceFigures]:
    text = files("mucudnn.ir").joinpath("devices.toml").read_text("utf-8")
    found: dict[str, DeviceFigures] = {}
    for row in tomllib.loads(text)["device"]:
        source, rate = row["source"], _rate(row["link"])
        nbytes = row["gib"] * _GIB if "gib" in row else row["gb"] * 1e9
        cores = {
            dtype: 1e12 * tflops
            for kind, tflops in row.get("tensor_tflops", {}).items()
            for dtype in _OPERANDS[kind]
        }
        found[row["name"]] = DeviceFigures(
            title=row["title"],
            flops=Figure(row["tflops"] * 1e12, source),
            bandwidth=Figure(row["gb_per_s"] * 1e9, source),
            memory=Figure(nbytes, source),
            d2h=rate,
            h2d=rate,
            peers=_rate(row.get("peers", row["link"])),
            network=_rate(row.get("network", _EDR)),
            tensor_cores=MappingProxyType(cores),
        )
    return MappingProxyType(found)


DEVICES = _read_devices()
"""Devices by name. `null` is not a real device: round numbers for experiments."""

_DEPRECATED = ("_tf32", "_half")
"""Endings of names that once chose an arithmetic; operands' types do so now."""


def device_name(name: str) -> str:
    """Return the key in `DEVICES` for a name in any case, or for a deprecated name.

    Raises:
        ValueError: The device is not known; suggests the closest.
        TypeError: The name is no text.
    """
    check_type("device", name, str, "a device's name")
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
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(
            f"unknown device {name!r}{hint}; choose one of: {', '.join(DEVICES)}"
        )
    return found


def get_device(name: str) -> DeviceFigures:
    """Return the figures of a device; the error for an unknown name lists all names."""
    return DEVICES[device_name(name)]
