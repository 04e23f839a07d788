"""Compiled training steps: `torch.compile`, its budgets and ours, side by side.

    python -m bench.torch_compiled --prepare    # compiles; other work may go on
    python -m bench.torch_compiled              # measures, on a quiet machine

The second command writes `bench/results/torch-compiled.json` after every network, and
the tables and the picture of the documentation. Networks of an earlier run stay in the
file until they are measured again. `bench.torch.compiled` says what
is measured.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

from bench.machine import describe
from bench.table import render
from bench.torch import unkept

__all__ = ["NAMES", "run", "table"]

TITLES = {
    "gpt": "GPT",
    "unet": "U-Net",
    "llama": "Llama",
    "resnet18": "ResNet-18",
    "regnet_y_400mf": "RegNet-Y-400MF",
    "bert": "BERT",
    "vit": "ViT",
    "mobilenet_v3_small": "MobileNet-V3",
    "tiny": "tiny Llama",
}
NAMES = tuple(TITLES)[:-1]
WAYS = (
    "ours",
    "torch.compile",
    "activation_memory_budget",
    "torch.compile of the update",
    "ours, tuned",
)
RIVALS = WAYS[1:4]
"""PyTorch's own ways, whose peaks are budgets of ours."""

_ROOT = Path(__file__).parents[1]
_MIB = 1 << 20
_LESS = 0.95
"""Most of another way's time that ours is to take in the same memory."""


def main() -> int:
    """Measure networks, and write each result as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--networks", default=",".join(NAMES))
    parser.add_argument("--prepare", action="store_true", help="only compile")
    parser.add_argument("--rounds", type=int, default=15, help="steps of each way")
    parser.add_argument(
        "--seconds", type=float, default=25.0, help="for the steps of one network"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=20.0,
        help="no network begins that would end later",
    )
    parser.add_argument("--out", type=Path, default=_ROOT / "bench/results")
    parser.add_argument(
        "--docs", type=Path, default=_ROOT / "docs", help="folder of the pages"
    )
    options = parser.parse_args()
    names = options.networks.split(",")
    if options.prepare:
        return _prepare(names)
    path = options.out / "torch-compiled.json"
    known = json.loads(path.read_text())["networks"] if path.exists() else []
    known = [network for network in known if network["model"] not in names]
    result: dict[str, Any] = {"networks": [], "failures": []}
    for result in _measured(names, options.rounds, options.seconds, options.minutes):
        found = {network["model"]: network for network in (*known, *result["networks"])}
        result["networks"] = [found[name] for name in TITLES if name in found]
        command = " ".join(["python -m bench.torch_compiled", *sys.argv[1:]])
        machine = {**describe(), "command": command}
        text = json.dumps({"machine": machine, **result}, indent=1)
        path.write_text(text + "\n")
        drawn = picture(result["networks"])
        (options.docs / "img/torch-compiled.svg").write_text(drawn)
        write_pages(json.loads(text), options.docs)
    print(table(result))
    return 1 if result["failures"] else 0


def run(names: Sequence[str] = NAMES) -> dict[str, Any]:
    """Measure networks one after another. Ready for JSON."""
    *_, result = _measured(names, 15, 25.0, 60.0)
    return result


def _prepare(names: Sequence[str]) -> int:
    import torch

    from bench.torch import compiled

    torch.set_num_threads(1)
    for name in names:
        print(name, file=sys.stderr, flush=True)
        compiled.prepare(name)
        torch._dynamo.reset()
    return 0


def _measured(
    names: Sequence[str], rounds: int, seconds: float, minutes: float
) -> Iterator[dict[str, Any]]:
    """Yield all results so far, after every network."""
    import torch

    from bench.torch import compiled

    networks: list[dict[str, Any]] = []
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    start = monotonic()
    try:
        for i, name in enumerate(names):
            took = monotonic() - start
            if i and took * (i + 1) / i > 60 * minutes:
                print(f"no time for {', '.join(names[i:])}", file=sys.stderr)
                return
            print(name, file=sys.stderr, flush=True)
            networks.append(compiled.measure(name, rounds, seconds))
            torch._dynamo.reset()
            failures = [text for network in networks for text in _failures(network)]
            yield {"threads": 1, "networks": [*networks], "failures": failures}
    finally:
        torch.set_num_threads(before)


def _failures(network: Mapping[str, Any]) -> Iterator[str]:
    """Yield promises of ours that were not kept."""
    for row in network["rows"]:
        if row["way"].startswith("ours"):
            what = f"{network['model']}, {row['way']} with {row['setting']}"
            yield from unkept(what, row, row["same_bits"], "the bits of torch.compile")


def beside(
    network: Mapping[str, Any],
) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any] | None]]:
    """Yield each of PyTorch's ways, and ours planned for its peak if that fits."""
    ours = {row["setting"]: row for row in network["rows"] if row["way"] == "ours"}
    for row in network["rows"]:
        if row["way"] in RIVALS:
            yield row, ours.get(str(row["peak_bytes"]))


