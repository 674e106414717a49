"""Whether the files of a checkpoint and its index say the same."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping

from ._findings import Problem, ProblemKind
from ._header import Header
from ._index import Index

_NUMBERED = re.compile(r"(.*-)([0-9]{1,9})(-of-)([0-9]{1,9})(\.safetensors)", re.DOTALL)


def duplicates(headers: Mapping[str, Header]) -> Iterator[Problem]:
    """Names that several files have."""
    holders: dict[str, list[str]] = defaultdict(list)
    for file, header in headers.items():
        for name in header.entries:
            holders[name].append(file)
    for name, files in holders.items():
        if len(files) > 1:
            yield Problem(ProblemKind.DUPLICATE, f"{name!r} is in several files: {files}")


def absent_files(index: Index, present: Collection[str]) -> Iterator[Problem]:
    """Files that an index names, beyond those that are present."""
    for file in index.files:
        if file not in present:
            yield Problem(ProblemKind.MISSING_FILE, f"the index names {file!r}, which is absent")


def contradictions(index: Index, headers: Mapping[str, Header], incomplete: Collection[str] = ()) -> Iterator[Problem]:
    """Where an index and the files that it names differ; of `incomplete` headers it is not known what they lack."""
    listed = index.weight_map
    for file, header in headers.items():
        for name in header.entries:
            if name in index.unsound:
                continue
            if name not in listed:
                text = f"{file!r} holds {name!r}, which the index lacks"
                yield Problem(ProblemKind.UNLISTED_TENSOR, text)
            elif listed[name] != file and name not in _entries(headers, listed[name]):
                text = f"{file!r} holds {name!r}, which the index has in {listed[name]!r}"
                yield Problem(ProblemKind.UNLISTED_TENSOR, text)
    for name, file in listed.items():
        if file in headers and file not in incomplete and name not in headers[file].entries:
            yield Problem(ProblemKind.MISSING_TENSOR, f"the index has {name!r} in {file!r}, which lacks it")


def wrong_total(index: Index, headers: Mapping[str, Header]) -> Iterator[Problem]:
    """That the index, whose files' complete headers these are, says another size; nothing reads it."""
    total = index.metadata.get("total_size")
    nbytes = sum(entry.stop - entry.start for header in headers.values() for entry in header.entries.values())
    if total is not None and total != nbytes:
        yield Problem(ProblemKind.TOTAL_SIZE, f"the index says total_size {total!r}, the tensors have {nbytes} bytes")


def gaps_in_numbers(files: Iterable[str]) -> Iterator[Problem]:
    """Files that are absent by the numbers in the names of the others, such as `model-00001-of-00003.safetensors`."""
    sets: dict[tuple[str, ...], set[int]] = defaultdict(set)
    for file in files:
        found = _NUMBERED.fullmatch(file)
        if found:
            sets[(found[1], str(len(found[2])), found[3] + found[4] + found[5], found[4])].add(int(found[2]))
    for (prefix, width, suffix, count), numbers in sets.items():
        first = 0 if 0 in numbers else 1  # both ways of counting are in use
        total = int(count)
        if total <= len(numbers):
            continue
        absent = []
        for number in range(first, first + total):  # total may be a lie of a billion
            if number not in numbers:
                absent.append(f"{prefix}{number:0{width}}{suffix}")
            if len(absent) == 10:
                break
        left_out = total - len(numbers) - len(absent)
        more = f" and {left_out} more" if left_out > 0 else ""
        yield Problem(ProblemKind.MISSING_FILE, f"of {total} numbered files are absent: {absent}{more}")


def _entries(headers: Mapping[str, Header], file: str) -> Collection[str]:
    return headers[file].entries if file in headers else ()
