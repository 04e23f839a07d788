// As much of CUDA as the kernels use, for a C++ compiler: blocks one after another.
// The threads of a block take turns; each runs until the next barrier, as a fiber.
#include <cmath>
#include <type_traits>
#include <ucontext.h>
#include <utility>

#define __global__
#define __device__
#define __shared__ static
using std::erf;
using std::exp;
using std::log;
using std::pow;
using std::sqrt;
using std::tanh;

struct Place {
    unsigned x, y;
};
static Place blockIdx, threadIdx, gridDim;
static ucontext_t home, fibers[THREADS];
static char stacks[THREADS][1 << 14];
enum State { RUNNING, WAITING, DONE };
static State states[THREADS];

static inline void __syncthreads() {
    unsigned self = threadIdx.x;
    states[self] = WAITING;
    swapcontext(&fibers[self], &home);
    threadIdx.x = self;
}

static inline unsigned long long __umul64hi(unsigned long long a,
                                            unsigned long long b) {
    return (unsigned __int128)a * b >> 64;
}

namespace emulator {
// Of a parameter: a letter that says what may be passed.
template <class P> constexpr char kind() {
    using E = std::remove_cv_t<std::remove_pointer_t<P>>;
    constexpr bool pointer = std::is_pointer_v<P>;
    if (std::is_same_v<E, float>) return pointer ? 'F' : 'f';
    if (std::is_same_v<E, double>) return pointer ? 'D' : 'd';
    if (std::is_same_v<E, int>) return pointer ? '?' : 'i';
    if (std::is_same_v<E, long long>) return pointer ? 'L' : 'l';
    if (std::is_same_v<E, unsigned long long>) return pointer ? '?' : 'u';
    if (std::is_same_v<E, unsigned char>) return pointer ? 'B' : '?';
    return '?';
}

template <class... P> const char* kinds(void (*)(P...)) {
    static const char letters[] = {kind<P>()..., 0};
    return letters;
}

static void (*body)(void*);
static void* closure;
static void enter() {
    unsigned self = threadIdx.x;
    body(closure);
    states[self] = DONE;
    swapcontext(&fibers[self], &home);
}

// Whether all threads met at the same number of barriers.
static bool in_turns() {
    for (unsigned t = 0; t < THREADS; ++t) {
        states[t] = RUNNING;
        getcontext(&fibers[t]);
        fibers[t].uc_stack.ss_sp = stacks[t];
        fibers[t].uc_stack.ss_size = sizeof stacks[t];
        fibers[t].uc_link = &home;
        makecontext(&fibers[t], enter, 0);
    }
    for (;;) {
        unsigned done = 0;
        for (unsigned t = 0; t < THREADS; ++t) {
            threadIdx.x = t;
            swapcontext(&home, &fibers[t]);
            done += states[t] == DONE;
        }
        if (done == THREADS) return true;
        if (done != 0) return false;
    }
}

template <class... P, std::size_t... J>
bool run(void (*kernel)(P...), unsigned x, unsigned y, void** arguments, bool fibers,
         std::index_sequence<J...>) {
    auto call = [&] { kernel(*(std::remove_const_t<P>*)arguments[J]...); };
    body = [](void* self) { (*(decltype(call)*)self)(); };
    closure = &call;
    gridDim = {x, y};
    bool good = true;
    for (blockIdx.y = 0; blockIdx.y < y; ++blockIdx.y)
        for (blockIdx.x = 0; blockIdx.x < x; ++blockIdx.x) {
            if (fibers) good = in_turns() && good;
            else for (threadIdx.x = 0; threadIdx.x < THREADS; ++threadIdx.x) call();
        }
    return good;
}

template <class... P>
bool run(void (*kernel)(P...), unsigned x, unsigned y, void** arguments, bool fibers) {
    return run(kernel, x, y, arguments, fibers, std::index_sequence_for<P...>());
}
} // namespace emulator

#define ENTRY(name)                                                               \
    extern "C" int run_##name(unsigned x, unsigned y, void** arguments, int fibers) { \
        return emulator::run(::name, x, y, arguments, fibers);                    \
    }                                                                             \
    extern "C" const char* kinds_##name() { return emulator::kinds(::name); }
