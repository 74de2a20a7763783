"""A device that a plan is made for, by its data sheet."""

from __future__ import annotations

from dataclasses import dataclass

from hilbert_monitor.emulation.counts import Count


@dataclass(frozen=True, slots=True)
class Device:
    """A device's data sheet, and the fraction of it that a run is assumed to reach; hours follow from these."""

    name: str = "H200"
    bf16: float = 989e12
    """Dense bf16 FLOP/s."""
    fp32: float = 67e12
    """FLOP/s without TF32, which Newton-Schulz and the monitor do not use."""
    bandwidth: float = 4.8e12
    """Bytes of memory per second."""
    link: float = 450e9
    """Bytes per second that a device sends to others of its machine."""
    network: float = 50e9
    """Bytes per second that it sends to other machines."""
    utilisation: float = 0.4
    """Fraction of all of these that a run reaches."""
    launch: float = 4e-6
    """Seconds to launch a kernel."""
    wait: float = 10e-6
    """Seconds in which a host hears that its device has finished, and the device of what is next."""
    factorisation: float = 200e-6
    """Seconds of a small eigenvalue problem or QR factorisation, which are many kernels of a library."""
    collective: float = 30e-6
    """Least seconds of a collective."""

    def wire_seconds(self, sent: float, collectives: float, *, nodes: int) -> float:
        """Return the seconds of exchanging bytes, at the speed of the slowest link that they pass."""
        return sent / (self.utilisation * (self.network if nodes > 1 else self.link)) + collectives * self.collective

    def decoder_speed(self, *, bf16: bool) -> float:
        """Return the FLOP/s that the decoder is assumed to reach."""
        return self.utilisation * (self.bf16 if bf16 else self.fp32)

    def busy_seconds(self, count: Count) -> float:
        """Return the seconds in which the device computes and moves bytes, with nothing between its kernels."""
        u = self.utilisation
        return count.flops / (u * self.fp32) + count.bytes / (u * self.bandwidth)

    def seconds(self, count: Count) -> float:
        """Return the seconds of fp32 work if every kernel is waited for: nothing goes on beside anything."""
        starts = (count.kernels + count.copies) * self.launch + count.waits * self.wait
        return starts + count.factorisations * self.factorisation + self.busy_seconds(count)
