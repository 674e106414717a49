"""Mappers and specs that the command line names."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from .._import_path import import_path, is_mapper
from .._mapper import Mapper
from .._mappers import Identity
from .._open import open_checkpoint
from .._spec import TensorSpec
from .._toml import read_toml


def add_mapper_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say which mapper."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--mapper",
        metavar="MODULE:NAME",
        help="a mapper, or a function that makes one, found from the current directory too",
    )
    which.add_argument("--toml", type=Path, metavar="FILE", help="a mapper as TOML; by default nothing is renamed")
    parser.add_argument("--inverse", action="store_true", help="the inverse of the mapper")
    parser.add_argument(
        "--waive", action="append", default=[], metavar="PATTERN", help="tensors that may stay unused; may be repeated"
    )


def mapper_of(arguments: argparse.Namespace) -> Mapper:
    """The mapper that the options name.

    Raises:
        ValueError: There is none, or it has no inverse.
        OSError: A file cannot be read.
    """
    mapper: Mapper
    if arguments.toml is not None:
        mapper = read_toml(arguments.toml)
    elif arguments.mapper is not None:
        found = _import(arguments.mapper)
        if not is_mapper(found):
            raise ValueError(f"--mapper {arguments.mapper}: a mapper is needed, got {found!r}")
        mapper = found
    else:
        mapper = Identity()
    return mapper.inverse() if arguments.inverse else mapper


def target_of(text: str) -> Mapping[str, TensorSpec]:
    """Specs from a checkpoint, or from an import path of a module, a state dict, specs, or a function that makes one.

    Raises:
        ValueError: It is none of these.
        OSError: A checkpoint cannot be read.
    """
    if ":" not in text or Path(text).exists():
        return dict(open_checkpoint(Path(text)))
    found = _import(text)
    if isinstance(found, nn.Module):
        found = found.state_dict()
    if isinstance(found, Mapping):
        return {name: _spec(text, name, value) for name, value in found.items()}
    raise ValueError(f"--target {text}: a module or a mapping of tensors or specs is needed, got {found!r}")


def _spec(text: str, name: str, value: Any) -> TensorSpec:
    if isinstance(value, TensorSpec):
        return value
    if isinstance(value, Tensor):
        return TensorSpec.of(value)
    raise ValueError(f"--target {text}: {name!r} should be a tensor or a TensorSpec, is {value!r}")


def _import(path: str) -> Any:
    """The object, or what the function of that name returns."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does
    found = import_path(path)
    # mappers and modules are callable in places
    return found if is_mapper(found) or isinstance(found, nn.Module) or not callable(found) else found()
