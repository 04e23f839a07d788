"""Figures quoted in README and docs are those of the files in `bench/results`.

Tables are rendered from their file and compared line by line. In prose each figure has
an entry in `QUOTED`: the words around it, and where it stands in a file.
"""

import json
import re
import statistics
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import pages, torch_compiled
from bench.torch.picture import picture

ROOT = Path(__file__).parents[1]
MIB = 2.0**20
NETWORKS = {
    "resnet18": "ResNet-18",
    "resnet50": "ResNet-50",
    "gpt": "GPT",
    "mobilenet_v3_small": "MobileNet-V3",
    "unet": "U-Net",
}


def read(name: str) -> Any:
    return json.loads((ROOT / "bench/results" / name).read_text("utf-8"))


def page(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def network(model: str) -> Mapping[str, Any]:
    (found,) = (n for n in read("torch.json")["networks"] if n["model"] == model)
    return found


def way(model: str, name: str, setting: str = "") -> Mapping[str, Any]:
    rows = network(model)["rows"]
    return next(r for r in rows if (r["way"], r["setting"]) == (name, setting))


def ours(model: str, name: str, setting: str = "") -> Mapping[str, Any]:
    """Return our step within what another way took."""
    budget = way(model, name, setting)["peak_bytes"]
    rows = (r for r in network(model)["rows"] if r["way"] == "ours")
    return next(row for row in rows if row["budget_bytes"] == budget)


def in_half_of_fsdp2() -> Sequence[float]:
    """Return the times of compiled steps relative to FSDP2 with compiled layers."""
    networks = read("torch-sharded-compiled.json")["networks"]
    return [r["cost"] for n in networks for r in n["rows"] if r["share"] == 0.5]


AMB = "activation_memory_budget"


def least(model: str) -> Mapping[str, Any]:
    """Return our step within the least budget that was measured."""
    rows = (r for r in network(model)["rows"] if r["way"] == "ours")
    return min(rows, key=lambda row: row["peak_bytes"])


def compiled(way: str, setting: str = "") -> Mapping[str, Any]:
    """Return a compiled Llama step; ours, the fastest in three quarters of the least.

    Args:
        way: Who plans it; "ours" or one of PyTorch's ways.
        setting: Its budget, where PyTorch has one.
    """
    (found,) = (
        n for n in read("torch-compiled.json")["networks"] if n["model"] == "llama"
    )
    rows = found["rows"]
    if way != "ours":
        return next(r for r in rows if (r["way"], r["setting"]) == (way, setting))
    least = min(
        row["peak_bytes"] for row in rows if row["way"] in torch_compiled.RIVALS
    )
    within = str(3 * least // 4)
    return next(r for r in rows if (r["way"], r["setting"]) == ("ours", within))


def h100(way: str) -> float:
    return float(read("h100.json")["sections"]["times gpt2"]["ms"][way])


def h100_section(name: str) -> Mapping[str, Any]:
    section: Mapping[str, Any] = read("h100.json")["sections"][name]
    return section


def h100_budgets() -> dict[str, int]:
    found = h100_section("memory gpt2, default allocator")["budgets"]
    return {share: row["budget_bytes"] for share, row in found.items()}


def h100_reserved(how: str) -> list[float]:
    """Return reserved over planned bytes of GPT-2, budget by budget."""
    rows = h100_section(f"memory gpt2, {how}")["budgets"].values()
    return [row["reserved_bytes"] / row["planned_bytes"] for row in rows]


def h100_workspaces() -> list[float]:
    """Return how far workspaces on the card are from those of its description."""
    layers = read("h100.json")["listing"]["layers"].values()
    pairs = [pair for one in layers for pair in one["other_workspace"].values()]
    return [abs(here / there - 1) for here, there in pairs]


def in_front(gib: float, network: str = "resnet50") -> Mapping[str, float]:
    """Return slowdowns of a network within a budget, by technique."""
    points = read("front.json")["networks"][network]["points"]
    return next(p["slowdown"] for p in points if p["budget_bytes"] == gib * 2**30)


def in_llama(gib: float) -> Mapping[str, float]:
    """Return slowdowns of the Llama within a budget, by technique."""
    return in_front(gib, "llama")


def by_hand(slowdowns: Mapping[str, float]) -> float:
    """Return the least slowdown of checkpointing as it is written by hand."""
    return min(time for name, time in slowdowns.items() if time and "check" in name)


def over_predicted() -> list[float]:
    """Return measured over predicted times of all planned rows."""
    rows = (row for one in read("torch.json")["networks"] for row in one["rows"])
    return [row["measured"] / row["cost"] for row in rows if row["way"] == "ours"]


QUOTED = {
    "README.md": [
        ("at {95} % of the speed", lambda: 100 / least("resnet50")["measured"]),
        ("takes {115.0} MiB beyond", lambda: least("resnet50")["peak_bytes"] / MIB),
        ("of {222.2}, at", lambda: way("resnet50", "eager")["peak_bytes"] / MIB),
        ("{1.05} times eager", lambda: least("resnet50")["measured"]),
        ("takes {22.6} MiB", lambda: compiled("ours")["peak_bytes"] / MIB),
        ("instead of {41.7},", lambda: compiled("torch.compile")["peak_bytes"] / MIB),
        ("at {1.02} times", lambda: compiled("ours")["cost"]),
        ("takes {30.8}", lambda: compiled(AMB, "0.1")["peak_bytes"] / MIB),
        ("at {1.27}.", lambda: compiled(AMB, "0.1")["cost"]),
        ("in {6.47} GB", lambda: h100_budgets()["30%"] / 1e9),
        ("of {11.36} at", lambda: h100_budgets()["90%"] / 0.9 / 1e9),
        ("{1.03} times eager's", lambda: h100("planned, 30%") / h100("eager, foreach")),
    ],
    "docs/results.md": [
        ("in all {51} planned rows", lambda: len(over_predicted())),
        ("networks: {1.028} in the", lambda: statistics.median(over_predicted())),
        ("from {0.947}", lambda: min(over_predicted())),
        ("to {1.108};", lambda: max(over_predicted())),
        (
            "; {42} rows are within 5 %",
            lambda: sum(abs(ratio - 1) <= 0.05 for ratio in over_predicted()),
        ),
        ("`save_on_cpu` ({1.14}", lambda: ours("unet", "save_on_cpu")["measured"]),
        ("against {1.12})", lambda: way("unet", "save_on_cpu")["measured"]),
        ("costs U-Net {1.001}", lambda: way("unet", AMB, "1")["cost"]),
        ("ours {1.006};", lambda: ours("unet", AMB, "1")["cost"]),
        ("they took {1.88}", lambda: way("unet", AMB, "1")["measured"]),
        ("and {1.06}.", lambda: ours("unet", AMB, "1")["measured"]),
        ("our step takes {1.09} times", lambda: in_front(5)["planned"]),
        ("rule by hand {1.24},", lambda: by_hand(in_front(5))),
        ("SuperNeurons {4.54} and", lambda: in_front(5)["superneurons"]),
        ("vDNN {6.54};", lambda: in_front(5)["vdnn_all"]),
        ("takes {1.38}, where", lambda: in_front(2)["planned"]),
        ("bound says {1.17}.", lambda: in_front(2)["lower bound"]),
        ("step takes {1.09} times the time and", lambda: in_llama(11)["planned"]),
        ("hand {1.23};", lambda: by_hand(in_llama(11))),
        ("take most, {1.16}.", lambda: in_llama(8)["planned"]),
    ],
    "docs/gpu.md": [
        ("as {6.43} GB", lambda: h100_section("predicted gpt2")["least_bytes"] / 1e9),
        ("({6.47} on the card", lambda: h100_budgets()["30%"] / 1e9),
        (
            "and {11.32} GB without",
            lambda: h100_section("predicted gpt2")["unlimited_bytes"] / 1e9,
        ),
        ("budget ({11.36}):", lambda: h100_budgets()["90%"] / 0.9 / 1e9),
        ("from {1.28}", lambda: h100_reserved("default allocator, one block")[2]),
        ("to {1.02}.", lambda: h100_reserved("default allocator")[2]),
        ("GPT-2 reserved {1.12}", lambda: h100_reserved("expandable segments")[0]),
        (", {1.19}", lambda: h100_reserved("expandable segments")[1]),
        ("and {1.16}.", lambda: h100_reserved("expandable segments")[2]),
        ("{301} of the 581 tests", lambda: read("h100.json")["tests"]["passed"]),
        ("of the {581} tests", lambda: read("h100.json")["tests"]["selected"]),
        ("in {164} workspaces", lambda: len(h100_workspaces())),
        ("15 % in {154} of", lambda: sum(off <= 0.15 for off in h100_workspaces())),
    ],
    "docs/index.md": [],
    "docs/comparison.md": [],
    "docs/method.md": [],
    "docs/pytorch.md": [],
    "docs/tutorials/many_devices.md": [
        ("took {0.83} to", lambda: min(in_half_of_fsdp2())),
        ("{0.88} times as long as FSDP2", lambda: max(in_half_of_fsdp2())),
    ],
    "docs/reference/planning.md": [],
}
"""Page -> words with one figure in braces, and the value in its file."""

ELSEWHERE = re.compile(
    r"Python ≥ 3\.11|PyTorch 2\.11 to 2\.15|PyTorch 2\.1[134]|cuDNN 9\.19|580\.159"
)
"""Versions."""


@pytest.mark.parametrize(
    ("name", "words", "value"),
    [(name, *row) for name, rows in QUOTED.items() for row in rows],
)
def test_a_figure_in_prose_is_that_of_its_file(name, words, value):
    (figure,) = re.findall(r"\{(.*)\}", words)
    digits = len(figure.partition(".")[2])
    assert f"{value():.{digits}f}" == figure
    assert words.replace("{", "").replace("}", "") in " ".join(page(name).split())


@pytest.mark.parametrize("name", QUOTED)
def test_every_decimal_in_prose_has_its_file(name):
    prose = [line for line in page(name).splitlines() if not line.startswith("|")]
    text = " ".join(" ".join(prose).split())
    rendered = [pages.marks(one) for one in pages.TABLES]
    rendered += [(torch_compiled.BEGIN, torch_compiled.END), ("```", "```")]
    for begin, end in rendered:
        text = re.sub(f"{re.escape(begin)}.*?{re.escape(end)}", "", text)
    text = ELSEWHERE.sub("", text)
    for words, _ in QUOTED[name]:
        text = text.replace(re.sub(r"[{}]", "", words), "")
    text = re.sub("`[^`]*`", "", text)  # of options
    assert re.findall(r"(?<![\w.-])\d+\.\d+(?!\w|\.\d)", text) == []


def compared() -> Iterator[str]:
    """Yield the lines of the comparison with PyTorch's own ways."""
    for model, title in NETWORKS.items():
        planned = {
            r["budget_bytes"]: r for r in network(model)["rows"] if r["way"] == "ours"
        }
        for row in network(model)["rows"]:
            if row["way"] in ("eager", "ours"):
                continue
            label = row["way"] + (f"={row['setting']}" if row["setting"] else "")
            beside = planned.get(row["peak_bytes"])
            mine = (
                f"{beside['peak_bytes'] / MIB:.1f} | {beside['measured']:.2f}"
                if beside and beside["measured"]
                else "does not fit | –"
            )
            yield (
                f"| {title} | `{label}` | {row['peak_bytes'] / MIB:.1f} | "
                f"{row['measured']:.2f} | {mine} |"
            )


def beside_eager() -> Iterator[str]:
    """Yield the lines of the summary of that comparison."""
    eager = way("resnet50", "eager")["peak_bytes"] / MIB
    for model, name, setting in (
        *(("gpt", "eager", ""), ("gpt", AMB, "0.2"), ("gpt", "save_on_cpu", "")),
        *(("resnet18", "checkpoint_sequential", "3"), ("resnet50", AMB, "0.5")),
        *(("resnet50", "checkpoint_sequential", "4"), ("resnet50", "save_on_cpu", "")),
    ):
        theirs, mine = way(model, name, setting), ours(model, name, setting)
        label = f"`{name}={setting}`" if setting else f"`{name}`"
        yield (
            f"| {NETWORKS[model]} | {'eager mode' if name == 'eager' else label} | "
            f"{theirs['peak_bytes'] / MIB:.1f} | {theirs['measured']:.2f} | "
            f"{mine['peak_bytes'] / MIB:.1f} | {mine['measured']:.2f} |"
        )
    mine = least("resnet50")
    yield (
        f"| ResNet-50 | eager mode | {eager:.1f} | 1.00 | "
        f"{mine['peak_bytes'] / MIB:.1f} (the least) | {mine['measured']:.2f} |"
    )


TABLES = {
    "docs/comparison.md: | network | way |": compared,
    "docs/results.md: | model | way |": beside_eager,
}


@pytest.mark.parametrize("table", TABLES)
def test_a_table_is_rendered_from_its_file(table):
    name, _, head = table.partition(": ")
    lines = page(name).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(head)) + 2
    rows = lines[start : lines.index("", start)]
    assert rows == list(TABLES[table]())


def test_half_the_memory_is_half():
    share = least("resnet50")["peak_bytes"] / way("resnet50", "eager")["peak_bytes"]
    assert "half the memory" in page("README.md")
    assert share < 0.53


def h100_times() -> Iterator[str]:
    named = {share: f"{b / 1e9:.2f} GB" for share, b in h100_budgets().items()}
    named["30%"] += ", the least"
    named["no budget"] = f"none; {h100_budgets()['90%'] / 0.9 / 1e9:.2f} GB"
    for way in (
        *("eager, foreach", "eager, fused", "torch.compile", "planned, no budget"),
        *("planned, 90%", "planned, 60%", "planned, 30%", "checkpoint", "save_on_cpu"),
    ):
        name, _, share = way.partition(", ")
        shown = name if name == "planned" else way
        title = {
            "torch.compile": "`torch.compile`",
            "checkpoint": "`checkpoint` of the model",
            "save_on_cpu": "`save_on_cpu`",
        }.get(shown, shown)
        of = h100(way) / h100("eager, foreach")
        yield f"| {title} | {named.get(share, '–')} | {h100(way):.1f} | {of:.2f} |"


def h100_bytes() -> Iterator[str]:
    sections = read("h100.json")["sections"]
    columns = "budget", "planned", "requested", "reserved"
    for title, section in (
        ("GPT-2 124M, N=8", "memory gpt2, default allocator"),
        ("ResNet-50, N=256", "memory resnet50, default allocator, one block"),
    ):
        for row in sections[section]["budgets"].values():
            shown = " | ".join(f"{row[f'{c}_bytes'] / 1e9:.2f}" for c in columns)
            of = row["reserved_bytes"] / row["planned_bytes"]
            yield f"| {title}{' ' * bool(title)}| {shown} | {of:.2f} |"
            title = ""


def h100_predictions() -> Iterator[str]:
    predicted = h100_section("predicted gpt2")["ms"]
    named = {"no budget": "none"}
    named |= {share: f"{b / 1e9:.2f} GB" for share, b in h100_budgets().items()}
    for share, budget in named.items():
        both = predicted[share], h100(f"planned, {share}")
        free = predicted["no budget"], h100("planned, no budget")
        times = " | ".join(f"{ms:.1f}" for ms in both)
        slowdowns = (ms / whole for ms, whole in zip(both, free, strict=True))
        yield f"| {budget} | {times} | {' | '.join(f'{s:.2f}' for s in slowdowns)} |"


@pytest.mark.parametrize(
    ("name", "rows"),
    [("times", h100_times), ("predictions", h100_predictions), ("bytes", h100_bytes)],
)
def test_tables_of_a_real_gpu_are_those_of_its_file(name, rows):
    text = page("docs/gpu.md").partition(f"<!-- h100 {name} -->")[2]
    shown, end, _ = text.partition("<!-- h100 end -->")
    assert end
    assert shown.strip().splitlines()[2:] == [*rows()]


@pytest.mark.parametrize(
    "file", sorted((ROOT / "bench/results").glob("*.json")), ids=lambda file: file.stem
)
def test_a_result_file_is_of_this_version(file):
    """A file names the version of mucudnn that measured it."""
    current = tomllib.loads(page("pyproject.toml"))["project"]["version"]
    named = r"mucudnn-([0-9.]*)|\"mucudnn\": \"([^\"]*)\""
    versions = {a or b for a, b in re.findall(named, file.read_text("utf-8"))}
    assert versions == {current}


@pytest.mark.parametrize("name", pages.TABLES)
def test_lines_of_a_page_are_rendered_from_their_file(name):
    _, shown, _ = pages.split_page(pages.page_of(name).read_text("utf-8"), name)
    assert shown.strip() == pages.lines_of(name)


def test_the_picture_of_the_readme_is_drawn_from_its_file():
    drawn = page("bench/results/torch.svg")
    assert drawn == picture(read("torch.json")["networks"])
    assert page("docs/img/torch.svg") == drawn


@pytest.mark.parametrize("name", ["results.md", "comparison.md"])
def test_tables_of_compiled_steps_are_rendered_from_their_file(name):
    text = page(f"docs/{name}").partition(torch_compiled.BEGIN)[2]
    shown, end, _ = text.partition(torch_compiled.END)
    assert end
    measured = (ROOT / "bench/results/torch-compiled.json").exists()
    lines = torch_compiled.pages(read("torch-compiled.json"))[name] if measured else []
    assert shown.strip() == "\n".join(lines)
