"""What became of each test, a line each: a journal that survives its writer.

Lines are JSON: `{"begun": ID}`, then `{"ended": ID, "outcome": …, "message": …}`; one
pass through pytest ends with `{"finished": true, "left": 0}`. A test that has begun and
not ended took the process with it, or was cut off with it. So does a module that is
being imported, until it is `{"imported": ID}`.
"""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_TRIES = 2


@dataclass
class Journal:
    """What a journal says.

    Attributes:
        ended: Outcomes by test, in order.
        begun: What has begun and not ended since the last line of a pass.
        left: Tests that the last pass had still to run; None before it said so.
        finished: Whether the last pass came to its end.
        lines: How many there are.
    """

    file: Path
    ended: dict[str, dict[str, Any]] = field(default_factory=dict)
    begun: str | None = None
    left: int | None = None
    finished: bool = False
    lines: int = 0
    _tries: Counter[str] = field(default_factory=Counter)

    @classmethod
    def read(cls, file: Path) -> "Journal":
        """From a file; a line that was cut off is skipped, as is a missing file."""
        journal = cls(file)
        try:
            text = file.read_text(errors="replace")
        except OSError:
            return journal
        for line in text.splitlines():
            journal.lines += 1
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if isinstance(entry, dict):
                journal._take(entry)
        return journal

    def add(self, **entry: Any) -> None:
        """Append a line; it is in the file when this returns."""
        append(self.file, entry)
        self.lines += 1
        self._take(entry)

    def settle(self, outcome: str, message: str) -> None:
        """Give the test that took the process with it this outcome."""
        if self.begun is not None:
            self.add(ended=self.begun, outcome=outcome, message=message, seconds=None)

    def settle_repeated(self) -> None:
        """Give up what was cut off again and again, whatever it was."""
        for name, count in self._tries.items():
            if count >= _TRIES and name not in self.ended:
                message = f"it began {count} times, and the run was cut off in it"
                self.add(ended=name, outcome="cut off", message=message, seconds=None)

    def forget_skipped(self) -> None:
        """Have them run again: what they lacked may be here now."""
        skipped = [n for n, e in self.ended.items() if e["outcome"] == "skipped"]
        if skipped:
            self.add(forgotten=skipped)

    def _take(self, entry: dict[str, Any]) -> None:
        if "begun" in entry:
            self.begun = entry["begun"]
            self._tries[entry["begun"]] += 1
        elif "imported" in entry:
            self.begun = None
            del self._tries[entry["imported"]]
        elif "ended" in entry:
            self.ended[entry["ended"]] = entry
            if self.begun == entry["ended"]:
                self.begun = None
        elif "forgotten" in entry:
            for name in entry["forgotten"]:
                self.ended.pop(name, None)
        elif "started" in entry:
            self.begun, self.finished, self.left = None, False, None
        elif "selected" in entry:
            self.left = entry["selected"]
        elif "finished" in entry:
            self.finished, self.left = bool(entry["finished"]), entry["left"]


def import_of(module: Path) -> str:
    """What the import of a module is called, as a test."""
    return f"import of {module.resolve()}"


def append(file: Path, entry: dict[str, Any]) -> None:
    """One line, in one write, after what may be half a line of a killed writer."""
    with file.open("ab+") as stream:
        stream.seek(0, 2)
        if stream.tell():
            stream.seek(-1, 2)
            broken = stream.read(1) != b"\n"
        else:
            broken = False
        line = json.dumps(entry) + "\n"
        stream.write((b"\n" if broken else b"") + line.encode())
