"""Checkpoints as a graph of named tensors: stream, transform, reshard."""

from ._collective import PeerError
from ._convert import convert
from ._diff import Difference, TensorDifference, diff
from ._export import export
from ._findings import Problem, ProblemKind
from ._hands import ChecksumError, ReadError
from ._job import JobCheckpoints
from ._job_read import JobCheckpoint
from ._json import JSON
from ._load import load
from ._manifest import UnknownFormatError
from ._mapper import Group, Mapper
from ._mappers import (
    Apply,
    Cast,
    Chunk,
    Concatenate,
    Constant,
    Dequantize,
    Drop,
    Identity,
    Parallel,
    Prefix,
    Rename,
    Repeat,
    Reshape,
    SelectChild,
    Sequential,
    Shard,
    Slice,
    Squeeze,
    Stack,
    Tie,
    Transpose,
    Unsqueeze,
    Unstack,
    Untie,
)
from ._open import open_checkpoint
from ._plan import plan
from ._planned import Plan
from ._problems import PlanError
from ._report import Report
from ._source import CheckpointError, Source
from ._spec import Region, TensorSpec
from ._toml import mapper_from_toml
from ._verify import verify

__all__ = [  # sorted within groups
    # the state graph
    "Group",
    "Mapper",
    "Plan",
    "PlanError",
    "Region",
    "TensorSpec",
    "plan",
    # leaves
    "Apply",
    "Cast",
    "Chunk",
    "Concatenate",
    "Constant",
    "Dequantize",
    "Drop",
    "Identity",
    "Rename",
    "Reshape",
    "SelectChild",
    "Slice",
    "Squeeze",
    "Stack",
    "Tie",
    "Transpose",
    "Unsqueeze",
    "Unstack",
    "Untie",
    # composites
    "Parallel",
    "Prefix",
    "Repeat",
    "Sequential",
    "Shard",
    "mapper_from_toml",
    # model checkpoints
    "CheckpointError",
    "ReadError",
    "Source",
    "convert",
    "export",
    "load",
    "open_checkpoint",
    # looking at checkpoints
    "Difference",
    "Problem",
    "ProblemKind",
    "Report",
    "TensorDifference",
    "diff",
    "verify",
    # job checkpoints
    "ChecksumError",
    "JSON",
    "JobCheckpoint",
    "JobCheckpoints",
    "UnknownFormatError",
    # errors of other ranks
    "PeerError",
]
