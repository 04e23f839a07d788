"""Pictures of the reports for the documentation: `python docs/screenshots.py`.

Makes the reports of docs/tutorials/read_a_report.md and photographs them with a
headless Chromium; times in them are those of the machine that it runs on.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).parent
WIDTH = 1100
HEIGHTS = {"memory.html": 1500, "layer.html": 1150}
NAMES = {"memory.html": "memory.png", "layer.html": "tune.png"}


def main() -> None:
    """Write docs/img/*.png."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("screenshots need Chromium (or Chrome) on PATH")
    page = (DOCS / "tutorials" / "read_a_report.md").read_text(encoding="utf-8")
    commands = re.search(r"```sh\n(.*?)```", page, re.S)
    if commands is None:
        sys.exit("the tutorial makes no reports")
    (DOCS / "img").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["bash", "-euc", commands[1]], cwd=folder, check=True)
        for report, height in HEIGHTS.items():
            picture = DOCS / "img" / NAMES[report]
            command = [
                *(browser, "--headless", "--no-sandbox", "--hide-scrollbars"),
                *(f"--window-size={WIDTH},{height}", f"--screenshot={picture}"),
                (Path(folder) / report).as_uri(),
            ]
            subprocess.run(command, check=True, capture_output=True, timeout=120)


if __name__ == "__main__":
    main()
