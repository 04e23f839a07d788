"""The binding against the headers of the library: a C++ compiler reads both.

What is compared is enumerated from the binding's own tables, so that an entry without
a counterpart in the headers does not compile. Types are compared as kinds: `i4`, `u8`,
`e4` for integers and enumerations with their size, `f4`, `c`, `s48` for a structure,
`o` for an opaque one, `v` for void, `*` before what a pointer points to.
"""

import ctypes
import inspect
import shutil
import subprocess
from enum import IntEnum
from importlib.util import find_spec
from pathlib import Path

import pytest

from mucudnn.backends.cuda import libcudnn
from mucudnn.backends.cuda.libcudnn import PROTOTYPES, AlgoPerf, Cudnn

pytestmark = pytest.mark.cudnn

STRUCTURES = {
    AlgoPerf: [
        f"cudnnConvolution{direction}AlgoPerf_t"
        for direction in ("Fwd", "BwdData", "BwdFilter")
    ]
}
ATTRIBUTES = IntEnum("Attribute", libcudnn.ATTRIBUTES)
ENUMERATIONS = [
    ATTRIBUTES,
    *(
        value
        for value in vars(libcudnn).values()
        if inspect.isclass(value)
        and issubclass(value, IntEnum)
        and value is not IntEnum
    ),
]
C_NAMES = {
    libcudnn.Status: "CUDNN_STATUS_{}",
    libcudnn.DataType: "CUDNN_DATA_{}",
    libcudnn.TensorFormat: "CUDNN_TENSOR_{}",
    libcudnn.ConvolutionMode: "CUDNN_{}",
    libcudnn.MathType: "CUDNN_{}",
    libcudnn.Determinism: "CUDNN_{}",
    libcudnn.ForwardAlgo: "CUDNN_CONVOLUTION_FWD_ALGO_{}",
    libcudnn.BackwardDataAlgo: "CUDNN_CONVOLUTION_BWD_DATA_{}",
    libcudnn.BackwardFilterAlgo: "CUDNN_CONVOLUTION_BWD_FILTER_{}",
    libcudnn.DescriptorType: "CUDNN_BACKEND_{}_DESCRIPTOR",
    libcudnn.AttributeType: "CUDNN_TYPE_{}",
    ATTRIBUTES: "CUDNN_ATTR_{}",
    libcudnn.HeurMode: "CUDNN_HEUR_MODE_{}",
    libcudnn.NanPropagation: "CUDNN_{}",
    libcudnn.PointwiseMode: "CUDNN_POINTWISE_{}",
    libcudnn.PoolingMode: "CUDNN_POOLING_{}",
    libcudnn.LRNMode: "CUDNN_LRN_{}",
    libcudnn.BatchNormMode: "CUDNN_BATCHNORM_{}",
    libcudnn.SoftmaxAlgorithm: "CUDNN_SOFTMAX_{}",
    libcudnn.SoftmaxMode: "CUDNN_SOFTMAX_MODE_{}",
    libcudnn.NumericalNote: "CUDNN_NUMERICAL_NOTE_{}",
    libcudnn.BehaviorNote: "CUDNN_BEHAVIOR_NOTE_{}",
}
"""Enumeration to the format of its enumerators' names in the header.

The backward algorithms `ALGO_0` … are `…_ALGO_0` there, the others `…_ALGO_FFT`; see
`c_name`.
"""
NO_CUDA = {
    "cuda_runtime_api.h": "typedef struct CUstream_st *cudaStream_t;\n"
    "typedef struct CUgraph_st *cudaGraph_t;\n",
    "library_types.h": "typedef enum { NO_TYPE } libraryPropertyType;\n",
}
PRELUDE = """
#include <cstddef>
#include <iostream>
#include <string>
#include <type_traits>
#include <cudnn.h>

template <class T, class = void> struct complete : std::false_type {};
template <class T>
struct complete<T, std::void_t<decltype(sizeof(T))>> : std::true_type {};

template <class Qualified> std::string kind() {
    using T = std::remove_cv_t<Qualified>;
    if constexpr (std::is_void_v<T>) return "v";
    else if constexpr (std::is_pointer_v<T>)
        return "*" + kind<std::remove_pointer_t<T>>();
    else if constexpr (std::is_array_v<T>)
        return std::to_string(std::extent_v<T>) + "x" + kind<std::remove_extent_t<T>>();
    else if constexpr (!complete<T>::value) return "o";
    else {
        std::string size = std::to_string(sizeof(T));
        if constexpr (std::is_same_v<T, char>) return "c";
        else if constexpr (std::is_enum_v<T>) return "e" + size;
        else if constexpr (std::is_floating_point_v<T>) return "f" + size;
        else if constexpr (std::is_integral_v<T>)
            return (std::is_signed_v<T> ? "i" : "u") + size;
        else return "s" + size;
    }
}

template <class Result, class... Arguments>
void describe(const char *name, Result (*)(Arguments...)) {
    std::cout << name << ' ' << kind<Result>();
    ((std::cout << ' ' << kind<Arguments>()), ...);
    std::cout << '\\n';
}
"""