def table(result: Mapping[str, Any]) -> str:
    """Print one table a network."""
    found = []
    for network in result["networks"]:
        rows = [
            (
                f"{row['way']} {_setting(row)}".rstrip(),
                f"{row['ms']:.1f}",
                f"{row['low_ms']:.1f}-{row['high_ms']:.1f}",
                f"{row['cost']:.3f}",
                f"{row['peak_bytes'] / _MIB:.2f}",
                ""
                if row["planned_bytes"] is None
                else f"{row['planned_bytes'] / _MIB:.2f}",
                f"{row['again']}/{row['leaving']}" if "again" in row else "",
                f"{row['prepared_s']:.1f}",
                "same" if row["same_bits"] else "differ",
            )
            for row in network["rows"]
        ]
        header = (
            *("way", "ms", "quartiles", "of compile"),
            *("MiB", "planned", "again/out", "s", "bits"),
        )
        load = " to ".join(f"{value:.1f}" for value in network["load"])
        found.append(
            f"{network['model']}, load {load}, {network['rounds']} rounds, "
            f"{network['prepared_s']:.0f} s before them; least "
            f"{network['least_bytes'] / _MIB:.2f} MiB\n{render(header, rows)}"
        )
    return "\n\n".join((*found, *result["failures"]))


def _setting(row: Mapping[str, Any]) -> str:
    setting = str(row["setting"])
    if row["way"].startswith("ours") and setting.isdigit():
        return f"{int(setting) / _MIB:.2f} MiB"
    return setting


# Tables of the documentation, which stand between two comments of a page.


BEGIN = "<!-- from bench/results/torch-compiled.json -->"
END = "<!-- end -->"


def write_pages(result: Mapping[str, Any], docs: Path) -> None:
    """Write the tables of a result into the pages that show them."""
    for name, lines in pages(result).items():
        path = docs / name
        before, begin, rest = path.read_text("utf-8").partition(BEGIN)
        _, end, after = rest.partition(END)
        if not begin or not end:
            raise ValueError(f"{path} has no place for the tables: {BEGIN} … {END}")
        text = "\n".join(lines)
        path.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", "utf-8")


def pages(result: Mapping[str, Any]) -> Mapping[str, Sequence[str]]:
    """Return the lines that each page shows of a result."""
    machine, networks = result["machine"], result["networks"]
    processor = machine["fingerprint"].split("/")[1]
    head = (
        f"One thread of an {processor}, PyTorch {machine['torch']}, "
        f"{machine['measured_at'][:10]}; `python -m bench.torch_compiled`."
    )
    shown = "![time against bytes in use, one curve a way](img/torch-compiled.svg)"
    return {
        "results.md": [head, "", *_summary(networks), "", shown],
        "comparison.md": [head, "", *_pairs(networks)],
    }


def _summary(networks: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of one row a network."""
    yield (
        "| network | `torch.compile`: MiB | ours, no limit: time | MiB | at the peaks "
        "of its budgets: median | most | least peak of its budgets, time | ours: "
        "least peak measured, time | `torch.compile`, tuned: MiB, time | ours, tuned: "
        "MiB, time |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for network in networks:
        rows = network["rows"]
        first, ours = rows[0], [row for row in rows if row["way"] == "ours"]
        ratios = [
            mine["cost"] / theirs["cost"]
            for theirs, mine in beside(network)
            if mine is not None and theirs["way"] != "torch.compile of the update"
        ]
        theirs = [row for row in rows if row["way"] in ("torch.compile", WAYS[2])]
        low, least = (min(r, key=lambda row: row["peak_bytes"]) for r in (theirs, ours))
        tuned = [row for row in rows if row["way"].endswith(", tuned")][:2]
        cells = " | ".join(f"{_mib(row)}, {row['cost']:.2f}" for row in tuned)
        yield (
            f"| {TITLES[network['model']]} | {_mib(first)} | {ours[0]['cost']:.2f} | "
            f"{_mib(ours[0])} | {median(ratios):.2f} | {max(ratios):.2f} | "
            f"{_mib(low)}, {low['cost']:.2f} | {_mib(least)}, {least['cost']:.2f} | "
            f"{cells} |"
        )


def _pairs(networks: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of each of PyTorch's ways beside ours at its peak."""
    yield "| network | compiled way | MiB | time | ours: MiB | time | of its time |"
    yield "|---|---|---|---|---|---|---|"
    for network in networks:
        for theirs, mine in beside(network):
            name = theirs["way"]
            if name == WAYS[2]:
                name = f"`{name}={theirs['setting']}`"
            cells = "does not fit | – | –"
            if mine is not None:
                ratio = mine["cost"] / theirs["cost"]
                cells = f"{_mib(mine)} | {mine['cost']:.2f} | {ratio:.2f}"
            yield (
                f"| {TITLES[network['model']]} | {name} | {_mib(theirs)} | "
                f"{theirs['cost']:.2f} | {cells} |"
            )


def _mib(row: Mapping[str, Any]) -> str:
    return f"{row['peak_bytes'] / _MIB:.1f}"


def picture(networks: Sequence[Mapping[str, Any]]) -> str:
    """Draw time against memory, one curve a way."""
    from bench.torch.picture import charts

    title = "Time of compiled steps against the bytes that are really in use"
    named = [(TITLES[network["model"]], network["rows"]) for network in networks]
    return charts(title, named, WAYS, "time, of torch.compile")


if __name__ == "__main__":
    sys.exit(main())
