"""Read the wrapper that Inductor writes for a compiled graph, line by line.

Each kernel call becomes a `KernelLine`: which values it reads, makes and changes, and a
Python function that runs the line alone. Allocations belong to the kernel that first
writes to them; views are part of the calls that read them; `del` is ignored, since the
plan decides what is freed. A line that is not known is refused by its text.

Directions of arguments come from a kernel's signature (`const` in C++, the names of
pointers in Triton), from `out=`, and from the schemas of PyTorch's operations.
"""

import ast
import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from mucudnn.torch.inductor.compiling import CompiledHalf
from mucudnn.torch.lowering.lower import CHECKS
from mucudnn.torch.lowering.lowered import Call, Layout, NotCompiledError, Operand
from mucudnn.torch.lowering.overloads import lstm_layer

_ALLOCATE = {"empty_strided_cpu": "cpu", "empty_strided_cuda": "cuda"}

_PURE = frozenset(
    {"convolution", "mm", "addmm", "bmm", "baddbmm", "_mm_plus_mm", "_addmm_activation"}
)
"""Functions of `extern_kernels` that return a new tensor, or write to `out`."""

_OF_NUMBERS = frozenset({"max", "min", "math.floor", "math.ceil", "math.trunc", "int"})
"""Functions of numbers in expressions of sizes."""

_SKIPPED = frozenset({"clear", "assert_size_stride", "assert_alignment", "set_device"})

_POINTER = re.compile(r"(in|in_out|out)_ptr\d+")
"""Names of the pointers of a Triton kernel that Inductor wrote."""


@dataclass(frozen=True)
class Kernel:
    """A C++ or Triton kernel of a wrapper.

    Attributes:
        source: Its source.
        parameters: Name of each pointer or number, and whether it is only read.
        triton: Whether it is a Triton kernel.
    """

    source: str
    parameters: Sequence[tuple[str, bool]]
    triton: bool = False


@dataclass(frozen=True)
class KernelLine:
    """A call of a kernel.

    Attributes:
        name: The called function, as in the wrapper.
        operands: Values that it takes.
        results: Values that it makes; first those that the wrapper allocates.
        layouts: Layouts of the results that the wrapper allocates, in their order.
        text: The call, in values.
        allocated: Allocation of each value that the wrapper allocates.
        space: Globals of the wrapper.
        changes: Operands that it writes to.
        random: Whether it draws random numbers.
        pure: Whether it may run twice.
        heavy: Whether it is a product or a convolution.
        kernel: The kernel that Inductor wrote; None for a function of PyTorch's.
        pointers: Value of each of the kernel's parameters, or a size.
        convolution: The line as a call of PyTorch's convolution or its gradient; None
            if it is another one.
        paths: What follows the call's result for each other result.
        gpu: The GPU that the line is guarded for, if any.
    """

    name: str
    operands: Sequence[str]
    results: Sequence[str]
    layouts: Mapping[str, Layout]
    text: str
    allocated: Mapping[str, str]
    space: dict[str, Any] = field(repr=False)
    changes: Sequence[str] = ()
    random: bool = False
    pure: bool = True
    heavy: bool = False
    kernel: Kernel | None = None
    pointers: Sequence[str | int | None] = ()
    convolution: Call | None = None
    paths: Sequence[str] = ()
    gpu: int | None = None

    @cached_property
    def function(self) -> Callable[..., Any]:
        """Takes the operands, and returns a tuple of results, or a single result."""
        return self._defined(into=False)

    @cached_property
    def into(self) -> Callable[..., Any] | None:
        """The function with its first result in the memory of the argument `out`.

        None if the wrapper does not allocate the first result.
        """
        return self._defined(into=True) if self.layouts else None

    def with_first(self, result: str) -> "KernelLine":
        """Return the line with one of the allocated results as the first one."""
        made = [result, *(v for v in self.layouts if v != result)]
        layouts = {v: self.layouts[v] for v in made}
        results = [*made, *self.results[len(made) :]]
        return replace(self, layouts=layouts, results=results)

    def _defined(self, *, into: bool) -> Callable[..., Any]:
        """Compile a function that runs the line."""
        operands = [f"a{i}" for i in range(len(self.operands))]
        results = [f"r{i}" for i in range(len(self.layouts))]
        names = dict(
            zip((*self.operands, *self.layouts), operands + results, strict=True)
        )
        body = [f"{names[v]} = {self.allocated[v]}" for v in self.layouts]
        if into:
            shape_and_strides = body[0].partition("(")[2].rpartition(", ")[0]
            body[0] = f"r0 = reinterpret_tensor(out, {shape_and_strides}, 0)"
        call = re.sub(
            r"\b[A-Za-z_]\w*\b",
            lambda m: names.get(m.group(0), m.group(0)),
            self.text,
        )
        body.append(f"found = {call}" if self.paths else call)
        results += [f"found{path}" for path in self.paths]
        if results:
            body.append(f"return {', '.join(results)}")
        if self.gpu is not None:
            guard = f"with torch.cuda._DeviceGuard({self.gpu}):"
            body = [guard, *(f"    {line}" for line in body)]
        parameters = [*operands, "*", "out"] if into else operands
        defined: Callable[..., Any] = define(parameters, body, self.space, self.kernel)
        return defined


