"""The manifest of a job checkpoint: what it holds and where."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from ._dtypes import DTYPE_NAMES, DTYPES
from ._json import JSON
from ._spec import Region, TensorSpec

MANIFEST = "manifest.json"
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
        try:
            document = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
            manifest = cls._parse(document)
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"the manifest is damaged: {error!r}") from error
        _check_coverage(manifest)
        for rank in manifest.ranks:
            found = (directory / rank.file).stat().st_size
            if found != rank.nbytes:
                raise ValueError(f"{rank.file!r} should have {rank.nbytes} bytes, has {found}")
        return manifest

    @classmethod
    def _parse(cls, document: Any) -> Manifest:
        found = {key: document[key] for key in FORMAT}
        if found != FORMAT:
            raise UnknownFormatError(f"a checkpoint is {found}, this code reads {FORMAT}")
        return cls(
            step=document["step"],
            shared=document["shared"],
            specs={
                name: TensorSpec(entry["shape"], DTYPES[entry["dtype"]]) for name, entry in document["tensors"].items()
            },
            stored={
                name: [_stored_from_json(name, chunk) for chunk in entry["chunks"]]
                for name, entry in document["tensors"].items()
            },
            ranks=[
                RankPart(
                    file=rank["file"],
                    nbytes=rank["bytes"],
                    tensors={name: _stored_from_json(name, chunk) for name, chunk in rank["tensors"].items()},
                    values=rank["values"],
                )
                for rank in document["ranks"]
            ],
        )


class UnknownFormatError(RuntimeError):
    """A checkpoint was written in a version of the format that is not known here."""


def _check_coverage(manifest: Manifest) -> None:
    """Raises a ValueError if chunks leave a part of a tensor out, or lie beyond it."""
    for name, spec in manifest.specs.items():
        chunks = [stored.region for stored in manifest.stored[name]]
        beyond = any(
            start < 0 or start + length > size
            for chunk in chunks
            for start, length, size in zip(chunk.offset, chunk.shape, spec.shape, strict=True)
        )
        if beyond or sum(chunk.numel for chunk in chunks) != spec.numel:
            raise ValueError(f"the manifest is damaged: the chunks of {name!r} are not all of {spec}")


def _stored_to_json(stored: Stored) -> dict[str, Any]:
    return {
        "offset": stored.region.offset,
        "shape": stored.region.shape,
        "file": stored.file,
        "key": stored.key,
        "crc32": stored.crc32,
    }


def _stored_from_json(name: str, chunk: Mapping[str, Any]) -> Stored:
    return Stored(Region(name, chunk["offset"], chunk["shape"]), chunk["file"], chunk["key"], chunk["crc32"])
