// A CUDA runtime without a GPU, for tests of what PyTorch records, allocates and waits
// for. Device memory is address space of the process, streams and events are points on
// a clock, and every call that a test may want to forbid is counted. A kernel takes
// time and computes nothing; copies of at most 1 MiB move their bytes.

#include <cuda_runtime_api.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <map>
#include <mutex>
#include <string>

#undef cudaGetDeviceProperties

namespace {

constexpr size_t kPage = 2 << 20;       // what the driver maps at once
constexpr size_t kMoved = 1 << 20;      // larger copies move nothing
constexpr double kKernelUs = 2.0;       // per launch, beside its threads
constexpr double kThreadsPerUs = 5.2e4;
constexpr double kLinkBytesPerUs = 5.0e4;
constexpr double kMemoryBytesPerUs = 1.3e6;
constexpr int kMostDevices = 8;

struct Stream {
  double ready = 0;
  int priority = 0;
  int device = 0;
};

struct Event {
  double at = 0;
};

struct Block {
  size_t nbytes;
  int device;
};

Stream null_streams[kMostDevices];
std::mutex lock;
std::map<char*, Block> device_blocks, host_blocks;
size_t used[kMostDevices], peak[kMostDevices], pinned = 0;
thread_local int current = 0;

#define COUNTERS(X)                                                              \
  X(launch) X(product) X(malloc) X(free) X(host_alloc) X(stream_sync)            \
  X(event_sync) X(device_sync) X(copy_async) X(copy_sync) X(event_create)        \
  X(event_record) X(wait_event) X(memset) X(query)
#define DEFINE(name) std::atomic<long> n_##name{0};
COUNTERS(DEFINE)

long setting(const char* name, long otherwise) {
  const char* value = getenv(name);
  return value ? atol(value) : otherwise;
}

int device_count() { return (int)setting("FAKECUDA_DEVICES", 2); }

size_t total_bytes() { return (size_t)setting("FAKECUDA_TOTAL_MB", 81000) << 20; }

double now_us() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e6 + t.tv_nsec * 1e-3;
}

Stream* of(cudaStream_t s) {
  bool is_null = !s || s == cudaStreamLegacy || s == cudaStreamPerThread;
  return is_null ? &null_streams[current] : (Stream*)s;
}

void work(cudaStream_t s, double us) {
  Stream* stream = of(s);
  double now = now_us();
  if (stream->ready < now) stream->ready = now;
  stream->ready += us;
}

void until(double at) {
  double now;
  while ((now = now_us()) < at)
    if (at - now > 60) usleep((useconds_t)(at - now - 50));
}

double kernel_us(dim3 grid, dim3 block) {
  double threads = (double)grid.x * grid.y * grid.z * block.x * block.y * block.z;
  return kKernelUs + threads / kThreadsPerUs;
}

void move(void* target, const void* source, size_t n, cudaMemcpyKind kind) {
  if (n <= kMoved || kind == cudaMemcpyHostToHost) memcpy(target, source, n);
}

double copy_us(size_t n, cudaMemcpyKind kind) {
  return 3.0 + n / (kind == cudaMemcpyDeviceToDevice ? kMemoryBytesPerUs
                                                     : kLinkBytesPerUs);
}

void* mapped(size_t n) {
  void* found = mmap(0, n, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return found == MAP_FAILED ? nullptr : found;
}

const Block* block_of(std::map<char*, Block>& blocks, const void* p) {
  auto found = blocks.upper_bound((char*)p);
  if (found == blocks.begin()) return nullptr;
  --found;
  return (char*)p < found->first + found->second.nbytes ? &found->second : nullptr;
}

struct { dim3 grid, block; size_t shared; void* stream; } thread_local call;

}  // namespace