@dataclass(frozen=True)
class Wrapper:
    """The lines of a wrapper.

    Attributes:
        lines: Its kernel calls, in order.
        results: Expression of each result, in values; "None" for no result.
    """

    lines: Sequence[KernelLine]
    results: Sequence[str]


def read_wrapper(
    half: CompiledHalf,
    prefix: str,
    given: Sequence[str],
    sizes: Mapping[str, int] | None = None,
) -> Wrapper:
    """Read a wrapper's text.

    Args:
        half: The compiled graph.
        prefix: Put before the names of the wrapper's variables.
        given: Expression of each argument, in values.
        sizes: Value of each symbol; expressions of sizes are read as numbers.

    Raises:
        NotCompiledError: A line is not known; quotes the line.
    """
    return _Reader(half, prefix, given, sizes or {}).read()


class _Reader:
    """Reads the statements of a wrapper's function `call`."""

    def __init__(
        self,
        half: CompiledHalf,
        prefix: str,
        given: Sequence[str],
        sizes: Mapping[str, int],
    ) -> None:
        tree = ast.parse(half.source)
        self._kernels = _kernels_of(tree)
        functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
        self._body = next(n for n in functions if n.name == "call").body
        self._space = {**half.space, "lstm_layer": lstm_layer}
        self._gpu: int | None = None  # which the lines are guarded for
        self._prefix = prefix
        self._given = given
        # Variable -> expression in values.
        self._names = {name: str(size) for name, size in sizes.items()}
        self._sizes = frozenset(sizes)
        names = (n for text in given for n in ast.walk(ast.parse(text)))
        words = {name.id for name in names if isinstance(name, ast.Name)}
        self._values = words - self._space.keys()
        self._allocated: dict[str, str] = {}  # value -> its allocation
        self._written: set[str] = set()
        self._parts: dict[str, dict[int, str]] = {}  # results by place
        self._lines: list[tuple[ast.Call, str | None, dict[int, str]]] = []

    def read(self) -> Wrapper:
        results: list[str] = []
        for statement in self._statements():
            match statement:
                case ast.Delete() | ast.Pass() | ast.Expr(ast.Constant()):
                    pass
                case ast.Expr(ast.Call() as call):
                    if ast.unparse(call.func).split(".")[-1] not in _SKIPPED:
                        self._lines.append((self._in_values(call), None, {}))
                case ast.Assign([target], value):
                    self._assign(statement, target, value)
                case ast.Return(ast.Tuple(elements)):
                    results = [ast.unparse(self._in_values(e)) for e in elements]
                case _:
                    raise unknown(statement)
        lines = [self._line(*row) for row in self._lines]
        # No kernel writes tensors without elements, such as an empty selection.
        empty = [
            self._empty(v)
            for v in self._allocated
            if v not in self._written and 0 in self._layout(v).shape
        ]
        return Wrapper([*empty, *lines], results)

    def _statements(self) -> Iterator[ast.stmt]:
        """Yield all statements, with those for one GPU in their place."""
        for statement in self._body:
            match statement:
                case ast.With([ast.withitem(ast.Call(guard, [ast.Constant(int(i))]))]):
                    if not ast.unparse(guard).endswith("_DeviceGuard"):
                        raise unknown(statement)
                    self._gpu = i
                    yield from statement.body
                case _:
                    yield statement

    def _assign(self, statement: ast.stmt, target: ast.expr, value: ast.expr) -> None:
        match target, value:
            case ast.Tuple(elements) | ast.List(elements), ast.Name("args"):
                names = [ast.unparse(e) for e in elements]
                if len(names) != len(self._given):
                    raise unknown(statement)
                self._names.update(zip(names, self._given, strict=True))
            case ast.Name(name), ast.Call(
                ast.Name("copy_if_misaligned"), [ast.Name(copied)]
            ) if name == copied:
                pass  # kernels of such inputs were compiled for any address
            case ast.Name(), ast.Call(ast.Attribute(ast.Name(), "size" | "stride")):
                pass  # sizes are known
            case ast.Name(name), ast.Subscript() if name in self._sizes:
                pass
            case ast.Name(name), ast.Subscript(
                ast.Name(whole), ast.Constant(int(i))
            ) if whole in self._parts:
                self._parts[whole][i] = self._declare(name)
            case ast.Name(name), (
                ast.Name()
                | ast.Attribute()
                | ast.BinOp()
                | ast.Subscript(ast.Name())
                | ast.Call(ast.Name("reinterpret_tensor" | "get_raw_stream"))
            ):
                self._names[name] = ast.unparse(self._in_values(value))
            case ast.Name(name), ast.Call(ast.Name(function)) if function in _ALLOCATE:
                text = ast.unparse(self._in_values(value))
                self._allocated[self._declare(name)] = text
            case ast.Name(name), ast.Call(ast.Attribute()):
                call = self._in_values(value)
                if returns_view(self._resolved(call)):  # of complex numbers
                    self._names[name] = ast.unparse(call)
                    return
                self._parts[name] = {}
                self._lines.append((call, self._declare(name), self._parts[name]))
            case _:
                raise unknown(statement)

    def _declare(self, name: str) -> str:
        """Return the value of a variable that is assigned a new tensor."""
        value = self._names[name] = self._prefix + name
        self._values.add(value)
        return value

    def _in_values(self, tree: Any) -> Any:
        """Return a copy of an expression with values in the place of variables.

        Expressions of numbers, which are those of sizes, are numbers then.
        """
        names = self._names

        class Replaced(ast.NodeTransformer):
            def visit(self, node: ast.AST) -> Any:
                found = super().visit(node)
                match found:
                    case ast.UnaryOp(_, ast.Constant()) | ast.BinOp(
                        ast.Constant(), _, ast.Constant()
                    ):
                        pass
                    case ast.Call(function, [_, *_] as args) if ast.unparse(
                        function
                    ) in _OF_NUMBERS and all(isinstance(a, ast.Constant) for a in args):
                        pass
                    case _:
                        return found
                tree = ast.fix_missing_locations(ast.Expression(found))
                return ast.Constant(eval(compile(tree, "", "eval"), {"math": math}))

            def visit_Name(self, node: ast.Name) -> ast.expr:
                found = names.get(node.id)
                return node if found is None else ast.parse(found, mode="eval").body

        return Replaced().visit(ast.parse(ast.unparse(tree), mode="eval").body)

    def _values_in(self, tree: ast.AST) -> list[str]:
        return [v for v in _identifiers(ast.unparse(tree)) if v in self._values]

    def _line(
        self, call: ast.Call, result: str | None, items: dict[int, str]
    ) -> KernelLine:
        """Return a kernel call with the directions of its arguments."""
        name = ast.unparse(call.func)
        kernel = self._kernels.get(name)
        read: list[str] = []
        written: list[str] = []
        pointers: list[str | int | None] = []
        function: Any = None
        if kernel is not None:
            keywords = ["stream"] if kernel.triton else []
            expected = len(kernel.parameters), keywords
            if (len(call.args), [k.arg for k in call.keywords]) != expected:
                raise unknown(call)
            for argument, (parameter, const) in zip(
                call.args, kernel.parameters, strict=True
            ):
                found = self._values_in(argument)
                (read if const else written).extend(found)
                if parameter.startswith("in_out"):
                    read.extend(found)
                match argument:
                    case ast.Constant(int(size)):
                        pointers.append(size)
                    case ast.Name() | ast.Call(
                        ast.Name("reinterpret_tensor"),
                        [ast.Name(), *_, ast.Constant(0)],
                    ) if found:
                        pointers.append(found[0])
                    case _:
                        pointers.append(None)
        else:
            function = self._resolved(call)
            if function is torch.ops.aten.mkldnn_rnn_layer.default:
                call.func = ast.Name("lstm_layer")
            writes = _written_arguments(call, function)
            if writes is None or (result is not None and writes):
                raise unknown(call)
            for argument in [*call.args, *(k.value for k in call.keywords)]:
                found = self._values_in(argument)
                (written if argument in writes else read).extend(found)
            if result is None and not writes and function not in CHECKS:
                raise unknown(call)
        for word in _identifiers(ast.unparse(call)):
            if isinstance(self._space.get(word), torch.Tensor):
                raise unknown(call)  # a constant, which the digest would not tell
        made = [
            v
            for v in dict.fromkeys(written)
            if v in self._allocated and v not in self._written
        ]
        self._written.update(made)
        changes = [v for v in dict.fromkeys(written) if v not in made]
        operands = [v for v in dict.fromkeys((*read, *changes)) if v not in made]
        tags = getattr(function, "tags", ())
        outside = getattr(function, "namespace", "aten") != "aten"
        random = torch.Tag.nondeterministic_seeded in tags
        heavy = kernel is None and any(w in name for w in ("conv", "mm", "attention"))
        return KernelLine(
            name.removesuffix(".run"),
            operands,
            [*made, *(items.values() or ([result] if result else []))],
            {v: self._layout(v) for v in made},
            ast.unparse(call),
            self._allocated,
            self._space,
            changes,
            random,
            pure=not random and not outside and not changes,
            heavy=heavy,
            kernel=kernel,
            pointers=pointers,
            convolution=_convolution(call, operands, tuple(items) or (None,)),
            paths=[] if result is None else [f"[{i}]" for i in items] or [""],
            gpu=self._gpu,
        )

    def _empty(self, value: str) -> KernelLine:
        """Return a line that only allocates a value."""
        return KernelLine(
            "empty",
            [],
            [value],
            {value: self._layout(value)},
            "None",
            self._allocated,
            self._space,
            gpu=self._gpu,
        )

    def _resolved(self, call: ast.Call) -> Any:
        """Return the function that a call names."""
        try:
            found = eval(ast.unparse(call.func), self._space)  # names and dots only
        except Exception as e:
            raise unknown(call) from e
        packet = isinstance(found, torch._ops.OpOverloadPacket)
        return found.default if packet and found.overloads() == ["default"] else found

    def _layout(self, value: str) -> Layout:
        """Return the layout of an allocation."""
        call: Any = ast.parse(self._allocated[value], mode="eval").body
        try:
            shape, stride = (ast.literal_eval(a) for a in call.args[:2])
        except ValueError as e:
            raise unknown(call) from e
        dtype = getattr(torch, call.args[2].attr)
        device = torch.device("cpu")
        if _ALLOCATE[call.func.id] == "cuda":
            device = torch.device("cuda", self._gpu or 0)
        return Layout(tuple(shape), tuple(stride), dtype, 0, device)


