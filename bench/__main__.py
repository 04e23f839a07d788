"""`python -m bench [NAME …] [--out DIR]`: measure, print, keep as JSON."""

import argparse
import importlib
import json
import sys
from pathlib import Path

from bench.machine import describe

NAMES = (
    *("overhead", "papers", "front", "gaps", "placement"),
    *("torch", "torch-compiled", "torch-sharded", "torch-step"),
)


def main() -> int:
    """Run the named benchmarks, one after another.

    Returns:
        0; 1 if a figure that must agree does not.
    """
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of: {', '.join(NAMES)}, all"
    )
    parser.add_argument("--out", type=Path, help="folder for one JSON file each")
    options = parser.parse_args()
    names = options.names or ["all"]
    unknown = set(names) - {"all", *NAMES}
    if unknown:
        parser.error(
            f"unknown benchmark {unknown.pop()!r}; choose of: {', '.join(NAMES)}"
        )
    if options.out is not None and not options.out.is_dir():
        parser.error(f"{options.out} is not a folder")
    status = 0
    for name in NAMES if "all" in names else names:
        module = importlib.import_module(f"bench.{name.replace('-', '_')}")
        print(f"== {name}", flush=True)
        result = module.run()
        print(module.table(result), end="\n\n", flush=True)
        if options.out is not None:
            text = json.dumps({"machine": describe(), **result}, indent=1)
            (options.out / f"{name}.json").write_text(text + "\n")
        if result.get("failures"):
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