def headers_of(library):
    """The folder of `cudnn.h`: in the library's wheel, or as NVIDIA finds it."""
    beside = Path(library.path).resolve().parent.parent / "include"
    if (beside / "cudnn.h").is_file():
        return beside
    if find_spec("cuda") is not None and find_spec("cuda.pathfinder") is not None:
        from cuda.pathfinder import find_nvidia_header_directory

        found = find_nvidia_header_directory("cudnn")
        if found is not None:
            return Path(found)
    return pytest.skip(f"needs cudnn.h of {library.path}")


@pytest.fixture(scope="module")
def headers_say(cudnn_library, tmp_path_factory):
    """Run C++ statements that see the headers; the words of each line printed."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    include = headers_of(cudnn_library)
    folder = tmp_path_factory.mktemp("abi")
    for name, text in NO_CUDA.items():
        (folder / name).write_text(text)

    def say(statements):
        source, program = folder / "abi.cpp", folder / "abi"
        body = "\n".join(statements)
        source.write_text(f"{PRELUDE}\nint main() {{\n{body}\n}}\n")
        command = [compiler, "-std=c++17", "-w", f"-I{folder}", f"-I{include}"]
        command += [str(source), "-o", str(program)]
        compiled = subprocess.run(command, capture_output=True, text=True, check=False)
        assert compiled.returncode == 0, compiled.stderr
        run = subprocess.run([program], capture_output=True, text=True, check=True)
        return [line.split() for line in run.stdout.splitlines()]

    return say


def c_name(member):
    """The header's spelling of a member."""
    name = member.name
    if isinstance(member, libcudnn.BackwardDataAlgo | libcudnn.BackwardFilterAlgo):
        name = name if name.startswith("ALGO_") else f"ALGO_{name}"
    return C_NAMES[type(member)].format(name)


def kinds(ctype):
    """Every kind in a header that a type of the binding may stand for."""
    if ctype is None:
        return {"v"}
    if ctype is ctypes.c_char_p:
        return {"*c"}
    if ctype is ctypes.c_void_p:
        return {"*v", "*o"}
    if issubclass(ctype, ctypes.Structure):
        return {f"s{ctypes.sizeof(ctype)}"}
    if issubclass(ctype, ctypes.Array):
        return {f"{ctype._length_}x{kind}" for kind in kinds(ctype._type_)}
    if issubclass(ctype, ctypes._Pointer):
        return {f"*{kind}" for kind in kinds(ctype._type_)}
    size = ctypes.sizeof(ctype)
    if ctype is ctypes.c_float or ctype is ctypes.c_double:
        return {f"f{size}"}
    signed = ctype(-1).value < 0
    return {f"i{size}", f"e{size}"} if signed else {f"u{size}"}


def test_every_function_is_called_as_declared(headers_say):
    # The type alone is asked for, so that the program is linked without the library.
    said = headers_say(
        f'describe("{name}", static_cast<decltype(&{name})>(nullptr));'
        for name in PROTOTYPES
    )
    declared = {name: types for name, *types in said}
    assert declared.keys() == PROTOTYPES.keys()
    for name, (result, arguments) in PROTOTYPES.items():
        expected = [kinds(ctype) for ctype in (result, *arguments)]
        assert len(declared[name]) == len(expected), name
        for place, (kind, accepted) in enumerate(
            zip(declared[name], expected, strict=True)
        ):
            assert kind in accepted, (name, f"argument {place}" if place else "result")


def test_every_function_is_exported(cudnn_library):
    calls = Cudnn(cudnn_library.cdll)
    assert calls.call("cudnnGetVersion") == cudnn_library.version


def test_the_headers_are_of_the_library(headers_say, cudnn_library):
    assert headers_say(["std::cout << CUDNN_VERSION;"]) == [
        [str(cudnn_library.version)]
    ]


def test_every_structure_is_laid_out_as_declared(headers_say):
    bound = {
        value
        for value in vars(libcudnn).values()
        if inspect.isclass(value) and issubclass(value, ctypes.Structure)
    }
    assert bound == STRUCTURES.keys()
    for structure, c_types in STRUCTURES.items():
        for c_type in c_types:
            said = headers_say(
                f'std::cout << "{name} " << offsetof({c_type}, {name}) << " "'
                f" << kind<decltype({c_type}::{name})>() << '\\n';"
                for name, _ in structure._fields_
            )
            assert [name for name, *_ in said] == [f[0] for f in structure._fields_]
            for (name, offset, kind), (_, ctype) in zip(
                said, structure._fields_, strict=True
            ):
                assert int(offset) == getattr(structure, name).offset, (c_type, name)
                assert kind in kinds(ctype), (c_type, name)
            assert headers_say([f"std::cout << kind<{c_type}>();"]) == [
                [f"s{ctypes.sizeof(structure)}"]
            ]


def test_every_enumeration_has_a_spelling():
    assert set(ENUMERATIONS) == C_NAMES.keys()


def test_every_enumerator_has_its_declared_value(headers_say):
    members = [member for kind in ENUMERATIONS for member in kind]
    said = headers_say(
        f'std::cout << "{c_name(m)} " << static_cast<long>({c_name(m)}) << "\\n";'
        for m in members
    )
    assert said == [[c_name(m), str(int(m))] for m in members]
