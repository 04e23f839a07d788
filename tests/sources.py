"""The library's syntax trees, parsed once for all tests of its structure."""

import ast
from functools import cache
from pathlib import Path

import mucudnn

ROOT = Path(mucudnn.__file__).parent


@cache
def sources() -> dict[str, ast.Module]:
    """Return the syntax tree of every module, by its name."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        name = ".".join(parts).removesuffix(".__init__")
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found
