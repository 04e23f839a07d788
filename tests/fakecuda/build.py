"""Build stand-ins for NVIDIA's libraries beside an installed CUDA build of PyTorch.

    python -m tests.fakecuda.build SITE_PACKAGES HEADERS OUT

`cudart.cpp` becomes the CUDA runtime. Of every other library that PyTorch's own ones
need (cuBLAS, cuDNN, NCCL, ...) only the symbols that they import are made: functions
that return 0, and a few that say how large a workspace is or take a stream's time.
"""

import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

OF_THE_SYSTEM = re.compile(
    r"lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s|gomp|util|numa)\.so|ld-linux"
)

LIBRARIES = {
    "cublasLt": "cublasLt",
    "cublas": "cublas",
    "cudnn": "cudnn",
    "cufft": "cufft",
    "curand": "curand",
    "cusolver": "cusolver",
    "cusparseLt": "cusparseLt",
    "cusparse": "cusparse",
    "nccl": "nccl",
    "nvrtc": "nvrtc",
    "cuda": "cudart",
    "__cuda": "cudart",
    "cupti": "cupti",
    "cuFile": "cufile",
    "nvshmem": "nvshmem",
    "nvJitLink": "nvJitLink",
    "cu": "cuda",
}
"""Beginning of a symbol's name -> the library that has it; the first that fits."""

PROLOGUE = """
#include <stdlib.h>
#include <string.h>
extern void fake_work(void*, double) __attribute__((weak));
#define NEW(place) (*(void**)(place) = calloc(1, 4096), 0L)
#define TAKE(stream, us) (fake_work ? fake_work(stream, us) : (void)0, 0L)
"""

HANDLE = "void** handle", "return NEW(handle);"
SHAPE = (
    "void* handle, int ta, int tb, int m, int n, int k",
    "return TAKE(*(void**)handle, 3.0 + 2.0 * m * n * k / 4.0e8);",
)

FUNCTIONS = {
    "cublasCreate_v2": HANDLE,
    "cublasLtCreate": HANDLE,
    "cublasLtMatmulDescCreate": HANDLE,
    "cublasLtMatrixLayoutCreate": HANDLE,
    "cublasLtMatmulPreferenceCreate": HANDLE,
    "cudnnCreate": HANDLE,
    "cudnnCreateTensorDescriptor": HANDLE,
    "cusolverDnCreate": HANDLE,
    "cusparseCreate": HANDLE,
    "cublasSetStream_v2": ("void* handle, void* s", "*(void**)handle = s; return 0;"),
    "cublasLtMatmulAlgoGetHeuristic": (
        "void* h, void* d, void* a, void* b, void* c, void* e, void* p, int n, "
        "void* result, int* found",
        "memset(result, 0, 96); *found = 1; return 0;",
    ),
    "cublasLtMatmul": (
        "void* h, void* d, void* al, void* a, void* ad, void* b, void* bd, void* be, "
        "void* c, void* cd, void* r, void* rd, void* algo, void* ws, long n, "
        "void* stream",
        "return TAKE(stream, 50.0);",
    ),
    **dict.fromkeys(
        (
            "cublasSgemm_v2",
            "cublasDgemm_v2",
            "cublasGemmEx",
            "cublasSgemmEx",
            "cublasGemmStridedBatchedEx",
            "cublasSgemmStridedBatched",
        ),
        SHAPE,
    ),
    "cudnnGetVersion": ("void", "return 92400;"),
    "cudnnGetCudartVersion": ("void", "return 13000;"),
    "cudnnGetProperty": (
        "int t, int* v",
        "*v = t == 0 ? 9 : t == 1 ? 24 : 0; return 0;",
    ),
    "cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize": (
        "void* h, int m, int o, void* x, void* z, void* y, void* b, void* a, long* n",
        "*n = 0; return 0;",
    ),
    "cudnnGetBatchNormalizationBackwardExWorkspaceSize": (
        "void* h, int m, int o, void* x, void* y, void* dy, void* dz, void* dx, "
        "void* b, void* a, long* n",
        "*n = 0; return 0;",
    ),
    "cudnnGetBatchNormalizationTrainingExReserveSpaceSize": (
        "void* h, int m, int o, void* a, void* x, long* n",
        "*n = 1024; return 0;",
    ),
    "cuCtxGetCurrent": ("void** context", "*context = (void*)1; return 0;"),
    "ncclGetVersion": ("int* v", "*v = 23007; return 0;"),
}
"""Functions that do more than return 0: parameters and body, in C."""


