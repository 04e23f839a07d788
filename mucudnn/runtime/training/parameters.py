"""What outlives a step: parameters, running statistics, optimizer state.

One buffer on the device, laid out in the order of declaration, and one on the host for
the host-resident ones. A narrow copy of a parameter is written with it. Every tensor
starts from a stream of random numbers of its own, seeded by the run's seed and the
tensor's name: adding a layer does not change how the others start. The network, without
the optimizer's state, goes to a file and back.
"""

import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mucudnn.arguments import a_path
from mucudnn.backends.base import Array, Buffer, Device
from mucudnn.backends.virtual import VirtualDevice
from mucudnn.errors import CheckpointError
from mucudnn.ir.graph import PERSISTENT, Graph
from mucudnn.ir.initializers import (
    Constant,
    CopyOf,
    HeNormal,
    Initializer,
    LecunUniform,
    Normal,
    XavierUniform,
)
from mucudnn.ir.tensor import TensorSpec
from mucudnn.passes.graph.precision.narrow_copies import copies_of_parameters
from mucudnn.passes.liveness import rounded
from mucudnn.runtime.executor.host_memory import HostTier, Tiers
from mucudnn.runtime.training.checkpoints.tensor_file import (
    read_arrays,
    read_header,
    write_arrays,
)

__all__ = ["StateStore", "load_weights", "save_weights"]


class StateStore(Mapping[str, Array]):
    """The persistent tensors of some graphs, by name.

    Args:
        device: Where they are.
        graphs: Whose they are; what has one name in several is one tensor.
        seed: Of the random numbers they start from.
        hosted: Those that are host-resident; where they are elsewhere meanwhile,
            whoever took them brings them back before they are read here.
        tiers: Where each of those has its place; host memory if None.

    Attributes:
        nbytes: On the device.
        host_buffers: Bytes of those that are host-resident.

    Raises:
        ValueError: One name means two things.
        OutOfMemoryError: There is no room.
    """

    def __init__(
        self,
        device: Device,
        *graphs: Graph,
        seed: int = 0,
        hosted: Collection[str] = (),
        tiers: Tiers | None = None,
    ) -> None:
        self._device = device
        self._specs: dict[str, TensorSpec] = {}
        initializers: dict[str, Initializer | CopyOf] = {}
        self._copies: dict[str, str] = {}
        for graph in graphs:
            self._declare(graph)
            initializers |= graph.initializers
            self._copies |= copies_of_parameters(graph)
        self._hosted = frozenset(hosted).intersection(self._specs)
        here = [s for s in self._specs.values() if s.name not in self._hosted]
        offsets, self.nbytes = _layout(here)
        self._buffer = device.allocate(self.nbytes)
        self._arrays = {
            s.name: device.view(self._buffer, offsets[s.name], s) for s in here
        }
        self.host_buffers = self._on_host(tiers)
        self._arrays |= {name: self._typed(name) for name in self.host_buffers}
        if isinstance(device, VirtualDevice):  # has no memory to fill
            return
        for name in self._own():
            how = initializers.get(name, Constant(0.0))
            if not isinstance(how, CopyOf):
                self._write(name, _drawn(self._specs[name], how, seed))

    def __getitem__(self, name: str) -> Array:
        """On the device, or on the host if the tensor is host-resident."""
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def _declare(self, graph: Graph) -> None:
        for spec in graph.with_role(*PERSISTENT):
            known = self._specs.setdefault(spec.name, spec)
            if known != spec:
                raise ValueError(
                    f"{spec.name} is {known.role.value} {known.dtype} {known.shape} in "
                    f"one graph, {spec.role.value} {spec.dtype} {spec.shape} in another"
                )

    def _on_host(self, tiers: Tiers | None) -> dict[str, Buffer]:
        specs = [spec for spec in self._specs.values() if spec.name in self._hosted]
        if not specs:
            return {}
        if tiers is not None:
            return {spec.name: tiers.view(spec.name, spec.nbytes) for spec in specs}
        offsets, nbytes = _layout(specs)
        tier = HostTier(self._device, nbytes)
        return {spec.name: tier.view(offsets[spec.name], spec.nbytes) for spec in specs}

    def _typed(self, name: str) -> Any:
        """The bytes on the host as an array; virtual ones have nothing to be seen."""
        buffer, spec = self.host_buffers[name], self._specs[name]
        if isinstance(self._device, VirtualDevice):
            return buffer
        return buffer.view(spec.dtype).reshape(spec.shape)

    def _write(self, name: str, value: Any) -> None:
        if name in self._hosted:
            np.copyto(self._arrays[name], value)
        else:
            self._device.upload(value, self._arrays[name])
        if (copy := self._copies.get(name)) is not None:
            turned = self._specs[copy].layout != self._specs[name].layout
            value = np.moveaxis(value, 1, -1) if turned else value
            self._write(copy, value.astype(self._arrays[copy].dtype, order="C"))

    def _own(self) -> list[str]:
        """Those that are no copies of others."""
        copies = frozenset(self._copies.values())
        return [name for name in self._specs if name not in copies]

    def save(self, names: Iterable[str] | None = None) -> dict[str, Any]:
        """Tensors as NumPy arrays of their own; if none are named all but copies."""
        return {
            name: np.array(self._arrays[name])
            if name in self._hosted
            else self._device.download(self._arrays[name])
            for name in (self._own() if names is None else names)
        }

    def load(
        self, values: Mapping[str, Any], names: Iterable[str] | None = None
    ) -> None:
        """Overwrite tensors, all of them if none are named, by those of the same names.

        Raises:
            ValueError: A tensor is missing, unknown, or of another shape or type; then
                nothing was overwritten.
        """
        wanted = self._own() if names is None else list(names)
        known = frozenset(wanted)
        missing = [name for name in wanted if name not in values]
        unknown = [name for name in values if name not in known]
        if missing or unknown:
            raise ValueError(
                f"these are tensors of another model: {len(missing)} are missing "
                f"({', '.join(missing[:3])}), {len(unknown)} unknown "
                f"({', '.join(unknown[:3])})"
            )
        for name in wanted:
            spec, value = self._specs[name], values[name]
            if value.shape != spec.shape or value.dtype != spec.dtype:
                raise ValueError(
                    f"{name} must be {spec.dtype} {spec.shape}, got {value.dtype} "
                    f"{value.shape}"
                )
        for name in wanted:
            self._write(name, values[name])


