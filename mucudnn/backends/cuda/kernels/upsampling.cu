#include "prelude.cuh"
#include "walk.cuh"

// One axis: pixels of the small image, and the factor.
struct Axis {
    I size, scale;
    __device__ I large() const { return size * scale; }
    __device__ A offset(I k) const { return ((A)k + (A)0.5) / scale - (A)0.5; }
    // The pixel that a result at offset f from pixel i takes |f| of.
    __device__ I neighbour(I i, A f) const {
        if (f < 0) return i > 0 ? i - 1 : 0;
        return f > 0 && i < size - 1 ? i + 1 : i;
    }
};
// Iterates over the results that depend on pixel i: the k-th of pixel i + t.
struct Taps {
    Axis axis;
    I i, o, end, t, k;
    __device__ Taps(const Axis& axis, I i)
        : axis(axis), i(i), o(i > 0 ? i * axis.scale - axis.scale / 2 : 0),
          end(i < axis.size - 1 ? (i + 1) * axis.scale + axis.scale / 2 : axis.large()),
          t(axis.scale > 1 && i > 0 ? -1 : 0),
          k(t < 0 ? axis.scale - axis.scale / 2 : 0) {}
    __device__ void next() {
        ++o;
        if (++k == axis.scale) k = 0, ++t;
    }
    __device__ A weight() const {
        A f = axis.offset(k), much = f < 0 ? -f : f;
        if (t != 0) return much;
        return axis.neighbour(i, f) == i ? (A)1 : 1 - much;
    }
};
#define AXES I d_size, I d_scale, I h_size, I h_scale, I w_size, I w_scale
#define MAKE_AXES                                                                 \
    const Axis D = {d_size, d_scale}, H = {h_size, h_scale}, W = {w_size, w_scale};

// Index of a thread's V neighbours, and of the row of large images that begins there.
#define EACH_SMALL                                                                \
    for (Walk at(W.size / V, H.size, D.size); at.i < count / V; at.next())
#define SMALL (((at.image * D.size + at.d) * H.size + at.h) * W.size + at.w * V)
#define LARGE(od, oh)                                                             \
    (((at.image * D.large() + (od)) * H.large() + (oh)) * W.large() +             \
     at.w * V * W.scale)

// Accesses of 16 bytes if rows are multiples of them and the factor is 1 or 2.
#define DISPATCH(function, small, large)                                          \
    bool packed = W.size % PACKED == 0 && aligned(small) && aligned(large);       \
    if (packed && W.scale == 1)                                                   \
        function<PACKED, 1>(small, large, count, D, H, W);                        \
    else if (packed && W.scale == 2)                                              \
        function<PACKED, 2>(small, large, count, D, H, W);                        \
    else                                                                          \
        function<1, 0>(small, large, count, D, H, W);

#define IMAGES(X, Y) X* small, Y* large, I count, Axis D, Axis H, Axis W

// SCALE packs of results, element by element: f(pixel of the pack, k).
template <int V, int SCALE, class F>
__device__ void put(T* large, I scale, const F& f) {
    if constexpr (V == 1) {
        for (I k = 0; k < scale; ++k) large[k] = f(0, k);
    } else {
#pragma unroll
        for (int q = 0; q < SCALE; ++q) {
            Pack<T, V> made;
#pragma unroll
            for (int j = 0; j < V; ++j)
                made.at[j] = f((q * V + j) / SCALE, (q * V + j) % SCALE);
            store(large + q * V, made);
        }
    }
}

template <int V, int SCALE> __device__ void repeat(IMAGES(const T, T)) {
    EACH_SMALL {
        Pack<T, V> v = load<V>(small + SMALL);
        for (I kd = 0; kd < D.scale; ++kd)
            for (I kh = 0; kh < H.scale; ++kh)
                put<V, SCALE>(large + LARGE(at.d * D.scale + kd, at.h * H.scale + kh),
                              W.scale, [&](int j, I) { return v.at[j]; });
    }
}

template <int V, int SCALE> __device__ void gather(IMAGES(T, const T)) {
    EACH_SMALL {
        A sums[V] = {};
        for (I kd = 0; kd < D.scale; ++kd)
            for (I kh = 0; kh < H.scale; ++kh) {
                const T* from =
                    large + LARGE(at.d * D.scale + kd, at.h * H.scale + kh);
                if constexpr (V == 1) {
                    for (I k = 0; k < W.scale; ++k) sums[0] += (A)from[k];
                } else {
#pragma unroll
                    for (int q = 0; q < SCALE; ++q) {
                        Pack<T, V> v = load<V>(from + q * V);
#pragma unroll
                        for (int j = 0; j < V; ++j)
                            sums[(q * V + j) / SCALE] += (A)v.at[j];
                    }
                }
            }
        Pack<T, V> made;
        for (int j = 0; j < V; ++j) made.at[j] = (T)sums[j];
        store(small + SMALL, made);
    }
}

