"""What copies to the host and back cost."""

from dataclasses import dataclass

__all__ = ["Links"]


@dataclass(frozen=True, slots=True)
class Links:
    """Both links, as a profile has them.

    Attributes:
        out_bytes_per_ms: Rate of copies to the host.
        in_bytes_per_ms: Rate of copies from the host.
        copy_share: Of a copy's time, what the computation beside it takes longer.
        copy_overhead_ms: What it takes longer for every copy, however few its bytes.
    """

    out_bytes_per_ms: float
    in_bytes_per_ms: float
    copy_share: float = 0.0
    copy_overhead_ms: float = 0.0
