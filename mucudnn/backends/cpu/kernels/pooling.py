"""Pooling and local response normalisation, with their gradients.

The divisor of a window's sum is counted along each axis separately: elements inside the
image, or inside it and its padding, but never positions that exist only because the
number of windows was rounded up.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mucudnn.backends.cpu.kernels.tiles import (
    BLOCK_BYTES,
    Attrs,
    KernelCall,
    Part,
    Run,
    as_ncs,
    tiles,
)
from mucudnn.backends.cpu.threads import Scratch


def max_pool(call: KernelCall) -> None:
    """Compute (y, index): the maximum, and its element number in the window.

    The first of equal maxima counts; if an element is NaN, so is the maximum.
    """
    axes = spatial_axes(call.inputs[0].shape, call.outputs[0].shape, call.attrs)
    x = call.inputs[0].reshape([axis.size for axis in axes])
    y, index = (out.reshape([axis.out for axis in axes]) for out in call.outputs)

    def tile(windows: Windows) -> None:
        scratch = call.scratch
        scratch.restart()
        images = {p: windows.gather(x, p, -np.inf, scratch) for p in windows.phases()}
        best = windows.reduce(images, np.maximum, scratch)
        number = _first_equal(windows, images, best, scratch)
        place = windows.place
        y[place] = windows.inner(best)
        # NaN equals nothing, and -inf also the padding: search again, in the image.
        if not np.isfinite(y[place]).all():
            _search_inside(windows, images, best, number, scratch)
        index[place] = windows.inner(number)

    call.share(Windows.cover(axes, y.shape, x.itemsize), tile)


def max_pool_grad(call: KernelCall) -> None:
    """Add each dy to dx at its maximum's position, in the order of the windows."""
    axes = spatial_axes(call.outputs[0].shape, call.inputs[0].shape, call.attrs)
    planes, *spatial = axes
    pixels = math.prod(axis.size for axis in spatial)
    dy, index = (v.reshape([axis.out for axis in axes]) for v in call.inputs)
    dx = call.outputs[0].reshape(planes.size, pixels)
    # Flat distance of each element of a window from its first.
    pitches = _pitches([axis.size for axis in spatial])
    pairs = zip(spatial, pitches, strict=True)
    along = [np.arange(axis.kernel) * pitch for axis, pitch in pairs]
    steps = functools.reduce(np.add.outer, along).reshape(-1)
    parts = tiles(dy.shape[1:], _INDEXED)
    together = max(1, _INDEXED // math.prod(dy.shape[1:]))
    alike = len(parts) == 1  # then corners are equal for all blocks of planes
    corners = _corners(spatial, parts[0], together, pixels) if alike else None

    def block(part: Part) -> None:
        (some,) = part
        target = dx[some].reshape(-1)
        target[...] = 0
        for inner in parts:
            part_of_dy, count = dy[(some, *inner)], len(dx[some])
            call.scratch.restart()
            room = (call.scratch.take(part_of_dy.size, np.intp) for _ in range(2))
            number, where = (each.reshape(part_of_dy.shape) for each in room)
            # A maximum is at the corner of its window plus an offset. The mode "clip"
            # changes no index; with "raise", NumPy would buffer the output.
            np.copyto(number, index[(some, *inner)])
            np.take(steps, number, out=where, mode="clip")
            if corners is None:
                where += _corners(spatial, inner, count, pixels)
            else:
                where += corners[:count]
            # Windows overlap: `target[where] += ...` would add to an element once.
            np.add.at(target, where.reshape(-1), part_of_dy.reshape(-1))

    call.share(tiles((planes.size,), together), block)


def avg_pool(call: KernelCall) -> None:
    """Compute the mean of each window."""
    axes = spatial_axes(call.inputs[0].shape, call.outputs[0].shape, call.attrs)
    if _is_global(axes):
        _global_mean(call, call.inputs[0], call.outputs[0])
        return
    x = call.inputs[0].reshape([axis.size for axis in axes])
    y = call.outputs[0].reshape([axis.out for axis in axes])
    counts = [_count(axis, call.attrs["count_include_pad"]) for axis in axes]

    def tile(windows: Windows) -> None:
        call.scratch.restart()
        images = {p: windows.gather(x, p, 0.0, call.scratch) for p in windows.phases()}
        place = windows.place
        total = windows.inner(windows.reduce(images, np.add, call.scratch))
        np.divide(total, _divisors(counts, place, y.dtype), out=y[place])

    call.share(Windows.cover(axes, y.shape, x.itemsize), tile)


def avg_pool_grad(call: KernelCall) -> None:
    """Compute dx by distributing each dy over the elements of its window."""
    axes = spatial_axes(call.outputs[0].shape, call.inputs[0].shape, call.attrs)
    if _is_global(axes):
        _global_mean_grad(call, call.inputs[0], call.outputs[0])
        return
    dy = call.inputs[0].reshape([axis.out for axis in axes])
    dx = call.outputs[0].reshape([axis.size for axis in axes])
    counts = [_count(axis, call.attrs["count_include_pad"]) for axis in axes]

    def tile(windows: Windows) -> None:
        # Zeros where no window exists: borders are no special case.
        flat = np.zeros(windows.size + windows.spare, dy.dtype)
        inside, source = windows.covering()
        share_of = flat[: windows.size].reshape(windows.lengths)[inside]
        np.divide(dy[source], _divisors(counts, source, dy.dtype), out=share_of)
        # Elements in the same phase of the strides are reached by the same taps.
        for phase in itertools.product(*(range(axis.stride) for axis in axes)):
            total: Any = None
            for tap in windows.taps():
                where, offset = windows.locate(tap)
                if where == phase:
                    # For each position, the window whose element of this tap is there.
                    start = windows.spare - offset
                    part = flat[start : start + windows.size]
                    total = part.copy() if total is None else np.add(total, part, total)
            windows.scatter(phase, total, dx)

    # One of the tiles, in some phase, has each element.
    positions = [-(-(axis.size + axis.padding) // axis.stride) for axis in axes]
    call.share(Windows.cover(axes, positions, dx.itemsize), tile)


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of an image and the windows along it."""

    size: int
    out: int
    kernel: int = 1
    stride: int = 1
    padding: int = 0

    @property
    def reach(self) -> int:
        """Displacement of a window's last element, in elements of a phase."""
        return (self.kernel - 1) // self.stride

    @property
    def phases(self) -> int:
        """Number of phases that windows touch."""
        return min(self.kernel, self.stride)


def _is_global(axes: list[Axis]) -> bool:
    return all(
        axis.out == 1 and axis.padding == 0 and axis.kernel == axis.size
        for axis in axes[1:]
    )


def _global_mean(call: KernelCall, x: Any, y: Any) -> None:
    pixels = math.prod(x.shape[2:])
    planes, means = x.reshape(-1, pixels), y.reshape(-1)
    share_of = np.full(pixels, 1 / pixels, x.dtype)

    def tile(part: Part) -> None:
        np.matmul(planes[part], share_of, out=means[part])

    call.share(tiles(means.shape, max(1, 2 * BLOCK_BYTES // x[0, 0].nbytes)), tile)


def _global_mean_grad(call: KernelCall, dy: Any, dx: Any) -> None:
    pixels = math.prod(dx.shape[2:])
    planes, column = dx.reshape(-1, pixels), dy.reshape(-1, 1)

    def tile(part: Part) -> None:
        np.multiply(column[part], 1 / pixels, out=planes[part])

    rows = max(1, 2 * BLOCK_BYTES // dx[0, 0].nbytes)
    call.share(tiles((len(planes),), rows), tile)


def _divisors(counts: Sequence[Any], place: Part, dtype: Any) -> Any:
    """Return divisors from the counts along each axis; one number if they are equal."""
    along = [of[part] for of, part in zip(counts, place, strict=True)]
    if all((of == of[:1]).all() for of in along):
        return dtype.type(math.prod(int(of[:1].sum()) for of in along))
    return functools.reduce(np.multiply.outer, along).astype(dtype)


def _count(axis: Axis, padded: bool) -> Any:
    margin = axis.padding if padded else 0
    first = np.arange(axis.out) * axis.stride - axis.padding
    last = np.minimum(first + axis.kernel, axis.size + margin)
    return last - np.maximum(first, -margin)


# Max pooling, with the position of each maximum in its window, and its gradient.
#
# The maximum is taken along one axis after the other. Its position is the number of
# elements before the first equal one: comparisons and additions of single bytes. The
# gradient is one indexed addition per output. Workers take separate planes, so that no
# two add to the same position.


_INDEXED = 32768  # outputs whose positions are computed at a time, 16 bytes each
Images = dict[tuple[int, ...], Any]


def _first_equal(
    windows: "Windows", images: Images, best: Any, scratch: Scratch
) -> Any:
    """Count the elements of each window before its maximum."""
    *taps, _ = windows.taps()  # if no other element is equal, the last one is
    before, searching = (scratch.take(windows.size, np.uint8) for _ in range(2))
    before[...], searching[...] = 0, 1
    differs = scratch.take(windows.size, bool)
    for tap in taps:
        np.not_equal(windows.element(images, tap), best, out=differs)
        np.bitwise_and(searching, differs.view(np.uint8), out=searching)
        np.add(before, searching, out=before)
    return before


def _search_inside(
    windows: "Windows", images: Images, best: Any, number: Any, scratch: Scratch
) -> None:
    """Correct `number` where a maximum is NaN, or minus infinity like the padding."""
    anything = np.broadcast_to(np.True_, [axis.size for axis in windows.axes])
    inside = {p: windows.gather(anything, p, False, scratch) for p in windows.phases()}
    for i, tap in reversed(list(enumerate(windows.taps()))):
        x = windows.element(images, tap)
        found = (x == best) | np.isnan(x)
        number[found & windows.element(inside, tap) & ~np.isfinite(best)] = i


def _pitches(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[i + 1 :]) for i in range(len(sizes)))


def _corners(axes: list[Axis], part: Part, planes: int, pixels: int) -> Any:
    """Return the flat positions of windows' first elements, maybe in the padding."""
    along = [np.arange(planes) * pixels]
    pitches = _pitches([axis.size for axis in axes])
    for axis, pitch, s in zip(axes, pitches, part, strict=True):
        first = np.arange(s.start, s.stop) * axis.stride - axis.padding
        along.append(first * pitch)
    return functools.reduce(np.add.outer, along)


# Sliding windows without strides: a tile of images, split by phase.
#
# With stride 2 an image is four smaller ones: even and odd columns of even and odd
# rows. Element (r, s) of every window is in the image of phase (r % 2, s % 2),
# displaced by (r // 2, s // 2) from the window's own position. Because these images and
# the results share a row length, a displacement is an offset into flat memory, so each
# step over all windows of a tile is one long vector operation. The price is a few
# unused elements at the end of each row.


_TILE_BYTES = 256 << 10  # of one phase's image; a kernel holds up to about ten of them


def spatial_axes(shape: Sequence[int], out: Sequence[int], attrs: Attrs) -> list[Axis]:
    """Return all axes of (N * C, *spatial), the first without windows."""
    windows = (attrs[name] for name in ("kernel", "stride", "padding"))
    spatial = zip(shape[2:], out[2:], *windows, strict=True)
    return [Axis(shape[0] * shape[1], out[0] * out[1]), *(Axis(*v) for v in spatial)]


class Windows:
    """Positions of a tile on every axis, plus those that windows reach beyond them.

    `place` are the tile's slices in a tensor of windows: `counts` positions from
    `starts` on. An image of one phase has the shape `lengths`, the positions beyond
    included, and `size` elements. `pitches` are the flat distances of neighbours along
    each axis, and `spare` the elements that flat offsets may run past the end.
    """

    def __init__(self, axes: Sequence[Axis], place: Part) -> None:
        self.axes, self.place = axes, place
        self.starts = [s.start for s in place]
        self.counts = [s.stop - s.start for s in place]
        pairs = zip(axes, self.counts, strict=True)
        self.lengths = [count + axis.reach for axis, count in pairs]
        self.size, self.pitches = math.prod(self.lengths), _pitches(self.lengths)
        steps = zip(axes, self.pitches, strict=True)
        self.spare = sum(axis.reach * pitch for axis, pitch in steps)

    @classmethod
    def cover(
        cls, axes: Sequence[Axis], positions: Sequence[int], itemsize: int
    ) -> "list[Windows]":
        """Return tiles that cover all positions."""
        return [cls(axes, part) for part in tiles(positions, _TILE_BYTES // itemsize)]

    def phases(self) -> Iterator[tuple[int, ...]]:
        """Yield every phase that a window touches."""
        return itertools.product(*(range(axis.phases) for axis in self.axes))

    def taps(self) -> Iterator[tuple[int, ...]]:
        """Yield every element of a window, in row-major order."""
        return itertools.product(*(range(axis.kernel) for axis in self.axes))

    def locate(self, tap: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
        """Return (phase, flat offset) of an element of the window."""
        return _locate(tuple(axis.stride for axis in self.axes), self.pitches, tap)

    def element(self, images: dict[tuple[int, ...], Any], tap: tuple[int, ...]) -> Any:
        """Return one element of every window, flat, from the images by phase."""
        phase, offset = self.locate(tap)
        return images[phase][offset : offset + self.size]

    def inner(self, flat: Any) -> Any:
        """Return the positions of an image, without the rest of its rows."""
        image = flat[: self.size].reshape(self.lengths)
        return image[tuple(slice(0, count) for count in self.counts)]

    def gather(
        self, x: Any, phase: Sequence[int], fill: float, scratch: Scratch
    ) -> Any:
        """Return a phase's flat image, with `fill` outside `x` and in the spare."""
        flat = scratch.take(self.size + self.spare, x.dtype)
        image = flat[: self.size].reshape(self.lengths)
        inside, source = self.overlap(phase, self.lengths)
        pairs = zip(inside, self.lengths, strict=True)
        if self.spare or any(s.stop - s.start < n for s, n in pairs):
            flat[...] = fill
        image[inside] = x[source]
        return flat

    def scatter(self, phase: Sequence[int], flat: Any, x: Any) -> None:
        """Write one phase of a tile of `x`; zeros if `flat` is None."""
        inside, target = self.overlap(phase, self.counts)
        x[target] = 0 if flat is None else self.inner(flat)[inside]

    def overlap(
        self, phase: Sequence[int], lengths: Sequence[int]
    ) -> tuple[Part, Part]:
        """Return the part of a phase's image in the tensor, as slices of both."""
        inside, source = [], []
        for axis, start, r, length in zip(
            self.axes, self.starts, phase, lengths, strict=True
        ):
            first = start * axis.stride + r - axis.padding
            low = max(0, -(first // axis.stride))
            high = max(low, min(length, (axis.size - 1 - first) // axis.stride + 1))
            begin = first + low * axis.stride
            inside.append(slice(low, high))
            reached = slice(begin, begin + (high - low) * axis.stride, axis.stride)
            source.append(reached if high > low else slice(0, 0))
        return tuple(inside), tuple(source)

    def covering(self) -> tuple[Part, Part]:
        """Return the windows that cover the tile, some of which start before it.

        As slices of an image of one element per window, and of a tensor of windows.
        """
        inside, source = [], []
        for axis, start, length in zip(
            self.axes, self.starts, self.lengths, strict=True
        ):
            first = start - axis.reach
            low = min(length, max(0, -first))
            high = max(low, min(length, axis.out - first))
            inside.append(slice(low, high))
            source.append(slice(first + low, first + high))
        return tuple(inside), tuple(source)

    def reduce(
        self, images: dict[tuple[int, ...], Any], combine: Any, scratch: Scratch
    ) -> Any:
        """Combine each window's elements, one axis after the other, the last first.

        `images`, by phase, are made by `gather` and not modified; `combine` is a ufunc.
        """
        for i in reversed(range(len(self.axes))):
            axis, pitch = self.axes[i], self.pitches[i]
            if axis.kernel == 1:
                images = {phase[:-1]: image for phase, image in images.items()}
                continue
            shorter: dict[tuple[int, ...], Any] = {}
            # An axis that is done leaves the phase: one image remains for each prefix.
            for prefix in {phase[:-1]: None for phase in images}:
                size = images[(*prefix, 0)].size - axis.reach * pitch
                parts = []
                for t in range(axis.kernel):
                    offset = t // axis.stride * pitch
                    image = images[(*prefix, t % axis.stride)]
                    parts.append(image[offset : offset + size])
                result = scratch.take(size, parts[0].dtype)
                combine(parts[0], parts[1], out=result)
                for part in parts[2:]:
                    combine(result, part, out=result)
                shorter[prefix] = result
            images = shorter
        return images[()]


@functools.lru_cache(maxsize=4096)  # numbers only; the same for nearly all tiles
def _locate(
    strides: tuple[int, ...], pitches: tuple[int, ...], tap: tuple[int, ...]
) -> tuple[tuple[int, ...], int]:
    along = list(zip(tap, strides, pitches, strict=True))
    phase = tuple(t % stride for t, stride, _ in along)
    return phase, sum(t // stride * pitch for t, stride, pitch in along)


# Local response normalisation across channels (Krizhevsky et al., 2012).
#
# y = x / d^beta, d = k + alpha / size * (sum of x² over neighbouring channels).


def lrn(call: KernelCall) -> None:
    """Divide each element by a power of its neighbourhood's mean square."""
    x, y, attrs = as_ncs(call.inputs[0]), as_ncs(call.outputs[0]), call.attrs

    def columns(n: int, s: slice) -> None:
        np.divide(x[n, :, s], _power(_base(x[n, :, s], attrs), attrs), out=y[n, :, s])

    _each_column(call, x, columns)


def lrn_grad(call: KernelCall) -> None:
    """Compute dx_i = dy_i / d_i^beta - 2 alpha beta / size x_i sum_j dy_j y_j / d_j."""
    x, y, dy = (as_ncs(v) for v in call.inputs)
    dx = as_ncs(call.outputs[0])
    size = call.attrs["size"]
    factor = -2 * call.attrs["alpha"] * call.attrs["beta"] / size

    def columns(n: int, s: slice) -> None:
        base = _base(x[n, :, s], call.attrs)
        share_of = np.multiply(dy[n, :, s], y[n, :, s])
        share_of /= base
        pull = _neighbour_sums(share_of, (size - 1) // 2, size // 2)
        pull *= x[n, :, s]
        pull *= factor
        out = dx[n, :, s]
        np.divide(dy[n, :, s], _power(base, call.attrs), out=out)
        out += pull

    _each_column(call, x, columns)


def _each_column(call: KernelCall, x: Any, fn: Callable[[int, slice], None]) -> None:
    """Call `fn(sample, pixels)` for all channels of some pixels at a time."""
    N, C, S = x.shape
    pixels = tiles((N, S), max(1, BLOCK_BYTES // 2 // x.itemsize // C))

    def block(part: Part) -> None:
        samples, s = part
        for n in range(samples.start, samples.stop):
            fn(n, s)

    call.share(pixels, block)


def _base(x: Any, attrs: Attrs) -> Any:
    size = attrs["size"]
    total = _neighbour_sums(np.square(x), size // 2, (size - 1) // 2)
    total *= attrs["alpha"] / size
    total += attrs["k"]
    return total


def _neighbour_sums(values: Any, before: int, after: int) -> Any:
    """Return sums of channels [c - before, c + after], by doubling; axis 0."""
    C = len(values)
    size = before + after + 1
    padded = np.zeros((C + size - 1, *values.shape[1:]), values.dtype)
    padded[before : before + C] = values
    result: Any = None
    covered = 0
    width = 1
    while True:
        if size & width:
            part = padded[covered : covered + C]
            result = part.copy() if result is None else np.add(result, part, result)
            covered += width
        if 2 * width > size:
            return result
        padded[:-width] += padded[width:]
        width *= 2


def _power(base: Any, attrs: Attrs) -> Any:
    """Compute base^beta, by square roots where possible; may overwrite `base`."""
    beta = attrs["beta"]
    if beta == 0.75:
        root = np.sqrt(base)
        np.sqrt(root, out=base)
        base *= root
        return base
    if beta == 0.5:
        return np.sqrt(base, out=base)
    if beta == 1:
        return base
    return np.power(base, beta, out=base)


OPERATIONS: dict[str, Run] = {
    "avg_pool": avg_pool,
    "avg_pool_grad": avg_pool_grad,
    "lrn": lrn,
    "lrn_grad": lrn_grad,
    "max_pool": max_pool,
    "max_pool_grad": max_pool_grad,
}
