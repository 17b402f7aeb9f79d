"""Hold the speeds and the memory that the planner and `muon-fsdp plan` assume.

It imports little, so that the command starts fast.
"""

from __future__ import annotations

from dataclasses import dataclass

# Speeds of one rank. FLOPs count symmetric products in full, although only half of each is computed. Counted this way,
# one H200 reached 840 to 1,030 TFLOP/s on large matrices (docs/performance.md).
FLOPS_PER_SECOND = 9e14
BYTES_PER_SECOND = 5e10  # sent, and also received: one 400 Gb/s network card per rank
MEMORY_BYTES_PER_SECOND = 4.2e12  # device memory: a copy on an H200
HOST_BYTES_PER_SECOND = 5e10  # to a GPU, and from it at the same time: PCIe 5.0 with 16 lanes
FIXED_SECONDS = 1e-4  # of any transfer
DEVICE_MEMORY = 80 * 2**30  # bytes of a device that is only planned for: an A100 or H100


@dataclass(frozen=True)
class Speeds:
    """Assumed speeds of one rank, per second: operations, bytes sent and received, and bytes of device memory."""

    flops: float = FLOPS_PER_SECOND
    network_bytes: float = BYTES_PER_SECOND
    memory_bytes: float = MEMORY_BYTES_PER_SECOND

    def compute(self, flops: float) -> float:
        """Return the seconds in which a rank computes this many FLOPs."""
        return flops / self.flops

    def send(self, num_bytes: float) -> float:
        """Return the seconds in which a rank sends or receives bytes, without the fixed time of a transfer."""
        return num_bytes / self.network_bytes

    def transfer(self, num_bytes: float) -> float:
        """Return the seconds of a transfer in which the busiest rank sends or receives this many bytes."""
        return FIXED_SECONDS + self.send(num_bytes) if num_bytes else 0.0


ASSUMED = Speeds()