def build(site: Path, headers: Path, out: Path) -> None:
    """Build a shared library for each one that PyTorch's libraries lack."""
    out.mkdir(parents=True, exist_ok=True)
    include = next(headers.rglob("cuda_runtime_api.h")).parent
    runtime = out / "cudart.o"
    source = Path(__file__).with_name("cudart.cpp")
    run("g++", "-O1", "-fPIC", "-w", f"-I{include}", "-c", source, "-o", runtime)
    defined = {
        line.split()[-1]
        for line in run("nm", "--defined-only", runtime).splitlines()
        if " T " in line
    }
    needed, symbols = imports_of(site / "torch" / "lib")
    of: dict[str, dict[str, str | None]] = {name: {} for name in needed}
    for symbol, version in symbols.items():
        if (name := library_of(symbol, version, needed)) is not None:
            of[name][symbol] = version
    with ThreadPoolExecutor(2) as pool:
        made = [
            pool.submit(make_library, out, name, of[name], defined, runtime)
            for name in needed
        ]
        for one in made:
            one.result()


def imports_of(folder: Path) -> tuple[list[str], dict[str, str | None]]:
    """Return the libraries that those of a folder lack, and the symbols they import."""
    own = {path.name for path in folder.iterdir()}
    needed: set[str] = set()
    symbols: dict[str, str | None] = {}
    for path in sorted(folder.glob("*.so*")):
        found = re.findall(r"NEEDED.*\[(.+?)\]", run("readelf", "-d", path))
        needed |= {n for n in found if n not in own and not OF_THE_SYSTEM.match(n)}
        for line in run("nm", "-D", "-u", path).splitlines():
            if match := re.match(r"\s+[UwVv]\s+(\S+?)(?:@(\S+))?$", line):
                symbols.setdefault(match[1], match[2])
    return sorted(needed), symbols


def library_of(symbol: str, version: str | None, needed: Sequence[str]) -> str | None:
    """Return the library that a symbol is imported from, by its version or its name."""
    if version and "." in version:
        stem = version.split(".so")[0]
        found = next((n for n in needed if n.split(".so")[0] == stem), None)
        if found is not None:
            return found
    for beginning, stem in LIBRARIES.items():
        if symbol.startswith(beginning):
            starts = f"lib{stem}.so", f"lib{stem}_"
            return next((n for n in needed if n.startswith(starts)), None)
    return None


def make_library(
    out: Path,
    name: str,
    symbols: dict[str, str | None],
    defined: set[str],
    runtime: Path,
) -> None:
    """Compile the stand-in of one library."""
    is_runtime = name.startswith("libcudart")
    lines = [PROLOGUE]
    for symbol in sorted(symbols):
        if not (is_runtime and symbol in defined):
            parameters, body = FUNCTIONS.get(symbol, ("void", "return 0;"))
            lines.append(f"long {symbol}({parameters}) {{ {body} }}\n")
    source = out / f"{name}.c"
    source.write_text("".join(lines))
    versions = sorted({v for v in symbols.values() if v})
    script = []
    if len(versions) == 1:
        path = out / f"{name}.map"
        path.write_text(f"{versions[0]} {{ global: *; }};\n")
        script = [f"-Wl,--version-script={path}"]
    more = [runtime, "-lstdc++", "-lpthread"] if is_runtime else []
    flags = "-O1", "-w", "-fno-builtin", "-shared", "-fPIC"
    run("gcc", *flags, source, *more, "-o", out / name, f"-Wl,-soname,{name}", *script)


def run(*command: object) -> str:
    """Run a program and return its output."""
    return subprocess.run(
        list(map(str, command)), check=True, capture_output=True, text=True
    ).stdout


if __name__ == "__main__":
    build(*map(Path, sys.argv[1:4]))
