"""Outcomes of a measurement as a closed set, and their text form.

Files store one text per row without a time; the text's prefix encodes the status. Only
this module parses the prefix; everything else asks the row for its status.
"""

import enum

__all__ = ["RowStatus"]


class RowStatus(enum.Enum):
    """Outcome of a measurement; the value is the prefix of its text in a file."""

    MEASURED = None
    """The row has a time."""

    LIMITED = "not measured: "
    """A limit on time or memory prevented the measurement; the row is not stored."""

    HOPELESS = "not timed: "
    """Another algorithm that fits the limits is far ahead. Under a smaller limit this
    one may be timed, so the row is not stored."""

    REFUSED = "not accepted: "
    """The algorithm can run, but its arithmetic is not accepted."""

    UNSUPPORTED = "UnsupportedError: "
    """The algorithm reported that it does not support the problem."""

    FAILED = ""
    """The algorithm failed when it was queried or run."""

    @classmethod
    def of(cls, error: str | None, samples: int = 1) -> "RowStatus":
        """Return the status of a row from its text and number of timed runs.

        A time without samples is of a cold run only: a limit ended the measurement.
        """
        if error is None:
            return cls.MEASURED if samples else cls.LIMITED
        return next(
            status
            for status in cls
            if status.value is not None and error.startswith(status.value)
        )

    def text(self, reason: str) -> str:
        """Return the text for a reason, with the status as prefix."""
        return f"{self.value or ''}{reason}"

    def reason(self, text: str) -> str:
        """Return the reason from a text, without the status prefix."""
        return text.removeprefix(self.value or "")
