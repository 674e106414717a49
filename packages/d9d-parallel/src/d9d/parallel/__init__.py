"""Parallelism for plain modules: replicas, shards, experts, gradient sums, norm and clipping.

A parallelize function turns parameters into DTensors and fixes over which mesh dims their gradients are addends;
`GradientSync` sums exactly those; `global_norm` and `scale_and_clip_` finish the step. Modules see local tensors.
`certify` proves that a layout of anybody's model trains as one process does.
"""

from ._expert import parallelize_expert_parallel
from ._fsdp import ShardPolicy, is_fully_sharded, parallelize_fsdp, parallelize_hsdp
from ._loss import LossSum
from ._norm import global_norm, scale_and_clip_
from ._protocols import SupportsExpertParallel
from ._replicate import parallelize_replicate
from ._stage import StageInfo
from ._sync import GradientSync
from .certify import Certificate, CertificateError, certify

__all__ = [
    "Certificate",
    "CertificateError",
    "GradientSync",
    "LossSum",
    "ShardPolicy",
    "StageInfo",
    "SupportsExpertParallel",
    "certify",
    "global_norm",
    "is_fully_sharded",
    "parallelize_expert_parallel",
    "parallelize_fsdp",
    "parallelize_hsdp",
    "parallelize_replicate",
    "scale_and_clip_",
]
