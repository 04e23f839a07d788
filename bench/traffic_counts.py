"""Launches, bytes and FLOPs, and the time that a device needs for them at least."""

from dataclasses import dataclass, field

from mucudnn.ir.devices import get_device

__all__ = ["DEVICE", "Rates", "Traffic", "rates_of"]

DEVICE = "h200"
"""Whose published figures times are estimated by."""


@dataclass(frozen=True)
class Rates:
    """What a device can do: bytes and FLOPs a second."""

    bandwidth: float
    flops: float


def rates_of(precision: str | None) -> Rates:
    """Those of the device in a type; in float32 with products in TF32."""
    figures = get_device(DEVICE)
    peak = figures.peak(precision or "float32", tf32=True)
    return Rates(figures.bandwidth.value, peak)


@dataclass
class Traffic:
    """Counted of a step, or of a part of it.

    Attributes:
        rates: Of the device.
        launches: Of kernels.
        nbytes: That they read and write.
        flops: Of convolutions and products of matrices.
        ms: Time of all launches, each at the device's peak in bytes or in FLOPs,
            whichever binds it: nothing that moves as much takes less.
    """

    rates: Rates = field(default_factory=lambda: rates_of(None))
    launches: int = 0
    nbytes: int = 0
    flops: float = 0.0
    ms: float = 0.0

    def add(self, launches: int, nbytes: int, flops: float = 0.0) -> None:
        """One more thing that is launched."""
        self.launches += launches
        self.nbytes += nbytes
        self.flops += flops
        rates = self.rates
        self.ms += 1e3 * max(nbytes / rates.bandwidth, flops / rates.flops)

    def join(self, other: "Traffic", launches: int) -> None:
        """What was counted apart, in so many launches."""
        self.launches += launches
        self.nbytes += other.nbytes
        self.flops += other.flops
        self.ms += other.ms
