"""Kernels on gradients before the update: sums, overflow detection, loss scaling.

Consecutive calls are combined into one launch over all of their tensors.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence

from mucudnn.backends.cuda.kernels.program import KernelCall, Operation, Program, flat
from mucudnn.backends.cuda.kernels.tables import TABLE, Row, table_of

__all__ = ["OPERATIONS", "PROGRAM"]

PROGRAM = Program(
    TABLE
    + r"""
KERNEL accumulate(T* total, const P* part, I count, double factor) {
    EACH(i, count) total[i] = (T)((A)total[i] + (A)factor * (A)part[i]);
}
KERNEL accumulate_all(const long long* table, I rows, double factor) {
    Part part(table, rows);
    T* total = part.array<T>(0);
    const P* more = part.array<P>(1);
    for (I i = threadIdx.x; i < part.count; i += THREADS)
        total[i] = (T)((A)total[i] + (A)factor * (A)more[i]);
}

// Infinity minus itself is NaN. All threads that find one write the same value.
__device__ bool is_finite(T value) { return (A)value - (A)value == 0; }
KERNEL find_overflow(const T* gradient, long long* counts, I count) {
    EACH(i, count) if (!is_finite(gradient[i])) counts[0] = 1;
}
KERNEL find_overflow_all(const long long* table, long long* counts, I rows) {
    Part part(table, rows);
    const T* gradient = part.array<T>(0);
    for (I i = threadIdx.x; i < part.count; i += THREADS)
        if (!is_finite(gradient[i])) counts[0] = 1;
}

KERNEL adjust_loss_scale(T* scale, long long* counts, double growth, double backoff,
                         double least, double most, I interval) {
    if (threadIdx.x != 0 || blockIdx.x != 0) return;
    double next = (double)(A)scale[0];
    long long good = counts[1] + 1;
    if (counts[0]) {
        next = next * backoff < least ? least : next * backoff;
        counts[2] += 1;
        good = 0;
    } else if (good >= interval) {
        next = next * growth > most ? most : next * growth;
        good = 0;
    }
    scale[0] = (T)(A)next;
    counts[0] = 0;
    counts[1] = good;
}
"""
)


def accumulate(call: KernelCall) -> None:
    """Compute total += factor part."""
    total, part = call.inputs
    size, factor = total.size, float(call.attrs["factor"])
    arguments = total, part, size, factor
    call.launch(PROGRAM, "accumulate", flat(size), *arguments, beside=part)


def accumulate_all(calls: Sequence[KernelCall]) -> None:
    """Accumulate several totals, with one launch per type and factor."""
    groups: dict[Hashable, list[KernelCall]] = defaultdict(list)
    for call in calls:
        total, part = call.inputs
        groups[total.dtype, part.dtype, call.attrs["factor"]].append(call)
    for group in groups.values():
        call, (total, part) = group[0], group[0].inputs
        table, count, blocks = table_of(call.gpu, [Row(c.inputs) for c in group])
        arguments = table, count, float(call.attrs["factor"])
        name = "accumulate_all"
        call.launch(PROGRAM, name, (blocks,), *arguments, like=total, beside=part)


def find_overflow(call: KernelCall) -> None:
    """Set counts[0] = 1 if a gradient is infinite or NaN."""
    gradient, counts = call.inputs
    arguments = gradient, counts, gradient.size
    call.launch(PROGRAM, "find_overflow", flat(gradient.size), *arguments)


def find_overflow_all(calls: Sequence[KernelCall]) -> None:
    """Check several gradients, with one launch per type."""
    groups: dict[Hashable, list[KernelCall]] = defaultdict(list)
    for call in calls:
        gradient, counts = call.inputs
        groups[gradient.dtype, call.gpu.address(counts)].append(call)
    for group in groups.values():
        first, (gradient, counts) = group[0], group[0].inputs
        rows = [Row(call.inputs[:1]) for call in group]
        table, count, blocks = table_of(first.gpu, rows)
        arguments, name = (table, counts, count), "find_overflow_all"
        first.launch(PROGRAM, name, (blocks,), *arguments, like=gradient)


def adjust_loss_scale(call: KernelCall) -> None:
    """Update the loss scale for the next step, and the counts."""
    numbers = call.numbers("growth", "backoff", "least", "most")
    arguments = *call.inputs, *numbers, int(call.attrs["interval"])
    call.launch(PROGRAM, "adjust_loss_scale", (1,), *arguments)


OPERATIONS: dict[str, Operation] = {
    "accumulate": Operation(accumulate, together=accumulate_all),
    "adjust_loss_scale": Operation(adjust_loss_scale),
    "find_overflow": Operation(find_overflow, together=find_overflow_all, flags=(1,)),
}
