"""Measure what the tests protect: `python -m tests.mutants --package passes`.

A mutant is the library with one expression changed. It is killed if a test fails and
survives if the tests of its module pass. Mutants are sampled with a seed, and `--save`
keeps them in a file; `--replay` runs the killed ones of such a file again, which shows
whether a change of the tests has lost protection. A full run takes minutes of processor
time for each dozen of mutants, so it is no part of `make test`.
"""

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parent.parent
COMPARISONS = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
ARITHMETIC = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.FloorDiv: "*",
    ast.Div: "*",
    ast.Mod: "+",
}
SKIPPED = (ast.Raise, ast.Import, ast.ImportFrom, ast.Global, ast.Nonlocal, ast.Assert)
"""Statements that are not changed: messages of errors are no behaviour to count."""


@dataclass(frozen=True)
class Mutant:
    """One changed expression: `before`, the `count`th of its kind in a function."""

    path: str
    function: str
    before: str
    after: str
    count: int
    killer: str | None = None
    killed: bool | None = None


def changed(node: ast.AST) -> Iterator[str]:
    """Yield the sources an expression or statement is replaced by."""
    text = ast.unparse
    match node:
        case ast.Compare(left, [op], [right]) if type(op) in COMPARISONS:
            yield f"({text(left)} {COMPARISONS[type(op)]} {text(right)})"
        case ast.BinOp(left, op, right) if type(op) in ARITHMETIC:
            if not any(isinstance(side, ast.JoinedStr) for side in (left, right)):
                yield f"(({text(left)}) {ARITHMETIC[type(op)]} ({text(right)}))"
        case ast.BoolOp(op, values):
            word = " or " if isinstance(op, ast.And) else " and "
            yield f"({word.join(f'({text(v)})' for v in values)})"
        case ast.UnaryOp(ast.Not(), operand):
            yield f"({text(operand)})"
        case ast.Constant(bool() as value):
            yield str(not value)
        case ast.Constant(int() as value):
            yield str(value + 1)
        case ast.IfExp(test, body, other):
            yield f"(({text(other)}) if ({text(test)}) else ({text(body)}))"
        case ast.Expr(ast.Call()) | ast.AugAssign() | ast.Continue() | ast.Break():
            yield "pass"
        case ast.Return(ast.expr() as value) if text(value) != "None":
            yield "return None"


def places(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Yield the changeable nodes within functions, with the function's full name."""

    def walk(node: ast.AST, inside: tuple[str, ...], deep: bool):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, SKIPPED):
                continue
            match child:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    for statement in child.body:
                        pair = (*inside, name)
                        yield ".".join(pair), statement
                        yield from walk(statement, pair, True)
                case ast.ClassDef(name=name):
                    yield from walk(child, (*inside, name), False)
                case ast.AnnAssign(value=value) if deep and value is not None:
                    yield ".".join(inside), value
                    yield from walk(value, inside, deep)
                case _ if deep:
                    yield ".".join(inside), child
                    yield from walk(child, inside, deep)

    yield from walk(tree, (), False)


def mutants_of(path: Path) -> Iterator[tuple[Mutant, ast.AST]]:
    """Yield every mutant of a file and the node that it replaces."""
    seen: dict[tuple[str, str, str], int] = {}
    for function, node in places(ast.parse((ROOT / path).read_text("utf-8"))):
        for after in changed(node):
            key = (function, ast.unparse(node), after)
            seen[key] = seen.get(key, -1) + 1
            yield Mutant(str(path), *key, seen[key]), node


def mutated(path: Path, mutant: Mutant) -> str | None:
    """Return the source of a file with a mutant in it; None if it has no such place."""
    for found, node in mutants_of(path):
        if asdict(found) == asdict(mutant) | {"killer": None, "killed": None}:
            lines = (ROOT / path).read_bytes().splitlines(keepends=True)
            first, last = node.lineno - 1, node.end_lineno - 1
            head = lines[first][: node.col_offset]
            tail = lines[last][node.end_col_offset :]
            new = head + mutant.after.encode() + tail
            return b"".join([*lines[:first], new, *lines[last + 1 :]]).decode()
    return None


