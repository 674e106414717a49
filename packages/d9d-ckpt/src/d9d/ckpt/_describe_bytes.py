"""Sizes for people."""

from __future__ import annotations


def describe_bytes(nbytes: int) -> str:
    """A size in decimal units, with three digits."""
    if nbytes < 1000:
        return f"{nbytes} B"
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} PB"
