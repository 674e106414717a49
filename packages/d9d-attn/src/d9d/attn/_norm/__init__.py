"""Root mean square normalization (Zhang and Sennrich, 2019, arXiv:1910.07467)."""

from ._apply import add_rms_norm, rms_norm
from ._module import RMSNorm

__all__ = ["RMSNorm", "add_rms_norm", "rms_norm"]
