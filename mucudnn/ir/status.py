"""What became of a measurement, as a closed set, and how each is written.

Files carry one text a row that has no time: the status is how that text begins. It is
read here and nowhere else; everything else asks the row for its status.
"""

import enum

__all__ = ["RowStatus"]


class RowStatus(enum.Enum):
    """Why a row is what it is; the value is how its text begins in a file."""

    MEASURED = None
    """It has a time."""

    LIMITED = "not measured: "
    """A limit on time or memory was in the way: nothing is known of the algorithm, and
    the row is not remembered."""

    HOPELESS = "not timed: "
    """Another algorithm is far ahead, and fits where this one would be asked for: under
    a smaller limit it may be timed, and the row is not remembered."""

    REFUSED = "not accepted: "
    """It can run, but not in a way of computing that was asked for."""

    UNSUPPORTED = "UnsupportedError: "
    """It said itself that it cannot run the problem, and touched nothing."""

    FAILED = ""
    """It was tried, or asked for, and something went wrong."""

    @classmethod
    def of(cls, error: str | None, samples: int = 1) -> "RowStatus":
        """The status of a row by its text and by how often it was timed.

        A time without samples is of a cold run only: a limit ended it.
        """
        if error is None:
            return cls.MEASURED if samples else cls.LIMITED
        return next(
            status
            for status in cls
            if status.value is not None and error.startswith(status.value)
        )

    def text(self, reason: str) -> str:
        """How a reason is written."""
        return f"{self.value or ''}{reason}"

    def reason(self, text: str) -> str:
        """What was written, without what the status says already."""
        return text.removeprefix(self.value or "")
