"""Verifying job checkpoints: the manifest, the files, and the checksum of every chunk."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs
import torch

from ._blocks import blocks
from ._findings import Problem, ProblemKind
from ._header import Entry, Header, inspect_header
from ._manifest import MANIFEST, Manifest, Stored, UnknownFormatError, fault_of_coverage, parse_manifest
from ._memory import memory_of
from ._names import natural_key
from ._report import Report
from ._spec import TensorSpec
from ._verify_data import Data, check_data


def verify_job(directory: Path, *, values: bool, contents: bool) -> Report:
    """As `verify`, for a job checkpoint."""
    try:
        manifest = parse_manifest((directory / MANIFEST).read_bytes())
    except (ValueError, UnknownFormatError) as error:
        problem = Problem(ProblemKind.MALFORMED, str(error), MANIFEST)
        return Report(path=directory, files=0, tensors=0, nbytes=0, problems=(problem,), notes=())
    problems = list(_faults_of_coverage(manifest))
    chunks: list[tuple[Stored, torch.dtype | None]] = [
        (chunk, manifest.specs[name].dtype) for name, parts in manifest.stored.items() for chunk in parts
    ]
    chunks += [(chunk, None) for rank in manifest.ranks for chunk in rank.tensors.values()]
    named = {*(rank.file for rank in manifest.ranks), *(chunk.file for chunk, _ in chunks)}
    headers, file_problems = _inspect_files(directory, manifest, named)
    problems += file_problems
    data: list[Data] = []
    for chunk, dtype in chunks:
        if chunk.file not in headers:
            continue  # said already
        fault = _fault_of_chunk(directory, chunk, headers[chunk.file], dtype)
        if fault is None:
            data.append(Data(chunk.key, directory / chunk.file, headers[chunk.file].entries[chunk.key]))
        else:
            problems.append(attrs.evolve(fault, file=chunk.file))
    known = {(chunk.file, chunk.key) for chunk, _ in chunks}
    problems += [
        Problem(ProblemKind.UNLISTED_TENSOR, f"the manifest lacks {key!r}", file)
        for file, header in headers.items()
        for key in header.entries
        if (file, key) not in known
    ]
    notes = [
        Problem(ProblemKind.UNLISTED_FILE, "the manifest does not name it, so it is not read", path.name)
        for path in sorted(directory.glob("*.safetensors"), key=lambda path: natural_key(path.name))
        if path.name not in named
    ]
    more_problems, more_notes = check_data(data, values=values, contents=contents)
    return Report(
        path=directory,
        files=len(headers),
        tensors=len(manifest.specs),
        nbytes=sum(spec.nbytes for spec in manifest.specs.values()),
        problems=(*problems, *more_problems),
        notes=(*notes, *more_notes),
    )


def _faults_of_coverage(manifest: Manifest) -> Iterator[Problem]:
    for name, spec in manifest.specs.items():
        regions = [stored.region for stored in manifest.stored[name]]
        fault = fault_of_coverage(spec, regions)
        if fault is not None:
            yield attrs.evolve(fault, text=f"the chunks of {name!r} {fault.text}", file=MANIFEST)


def _inspect_files(directory: Path, manifest: Manifest, named: set[str]) -> tuple[Mapping[str, Header], list[Problem]]:
    """The headers of all sound files, and what is wrong with the others."""
    sizes = {rank.file: rank.nbytes for rank in manifest.ranks}
    headers, problems = {}, list[Problem]()
    for file in sorted(named, key=natural_key):
        try:
            found = inspect_header(directory / file)
        except FileNotFoundError:
            problems.append(Problem(ProblemKind.MISSING_FILE, f"the manifest names {file!r}, which is absent"))
            continue
        except OSError as error:
            problems.append(Problem(ProblemKind.UNREADABLE, str(error)))
            continue
        problems += [attrs.evolve(problem, file=file) for problem in found.problems]
        if not found.problems:
            headers[file] = found.header
            nbytes = found.header.nbytes
            if sizes.get(file, nbytes) != nbytes:
                text = f"the manifest says that it has {sizes[file]} bytes, it has {nbytes}"
                problems.append(Problem(ProblemKind.WRONG_SIZE, text, file))
    return headers, problems


def _fault_of_chunk(directory: Path, chunk: Stored, header: Header, dtype: torch.dtype | None) -> Problem | None:
    entry = header.entries.get(chunk.key)
    if entry is None:
        return Problem(ProblemKind.MISSING_TENSOR, f"it lacks {chunk.key!r}, which the manifest has in it")
    expected = TensorSpec(chunk.region.shape, dtype or entry.spec.dtype)
    if entry.spec != expected:
        return Problem(ProblemKind.WRONG_SIZE, f"{chunk.key!r} should be {expected}, is {entry.spec}")
    try:
        found = _checksum(directory / chunk.file, entry)
    except OSError as error:
        return Problem(ProblemKind.UNREADABLE, str(error))
    if found != chunk.crc32:
        text = f"{chunk.key!r} has the checksum {found:#010x}, should have {chunk.crc32:#010x}"
        return Problem(ProblemKind.CHECKSUM, text)
    return None


def _checksum(path: Path, entry: Entry) -> int:
    crc32 = 0
    for block in blocks(path, entry):
        crc32 = zlib.crc32(memory_of(block), crc32)
    return crc32