def define(
    parameters: Sequence[str],
    body: Sequence[str],
    space: dict[str, Any],
    kernel: Kernel | None,
) -> Any:
    """Compile a function; equal ones have equal names, for remembered plans."""
    source = f"def line({', '.join(parameters)}):\n    " + "\n    ".join(body)
    key = source if kernel is None else source + kernel.source
    digest = hashlib.sha256(key.encode()).hexdigest()[:32]
    if (known := _LINES.get(digest)) is not None:
        return known
    found: dict[str, Any] = {}
    exec(compile(source, "<line of Inductor's>", "exec"), space, found)
    function = found["line"]
    function.__qualname__ = f"inductor_{digest}"
    function.__module__ = "mucudnn"
    return _LINES.setdefault(digest, function)


_LINES: dict[str, Any] = {}
"""Functions by the digest of their text: equal kernels are measured once."""


def unknown(statement: ast.AST) -> NotCompiledError:
    """Return the error of a line that is not known."""
    text = " ".join(ast.unparse(statement).split())
    return NotCompiledError(
        f"the reader of Inductor's wrapper (PyTorch {torch.__version__}) does not "
        f"know this line: {text[:160]}"
    )


_CONVOLUTIONS = {
    "extern_kernels.convolution": torch.ops.aten.convolution.default,
    "torch.ops.aten.convolution_backward.default": (
        torch.ops.aten.convolution_backward.default
    ),
}


