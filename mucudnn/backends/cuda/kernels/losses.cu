#include "prelude.cuh"
#include "reduce.cuh"
#include "walk.cuh"

typedef long long Label;
// Elements of one access to the wider of two tensors.
#define BOTH_PACKED ((int)(16 / (sizeof(T) > sizeof(P) ? sizeof(T) : sizeof(P))))

// As `lane_sum`, for the maximum.
__device__ A lane_max(A value, I width) {
    __shared__ A highest[THREADS];
    for (int other = 16; other >= width; other /= 2) {
        A theirs = __shfl_xor_sync(0xffffffffu, value, other);
        if (theirs > value) value = theirs;
    }
    __syncthreads();
    highest[threadIdx.x] = value;
    __syncthreads();
    I apart = width < 32 ? 32 : width;
    for (I each = threadIdx.x & (width - 1); each < THREADS; each += apart)
        if (highest[each] > value) value = highest[each];
    return value;
}

// Lanes are pixels; the threads of a lane share its classes. Classes are contiguous if
// a sample has a single pixel, and then W of them are read at once.
#define EACH_CLASS(...)                                                           \
    if (packed) {                                                                 \
        constexpr int W = BOTH_PACKED;                                            \
        I c = row * W, i = start + c, next = apart * W;                           \
        for (; c < stop; c += next, i += next) {                                  \
            __VA_ARGS__                                                           \
        }                                                                         \
    } else {                                                                      \
        constexpr int W = 1;                                                      \
        I c = row, i = start + c * S;                                             \
        for (; c < stop; c += apart, i += apart * S) {                            \
            __VA_ARGS__                                                           \
        }                                                                         \
    }
#define EACH_PIXEL(pixel)                                                         \
    I lane = threadIdx.x % width, row = threadIdx.x / width;                      \
    I pixels = N * S, apart = THREADS / width;                                    \
    for (I base = blockIdx.x * width, pixel = base + lane; base < pixels;         \
         base += (I)gridDim.x * width, pixel = base + lane)

KERNEL softmax_cross_entropy(const T* x, const Label* labels, P* logs, double* parts,
                             I N, I C, I S, I width) {
    double loss = 0;
    bool packed = S == 1 && C % BOTH_PACKED == 0 && aligned(x) && aligned(logs);
    EACH_PIXEL(pixel) {
        bool here = pixel < pixels;
        I start = here ? pixel / S * C * S + pixel % S : 0, stop = here ? C : 0;
        A highest = -(A)INFINITY;
        EACH_CLASS({
            Pack<T, W> v = load<W>(x + i);
            for (int j = 0; j < W; ++j)
                if ((A)v.at[j] > highest) highest = (A)v.at[j];
        })
        highest = lane_max(highest, width);
        double sum = 0;
        EACH_CLASS({
            Pack<T, W> v = load<W>(x + i);
            for (int j = 0; j < W; ++j) sum += (double)exp((A)v.at[j] - highest);
        })
        sum = log(lane_sum(sum, width));
        EACH_CLASS({
            Pack<T, W> v = load<W>(x + i);
            Pack<P, W> made;
            for (int j = 0; j < W; ++j)
                made.at[j] = (P)((A)v.at[j] - highest - (A)sum);
            store(logs + i, made);
        })
        if (!here || row != 0) continue;
        Label label = labels[pixel];
        if (label < 0 || label >= C) loss += (double)NAN;
        else loss += sum - (double)((A)x[start + (I)label * S] - highest);
    }
    loss = lane_sum(loss, 1);
    if (threadIdx.x == 0) parts[blockIdx.x] = loss;
}

// The loss from known logarithms. If a label's is too low for the type, the
// logits tell its distance from the highest.
KERNEL picked_mean(const T* x, const P* logs, const Label* labels, double* parts,
                   I pixels, I C, I S) {
    double loss = 0;
    EACH(pixel, pixels) {
        Label label = labels[pixel];
        if (label < 0 || label >= C) {
            loss += (double)NAN;
            continue;
        }
        I start = pixel / S * C * S + pixel % S, own = start + (I)label * S;
        double below = -(double)(A)logs[own];
        if (below == (double)INFINITY) {
            I best = start;
            for (I i = start; i < start + C * S; i += S)
                if ((A)x[i] > (A)x[best]) best = i;
            below = (double)((A)x[best] - (A)x[own]) - (double)(A)logs[best];
        }
        loss += below;
    }
    loss = lane_sum(loss, 1);
    if (threadIdx.x == 0) parts[blockIdx.x] = loss;
}

KERNEL softmax_cross_entropy_grad(const P* logs, const Label* labels, const P* dloss,
                                  T* dx, I count, I C, I S, double labelled) {
    A factor = (A)((double)dloss[0] / labelled);
    EACH_AT(at, count, S, C, 1) {
        bool own = labels[at.image * S + at.w] == at.h;
        A low = (A)logs[at.i];
        dx[at.i] = (T)((own ? expm1(low) : exp(low)) * factor);
    }
}

KERNEL accuracy(const T* x, const Label* labels, double* parts, I N, I C, I S, I width,
                I most) {
    double right = 0;
    bool packed = S == 1 && C % BOTH_PACKED == 0 && aligned(x);
    EACH_PIXEL(pixel) {
        bool here = pixel < pixels;
        Label label = here ? labels[pixel] : -1;
        here = label >= 0 && label < C;
        I start = here ? pixel / S * C * S + pixel % S : 0, stop = here ? C : 0;
        A own = here ? (A)x[start + (I)label * S] : (A)0;
        double above = 0;
        EACH_CLASS({
            Pack<T, W> v = load<W>(x + i);
            for (int j = 0; j < W; ++j) above += (A)v.at[j] > own;
        })
        above = lane_sum(above, width);
        if (here && row == 0 && above < most && own == own) right += 1;
    }
    right = lane_sum(right, 1);
    if (threadIdx.x == 0) parts[blockIdx.x] = right;
}

KERNEL mean_squared_error(const T* a, const T* b, double* parts, I count) {
    double sum = 0;
    EACH(i, count) {
        A difference = (A)a[i] - (A)b[i];
        sum += (double)difference * difference;
    }
    sum = lane_sum(sum, 1);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

KERNEL mean_squared_error_grad(const T* a, const T* b, const T* dloss, T* dx, I count,
                               double compared) {
    A factor = (A)(2 * (double)dloss[0] / compared);
    EACH(i, count) dx[i] = (T)(((A)a[i] - (A)b[i]) * factor);
}

__device__ double sum_of(const double* parts, I count) {
    double sum = 0;
    for (I i = threadIdx.x; i < count; i += THREADS) sum += parts[i];
    return lane_sum(sum, 1);
}

KERNEL finish_mean(const double* parts, T* out, I count, double divisor) {
    double sum = sum_of(parts, count);
    if (threadIdx.x == 0) out[0] = (T)(sum / divisor);
}

KERNEL finish_count(const double* parts, long long* out, I count, I more) {
    double sum = sum_of(parts, count);
    if (threadIdx.x == 0) out[0] = (more ? out[0] : 0) + (long long)sum;
}

KERNEL finish_float(const double* parts, T* out, I count, I more) {
    double sum = sum_of(parts, count);
    if (threadIdx.x == 0) out[0] = (T)(A)((more ? (double)out[0] : 0) + sum);
}
