"""Group and layer normalisation (Wu and He, 2018; Ba et al., 2016), also in slices.

All arrays are viewed as (N, groups, channels of a group, S), in either layout. Gamma
has one value per channel or per element; both broadcast with a last axis of size 1 or
S.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mucudnn.backends.cpu.kernels.batch_norm import all_moments, moments
from mucudnn.backends.cpu.kernels.tiles import (
    BLOCK_BYTES,
    Attrs,
    KernelCall,
    Part,
    Run,
    as_ncs,
    tiles,
)


class Grouped:
    """Views of an operation's arrays as `shape`: (N, groups, channels of a group, S).

    `affine` is the shape of gamma and beta, with an axis for the samples; `count` the
    number of elements that share a mean.
    """

    def __init__(self, x: Any, attrs: Attrs) -> None:
        self._last = bool(attrs.get("channels_last"))  # then arrays are (N, S, C)
        N, C, S = as_ncs(np.moveaxis(x, -1, 1) if self._last else x).shape
        groups = attrs["groups"]
        self.shape = (N, groups, C // groups, S)
        self.affine = (1, groups, C // groups, S if attrs["per_element"] else 1)
        self.count = C // groups * S

    def view(self, array: Any) -> Any:
        """View an array in the grouped shape."""
        if not self._last:
            return array.reshape(self.shape)
        N, groups, channels, S = self.shape
        return array.reshape(N, S, groups, channels).transpose(0, 2, 3, 1)

    def groups(self, itemsize: int) -> list[tuple[slice, slice]]:
        """Return the parts of (N, groups) that workers take."""
        limit = max(1, BLOCK_BYTES // itemsize // self.count)
        return [(n, g) for n, g in tiles(self.shape[:2], limit)]

    def chunks(self, part: tuple[slice, slice], itemsize: int) -> Iterator[Part]:
        """Yield the tiles of a part."""
        for inner in tiles(self.shape[2:], BLOCK_BYTES // itemsize):
            yield (*part, *inner)

    def affine_part(self, part: Part) -> Part:
        """Return the part of gamma that belongs to a part of x."""
        _, g, c, s = part
        return (slice(None), g, c, s if self.affine[3] > 1 else slice(None))


def group_norm(call: KernelCall) -> None:
    """Normalise each group of channels of each sample by its own statistics."""
    grouped = Grouped(call.inputs[0], call.attrs)
    x, y = (grouped.view(v) for v in (call.inputs[0], call.outputs[0]))
    gamma, beta = (v.reshape(grouped.affine) for v in call.inputs[1:])
    mean, inv_std = call.outputs[1:]
    size = x.itemsize

    def block(part: tuple[slice, slice]) -> None:
        chunks = list(grouped.chunks(part, size))
        mean[part] = sum(_row_sums(x[c]) for c in chunks) / grouped.count
        centre = mean[part][..., None, None]
        # E[x²] - E[x]² would cancel: sum squares of deviations, which y holds.
        squares: Any = 0.0
        for c in chunks:
            np.subtract(x[c], centre, out=y[c])
            squares = squares + _row_dots(y[c], y[c])
        inv_std[part] = 1 / np.sqrt(squares / grouped.count + call.attrs["eps"])
        factor = inv_std[part][..., None, None]
        for c in chunks:
            out, affine = y[c], grouped.affine_part(c)
            out *= factor
            out *= gamma[affine]
            out += beta[affine]

    call.share(grouped.groups(size), block)


def group_norm_grad(call: KernelCall) -> None:
    """Compute dgamma and dbeta, then dx, which may overwrite dy."""
    grouped, x, dy, gamma, mean, inv_std = _gradient_operands(call)
    dx = grouped.view(call.outputs[0])
    affine_grads(call, grouped, (x, dy, mean, inv_std), call.outputs[1:])

    def block(part: tuple[slice, slice]) -> None:
        sums = weighted_sums(grouped, x, dy, gamma, mean, part)
        numbers = _coefficients(mean[part], inv_std[part], sums, grouped.count)
        for c in grouped.chunks(part, x.itemsize):
            input_grad(x[c], dy[c], gamma[grouped.affine_part(c)], numbers, dx[c])

    call.share(grouped.groups(x.itemsize), block)


# Group and layer normalisation of image strips, split into per-strip operations.
#
# A group's rows within a strip are contiguous, so its moments are those of one channel
# of a batch normalisation, sample by sample.


def group_norm_sums(call: KernelCall) -> None:
    """Compute count, mean, and squares about the mean of each group, (3, N, groups)."""
    (x,), (stats,) = call.inputs, call.outputs
    moments(call, x.reshape(1, stats[0].size, -1), stats.reshape(len(stats), -1))


def group_norm_merge(call: KernelCall) -> None:
    """Compute the mean and inv_std of each group."""
    mean, inv_std = call.outputs
    count, centre, squares = all_moments(call.inputs)
    mean[...] = centre
    inv_std[...] = 1 / np.sqrt(squares / count + call.attrs["eps"])


def group_norm_apply(call: KernelCall) -> None:
    """Normalise a strip by the statistics of its image."""
    grouped = Grouped(call.inputs[0], call.attrs)
    x, y = (v.reshape(grouped.shape) for v in (call.inputs[0], call.outputs[0]))
    gamma, beta = (v.reshape(grouped.affine) for v in call.inputs[1:3])
    mean, inv_std = (v[..., None, None] for v in call.inputs[3:])

    def tile(part: Part) -> None:
        out, affine = y[part], grouped.affine_part(part)
        np.subtract(x[part], mean[part[:2]], out=out)
        out *= inv_std[part[:2]]
        out *= gamma[affine]
        out += beta[affine]

    call.share(tiles(grouped.shape, BLOCK_BYTES // call.inputs[0].itemsize), tile)


def group_norm_grad_sums(call: KernelCall) -> None:
    """Compute a strip's share of dgamma and dbeta, and of its groups' sums."""
    grouped, x, dy, gamma, mean, inv_std = _gradient_operands(call)
    *gradients, totals = call.outputs
    affine_grads(call, grouped, (x, dy, mean, inv_std), gradients)

    def block(part: tuple[slice, slice]) -> None:
        for place, found in enumerate(weighted_sums(grouped, x, dy, gamma, mean, part)):
            totals[place][part] = found

    call.share(grouped.groups(x.itemsize), block)


def group_norm_grad_apply(call: KernelCall) -> None:
    """Compute dx of a strip from the sums of its whole image."""
    grouped, x, dy, gamma, mean, inv_std = _gradient_operands(call)
    sums, dx = call.inputs[5].astype(np.float64), grouped.view(call.outputs[0])
    whole = _coefficients(mean, inv_std, sums, call.attrs["count"])

    def tile(part: Part) -> None:
        numbers = [number[part[:2]] for number in whole]
        affine = gamma[grouped.affine_part(part)]
        input_grad(x[part], dy[part], affine, numbers, dx[part])

    call.share(tiles(grouped.shape, BLOCK_BYTES // x.itemsize), tile)


def _gradient_operands(call: KernelCall) -> tuple[Grouped, Any, Any, Any, Any, Any]:
    """Return the grouping, and views of x, dy, gamma, mean and inv_std."""
    x, dy, gamma, mean, inv_std = call.inputs[:5]
    grouped = Grouped(x, call.attrs)
    gamma = gamma.reshape(grouped.affine)
    statistics = mean[..., None, None], inv_std[..., None, None]
    return grouped, grouped.view(x), grouped.view(dy), gamma, *statistics


def _coefficients(
    mean: Any, inv_std: Any, sums: Sequence[Any], count: int
) -> tuple[Any, Any, Any, Any]:
    """Return what `input_grad` takes, from the `weighted_sums` of whole groups."""
    (total, dots), inverse = sums, inv_std[..., 0, 0].astype(np.float64)
    offset = (-inverse * total / count).astype(inv_std.dtype)[..., None, None]
    along = (-(inverse**3) * dots / count).astype(inv_std.dtype)[..., None, None]
    return mean, inv_std, along, offset


_SAMPLES = 64  # most samples summed in single precision for gradients of gamma


def weighted_sums(
    grouped: Grouped, x: Any, dy: Any, gamma: Any, mean: Any, part: tuple[slice, slice]
) -> tuple[Any, Any]:
    """Sum dy gamma, and dy gamma (x - mean), per group, in float64."""
    total: Any = 0.0
    dots: Any = 0.0
    for c in grouped.chunks(part, x.itemsize):
        weighted = dy[c] * gamma[grouped.affine_part(c)]
        total = total + _row_sums(weighted)
        dots = dots + _row_dots(x[c] - mean[part], weighted)
    return total, dots


def input_grad(x: Any, dy: Any, gamma: Any, numbers: Sequence[Any], out: Any) -> None:
    """Compute dx of a tile from (mean, inv_std, along, offset) of its groups."""
    centre, inverse, along, offset = numbers
    deviation = x - centre
    deviation *= along
    deviation += offset
    np.multiply(dy, gamma, out=out)
    out *= inverse
    out += deviation


def affine_grads(
    call: KernelCall, grouped: Grouped, arrays: Sequence[Any], gradients: Sequence[Any]
) -> None:
    """Sum dy x̂ and dy over samples, and over pixels unless gamma is per element."""
    x, dy, mean, inv_std = arrays
    dgamma, dbeta = (v.reshape(grouped.affine) for v in gradients)
    samples = grouped.shape[0]
    per_element = grouped.affine[3] == grouped.shape[3]

    def block(inner: Part) -> None:
        few = min(samples, _SAMPLES)
        width = int(np.prod([s.stop - s.start for s in inner]))
        step = max(1, min(few, BLOCK_BYTES // x.itemsize // width))
        gammas: Any = 0.0
        betas: Any = 0.0
        for start in range(0, samples, step):
            part = (slice(start, start + step), *inner)
            normal = x[part] - mean[part[:2]]
            normal *= inv_std[part[:2]]
            if per_element:
                normal *= dy[part]
                gammas = gammas + np.add.reduce(normal, axis=0, keepdims=True)
                betas = betas + np.add.reduce(dy[part], axis=0, keepdims=True)
            else:
                gammas = gammas + np.vecdot(normal, dy[part]).sum(axis=0)
                ones = np.ones(dy.shape[3], dy.dtype)
                betas = betas + np.matmul(dy[part], ones).sum(axis=0)
        place = grouped.affine_part((slice(0, 1), *inner))
        dgamma[place] = np.reshape(gammas, dgamma[place].shape)
        dbeta[place] = np.reshape(betas, dbeta[place].shape)

    # Split (groups, channels, S); pixels that share gamma stay together.
    _, groups, channels, S = grouped.shape
    elements = BLOCK_BYTES // x.itemsize
    if per_element:
        few = max(1, elements // min(samples, _SAMPLES))
        parts = tiles((groups, channels, S), few)
    else:
        rows = tiles((groups, channels), max(1, elements // (S * samples)))
        parts = [(*part, slice(0, S)) for part in rows]
    call.share(parts, block)


def _row_sums(part: Any) -> Any:
    """Return the sums of (n, groups) in float64; a product with ones is fastest."""
    if part.shape[3] > 1:
        sums = np.matmul(part, np.ones(part.shape[3], part.dtype))
        return np.add.reduce(sums, axis=2, dtype=np.float64)
    ones = np.ones(part.shape[2], part.dtype)
    return np.matmul(part[..., 0], ones).astype(np.float64)


def _row_dots(a: Any, b: Any) -> Any:
    if a.shape[3] > 1:
        return np.add.reduce(np.vecdot(a, b), axis=2, dtype=np.float64)
    return np.vecdot(a[..., 0], b[..., 0]).astype(np.float64)


OPERATIONS: dict[str, Run] = {
    "group_norm": group_norm,
    "group_norm_grad": group_norm_grad,
    "group_norm_apply": group_norm_apply,
    "group_norm_grad_apply": group_norm_grad_apply,
    "group_norm_grad_sums": group_norm_grad_sums,
    "group_norm_merge": group_norm_merge,
    "group_norm_sums": group_norm_sums,
}