def _convolution(
    call: ast.Call, operands: Sequence[str], results: tuple[int | None, ...]
) -> Call | None:
    """Return a line as a call of PyTorch's convolution; None if it reads views."""
    function: Any = _CONVOLUTIONS.get(ast.unparse(call.func))
    if function is None:
        return None
    arguments: list[Any] = []
    for _, given in _by_schema(call, function):
        match given:
            case ast.Name(value) if value in operands:
                arguments.append(Operand(operands.index(value)))
                continue
            case None:
                return None
        try:
            value = ast.literal_eval(given)
        except ValueError:
            return None
        arguments.append(list(value) if isinstance(value, tuple) else value)
    return Call(function, tuple(arguments), {}, results)


def _by_schema(call: ast.Call, function: Any) -> Iterator[tuple[Any, ast.expr | None]]:
    """Yield the arguments that a function declares, and what a call gives for each."""
    named = {k.arg: k.value for k in call.keywords}
    for i, argument in enumerate(function._schema.arguments):
        yield argument, call.args[i] if i < len(call.args) else named.get(argument.name)


def _identifiers(text: str) -> list[str]:
    return list(dict.fromkeys(re.findall(r"\b[A-Za-z_]\w*\b", text)))


def _kernels_of(tree: ast.Module) -> dict[str, Kernel]:
    """Return the kernels that a module defines, by what a call names."""
    found = {}
    for node in tree.body:
        match node:
            case ast.Assign(
                [ast.Name(name)],
                ast.Call(ast.Attribute(attr="cpp_pybinding"), [types, source, *_]),
            ):
                text = ast.literal_eval(source)
                head = re.search(r"void\s+kernel\((.*?)\)", text, re.DOTALL)
                if head is None:
                    continue
                words = [p.split()[-1].lstrip("*") for p in head.group(1).split(",")]
                kinds = [t.startswith("const") for t in ast.literal_eval(types)]
                found[name] = Kernel(text, list(zip(words, kinds, strict=True)))
            case ast.Assign(
                [ast.Name(name)],
                ast.Call(ast.Attribute(attr="triton"), [_, ast.Constant(str(text))]),
            ):
                if (kernel := _triton_kernel(text)) is not None:
                    found[f"{name}.run"] = kernel
    return found