extern "C" {

// What tests read, and what stand-ins of cuBLAS call.

void fake_counters(char* out, int size) {
  std::string text;
#define PUT(name) text += #name "=" + std::to_string(n_##name.load()) + " ";
  COUNTERS(PUT)
  text += "used=" + std::to_string(used[0]) + " peak=" + std::to_string(peak[0]) +
          " pinned=" + std::to_string(pinned);
  strncpy(out, text.c_str(), size - 1);
  out[size - 1] = 0;
}

void fake_reset() {
#define RESET(name) n_##name = 0;
  COUNTERS(RESET)
  for (int i = 0; i < kMostDevices; i++) peak[i] = used[i];
}

void fake_work(void* stream, double us) {
  n_product++;
  work((cudaStream_t)stream, us);
}

// Devices.

cudaError_t cudaGetDeviceCount(int* n) { *n = device_count(); return cudaSuccess; }
cudaError_t cudaGetDevice(int* d) { *d = current; return cudaSuccess; }
cudaError_t cudaSetDevice(int d) {
  if (d < 0 || d >= device_count()) return cudaErrorInvalidDevice;
  current = d;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* v) { *v = 13000; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* v) { *v = 13000; return cudaSuccess; }

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "Stand-in (compute capability 9.0)");
  p->totalGlobalMem = total_bytes();
  p->major = 9;
  p->multiProcessorCount = 132;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = 232448;
  p->sharedMemPerMultiprocessor = 233472;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->l2CacheSize = 50 << 20;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->totalConstMem = 65536;
  p->concurrentKernels = p->unifiedAddressing = p->canMapHostMemory = 1;
  p->asyncEngineCount = 3;
  p->textureAlignment = 512;
  p->maxBlocksPerMultiProcessor = 32;
  p->memoryBusWidth = 5120;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* v, cudaDeviceAttr a, int) {
  switch (a) {
    case cudaDevAttrMultiProcessorCount: *v = 132; break;
    case cudaDevAttrComputeCapabilityMajor: *v = 9; break;
    case cudaDevAttrMaxThreadsPerBlock: *v = 1024; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *v = 49152; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *v = 232448; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *v = 233472; break;
    case cudaDevAttrWarpSize: *v = 32; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *v = 2048; break;
    case cudaDevAttrMaxGridDimX: *v = 2147483647; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *v = 65535; break;
    case cudaDevAttrUnifiedAddressing: *v = 1; break;
    case cudaDevAttrL2CacheSize: *v = 50 << 20; break;
    case cudaDevAttrMaxRegistersPerBlock: *v = 65536; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *v = 32; break;
    case cudaDevAttrReservedSharedMemoryPerBlock: *v = 1024; break;
    default: *v = 0;
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* c, int, int) { *c = 0; return cudaSuccess; }
cudaError_t cudaDeviceGetPCIBusId(char* s, int n, int d) {
  snprintf(s, n, "0000:0%d:00.0", d);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetLimit(size_t* v, cudaLimit) { *v = 1 << 20; return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int* low, int* high) {
  *low = 0;
  *high = -5;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  n_device_sync++;
  until(null_streams[current].ready);
  return cudaSuccess;
}

// Memory.

cudaError_t cudaMalloc(void** p, size_t n) {
  std::lock_guard<std::mutex> held(lock);
  n_malloc++;
  size_t whole = (n + kPage - 1) / kPage * kPage;
  *p = used[current] + whole > total_bytes() ? nullptr : mapped(whole);
  if (!*p) return cudaErrorMemoryAllocation;
  device_blocks[(char*)*p] = {whole, current};
  used[current] += whole;
  if (used[current] > peak[current]) peak[current] = used[current];
  return cudaSuccess;
}
cudaError_t cudaFree(void* p) {
  if (!p) return cudaSuccess;
  std::lock_guard<std::mutex> held(lock);
  n_free++;
  auto found = device_blocks.find((char*)p);
  if (found == device_blocks.end()) return cudaErrorInvalidValue;
  munmap(p, found->second.nbytes);
  used[found->second.device] -= found->second.nbytes;
  device_blocks.erase(found);
  return cudaSuccess;
}
cudaError_t cudaMallocAsync(void** p, size_t n, cudaStream_t) { return cudaMalloc(p, n); }
cudaError_t cudaFreeAsync(void* p, cudaStream_t) { return cudaFree(p); }
cudaError_t cudaHostAlloc(void** p, size_t n, unsigned) {
  std::lock_guard<std::mutex> held(lock);
  n_host_alloc++;
  *p = mapped(n);
  if (!*p) return cudaErrorMemoryAllocation;
  host_blocks[(char*)*p] = {n, 0};
  pinned += n;
  return cudaSuccess;
}
cudaError_t cudaMallocHost(void** p, size_t n) { return cudaHostAlloc(p, n, 0); }
cudaError_t cudaFreeHost(void* p) {
  std::lock_guard<std::mutex> held(lock);
  auto found = host_blocks.find((char*)p);
  if (found == host_blocks.end()) return cudaSuccess;
  munmap(p, found->second.nbytes);
  pinned -= found->second.nbytes;
  host_blocks.erase(found);
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* available, size_t* whole) {
  *whole = total_bytes();
  *available = *whole - used[current];
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  std::lock_guard<std::mutex> held(lock);
  memset(a, 0, sizeof *a);
  if (const Block* found = block_of(device_blocks, p)) {
    a->type = cudaMemoryTypeDevice;
    a->device = found->device;
    a->devicePointer = (void*)p;
  } else if (block_of(host_blocks, p)) {
    a->type = cudaMemoryTypeHost;
    a->hostPointer = a->devicePointer = (void*)p;
  } else {
    a->type = cudaMemoryTypeUnregistered;
    a->device = -1;
    a->hostPointer = (void*)p;
  }
  return cudaSuccess;
}

// Streams and events.

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned, int priority) {
  *s = (cudaStream_t) new Stream{0, priority, current};
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned flags) {
  return cudaStreamCreateWithPriority(s, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t* s) { return cudaStreamCreateWithPriority(s, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  n_stream_sync++;
  until(of(s)->ready);
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t s) {
  n_query++;
  return of(s)->ready <= now_us() ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) {
  n_wait_event++;
  if (((Event*)e)->at > of(s)->ready) of(s)->ready = ((Event*)e)->at;
  return cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t s, int* p) {
  *p = of(s)->priority;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* s) {
  *s = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* s,
                                     unsigned long long* id, cudaGraph_t*,
                                     const cudaGraphNode_t**,
                                     const cudaGraphEdgeData**, size_t*) {
  *s = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) {
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) {
  n_event_create++;
  *e = (cudaEvent_t) new Event;
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* e) { return cudaEventCreateWithFlags(e, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t e) { delete (Event*)e; return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
  n_event_record++;
  double now = now_us();
  ((Event*)e)->at = of(s)->ready > now ? of(s)->ready : now;
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned) {
  return cudaEventRecord(e, s);
}
cudaError_t cudaEventQuery(cudaEvent_t e) {
  n_query++;
  return ((Event*)e)->at <= now_us() ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t e) {
  n_event_sync++;
  until(((Event*)e)->at);
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) {
  double us = ((Event*)b)->at - ((Event*)a)->at;
  *ms = us > 0 ? (float)(us / 1e3) : 0;
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime_v2(float* ms, cudaEvent_t a, cudaEvent_t b) {
  return cudaEventElapsedTime(ms, a, b);
}

// Work.

cudaError_t cudaLaunchKernel(const void*, dim3 grid, dim3 block, void**, size_t,
                             cudaStream_t s) {
  n_launch++;
  work(s, kernel_us(grid, block));
  return cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void*, void**) {
  n_launch++;
  work(c->stream, kernel_us(c->gridDim, c->blockDim));
  return cudaSuccess;
}
cudaError_t cudaLaunchCooperativeKernel(const void* k, dim3 grid, dim3 block, void** a,
                                        size_t shared, cudaStream_t s) {
  return cudaLaunchKernel(k, grid, block, a, shared, s);
}
cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t n,
                            cudaMemcpyKind kind, cudaStream_t s) {
  n_copy_async++;
  move(target, source, n, kind);
  work(s, copy_us(n, kind));
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* target, const void* source, size_t n, cudaMemcpyKind kind) {
  n_copy_sync++;
  move(target, source, n, kind);
  work(nullptr, copy_us(n, kind));
  until(null_streams[current].ready);
  return cudaSuccess;
}
cudaError_t cudaMemcpyPeerAsync(void* target, int, const void* source, int, size_t n,
                                cudaStream_t s) {
  return cudaMemcpyAsync(target, source, n, cudaMemcpyDeviceToDevice, s);
}
cudaError_t cudaMemsetAsync(void* p, int value, size_t n, cudaStream_t s) {
  n_memset++;
  if (n <= kMoved) memset(p, value, n);
  work(s, 2 + n / kMemoryBytesPerUs);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* p, int value, size_t n) {
  return cudaMemsetAsync(p, value, n, nullptr);
}

// What PyTorch asks about errors, kernels and the driver.

const char* cudaGetErrorString(cudaError_t e) {
  static char text[48];
  if (e == cudaErrorMemoryAllocation) return "out of memory";
  snprintf(text, sizeof text, "error %d of the stand-in", (int)e);
  return text;
}
const char* cudaGetErrorName(cudaError_t e) { return cudaGetErrorString(e); }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 32;
  a->binaryVersion = a->ptxVersion = 90;
  a->maxDynamicSharedSizeBytes = 232448;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void*, int block,
                                                          size_t) {
  *n = 2048 / (block > 0 ? block : 1);
  if (*n < 1) *n = 1;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void* f,
                                                                   int block, size_t s,
                                                                   unsigned) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(n, f, block, s);
}
cudaError_t cudaGetSymbolAddress(void** p, const void*) {
  static char symbol[1 << 20];
  *p = symbol;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPoint(const char*, void** f, unsigned long long,
                                    cudaDriverEntryPointQueryResult* found) {
  *f = nullptr;
  if (found) *found = cudaDriverEntryPointSymbolNotFound;
  return cudaErrorSymbolNotFound;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** f, unsigned,
                                             unsigned long long flags,
                                             cudaDriverEntryPointQueryResult* found) {
  return cudaGetDriverEntryPoint(name, f, flags, found);
}

// What nvcc's host code calls.

void** __cudaRegisterFatBinary(void*) { static void* handle = &handle; return &handle; }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char*, char*, const char*, int, void*, void*,
                            void*, void*, int*) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterManagedVar(void**, void**, char*, const char*, int, size_t, int,
                              int) {}
char __cudaInitModule(void**) { return 1; }
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* s) {
  call.grid = grid;
  call.block = block;
  call.shared = shared;
  call.stream = s;
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* s) {
  *grid = call.grid;
  *block = call.block;
  *shared = call.shared;
  *(void**)s = call.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* k, const void* f) {
  *k = (cudaKernel_t)f;
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3 grid, dim3 block, void** a,
                               size_t shared, cudaStream_t s) {
  return cudaLaunchKernel((void*)k, grid, block, a, shared, s);
}
cudaError_t __cudaLaunchKernel_ptsz(cudaKernel_t k, dim3 grid, dim3 block, void** a,
                                    size_t shared, cudaStream_t s) {
  return cudaLaunchKernel((void*)k, grid, block, a, shared, s);
}
}
