#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS)
#define EACH(i, count)                                                            \
    for (I i = (I)blockIdx.x * THREADS + threadIdx.x; i < (count);                \
         i += (I)gridDim.x * THREADS)

#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fc00000)
#endif

#ifdef HALVES
struct Half {
    unsigned short bits;
    Half() = default;
    __device__ explicit Half(float value) {
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    }
    __device__ operator float() const {
        float value;
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
        return value;
    }
};
struct BFloat {
    unsigned short bits;
    BFloat() = default;
    __device__ explicit BFloat(float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#else
        unsigned int wide = __float_as_uint(value);
        bits = (wide & 0x7fffffffu) > 0x7f800000u
                   ? 0x7fff
                   : (wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16;
#endif
    }
    __device__ operator float() const {
        return __uint_as_float((unsigned int)bits << 16);
    }
};
#endif
typedef ELEMENT T;
typedef PARAMETER P;
typedef COMPUTED A;
typedef INDEX I;

// Neighbouring elements, read and written by one access to memory; 16 bytes at most.
template <class E, int W> struct alignas(W * sizeof(E)) Pack { E at[W]; };
// The largest positive number that rounds to 0 in E.
template <class E> __device__ A vanishing() { return 0; }
#ifdef HALVES
template <> __device__ A vanishing<Half>() { return (A)0x1p-25; }
template <> __device__ A vanishing<BFloat>() { return (A)0x1p-134; }
#endif
#define PACKED ((int)(16 / sizeof(T)))
__device__ bool aligned(const void* p) { return (unsigned long long)p % 16 == 0; }
#ifndef ACCESSIBLE  // a test harness may redefine it to check accesses
#define ACCESSIBLE(Access, p) true
#endif
template <int W, class E> __device__ Pack<E, W> load(const E* p) {
    typedef Pack<E, W> Access;
    return ACCESSIBLE(Access, p) ? *(const Access*)p : Access();
}
template <int W, class E> __device__ void store(E* p, const Pack<E, W>& pack) {
    typedef Pack<E, W> Access;
    if (ACCESSIBLE(Access, p)) *(Access*)p = pack;
}
