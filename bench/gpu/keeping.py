"""What is there so far, packed again and again, so that nothing waits for an end.

A part may be killed without notice. Packing costs time that measuring could have, so it
waits until it takes no more than a small share.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bench.gpu.archive import pack

__all__ = ["Keeper"]

_SHARE = 0.05


@dataclass
class Keeper:
    """Packs one folder into another.

    Args:
        work: Where results are.
        out: Where archives go; None if the folder itself is kept.
        least_s: Seconds between two times at least.
    """

    work: Path
    out: Path | None
    least_s: float = 5.0
    _due: float = field(default=0.0, init=False)

    def keep(
        self, prepare: Callable[[], object] | None = None, *, now: bool = False
    ) -> None:
        """Write down and pack, where it is time.

        Args:
            prepare: Writes what is not yet a file, such as a recording.
            now: Whatever it costs.
        """
        begun = time.monotonic()
        if begun < self._due and not now:
            return
        if prepare is not None:
            prepare()
        if self.out is not None:
            pack(self.work, self.out)
        ended = time.monotonic()
        self._due = ended + max(self.least_s, (ended - begun) / _SHARE)
