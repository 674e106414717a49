"""Normalization of queries and keys, and their rotation, in one pass over both."""

from ._apply import apply_rotary, norm_and_rotate

__all__ = ["apply_rotary", "norm_and_rotate"]
