// Bytes of a channel in shared memory: with the sums they fit the 48 KiB that every GPU
// grants a block by default.
#define ROOM_BYTES 46080
#define ROOM (ROOM_BYTES / (int)sizeof(T))
// Elements that a thread holds in registers, for at least two blocks at once.
#define MOST_HELD 64
#define HELD (sizeof(T) == 2 ? MOST_HELD : (ROOM + THREADS * PACKED - 1) / THREADS / \
                                           PACKED * PACKED)

// A ReLU that passes NaN.
__device__ A positive(A v) { return v <= 0 ? (A)0 : v; }

// Normalised elements of a channel, from numbers as they are saved.
struct Normed {
    A centre, factor, shift;
    Normed() = default;
    __device__ Normed(P mean, P inverse, P gamma, P beta)
        : centre((A)mean), factor((A)((double)gamma * (double)inverse)),
          shift((A)beta) {}
    __device__ explicit Normed(P mean) : centre((A)mean), factor(0), shift(0) {}
    __device__ Normed(A centre, A factor, A shift)
        : centre(centre), factor(factor), shift(shift) {}
    __device__ A operator()(T x) const {
        return fma((A)x - centre, factor, shift);
    }
    __device__ A masked(T x, A dy) const {
        return (*this)(x) <= vanishing<T>() ? (A)0 : dy;
    }
};

// `Normed` of CH neighbouring channels; without beta only their means are set.
template <int CH> struct NormedOf {
    Normed of[CH];
    NormedOf() = default;
    __device__ NormedOf(I c, const P* gamma, const P* beta, const P* mean,
                        const P* inv_std) {
        for (int j = 0; j < CH; ++j)
            of[j] = beta ? Normed(mean[c + j], inv_std[c + j], gamma[c + j],
                                  beta[c + j])
                         : Normed(mean[c + j]);
    }
};

// A channel's statistics, from its sums about an origin.
struct Moments {
    double average, square, count;
    __device__ Moments(A origin, double sum, double squares, double count)
        : count(count) {
        average = (double)origin + sum / count;
        square = squares - sum * sum / count;
        if (square < 0) square = 0;
    }
    __device__ P inverse(double eps) const {
        return (P)(1 / sqrt(square / count + eps));
    }
    __device__ void move(P* running_mean, P* running_var, double momentum) const {
        double unbiased = square / (count > 1 ? count - 1 : 1), rest = 1 - momentum;
        *running_mean = (P)(rest * (double)*running_mean + momentum * average);
        *running_var = (P)(rest * (double)*running_var + momentum * unbiased);
    }
};

// The input's gradient: a linear function of the masked gradient and the input.
struct InputGrad {
    A centre, scale, along, offset;
    InputGrad() = default;
    __device__ InputGrad(P mean, P inv_std, P gamma, double sum, double dot,
                         double count)
        : centre((A)mean) {
        double inverse = (double)inv_std, factor = (double)gamma * inverse;
        scale = (A)factor;
        offset = (A)(-factor * sum / count);
        along = (A)(-factor * inverse * inverse * dot / count);
    }
    __device__ A operator()(T x, A dy) const {
        return dy * scale + ((A)x - centre) * along + offset;
    }
};
