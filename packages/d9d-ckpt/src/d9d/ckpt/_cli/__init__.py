"""The command `d9d-ckpt`."""

from ._main import main

__all__ = ["main"]
