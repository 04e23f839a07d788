"""Persistent tensors of a training: parameters, running statistics, optimizer state.

One buffer on the device, laid out in the order of declaration, and one on the host for
host-resident tensors. Writing a parameter also writes its low-precision copy. Each
tensor is initialized from its own random stream, seeded by the run's seed and the
tensor's name, so that adding a layer does not change the others.

The network's tensors, without the optimizer's state, can be saved to a file and loaded.
"""

import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mucudnn.arguments import check_path
from mucudnn.backends import Device
from mucudnn.backends.device import Array, Buffer
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
from mucudnn.passes.graph.precision import copies_of_parameters
from mucudnn.passes.liveness import rounded
from mucudnn.runtime.executor.tiers import HostTier, Tiers
from mucudnn.runtime.training.checkpoints import read_arrays, read_header, write_arrays


class StateStore(Mapping[str, Array]):
    """The persistent tensors of some graphs, by name.

    Args:
        graphs: Graphs; equal names in several graphs are one tensor.
        hosted: Host-resident tensors. While an executor has fetched one, its host bytes
            are outdated until the executor is parked.
        tiers: Offload targets of the host-resident tensors; host memory if None.

    Attributes:
        nbytes: Bytes on the device.
        host_buffers: Host-resident tensor -> its bytes.
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
            for spec in graph.with_role(*PERSISTENT):
                known = self._specs.setdefault(spec.name, spec)
                if known != spec:
                    raise ValueError(
                        f"{spec.name} is {known.role.value} {known.dtype} "
                        f"{known.shape} in one graph, {spec.role.value} {spec.dtype} "
                        f"{spec.shape} in another"
                    )
            initializers |= graph.initializers
            self._copies |= copies_of_parameters(graph)
        self._hosted = frozenset(hosted).intersection(self._specs)
        here = [s for s in self._specs.values() if s.name not in self._hosted]
        offsets, self.nbytes = _layout(here)
        self._buffer = device.allocate(self.nbytes)
        self._arrays = {
            s.name: device.view(self._buffer, offsets[s.name], s) for s in here
        }
        there = [s for s in self._specs.values() if s.name in self._hosted]
        self.host_buffers: dict[str, Buffer] = {}
        if tiers is not None:
            self.host_buffers = {s.name: tiers.view(s.name, s.nbytes) for s in there}
        elif there:
            offsets, nbytes = _layout(there)
            slab = HostTier(device, nbytes)
            self.host_buffers = {
                s.name: slab.view(offsets[s.name], s.nbytes) for s in there
            }
        if isinstance(device, VirtualDevice):  # has no memory to view or to fill
            for name, buffer in self.host_buffers.items():
                self._arrays[name] = device.view(buffer, 0, self._specs[name])
            self._hosted = frozenset()
            return
        for name, buffer in self.host_buffers.items():
            spec = self._specs[name]
            self._arrays[name] = buffer.view(spec.dtype).reshape(spec.shape)
        # Low-precision copies are written with their parameters.
        for name in self._without_copies():
            how = initializers.get(name, Constant(0.0))
            if not isinstance(how, CopyOf):
                self._write(name, _initial_value(self._specs[name], how, seed))

    def __getitem__(self, name: str) -> Array:
        """Return the device array, or the host array if host-resident."""
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def _write(self, name: str, value: Any) -> None:
        if name in self._hosted:
            np.copyto(self._arrays[name], value)
        else:
            self._device.upload(value, self._arrays[name])
        if (copy := self._copies.get(name)) is not None:
            # The low-precision copy may be stored channels last.
            transposed = self._specs[copy].layout != self._specs[name].layout
            value = np.moveaxis(value, 1, -1) if transposed else value
            self._write(copy, value.astype(self._arrays[copy].dtype, order="C"))

    def _without_copies(self) -> list[str]:
        """Return the names of tensors that are not low-precision copies."""
        copies = frozenset(self._copies.values())
        return [name for name in self._specs if name not in copies]

    def save(self, names: Iterable[str] | None = None) -> dict[str, Any]:
        """Return copies of tensors as NumPy arrays; by default all but copies."""
        return {
            name: np.array(self._arrays[name])
            if name in self._hosted
            else self._device.download(self._arrays[name])
            for name in (self._without_copies() if names is None else names)
        }

    def load(
        self, values: Mapping[str, Any], names: Iterable[str] | None = None
    ) -> None:
        """Overwrite tensors by values of the same names; by default all."""
        wanted = self._without_copies() if names is None else list(names)
        known = frozenset(wanted)
        missing = [name for name in wanted if name not in values]
        unknown = [name for name in values if name not in known]
        if missing or unknown:
            raise ValueError(
                f"the tensors belong to another model: {len(missing)} are missing "
                f"({', '.join(missing[:3])}), {len(unknown)} are unknown "
                f"({', '.join(unknown[:3])})"
            )
        for name in wanted:
            spec, value = self._specs[name], values[name]
            if value.shape != spec.shape or value.dtype != spec.dtype:
                raise ValueError(
                    f"{name} must be {spec.dtype} {spec.shape}, got {value.dtype} "
                    f"{value.shape}"
                )
        for name in wanted:  # only after all are validated
            self._write(name, values[name])


def save_weights(path: Path | str, arrays: Mapping[str, Any]) -> None:
    """Write arrays to a safetensors file; `CheckpointError` if that fails."""
    path = check_path("path", path)
    try:
        write_arrays(path, arrays, {})
    except OSError as e:
        raise CheckpointError(
            f"cannot write weights to {path}: {e.strerror or e}"
        ) from e


def load_weights(path: Path | str, state: StateStore, names: Sequence[str]) -> None:
    """Overwrite tensors of a state by those of a safetensors file."""
    path = check_path("path", path)
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


def _initial_value(spec: TensorSpec, how: Initializer, seed: int) -> Any:
    # A stream of its own for each tensor: another layer does not change the others.
    rng = np.random.default_rng([seed, zlib.crc32(spec.name.encode())])
    match how:
        case Constant(value):
            return np.full(spec.shape, value, spec.dtype)
        case Normal() | HeNormal():
            std = how.std if isinstance(how, Normal) else how.std(spec.shape)
            return (rng.standard_normal(spec.shape) * std).astype(spec.dtype)
        case XavierUniform() | LecunUniform():
            limit = how.limit(spec.shape)
            return rng.uniform(-limit, limit, spec.shape).astype(spec.dtype)