def _triton_kernel(source: str) -> Kernel | None:
    """Return a Triton kernel; None if its pointers do not tell their direction."""
    signature = re.search(r"'signature': (\{.*?\})", source)
    head = re.search(r"^def \w+\((.*)\):$", source, re.MULTILINE)
    if signature is None or head is None:
        return None
    kinds = ast.literal_eval(signature.group(1))
    parameters = []
    for name in head.group(1).split(", "):
        if ":" in name:  # the size of a block, which Triton chooses
            continue
        if kinds[name].startswith("*") and not _POINTER.fullmatch(name):
            return None
        parameters.append((name, not name.startswith(("in_out_ptr", "out_ptr"))))
    return Kernel(source, parameters, triton=True)


def returns_view(function: Any) -> bool:
    """Return whether an operation returns a view of an argument."""
    returned = function._schema.returns if hasattr(function, "_schema") else ()
    found = [result.alias_info for result in returned]
    return any(info is not None and not info.is_write for info in found)


def _written_arguments(call: ast.Call, function: Any) -> Sequence[ast.expr] | None:
    """Return the arguments that a function of PyTorch's writes to; None if unknown."""
    if getattr(function, "_schema", None) is None:
        path = ast.unparse(call.func).split(".")
        known = path[0] == "extern_kernels" and path[-1] in _PURE
        return [k.value for k in call.keywords if k.arg == "out"] if known else None
    if returns_view(function):
        return None
    return [
        given
        for argument, given in _by_schema(call, function)
        if given is not None and argument.alias_info and argument.alias_info.is_write
    ]
