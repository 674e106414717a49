"""The manifest of a job checkpoint: what it holds and where."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from ._dtypes import DTYPE_NAMES, DTYPES
from ._findings import Problem, ProblemKind
from ._index import fault_of_file_name
from ._json import JSON
from ._parse_json import is_text, parse_json, repeated
from ._spec import Region, TensorSpec

MANIFEST = "manifest.json"


def job_directory(path: Path) -> Path | None:
    """The directory of the job checkpoint that `path` or its manifest is; None where it is none."""
    directory = path.parent if path.name == MANIFEST else path
    if not (directory / MANIFEST).exists():
        return None
    files = [file.name for file in directory.glob("*.safetensors")]
    # others have a `manifest.json` too
    is_of_job = not files or any(re.fullmatch(r"rank-[0-9]{5,}\.safetensors", file) for file in files)
    return directory if is_of_job else None


def not_found(path: Path) -> FileNotFoundError:
    """Says that there is no checkpoint, or which job checkpoints may be meant."""
    steps = sorted(found.name for found in path.glob("step-*") if job_directory(found) is not None)
    if steps:
        last = str(path / steps[-1])
        return FileNotFoundError(f"{str(path)!r} has {len(steps)} job checkpoint(s): name one, such as {last!r}")
    if path.is_dir():
        return FileNotFoundError(f"no .safetensors file in {str(path)!r}")
    return FileNotFoundError(f"no checkpoint at {str(path)!r}")


FORMAT = {"format": "d9d job checkpoint", "version": 1}


@attrs.frozen
class Stored:
    """A region of a tensor as a rank wrote it: in which file, under which key, with which CRC-32 of its bytes."""

    region: Region
    file: str
    key: str
    crc32: int


@attrs.frozen(kw_only=True)
class RankPart:
    """What one rank wrote."""

    file: str
    """Holds its tensors, its own and its share of those of all ranks."""
    nbytes: int
    """Size of the file."""
    tensors: Mapping[str, Stored]
    """Its own tensors."""
    values: Mapping[str, JSON]
    """Its own other state."""


@attrs.frozen(kw_only=True)
class Manifest:
    """All that is known of a checkpoint without its tensors."""

    step: int
    shared: Mapping[str, JSON]
    specs: Mapping[str, TensorSpec]
    stored: Mapping[str, Sequence[Stored]]
    """Disjoint regions that cover each tensor of `specs`."""
    ranks: Sequence[RankPart]

    def dumps(self) -> str:
        """The manifest as JSON."""
        document = {
            **FORMAT,
            "step": self.step,
            "shared": self.shared,
            "tensors": {
                name: {
                    "dtype": DTYPE_NAMES[spec.dtype],
                    "shape": spec.shape,
                    "chunks": [_stored_to_json(stored) for stored in self.stored[name]],
                }
                for name, spec in self.specs.items()
            },
            "ranks": [
                {
                    "file": rank.file,
                    "bytes": rank.nbytes,
                    "tensors": {name: _stored_to_json(stored) for name, stored in rank.tensors.items()},
                    "values": rank.values,
                }
                for rank in self.ranks
            ],
        }
        return json.dumps(document, indent=1)

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Reads the manifest of a checkpoint and looks that its files are there, of the right size.

        Raises:
            ValueError, OSError: The checkpoint is broken.
            UnknownFormatError: It is of a version that this code does not know.
        """
        manifest = parse_manifest((directory / MANIFEST).read_bytes())
        for name, spec in manifest.specs.items():
            fault = fault_of_coverage(spec, [stored.region for stored in manifest.stored[name]])
            if fault is not None:
                raise ValueError(f"the manifest is damaged: the chunks of {name!r} {fault.text}")
        for rank in manifest.ranks:
            found = (directory / rank.file).stat().st_size
            if found != rank.nbytes:
                raise ValueError(f"{rank.file!r} should have {rank.nbytes} bytes, has {found}")
        return manifest


class UnknownFormatError(RuntimeError):
    """A checkpoint was written in a version of the format that is not known here."""


