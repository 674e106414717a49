"""Parallelism for plain modules: replicas, shards, experts, pipelines, gradient sums, norm and clipping.

A parallelize function turns parameters into DTensors and fixes over which mesh dims their gradients are addends;
`GradientSync` sums exactly those; `global_norm` and `scale_and_clip_` finish the step. Modules see local tensors.
`certify` proves that a layout of anybody's model trains as one process does. Pipelines are in `d9d.parallel.pipeline`.
"""

from ._clip import NonFinite, scale_and_clip_
from ._expert import parallelize_expert_parallel
from ._fsdp import (
    ShardPolicy,
    is_fully_sharded,
    parallelize_fsdp,
    parallelize_hsdp,
    prefetch,
    sharded_microbatch,
)
from ._loss import LossSum
from ._norm import global_norm, group_norms, total_norm
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
    "NonFinite",
    "ShardPolicy",
    "StageInfo",
    "SupportsExpertParallel",
    "certify",
    "global_norm",
    "group_norms",
    "is_fully_sharded",
    "parallelize_expert_parallel",
    "parallelize_fsdp",
    "parallelize_hsdp",
    "parallelize_replicate",
    "prefetch",
    "scale_and_clip_",
    "sharded_microbatch",
    "total_norm",
]
