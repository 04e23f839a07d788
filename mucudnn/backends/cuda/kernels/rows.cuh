// A row, and a thread's elements of it with their values of gamma: one value for
// `inner` neighbours.
struct Row {
    I begin, first, length, inner, thread, threads;
    __device__ Row(I row, I groups, I length, I inner, I part, I parts)
        : begin(row * length), first(row % groups * length), length(length),
          inner(inner), thread(part * THREADS + threadIdx.x),
          threads(parts * THREADS) {}
    __device__ bool packs() const {
        return length % PACKED == 0 && (inner == 1 || inner >= PACKED);
    }
    struct Steps {
        I i, k, rest, inner;
        // The value of gamma for the j-th of some neighbours.
        __device__ I of(int j) const {
            return inner == 1 ? k + j : k + (rest + j >= inner);
        }
    };
    // Calls `body` for each W neighbours of the thread.
    template <int W, class F> __device__ void each(const F& body) const {
        I j = thread * W, step = threads * W;
        I values = step / inner, over = step % inner;
        Steps at = {begin + j, (first + j) / inner, (first + j) % inner, inner};
        for (; j < length; j += step) {
            body(at);
            at.i += step, at.k += values, at.rest += over;
            if (at.rest >= inner) at.rest -= inner, ++at.k;
        }
    }
};
// The same for a group of a sample with channels last, over all pixels; W at once if
// all tensors are aligned. Only a thread's first position takes divisions.
struct LastRow {
    I C, width, first, length, apiece, begin, own, over, jump;
    __device__ LastRow(I row, I groups, I pixels, I C, bool aligned)
        : C(C), width(C / groups), length(pixels * width),
          apiece(aligned && width % PACKED == 0 ? PACKED : 1) {
        I sample = row / groups, j = threadIdx.x * apiece, step = THREADS * apiece;
        I pixel = j / width, more = step / width;
        first = (row - sample * groups) * width;
        own = first + j - pixel * width;
        begin = (sample * pixels + pixel) * C + own;
        over = step - more * width;
        jump = more * C + over;
    }
    __device__ bool packs() const { return apiece > 1; }
    struct Steps {
        I i, k;
        __device__ I of(int j) const { return k + j; }
    };
    template <int W, class F> __device__ void each(const F& body) const {
        I end = first + width;
        Steps at = {begin, own};
        for (I j = threadIdx.x * W; j < length; j += THREADS * W) {
            body(at);
            at.i += jump, at.k += over;
            if (at.k >= end) at.k -= width, at.i += C - width;
        }
    }
};
// Loops over elements `at` of a row of type R, W at once if `packed`.
#define EACH_OF_ROW(row, packed, ...)                                             \
    if (row.packs() && (packed)) {                                                \
        constexpr int W = PACKED;                                                 \
        row.template each<W>([&](const typename R::Steps& at) { __VA_ARGS__ });   \
    } else {                                                                      \
        constexpr int W = 1;                                                      \
        row.template each<W>([&](const typename R::Steps& at) { __VA_ARGS__ });   \
    }

// y = (x - centre) inverse gamma + beta.
template <class R>
__device__ void normalise(const R& row, const T* x, const P* gamma, const P* beta,
                          A centre, A inverse, T* y) {
    EACH_OF_ROW(row, aligned(x) && aligned(y), {
        Pack<T, W> v = load<W>(x + at.i);
        for (int j = 0; j < W; ++j) {
            I k = at.of(j);
            v.at[j] =
                (T)(((A)v.at[j] - centre) * inverse * (A)gamma[k] + (A)beta[k]);
        }
        store(y + at.i, v);
    })
}

// The sums of dy gamma, and of it times deviations, over a block's part of a row.
struct RowSums {
    double sum, dots;
    template <class R>
    __device__ RowSums(const R& row, const T* x, const T* dy, const P* gamma, A centre)
        : sum(0), dots(0) {
        EACH_OF_ROW(row, aligned(x) && aligned(dy), {
            Pack<T, W> v = load<W>(x + at.i), d = load<W>(dy + at.i);
            A part = 0, dot = 0;
            for (int j = 0; j < W; ++j) {
                A weighted = (A)d.at[j] * (A)gamma[at.of(j)];
                part += weighted;
                dot += ((A)v.at[j] - centre) * weighted;
            }
            sum += (double)part;
            dots += (double)dot;
        })
        sum = lane_sum(sum, 1);
        dots = lane_sum(dots, 1);
    }
};

// dx = dy gamma inverse + deviation along + offset.
template <class R>
__device__ void input_grad(const R& row, const T* x, const T* dy, const P* gamma,
                           A centre, A inverse, double sum, double dots, double count,
                           T* dx) {
    double wide = inverse;
    A offset = (A)(-wide * sum / count);
    A along = (A)(-wide * wide * wide * dots / count);
    EACH_OF_ROW(row, aligned(x) && aligned(dy) && aligned(dx), {
        Pack<T, W> v = load<W>(x + at.i), d = load<W>(dy + at.i);
        for (int j = 0; j < W; ++j) {
            A weighted = (A)d.at[j] * (A)gamma[at.of(j)];
            v.at[j] =
                (T)(weighted * inverse + ((A)v.at[j] - centre) * along + offset);
        }
        store(dx + at.i, v);
    })
}