def parse_manifest(data: bytes) -> Manifest:
    """A manifest from JSON, every value of its type.

    Raises:
        ValueError: It is damaged.
        UnknownFormatError: It is of a version that this code does not know.
    """
    try:
        document = parse_json(data, allow_nan=True)  # state may hold any float
        found = {key: document[key] for key in FORMAT}
        if found != FORMAT:
            raise UnknownFormatError(f"a checkpoint is {found}, this code reads {FORMAT}")
        return Manifest(
            step=_number(document["step"]),
            shared=_mapping(document["shared"]),
            specs={
                name: TensorSpec(_numbers(entry["shape"]), DTYPES[entry["dtype"]])
                for name, entry in _mapping(document["tensors"]).items()
            },
            stored={
                name: [_stored_from_json(name, chunk) for chunk in entry["chunks"]]
                for name, entry in document["tensors"].items()
            },
            ranks=[
                RankPart(
                    file=_file(rank["file"]),
                    nbytes=_number(rank["bytes"]),
                    tensors={name: _stored_from_json(name, chunk) for name, chunk in _mapping(rank["tensors"]).items()},
                    values=_mapping(rank["values"]),
                )
                for rank in document["ranks"]
            ],
        )
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        reason = str(error) if type(error) is ValueError else repr(error)
        raise ValueError(f"the manifest is damaged: {reason}") from error


def fault_of_coverage(spec: TensorSpec, chunks: Sequence[Region]) -> Problem | None:
    """How chunks fail to be all of a tensor, each element once."""
    if any(len(chunk.shape) != len(spec.shape) or len(chunk.offset) != len(spec.shape) for chunk in chunks):
        return Problem(ProblemKind.WRONG_SIZE, f"have other dims than {spec}")
    beyond = any(
        start + length > size
        for chunk in chunks
        for start, length, size in zip(chunk.offset, chunk.shape, spec.shape, strict=True)
    )
    if beyond:
        return Problem(ProblemKind.OUT_OF_RANGE, f"are not all of {spec}: some lie beyond it")
    held = sum(chunk.numel for chunk in chunks)
    if held != spec.numel:
        kind = ProblemKind.HOLE if held < spec.numel else ProblemKind.OVERLAPPING
        return Problem(kind, f"are not all of {spec}: they have {held} of {spec.numel} elements")
    pair = _overlap(chunks)  # then others are missing
    return None if pair is None else Problem(ProblemKind.OVERLAPPING, f"overlap: {pair[0]} and {pair[1]}")


def _overlap(regions: Sequence[Region]) -> tuple[Region, Region] | None:
    """Two regions that overlap. Compares those alone that share an index of the dim with most cuts."""
    if len(regions) < 2 or not regions[0].shape:
        return (regions[0], regions[1]) if len(regions) > 1 else None
    dim = max(range(len(regions[0].shape)), key=lambda dim: len({region.offset[dim] for region in regions}))
    earlier: list[Region] = []
    for region in sorted(regions, key=lambda region: region.offset[dim]):
        earlier = [other for other in earlier if other.offset[dim] + other.shape[dim] > region.offset[dim]]
        for other in earlier:
            if region.intersect(other) is not None:
                return other, region
        earlier.append(region)
    return None


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:  # type(), as True is an int
        raise ValueError(f"a whole number from 0 on is needed, got {value!r}")
    return value


def _numbers(values: Any) -> list[int]:
    return [_number(value) for value in values]


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or repeated(value):
        raise ValueError(f"an object without repeated keys is needed, got {repeated(value) or type(value).__name__}")
    return value


def _file(name: Any) -> str:
    fault = fault_of_file_name(name)
    if fault is not None:
        raise ValueError(fault.text)
    return str(name)


def _text(value: Any) -> str:
    if not is_text(value):
        raise ValueError(f"a string is needed, got {value!r}")
    return str(value)


def _stored_to_json(stored: Stored) -> dict[str, Any]:
    return {
        "offset": stored.region.offset,
        "shape": stored.region.shape,
        "file": stored.file,
        "key": stored.key,
        "crc32": stored.crc32,
    }


def _stored_from_json(name: str, chunk: Mapping[str, Any]) -> Stored:
    region = Region(name, _numbers(chunk["offset"]), _numbers(chunk["shape"]))
    return Stored(region, _file(chunk["file"]), _text(chunk["key"]), _number(chunk["crc32"]))
