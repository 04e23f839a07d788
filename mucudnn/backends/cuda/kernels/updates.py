"""Optimizer steps in PyTorch's conventions, and kernels on gradients.

Half-precision weights are computed in float32 and rounded once; their learning rate has
the type of the weights. Gradients may be narrower than weights. If the loss scale is
state, an update's last two inputs are the scale and its counts
(`passes.graph.loss_scaling`): gradients are divided by the scale, and after an overflow
nothing changes. Before these two comes the weight's copy in the gradient's type and
layout, if there is one: both may be `turned`, stored as (K, *taps, C) for a filter
(K, C, *taps).

Consecutive updates are one launch over a table of their tensors.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from mucudnn.backends.cuda.kernels.launch import (
    TABLE,
    KernelCall,
    Operation,
    Row,
    as_ncs,
    flat,
    table_of,
)
from mucudnn.backends.cuda.kernels.source import Program


def accumulate(call: KernelCall) -> None:
    """Compute total += factor part."""
    total, part = call.inputs
    size, factor = total.size, float(call.attrs["factor"])
    arguments = total, part, size, factor
    call.launch(GRADIENTS_PROGRAM, "accumulate", flat(size), *arguments, beside=part)


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
        call.launch(
            GRADIENTS_PROGRAM, name, (blocks,), *arguments, like=total, beside=part
        )


def find_overflow(call: KernelCall) -> None:
    """Set counts[0] = 1 if a gradient is infinite or NaN."""
    gradient, counts = call.inputs
    arguments = gradient, counts, gradient.size
    call.launch(GRADIENTS_PROGRAM, "find_overflow", flat(gradient.size), *arguments)


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
        first.launch(GRADIENTS_PROGRAM, name, (blocks,), *arguments, like=gradient)


def adjust_loss_scale(call: KernelCall) -> None:
    """Update the loss scale for the next step, and the counts."""
    numbers = call.numbers("growth", "backoff", "least", "most")
    arguments = *call.inputs, *numbers, int(call.attrs["interval"])
    call.launch(GRADIENTS_PROGRAM, "adjust_loss_scale", (1,), *arguments)


@dataclass(frozen=True, slots=True)
class _Update:
    """An update with its attributes and flags, in its kernels' order."""

    kernel: str
    names: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    counted: bool = False

    def run(self, call: KernelCall) -> None:
        """Update one tensor."""
        (w, dw, *others), scalars = self._operands(call)
        numbers = *call.numbers(*_COMMON), *self._numbers(call)
        blocks = flat(-(-w.size // _PER_THREAD))
        arguments = w, dw, *others, *_turned(call), *scalars, w.size, *numbers
        call.launch(PROGRAM, self.kernel, blocks, *arguments, beside=dw)

    def together(self, calls: Sequence[KernelCall]) -> None:
        """Update many tensors, with one launch per type, scalars and weight decay."""
        groups: dict[Hashable, list[KernelCall]] = defaultdict(list)
        for call in calls:
            arrays, scalars = self._operands(call)
            places = tuple(a if a is None else call.gpu.address(a) for a in scalars)
            factor = call.attrs["gradient_scale"]
            alike = (
                arrays[0].dtype,
                arrays[1].dtype,
                places,
                factor,
                self._numbers(call),
            )
            groups[alike].append(call)
        for group in groups.values():
            known = {call.attrs["weight_decay"] for call in group}
            decays = sorted(known - {0.0}) or [0.0]
            for decay in decays:
                mine = {decay, 0.0} if decay == decays[0] else {decay}
                part = [c for c in group if c.attrs["weight_decay"] in mine]
                self._launch(part, decay)

    def _launch(self, calls: Sequence[KernelCall], decay: float) -> None:
        """Launch calls whose weight decay is this one or none."""
        first = calls[0]
        rows = [
            Row(self._operands(c)[0], c.attrs["weight_decay"] != 0, _turned(c))
            for c in calls
        ]
        table, count, blocks = table_of(first.gpu, rows)
        (w, dw, *_), scalars = self._operands(first)
        numbers = decay, *first.numbers("gradient_scale"), *self._numbers(first)
        arguments = table, *scalars, count, *numbers
        name = f"{self.kernel}_all"
        first.launch(PROGRAM, name, (blocks,), *arguments, like=w, beside=dw)

    def _operands(self, call: KernelCall) -> tuple[list[Any], tuple[Any, ...]]:
        """Return weight, gradient, states, copy; and rate, step, scale, counts."""
        w, dw, lr, *others = call.inputs
        step = others.pop(0) if self.counted else None
        scale = counts = None
        if call.attrs.get("scaled"):
            *others, scale, counts = others
        copy = others.pop() if call.attrs.get("copied") else None
        others += [None] * (2 - len(others))
        return [w, dw, *others, copy], (lr, step, scale, counts)

    def _numbers(self, call: KernelCall) -> tuple[float | int, ...]:
        flags = (int(call.attrs[name]) for name in self.flags)
        return (*call.numbers(*self.names), *flags)


_RULES = r"""
// Scalars of every update; `scale` and `counts` may be missing.
struct Common {
    A rate, factor;
    bool skipped;
    __device__ Common(const T* lr, const T* scale, const long long* counts,
                      double factor)
        : rate((A)lr[0]), factor((A)(scale ? factor / (double)scale[0] : factor)),
          skipped(counts && counts[0]) {}
};

struct Sgd {
    static const int STATES = 0;
    A rate;
    __device__ A operator()(A w, A g, A decay, A*) const {
        return w - rate * (g + w * decay);
    }
};

struct Momentum {
    static const int STATES = 1;
    A rate, mu;
    bool nesterov;
    __device__ A operator()(A w, A g, A decay, A* m) const {
        g += w * decay;
        m[0] = mu * m[0] + g;
        return w - rate * (nesterov ? g + mu * m[0] : m[0]);
    }
};

struct Adam {
    static const int STATES = 2;
    A lr, rate, root, beta1, other1, beta2, other2, eps;
    bool decoupled;
    __device__ A operator()(A w, A g, A decay, A* s) const {
        if (decoupled) w *= 1 - lr * decay;
        else g += w * decay;
        s[0] = beta1 * s[0] + other1 * g;
        s[1] = beta2 * s[1] + other2 * (g * g);
        return w - rate * (s[0] / (sqrt(s[1]) * root + eps));
    }
};

struct AdaGrad {
    static const int STATES = 1;
    A rate, eps;
    __device__ A operator()(A w, A g, A decay, A* s) const {
        g += w * decay;
        s[0] += g * g;
        return w - rate * (g / (sqrt(s[0]) + eps));
    }
};

struct RmsProp {
    static const int STATES = 1;
    A rate, alpha, other, eps;
    __device__ A operator()(A w, A g, A decay, A* s) const {
        g += w * decay;
        s[0] = alpha * s[0] + other * (g * g);
        return w - rate * (g / (sqrt(s[0]) + eps));
    }
};
"""


_LOOPS = r"""
// Position of a weight's element in its gradient and copy: the same.
struct Same {
    __device__ I at(I i) const { return i; }
    __device__ void next() {}
};
// Or transposed from (K, C, taps) to (K, taps, C). Divides for a thread's first only.
struct Turned {
    I channels, taps, c, s, step_c, step_s;
    long long row, step_row, size;
    __device__ Turned(long long first, I step, I channels, I taps)
        : channels(channels), taps(taps), c((I)(first / taps % channels)),
          s((I)(first % taps)), step_c(step / taps % channels), step_s(step % taps),
          size((long long)channels * taps) {
        row = first / size * size;
        step_row = step / size * size;
    }
    __device__ long long at(I) const { return row + (long long)s * channels + c; }
    __device__ void next() {
        s += step_s;
        c += step_c;
        row += step_row;
        if (s >= taps) s -= taps, ++c;
        if (c >= channels) c -= channels, row += size;
    }
};
// A weight, its gradient, its state, and its copy if there is one.
struct Tensors {
    T* w;
    const P* dw;
    T* state[2];
    P* copy;
    __device__ bool packed() const {
        return aligned(w) && aligned(dw) && aligned(state[0]) && aligned(state[1]) &&
               aligned(copy);
    }
};
template <int W, class Place, class Rule>
__device__ void span(const Tensors& t, I first, I stop, I step, Place place, A factor,
                     A decay, const Rule& rule) {
    const int STATES = Rule::STATES;
    for (I i = first; i < stop; i += step, place.next()) {
        Pack<T, W> w = load<W>(t.w + i), kept[STATES + 1];
        Pack<P, W> dw = load<W>(t.dw + place.at(i));
        for (int k = 0; k < STATES; ++k) kept[k] = load<W>(t.state[k] + i);
        for (int j = 0; j < W; ++j) {
            A states[STATES + 1];
            for (int k = 0; k < STATES; ++k) states[k] = (A)kept[k].at[j];
            w.at[j] = (T)rule((A)w.at[j], (A)dw.at[j] * factor, decay, states);
            for (int k = 0; k < STATES; ++k) kept[k].at[j] = (T)states[k];
        }
        store(t.w + i, w);
        for (int k = 0; k < STATES; ++k) store(t.state[k] + i, kept[k]);
        if (!t.copy) continue;
        for (int j = 0; j < W; ++j) dw.at[j] = (P)(A)w.at[j];
        store(t.copy + place.at(i), dw);
    }
}
template <class Rule>
__device__ void update(const Tensors& t, I count, I thread, I threads, long long start,
                       I channels, I taps, A factor, A decay, const Rule& rule) {
    if (taps > 0) {
        Turned place(start + thread, threads, channels, taps);
        span<1>(t, thread, count, threads, place, factor, decay, rule);
        return;
    }
    I whole = t.packed() ? count / PACKED * PACKED : 0, step = threads * PACKED;
    span<PACKED>(t, thread * PACKED, whole, step, Same(), factor, decay, rule);
    span<1>(t, whole + thread, count, threads, Same(), factor, decay, rule);
}
"""


def _pair(name: str, parameters: str, rule: str, before: str = "") -> str:
    """Return the source of an update's kernels: for one tensor, and for a table."""
    scalars = (
        "const T* lr, const long long* step, const T* scale, const long long* counts, "
        f"I count, double decay, double factor{parameters}"
    )
    begin = f"Common common(lr, scale, counts, factor);{before}"
    return f"""
KERNEL {name}(T* w, const P* dw, T* first, T* second, P* copy, I channels, I taps,
               {scalars}) {{
    {begin}
    if (common.skipped) return;
    I thread = (I)blockIdx.x * THREADS + threadIdx.x;
    update(Tensors{{w, dw, {{first, second}}, copy}}, count, thread,
           (I)gridDim.x * THREADS, 0, channels, taps, common.factor, (A)decay, {rule});
}}
KERNEL {name}_all(const long long* table, {scalars}) {{
    {begin}
    if (common.skipped) return;
    Part part(table, count);
    bool turned = part.taps() > 0;
    Tensors t{{part.array<T>(0), part.array<P>(1, turned),
              {{part.array<T>(2), part.array<T>(3)}}, part.array<P>(4, turned)}};
    update(t, part.count, (I)threadIdx.x, (I)THREADS, part.start, part.channels(),
           part.taps(), common.factor, part.flag() ? (A)decay : (A)0, {rule});
}}
"""


_ADAM = """
    __shared__ double shared[2];
    if (threadIdx.x == 0) {
        double taken = (double)(*step + 1 - (counts ? counts[2] : 0));
        shared[0] = (double)(A)lr[0] / (1 - pow(beta1, taken));
        shared[1] = 1 / sqrt(1 - pow(beta2, taken));
    }
    __syncthreads();
"""


PROGRAM = Program(
    TABLE
    + _RULES
    + _LOOPS
    + _pair("sgd", "", "Sgd{common.rate}")
    + _pair(
        "momentum",
        ", double mu, I nesterov",
        "Momentum{common.rate, (A)mu, nesterov != 0}",
    )
    + _pair(
        "adam",
        ", double beta1, double beta2, double eps, I decoupled",
        "Adam{common.rate, (A)shared[0], (A)shared[1], (A)beta1, (A)(1 - beta1), "
        "(A)beta2, (A)(1 - beta2), (A)eps, decoupled != 0}",
        _ADAM,
    )
    + _pair("adagrad", ", double eps", "AdaGrad{common.rate, (A)eps}")
    + _pair(
        "rmsprop",
        ", double alpha, double eps",
        "RmsProp{common.rate, (A)alpha, (A)(1 - alpha), (A)eps}",
    )
)


def _turned(call: KernelCall) -> tuple[int, int]:
    """Return (channels, taps) of a filter with a transposed gradient, else (0, 0)."""
    if not call.attrs.get("turned"):
        return 0, 0
    _, channels, taps = as_ncs(call.inputs[0].shape)
    return channels, taps


_PER_THREAD = 4  # elements per thread in a launch for one tensor


_COMMON = ("weight_decay", "gradient_scale")


# Kernels on gradients before the update: sums, overflow detection, loss scaling.
#
# Consecutive calls are combined into one launch over all of their tensors.


GRADIENTS_PROGRAM = Program(
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


OPERATIONS: dict[str, Operation] = {
    **{
        update.kernel: Operation(update.run, together=update.together)
        for update in (
            _Update("adagrad", ("eps",)),
            _Update("adam", ("beta1", "beta2", "eps"), ("decoupled",), counted=True),
            _Update("momentum", ("momentum",), ("nesterov",)),
            _Update("rmsprop", ("alpha", "eps")),
            _Update("sgd"),
        )
    },
    "accumulate": Operation(accumulate, together=accumulate_all),
    "adjust_loss_scale": Operation(adjust_loss_scale),
    "find_overflow": Operation(find_overflow, together=find_overflow_all, flags=(1,)),
}
