// A row of a table: HEAD numbers, then the addresses of ARRAYS arrays; see `Row`.
#define HEAD 5
#define ARRAYS 5
#define CHUNK 4096  // most elements of a block: few, but locating them costs little

// The part of a tensor that a block has.
struct Part {
    const long long* row;
    long long start;
    I count;
    __device__ Part(const long long* table, I rows) {
        I low = 0, high = rows;
        while (high - low > 1) {
            I middle = (low + high) / 2;
            long long before = table[middle * (HEAD + ARRAYS)];
            (before <= (long long)blockIdx.x ? low : high) = middle;
        }
        row = table + low * (HEAD + ARRAYS);
        start = ((long long)blockIdx.x - row[0]) * CHUNK;
        count = (I)(row[1] - start < CHUNK ? row[1] - start : CHUNK);
    }
    __device__ bool flag() const { return row[2] != 0; }
    __device__ I channels() const { return (I)row[3]; }
    __device__ I taps() const { return (I)row[4]; }
    // The block's part of an array, or all of one.
    template <class E> __device__ E* array(int i, bool whole = false) const {
        return row[HEAD + i] ? (E*)row[HEAD + i] + (whole ? 0 : start) : 0;
    }
};