def imported(path: Path) -> set[str]:
    """Return the modules that a file imports, with the names of a package's parts."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        match node:
            case ast.ImportFrom(module=str(module), names=names):
                found |= {module, *(f"{module}.{name.name}" for name in names)}
            case ast.Import(names=names):
                found |= {name.name for name in names}
    return found


def module_name(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def tests_by_module() -> dict[str, list[str]]:
    """Return, for every module of the library, the test files that are nearest to it.

    Distance is counted in imports from the test file; helpers of tests are followed.
    Among equals, the test file that imports fewer modules comes first.
    """
    files = [*ROOT.glob("mucudnn/**/*.py"), *ROOT.glob("tests/*.py")]
    edges = {module_name(f.relative_to(ROOT)): imported(f) for f in files}
    found: dict[str, list[tuple[int, int, str]]] = {name: [] for name in edges}
    for name in edges:
        if not name.startswith("tests.test_"):
            continue
        near, ring, distance = {name}, {name}, 0
        while ring and distance < 5:
            distance += 1
            ring = {m for n in ring for m in edges[n] if m in edges} - near
            near |= ring
            for module in ring:
                path = name.replace(".", "/") + ".py"
                found[module].append((distance, len(edges[name]), path))
    return {name: [path for *_, path in sorted(rows)] for name, rows in found.items()}


def failing_test(folder: Path, tests: list[str], limit_s: float) -> str | None:
    """Return the first test that fails; None if all pass or take too long together."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            [*command, "-m", "not slow", *tests],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        return None
    if done.returncode not in (1, 2):
        return None
    named = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return named[1] if named else tests[0]


def sample(packages: list[str], skip: str, count: int, seed: int) -> list[Mutant]:
    """Draw mutants, each of the sampled ones from the whole of the packages."""
    every = []
    for package in packages:
        for file in sorted((ROOT / "mucudnn" / package).rglob("*.py")):
            path = file.relative_to(ROOT)
            if not re.search(skip, str(path)):
                every += [mutant for mutant, _ in mutants_of(path)]
    print(f"{len(every)} mutants, {min(count, len(every))} drawn", flush=True)
    return random.Random(seed).sample(every, min(count, len(every)))


def judge(mutant: Mutant, tests: list[str], folder: Path, limit_s: float) -> Mutant:
    """Run the tests of a mutant, nearest files first, until one fails."""
    path = Path(mutant.path)
    source = mutated(path, mutant)
    if source is None:
        print(f"gone      {mutant.path} {mutant.function}", flush=True)
        return replace(mutant, killed=None)
    (folder / path).write_text(source, "utf-8")
    killer = failing_test(folder, tests, limit_s)
    shutil.copy(ROOT / path, folder / path)
    found = replace(mutant, killer=killer, killed=killer is not None)
    word = "killed  " if killer else "SURVIVES"
    print(f"{word} {path} {mutant.function}: {mutant.before!r:.60}", killer, flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--package", action="append", help="passes, torch, ...")
    parser.add_argument("--skip", default="^$", help="leave files out: a pattern")
    parser.add_argument("--count", type=int, default=70)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--files", type=int, default=4, help="test files a mutant")
    parser.add_argument("--tests", nargs="*", default=[], help="these: patterns")
    parser.add_argument("--limit", type=float, default=300, help="seconds a mutant")
    parser.add_argument("--save", type=Path, help="JSON file for the results")
    parser.add_argument("--replay", type=Path, help="run the killed ones of a file")
    given = parser.parse_args()
    if given.replay:
        kept = json.loads(given.replay.read_text("utf-8"))
        drawn = [Mutant(**m) for m in kept if m["killed"]]
    else:
        drawn = sample(given.package, given.skip, given.count, given.seed)
    nearest = tests_by_module()
    chosen = [file for pattern in given.tests for file in ROOT.glob(pattern)]
    results = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        listed = subprocess.run(
            ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        for name in listed.stdout.splitlines():
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, folder / name)
        for mutant in drawn:
            near = nearest[module_name(Path(mutant.path))][: given.files]
            given_files = sorted(str(f.relative_to(ROOT)) for f in chosen)
            tests = given_files or near
            if mutant.killer and (folder / mutant.killer.split("::")[0]).exists():
                tests = list(dict.fromkeys([mutant.killer.split("::")[0], *tests]))
            results.append(judge(mutant, tests, folder, given.limit))
            if given.save:
                given.save.write_text(
                    json.dumps([asdict(m) for m in results], indent=1)
                )
    judged = [mutant.killed for mutant in results if mutant.killed is not None]
    gone = len(results) - len(judged)
    print(f"{sum(judged)} of {len(judged)} killed, {gone} whose code is gone")
    return int(bool(given.replay) and not all(judged))


if __name__ == "__main__":
    sys.exit(main())
