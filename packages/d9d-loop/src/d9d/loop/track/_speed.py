"""How fast, how well used, how full."""

import resource
import time
from collections.abc import Generator
from contextlib import contextmanager

import torch

from ._tracker import Number

_PEAK_FLOPS = {  # dense bf16, from the vendor's data sheets; the first name found in the device's name counts
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
}


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """The data sheet's dense FLOP/s of a device, or None where it is not known here (all but bf16 on some GPUs)."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in _PEAK_FLOPS.items() if known in name), None)


class Speedometer:
    """Speed between two readings, which the caller takes when the device has caught up.

    Args:
        device: Of this rank; its peak memory is read.
        flops: FLOPs that the model needs for one token; None leaves MFU out.
        peak: FLOP/s of all devices of the run together; None leaves MFU out.
    """

    def __init__(self, device: torch.device, *, flops: float | None = None, peak: float | None = None) -> None:
        self._device, self._flops, self._peak = device, flops, peak
        self._since = time.monotonic()

    @contextmanager
    def paused(self) -> Generator[None]:
        """Leave the time of the body out."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._since += time.monotonic() - began

    def read(self, *, tokens: int, steps: int) -> dict[str, Number]:
        """Seconds a step, tokens/s of the whole run, MFU if known, and peak memory of this rank; then count anew.

        Args:
            tokens: Of all ranks, since the last reading.
            steps: Since the last reading.
        """
        now = time.monotonic()
        elapsed = max(now - self._since, 1e-9)
        self._since = now
        read: dict[str, Number] = {"seconds": elapsed / steps, "tokens_per_second": tokens / elapsed}
        if self._flops is not None and self._peak is not None:
            read["mfu"] = tokens / elapsed * self._flops / self._peak
        read["memory_gib"] = _peak_bytes(self._device) / 2**30
        return read


def _peak_bytes(device: torch.device) -> int:
    """Allocated on a GPU; resident in the host's memory otherwise."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
