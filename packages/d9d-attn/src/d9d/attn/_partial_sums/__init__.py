"""Sums over tokens whose order of additions depends on shapes alone.

Tokens are cut into consecutive leaves. A kernel of the operation sums each leaf in the order of its tokens, whichever
program has it, and one more kernel sums the leaves in an order that is fixed: no atomics, and the same bits from every
launch geometry.
"""

from ._fold import SHORTEST_LEAF, fold, leaf_length

__all__ = ["SHORTEST_LEAF", "fold", "leaf_length"]
