"""The separable Fourier transform of the tiles of one tensor, forward and inverse.

A tensor is cut into chunks of samples or channels, the workers' units of work, so that
a chunk's intermediate arrays stay in the processor's cache. Within a chunk the
transform runs over the spatial axes, innermost first, and within an axis over the
tiles. No tile is copied out of its image: a window of an axis is a matrix with a longer
row stride, which BLAS accepts. Channels-last tensors take one small product per pixel
line instead of one large product, and need no transposition either.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mucudnn.backends.cpu.conv.carve import Region, carve
from mucudnn.backends.cpu.conv.fourier.dft import (
    Window,
    frequencies,
    halves,
    merge,
    planar,
    split,
)

__all__ = ["Chunk", "Separable"]

_CHUNK_BYTES = 1 << 20  # of intermediate arrays; about a core's second-level cache
_CHANNELS = 16  # unit of the number of channels of a chunk smaller than a sample


@dataclass(frozen=True, slots=True)
class Chunk:
    """Samples and channels of a tensor that are transformed together."""

    samples: slice
    channels: slice

    @property
    def shape(self) -> tuple[int, int]:
        """Number of samples and of channels."""
        return (
            self.samples.stop - self.samples.start,
            self.channels.stop - self.channels.start,
        )


@dataclass(frozen=True, slots=True)
class Separable:
    """The transform of one tensor (N, C, *spatial).

    Sequences run over the spatial axes, innermost first: points of the transform, sizes
    of the tensor, and tiles. With `channels_last` the channels are contiguous.
    """

    batch: int
    channels: int
    lengths: tuple[int, ...]
    sizes: tuple[int, ...]
    windows: tuple[tuple[Window, ...], ...]
    channels_last: bool
    dtype: str

    @property
    def spectrum(self) -> Region:
        """Region (frequencies, 2, *tiles, N, C), real and imaginary parts."""
        tiles = (len(windows) for windows in self.windows)
        shape = (sum(frequencies(self.lengths)), 2, *tiles, self.batch, self.channels)
        return shape, self.dtype

    def _states(self, planes: int) -> list[tuple[int, ...]]:
        """Return the shapes (columns, planes x pixels) before the later axes."""
        return [
            (math.prod(self.lengths[:i]), planes * math.prod(self.sizes[i:]))
            for i in range(1, len(self.sizes))
        ]

    def _products(self, planes: int) -> list[tuple[int, ...]]:
        """Return shapes of the products with a table that are not states."""
        rank = len(self.sizes)
        return [
            (math.prod(self.lengths[: i + 1]), planes * math.prod(self.sizes[i + 1 :]))
            for i in range(min(1, rank - 1), rank)
        ]

    def scratch(self, samples: int, channels: int) -> list[Region]:
        """Return a chunk's intermediate regions: states, products, an output tile."""
        planes = samples * channels
        widest = max(w.stop - w.start for w in self.windows[0])
        tile: tuple[int, ...] = (planes * math.prod(self.sizes[1:]) * widest,)
        shapes = [*self._states(planes), *self._products(planes), tile]
        return [(shape, self.dtype) for shape in shapes]

    def chunk_shape(self, nworkers: int) -> tuple[int, int]:
        """Return the numbers of samples and channels of the largest chunk."""
        plane = sum(math.prod(shape) for shape, _ in self.scratch(1, 1))
        planes = max(1, _CHUNK_BYTES // (plane * np.dtype(self.dtype).itemsize))
        if planes >= self.channels:
            fair = -(-self.batch // nworkers)
            return min(fair, planes // self.channels), self.channels
        step = max(1, planes // _CHANNELS) * _CHANNELS
        return 1, min(step, self.channels)

    def chunks(self, nworkers: int) -> Iterator[Chunk]:
        """Yield all chunks lazily: a list of thousands would take memory too."""
        samples, channels = self.chunk_shape(nworkers)
        for n in range(0, self.batch, samples):
            for c in range(0, self.channels, channels):
                yield Chunk(
                    slice(n, min(n + samples, self.batch)),
                    slice(c, min(c + channels, self.channels)),
                )

    def forward(
        self,
        tables: Sequence[Any],
        tensor: Any,
        spectrum: Any,
        chunk: Chunk,
        workspace: Any,
    ) -> None:
        """Transform a chunk of `tensor` into its part of `spectrum`."""
        job = self._job(tables, tensor, spectrum, chunk, workspace)
        job.forward(0, job.image[None], ())

    def inverse(
        self,
        tables: Sequence[Any],
        spectrum: Any,
        tensor: Any,
        chunk: Chunk,
        workspace: Any,
        accumulate: bool,
    ) -> None:
        """Transform back, into (or onto) a chunk of `tensor`.

        The tables include the inverse's factors; those of the first axis also the
        factor 2 for conjugate frequencies.
        """
        job = self._job(tables, tensor, spectrum, chunk, workspace)
        for i, window in enumerate(self.windows[0]):
            job.inverse(0, job.image[None], window, (i,), accumulate)

    def _job(
        self, tables: Sequence[Any], tensor: Any, spectrum: Any, chunk: Chunk, ws: Any
    ) -> "_Job":
        image = tensor[chunk.samples, chunk.channels]
        rank = len(self.sizes)
        if self.channels_last:
            image = image.transpose(0, *range(2, 2 + rank), 1)
        else:
            image = image.reshape(-1, *image.shape[2:])
        regions = self.scratch(*chunk.shape)
        *arrays, tile = carve(ws, regions)
        states, products = arrays[: rank - 1], arrays[rank - 1 :]
        if rank > 1:
            products.insert(0, states[0])
        return _Job(
            self,
            tables,
            image,
            spectrum[..., chunk.samples, chunk.channels],
            [None, *states],
            products,
            tile,
        )


@dataclass(frozen=True, slots=True)
class _Job:
    """The transform of one chunk with all of its arrays.

    Images are (planes, …, size) or, channels last, (samples, …, size, channels); states
    have an axis of columns in front.
    """

    plan: Separable
    tables: Sequence[Any]
    image: Any
    spectrum: Any
    states: Sequence[Any]
    products: Sequence[Any]
    tile: Any

    def forward(self, level: int, state: Any, tile: tuple[int, ...]) -> None:
        """Transform the axes from `level` on, for all their tiles."""
        lines = self._lines(state, level)
        table, last = self.tables[level], len(self.tables) - 1
        r, _ = frequencies(self.plan.lengths[:level])
        after, _ = frequencies(self.plan.lengths[: level + 1])
        product = self._product(level, lines.shape)
        for i, window in enumerate(self.plan.windows[level]):
            part = lines[:, :, window.start : window.stop]
            if self.plan.channels_last:
                np.matmul(
                    table[:, window.columns], part, out=product.transpose(0, 2, 1, 3)
                )
            else:
                np.matmul(
                    table[:, window.columns], part.transpose(0, 2, 1), out=product
                )
            if level == last:
                out = self.spectrum[(slice(None), slice(None), *tile, i)]
                split(self._leaf(product, out), r, halves(out, after))
                out[:after, 1] = 0
                continue
            following = self.states[level + 1].reshape(-1, *product.shape[2:])
            if level > 0:  # the first product already is the next state
                split(product, r, planar(following, after))
            self.forward(level + 1, following, (*tile, i))

    def inverse(
        self,
        level: int,
        state: Any,
        window: Window,
        tile: tuple[int, ...],
        accumulate: bool,
    ) -> None:
        """Write one tile of `state` from the spectrum of all later axes."""
        if window.start == window.stop:
            return
        lines = self._lines(state, level)
        product = self._product(level, lines.shape)
        last = len(self.tables) - 1
        r, _ = frequencies(self.plan.lengths[:level])
        after, _ = frequencies(self.plan.lengths[: level + 1])
        if level == last:
            source = self.spectrum[(slice(None), slice(None), *tile)]
            merge(
                halves(source, after),
                r,
                self._leaf(product, source),
                1.0 if level == 0 else 2.0,
            )
        else:
            following = self.states[level + 1].reshape(-1, *product.shape[2:])
            for i, inner in enumerate(self.plan.windows[level + 1]):
                self.inverse(level + 1, following, inner, (*tile, i), False)
            if level > 0:
                merge(planar(following, after), r, product, 2.0)
        self._back(level, product, lines, window, accumulate)

    def _back(
        self, level: int, product: Any, lines: Any, window: Window, accumulate: bool
    ) -> None:
        """Multiply by the inverse's table into or onto a window of lines."""
        table = self.tables[level][:, window.columns]
        target = out = lines[:, :, window.start : window.stop]
        if accumulate:
            target = self.tile[: out.size].reshape(out.shape)
        if self.plan.channels_last:
            np.matmul(table.T, product.transpose(0, 2, 1, 3), out=target)
        else:
            np.matmul(product.transpose(0, 2, 1), table, out=target)
        if accumulate:
            np.add(out, target, out=out)

    def _lines(self, state: Any, level: int) -> Any:
        """Return a state as (columns, lines, size[, channels])."""
        size = self.plan.sizes[level]
        if self.plan.channels_last:
            return state.reshape(len(state), -1, size, self.image.shape[-1])
        return state.reshape(len(state), -1, size)

    def _product(self, level: int, lines: tuple[int, ...]) -> Any:
        """Return the buffer of a table's product with lines of this shape."""
        columns, count, _, *channels = lines
        n = self.plan.lengths[level]
        return self.products[level].reshape(columns, n, count, *channels)

    def _leaf(self, product: Any, spectrum: Any) -> Any:
        return product.reshape(*product.shape[:2], *spectrum.shape[-2:])
