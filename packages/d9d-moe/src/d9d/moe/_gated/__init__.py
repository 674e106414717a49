"""SiLU of the gate times up, with the routing probability multiplied in."""

from ._silu_mul import silu_mul, silu_mul_pair

__all__ = ["silu_mul", "silu_mul_pair"]