// Interpolation of two neighbours; ignores the second, even NaN, if its part is 0.
__device__ A between(A one, A other, A part) {
    return part == 0 ? one : (1 - part) * one + part * other;
}

// Interpolates one column of the (up to four) rows that a row of results depends on.
struct Column {
    const T *near, *high, *deep, *both;
    A part_h, part_d;
    __device__ A operator()(I w) const {
        A here = between((A)near[w], part_h == 0 ? (A)0 : (A)high[w], part_h);
        if (part_d == 0) return here;
        A there = between((A)deep[w], part_h == 0 ? (A)0 : (A)both[w], part_h);
        return between(here, there, part_d);
    }
};

template <int V, int SCALE> __device__ void blend(IMAGES(const T, T)) {
    EACH_SMALL {
        I w = at.w * V, left = w > 0 ? w - 1 : 0;
        I right = w + V < W.size ? w + V : W.size - 1;
        const T* image = small + at.image * D.size * H.size * W.size;
        for (I kd = 0; kd < D.scale; ++kd)
            for (I kh = 0; kh < H.scale; ++kh) {
                A fd = D.offset(kd), fh = H.offset(kh);
                I near = at.d * H.size, deep = D.neighbour(at.d, fd) * H.size;
                I high = H.neighbour(at.h, fh);
                Column column = {image + (near + at.h) * W.size,
                                 image + (near + high) * W.size,
                                 image + (deep + at.h) * W.size,
                                 image + (deep + high) * W.size,
                                 fh < 0 ? -fh : fh,
                                 fd < 0 ? -fd : fd};
                A columns[V + 2];
                columns[0] = column(left), columns[V + 1] = column(right);
                for (int j = 0; j < V; ++j) columns[j + 1] = column(w + j);
                put<V, SCALE>(large + LARGE(at.d * D.scale + kd, at.h * H.scale + kh),
                              W.scale, [&](int j, I k) {
                                  A f = W.offset(k), own = columns[j + 1];
                                  return (T)(f < 0 ? between(own, columns[j], -f)
                                                   : between(own, columns[j + 2], f));
                              });
            }
    }
}

// Gradient of V pixels from w on from a row of a large image, which begins at theirs.
template <int V, int SCALE>
__device__ void row_grad(const T* row, const Axis& W, I w, A* made) {
    if constexpr (SCALE == 0) {
        A sum = 0;
        for (Taps tap(W, w); tap.o < tap.end; tap.next())
            sum += tap.weight() * (A)row[tap.o - w * W.scale];
        made[0] = sum;
    } else if constexpr (SCALE == 1) {
        Pack<T, V> v = load<V>(row);
        for (int j = 0; j < V; ++j) made[j] = (A)v.at[j];
    } else {
        A d[2 * V + 2];
        d[0] = w > 0 ? (A)row[-1] : (A)0;
        d[2 * V + 1] = w + V < W.size ? (A)row[2 * V] : (A)0;
        Pack<T, V> one = load<V>(row), other = load<V>(row + V);
#pragma unroll
        for (int j = 0; j < V; ++j)
            d[j + 1] = (A)one.at[j], d[V + j + 1] = (A)other.at[j];
#pragma unroll
        for (int j = 0; j < V; ++j) {
            A first = w + j == 0 ? (A)1 : (A)0.75;
            A second = w + j == W.size - 1 ? (A)1 : (A)0.75;
            made[j] = (A)0.25 * d[2 * j] + first * d[2 * j + 1] +
                      second * d[2 * j + 2] + (A)0.25 * d[2 * j + 3];
        }
    }
}

template <int V, int SCALE> __device__ void blend_grad(IMAGES(T, const T)) {
    EACH_SMALL {
        A sums[V] = {}, row[V];
        for (Taps d(D, at.d); d.o < d.end; d.next())
            for (Taps h(H, at.h); h.o < h.end; h.next()) {
                A weight = d.weight() * h.weight();
                row_grad<V, SCALE>(large + LARGE(d.o, h.o), W, at.w * V, row);
                for (int j = 0; j < V; ++j) sums[j] += weight * row[j];
            }
        Pack<T, V> made;
        for (int j = 0; j < V; ++j) made.at[j] = (T)sums[j];
        store(small + SMALL, made);
    }
}

KERNEL upsample_nearest(const T* x, T* y, I count, AXES) {
    MAKE_AXES
    DISPATCH(repeat, x, y)
}

KERNEL upsample_nearest_grad(const T* dy, T* dx, I count, AXES) {
    MAKE_AXES
    DISPATCH(gather, dx, dy)
}

KERNEL upsample_bilinear(const T* x, T* y, I count, AXES) {
    MAKE_AXES
    DISPATCH(blend, x, y)
}

KERNEL upsample_bilinear_grad(const T* dy, T* dx, I count, AXES) {
    MAKE_AXES
    DISPATCH(blend_grad, dx, dy)
}