def save_weights(path: Path | str, arrays: Mapping[str, Any]) -> None:
    """Write arrays by name to a safetensors file.

    Raises:
        CheckpointError: It cannot be written.
    """
    path = a_path("path", path)
    try:
        write_arrays(path, arrays, {})
    except OSError as e:
        raise CheckpointError(
            f"cannot write weights to {path}: {e.strerror or e}"
        ) from e


def load_weights(path: Path | str, state: StateStore, names: Sequence[str]) -> None:
    """Overwrite tensors of a state by those of a safetensors file.

    Raises:
        CheckpointError: It cannot be read or is damaged, or holds other tensors than
            those named; then nothing is changed.
    """
    path = a_path("path", path)
    try:
        state.load(read_arrays(path, read_header(path)), names)
    except OSError as e:
        raise CheckpointError(
            f"cannot read weights from {path}: {e.strerror or e}"
        ) from e
    except ValueError as e:
        raise CheckpointError(f"cannot load weights from {path}: {e}") from e


def _layout(specs: Any) -> tuple[dict[str, int], int]:
    offsets, end = {}, 0
    for spec in specs:
        offsets[spec.name] = end
        end += rounded(spec.nbytes)
    return offsets, end


def _drawn(spec: TensorSpec, how: Initializer, seed: int) -> Any:
    rng = np.random.default_rng([seed, zlib.crc32(spec.name.encode())])
    match how:
        case Constant(value):
            return np.full(spec.shape, value, spec.dtype)
        case Normal(std):
            return _normal(rng, spec, std)
        case HeNormal():
            return _normal(rng, spec, how.std(spec.shape))
        case XavierUniform() | LecunUniform():
            limit = how.limit(spec.shape)
            return rng.uniform(-limit, limit, spec.shape).astype(spec.dtype)


def _normal(rng: np.random.Generator, spec: TensorSpec, std: float) -> Any:
    return (rng.standard_normal(spec.shape) * std).astype(spec.dtype)
