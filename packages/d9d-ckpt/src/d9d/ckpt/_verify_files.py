"""Verifying safetensors files and their index."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import attrs

from ._cross_check import absent_files, contradictions, duplicates, gaps_in_numbers, wrong_total
from ._findings import Problem, ProblemKind
from ._header import Inspection, inspect_header
from ._index import Index, inspect_index
from ._manifest import not_found
from ._names import natural_key
from ._report import Report
from ._verify_data import Data, check_data


def verify_files(path: Path, *, values: bool, contents: bool) -> Report:
    """As `verify`, for a model checkpoint."""
    directory, indexes, present = _look(path)
    index, problems = Index({}, {}), list[Problem]()
    if len(indexes) > 1:
        problems.append(Problem(ProblemKind.SEVERAL_INDEXES, f"open one of {indexes}"))
    elif indexes:
        index, problems = _inspect_index(directory / indexes[0])
    files: Sequence[str] = index.files or present
    notes = [
        Problem(ProblemKind.UNLISTED_FILE, "the index does not name it, so it is not read", file)
        for file in present
        if file not in files
    ]
    found: dict[str, Inspection] = {}
    absent = [file for file in files if not (directory / file).exists()]
    problems += absent_files(index, set(files) - set(absent))
    for file in files:
        if file in absent:
            continue
        try:
            found[file] = inspect_header(directory / file)
        except OSError as error:
            problems.append(Problem(ProblemKind.UNREADABLE, str(error)))
        else:
            problems += [attrs.evolve(problem, file=file) for problem in found[file].problems]
    headers = {file: inspection.header for file, inspection in found.items()}
    problems += duplicates(headers)
    if index.files:
        incomplete = {file for file, inspection in found.items() if not inspection.complete}
        problems += contradictions(index, headers, incomplete)
        if not incomplete and headers.keys() == set(files):
            problems += wrong_total(index, headers)
    else:
        problems += gaps_in_numbers(files)
    more_problems, more_notes = check_data(_data(directory, found), values=values, contents=contents)
    return Report(
        path=path,
        files=len(headers),
        tensors=sum(len(header.entries) for header in headers.values()),
        nbytes=sum(entry.stop - entry.start for header in headers.values() for entry in header.entries.values()),
        problems=(*problems, *more_problems),
        notes=(*notes, *more_notes),
    )


def _look(path: Path) -> tuple[Path, list[str], list[str]]:
    """The directory, and which indexes and files of it are meant."""
    if not path.is_dir():
        if not path.exists():
            raise not_found(path)
        return (path.parent, [path.name], []) if path.suffix == ".json" else (path.parent, [], [path.name])
    indexes, files = (
        sorted((found.name for found in path.glob(pattern)), key=natural_key)
        for pattern in ("*.safetensors.index.json", "*.safetensors")
    )
    if not indexes and not files:
        raise not_found(path)
    return path, indexes, files


def _inspect_index(path: Path) -> tuple[Index, list[Problem]]:
    try:
        index, problems = inspect_index(path)
    except OSError as error:
        return Index({}, {}), [Problem(ProblemKind.UNREADABLE, str(error))]
    return index, [attrs.evolve(problem, file=path.name) for problem in problems]


def _data(directory: Path, found: dict[str, Inspection]) -> Collection[Data]:
    """What can be read: of a file with problems it is not known which bytes are whose."""
    return [
        Data(name, directory / file, entry)
        for file, inspection in found.items()
        if not inspection.problems
        for name, entry in inspection.header.entries.items()
    ]
