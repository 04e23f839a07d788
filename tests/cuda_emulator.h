// As much of CUDA as the kernels use, for a C++ compiler: blocks one after another.
// The threads of a block take turns; each runs until the next barrier, as a fiber that
// goes on with the next block. Jumps are cheaper than `swapcontext`, a system call.
#include <cmath>
#include <setjmp.h>
#include <type_traits>
#include <ucontext.h>
#include <utility>

#define __global__
#define __launch_bounds__(threads)
#define __device__
#define __shared__ static
using std::erf;
using std::exp;
using std::log;
using std::pow;
using std::sqrt;
using std::tanh;

// A GPU stops at an access that is not aligned.
static bool misaligned;
template <class Access> static bool accessible(const void* p) {
    bool good = (unsigned long long)p % alignof(Access) == 0;
    misaligned |= !good;
    return good;
}
#define ACCESSIBLE(Access, p) accessible<Access>(p)

struct Place {
    unsigned x, y;
};
static Place blockIdx, threadIdx, gridDim;
static jmp_buf home, fibers[THREADS];
static char stacks[THREADS][1 << 14];
enum State { WAITING, DONE };
static State states[THREADS];

static void give_way(State state) {
    unsigned self = threadIdx.x;
    states[self] = state;
    if (!_setjmp(fibers[self])) _longjmp(home, 1);
}
static void __syncthreads() { give_way(WAITING); }

// All threads of a block call it together: a warp's exchange is a block's.
static double __shfl_xor_sync(unsigned, double value, int other) {
    static double room[THREADS];
    unsigned self = threadIdx.x;
    room[self] = value;
    __syncthreads();
    double theirs = room[self ^ other];
    __syncthreads();
    return theirs;
}

// Blocks run one after another: what one has written the next sees.
static void __threadfence() {}
static inline double __ldcg(const double* p) { return *p; }
static inline unsigned long long atomicAdd(unsigned long long* p,
                                           unsigned long long more) {
    unsigned long long before = *p;
    *p += more;
    return before;
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

static bool backwards; // whether the last thread of a block and the last block come first
static void (*body)(void*);
static void* closure;
static void enter() {
    for (;;) {
        body(closure);
        give_way(DONE);
    }
}

static bool begun[THREADS];
static void resume(unsigned t) {
    threadIdx.x = t;
    if (_setjmp(home)) return;
    if (begun[t]) _longjmp(fibers[t], 1);
    begun[t] = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = stacks[t];
    context.uc_stack.ss_size = sizeof stacks[t];
    makecontext(&context, enter, 0);
    setcontext(&context);
}

// Whether all threads met at the same number of barriers.
static bool in_turns() {
    for (;;) {
        unsigned done = 0;
        for (unsigned i = 0; i < THREADS; ++i) {
            unsigned t = backwards ? THREADS - 1 - i : i;
            resume(t);
            done += states[t] == DONE;
        }
        if (done == THREADS) return true;
        if (done != 0) return false;
    }
}

enum Outcome { DIVERGED, GOOD, MISALIGNED, TOO_LARGE };
template <class... P, std::size_t... J>
Outcome run(void (*kernel)(P...), unsigned x, unsigned y, void** arguments, bool fibers,
            bool last_first, std::index_sequence<J...>) {
    backwards = last_first;
    auto call = [&] { kernel(*(std::remove_const_t<P>*)arguments[J]...); };
    body = [](void* self) { (*(decltype(call)*)self)(); };
    closure = &call;
    if (x > 0x7fffffffu || y > 65535u) return TOO_LARGE;
    gridDim = {x, y};
    misaligned = false;
    bool good = true;
    for (unsigned j = 0; j < y; ++j)
        for (unsigned i = 0; i < x; ++i) {
            blockIdx = {backwards ? x - 1 - i : i, backwards ? y - 1 - j : j};
            if (fibers) good = good && in_turns();
            else for (threadIdx.x = 0; threadIdx.x < THREADS; ++threadIdx.x) call();
        }
    if (!good) // the threads that wait are given up
        for (bool& one : begun) one = false;
    return !good ? DIVERGED : misaligned ? MISALIGNED : GOOD;
}

template <class... P>
Outcome run(void (*kernel)(P...), unsigned x, unsigned y, void** arguments, bool fibers,
            bool last_first) {
    return run(kernel, x, y, arguments, fibers, last_first,
               std::index_sequence_for<P...>());
}
} // namespace emulator

#define ENTRY(name)                                                               \
    extern "C" int run_##name(unsigned x, unsigned y, void** arguments, int fibers, \
                              int backwards) {                                    \
        return emulator::run(::name, x, y, arguments, fibers, backwards);         \
    }                                                                             \
    extern "C" const char* kinds_##name() { return emulator::kinds(::name); }
