"""The page of refusals has every error and warning of the PyTorch half, as it reads."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reference" / "torch_refusals.md"

SOURCES = (
    *sorted((ROOT / "mucudnn" / "torch").rglob("*.py")),
    ROOT / "mucudnn" / "arguments.py",
    ROOT / "mucudnn" / "backends" / "cpu" / "device.py",
    ROOT / "mucudnn" / "ir" / "sizes.py",
    ROOT / "mucudnn" / "passes" / "planning" / "cutting.py",
    ROOT / "mucudnn" / "runtime" / "executor" / "tiers.py",
)

INTERNAL = ("plan_store.py", "conv/kernels.py", "torch/__init__.py")
"""Files whose errors no user sees: each is caught where it is raised for."""

UNSEEN = {
    "…, not an integer",
    "…; the least is …",
    "…; the most is …",
    "a copy that it waits for failed",
    "a copy was dropped: its copier was closed",
    "a copy … of … bytes was given …",
    "a copy … was requested from a closed copier",
    "the step has no plan",
    "…: …",
    "…; …",
    "…: …; …",
    "… must be …, got …",
}
"""Parts of other messages, and what would be a fault of ours."""


def template(node):
    """A text in the sources, with `…` where something is put in; None for others."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = (isinstance(v, ast.Constant) and str(v.value) for v in node.values)
        return "".join(part or "…" for part in parts)
    return None


def raised():
    """(name of the error, or "warning", text) of every one with a text of its own."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            name = {"too_small": "PlanningError"}.get(name, name)
            given = node.args[0]
            either = [given.body, given.orelse] if type(given) is ast.IfExp else [given]
            for text in map(template, either):
                if text is None or name == "AssertionError" or text in UNSEEN:
                    continue
                if name.endswith("Error") and not any(f in str(path) for f in INTERNAL):
                    yield name, text
                elif name == "warn":
                    yield "warning", text


def row(name, text):
    return f"| `{name}` | ``{text}`` |"


def test_every_error_is_listed_as_it_is_raised():
    listed = set(re.findall(r"^\| `(\w+)` \| ``(.*)`` \|$", PAGE.read_text(), re.M))
    there = set(raised())
    missing = "\n".join(row(*pair) for pair in sorted(there - listed))
    gone = "\n".join(row(*pair) for pair in sorted(listed - there))
    assert not missing, f"rows to add to {PAGE.name}:\n{missing}"
    assert not gone, f"rows of {PAGE.name} that nothing raises:\n{gone}"


def test_every_reason_is_in_the_sources():
    texts = [
        text
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if (text := template(node))
    ]
    reasons = re.findall(r"^\| …: ``(.*)`` \|$", PAGE.read_text(), re.M)
    assert len(reasons) > 10
    assert not [reason for reason in reasons if not any(reason in t for t in texts)]
