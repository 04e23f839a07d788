"""Numerics of an algorithm: math mode, traits, and the status of a measurement.

A measurement records the first (`Traits`); the second (`Numerics`) only filters what is
measured and planned, so one cache serves every policy.
"""

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from mucudnn.arguments import check_text

NATIVE = "default"
"""Math mode: arithmetic in the data type of the operands."""

TF32 = "tf32"
"""Math mode: float32 operands rounded to 10 bits of mantissa by tensor cores."""

DOWN_CONVERT = "down_convert"
"""Math mode: operands cast to a narrower data type first."""

REDUCED_REDUCTION = "reduced_precision_reduction"
"""Note: partial sums are stored in less than float32."""

HALF_SUM = "half_sum"
"""Note: adding a part to a half-precision result rounds the sum to half."""

FLOAT32_SUM = "float32_sum"
"""Note: parts of a half-precision result are added up in float32."""


@dataclass(frozen=True, slots=True)
class Traits:
    """Numerical properties of an algorithm on one problem, as its library reports them.

    Attributes:
        deterministic: Whether two runs give the same bits.
        math_mode: `default`, `tf32` or `down_convert`.
        notes: Further properties in the library's words (`tensor_core`, `winograd`,
            `runtime_compilation` …).
    """

    deterministic: bool = True
    math_mode: str = NATIVE
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Numerics:
    """The arithmetic that a user accepts.

    >>> Numerics.parse("strict,deterministic")
    Numerics(tf32=False, deterministic=True, down_convert=False, float32_sums=False)
    >>> Numerics(tf32=False).refusal(Traits(math_mode="tf32"))
    'not accepted: it rounds float32 to TF32'

    Pass it to a `Tuner`: `Tuner(numerics=Numerics(deterministic=True))`. The default
    is that of cuDNN and PyTorch for convolutions: TF32 for float32.

    Attributes:
        tf32: Whether tensor cores may round float32 operands to TF32.
        deterministic: Whether only bit-reproducible algorithms are accepted.
        down_convert: Whether operands may be cast to a narrower type.
        float32_sums: Whether micro-batches of a half-precision filter gradient must be
            accumulated in float32, which takes workspace.
    """

    tf32: bool = True
    deterministic: bool = False
    down_convert: bool = False
    float32_sums: bool = False

    @classmethod
    def parse(cls, text: str) -> "Numerics":
        """Parse words such as `strict,deterministic`.

        Raises:
            ValueError: A word is not in `NUMERICS`, or two contradict each other.
        """
        words = [word.strip() for word in check_text("numerics", text).split(",")]
        for word in words:
            if word not in NUMERICS:
                valid = ", ".join(NUMERICS)
                raise ValueError(f"unknown numerics {word!r}; choose some of: {valid}")
        if "strict" in words and {"tf32", "down_convert"} & {*words}:
            raise ValueError(f"{text!r}: strict allows neither tf32 nor down_convert")
        return cls(
            tf32="strict" not in words,
            deterministic="deterministic" in words,
            down_convert="down_convert" in words,
            float32_sums="float32_sums" in words,
        )

    @property
    def words(self) -> str:
        """The policy as text that `parse` accepts."""
        flags = ("deterministic", "down_convert", "float32_sums")
        chosen = (name for name in flags if getattr(self, name))
        return ",".join(["tf32" if self.tf32 else "strict", *chosen])

    def refusal(self, traits: Traits, *, whole: bool = False) -> str | None:
        """Return why an algorithm is not accepted; None if it is.

        `whole`: it runs on the whole mini-batch, without accumulation.
        """
        reason = next(self._refusals(traits, whole), None)
        return None if reason is None else RowStatus.REFUSED.text(reason)

    def _refusals(self, traits: Traits, whole: bool) -> Iterator[str]:
        # An undivided call adds nothing up, so its sums need no wider type.
        wide_sums = self.float32_sums and not whole
        if HALF_SUM in traits.notes and wide_sums:
            yield "it adds micro-batches up in half precision"
        if FLOAT32_SUM in traits.notes and not wide_sums:
            yield "it adds up in float32, which was not asked for or is not needed"
        if traits.math_mode == DOWN_CONVERT and not self.down_convert:
            yield "it casts its operands to a narrower data type"
        if traits.math_mode == TF32 and not self.tf32:
            yield "it rounds float32 to TF32"
        if REDUCED_REDUCTION in traits.notes and not self.tf32:
            yield "it reduces in less than float32"
        if self.deterministic and not traits.deterministic:
            yield "it is not deterministic"


NUMERICS = {
    "tf32": "float32 may use TF32 tensor cores (the default)",
    "strict": "float32 is computed in float32",
    "deterministic": "only algorithms that repeat their bits",
    "down_convert": "operands may be cast to a narrower type",
    "float32_sums": "half-precision filter gradients add micro-batches in float32",
}
"""Words of `Numerics.parse` and their meanings."""


# Outcomes of a measurement as a closed set, and their text form.
#
# Files store one text per row without a time; the text's prefix encodes the status.
# Only this module parses the prefix; everything else asks the row for its status.


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
        """Return the status of a row from its text and number of timed runs."""
        if error is None:
            # No samples: a limit ended the measurement after the cold run.
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
