"""Headers of safetensors files: parsed and checked before a byte of data is looked at.

A file is the length of its header (8 bytes, little-endian), the header (a JSON object from names to dtype, shape and
offsets from its end, with `__metadata__` from strings to strings), and the data without gaps. What the `safetensors`
library refuses is refused here. Beyond it are refused: a name or a key of the metadata that comes twice (the library
takes the last), fields of a tensor that the format does not know, and shapes and dtypes that torch cannot hold.
"""

from __future__ import annotations

import math
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from ._collector import collector_paused
from ._dtypes import DTYPES, PACKED
from ._findings import FileError, Problem, ProblemKind
from ._parse_json import is_text, parse_json, repeated
from ._spans import Span, faults_of_spans
from ._spec import TensorSpec

MAX_HEADER_BYTES = 100_000_000
"""Longer headers are refused, as the `safetensors` library does."""
_METADATA = "__metadata__"
_FIELDS = {"dtype", "shape", "data_offsets"}
_LARGEST = 2**63 - 1


@attrs.frozen
class Entry:
    """A tensor of a file and where its bytes are, `[start, stop)` from the start of the file."""

    spec: TensorSpec
    start: int
    stop: int


@attrs.frozen
class Header:
    """All that a file says of its tensors."""

    entries: Mapping[str, Entry]
    """In the order of their bytes."""
    metadata: Mapping[str, str]
    nbytes: int
    """Size of the whole file."""


@attrs.frozen
class Inspection:
    """A header as far as it can be told, and what is wrong with it."""

    header: Header
    problems: tuple[Problem, ...]
    complete: bool
    """Whether the header has all tensors that the file names."""


def read_header(path: Path) -> Header:
    """Reads and checks the header of a file, and nothing else of it.

    Raises:
        ValueError: It is no sound safetensors file; all that is wrong with it is listed.
        OSError: It cannot be read.
    """
    found = inspect_header(path)
    if found.problems:
        raise FileError(path, "not a whole safetensors file", found.problems)
    return found.header


def inspect_header(path: Path) -> Inspection:
    """As `read_header`, but returns the problems, and of the header what can be told in spite of them.

    Raises:
        OSError: It cannot be read.
    """
    if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for ever
        return _nothing(0, _malformed("it is no regular file"))
    with path.open("rb") as file:
        nbytes = file.seek(0, 2)
        file.seek(0)
        length = int.from_bytes(file.read(8), "little")
        fault = _fault_of_length(length, nbytes)
        if fault is not None:
            return _nothing(nbytes, fault)
        data = file.read(length)
    if len(data) < length:
        return _nothing(nbytes, Problem(ProblemKind.TRUNCATED, "it shrank while it was read"))
    with collector_paused():
        try:
            document = parse_json(data)
        except ValueError as error:
            return _nothing(nbytes, _malformed(f"the header: {error}"))
        if not isinstance(document, dict):
            return _nothing(nbytes, _malformed(f"the header is a {type(document).__name__}, not an object"))
        return _check(document, base=8 + length, nbytes=nbytes)


def _nothing(nbytes: int, fault: Problem) -> Inspection:
    return Inspection(Header({}, {}, nbytes), (fault,), complete=False)


def _fault_of_length(length: int, nbytes: int) -> Problem | None:
    if nbytes < 8:
        return Problem(ProblemKind.TRUNCATED, f"it has {nbytes} bytes, too few for the length of a header")
    if length > MAX_HEADER_BYTES:
        return _malformed(f"its header should have {length} bytes, of which at most {MAX_HEADER_BYTES} are read")
    if length > nbytes - 8:
        return Problem(ProblemKind.TRUNCATED, f"its header should have {length} bytes, {nbytes - 8} are there")
    return None


def _check(document: dict[str, Any], *, base: int, nbytes: int) -> Inspection:
    problems = [
        Problem(ProblemKind.DUPLICATE, f"the header has {name!r} more than once") for name in repeated(document)
    ]
    metadata = document.pop(_METADATA, None)
    if metadata is None:  # the library takes null as well
        metadata = {}
    elif not isinstance(metadata, dict) or not all(map(is_text, [*metadata, *metadata.values()])):
        problems.append(_malformed(f"{_METADATA} is no object of strings"))
        metadata = {}
    problems += [
        Problem(ProblemKind.DUPLICATE, f"{_METADATA} has {key!r} more than once") for key in repeated(metadata)
    ]
    specs: dict[tuple[str, tuple[int, ...]], TensorSpec] = {}  # a model has few different ones
    entries: dict[str, Entry] = {}
    for name, fields in document.items():
        fault = _fault_of_fields(name, fields)
        if fault is not None:
            problems.append(fault)
            continue
        start, stop = fields["data_offsets"]
        key = fields["dtype"], tuple(fields["shape"])
        if key not in specs:
            specs[key] = TensorSpec(key[1], DTYPES[key[0]])
        entry = Entry(specs[key], base + start, base + stop)
        if stop - start != entry.spec.nbytes:
            problems.append(
                Problem(
                    ProblemKind.WRONG_SIZE,
                    f"{name!r} is {entry.spec}, {entry.spec.nbytes} bytes, but has [{start}, {stop}) of the data",
                )
            )
        entries[name] = entry
    placed = sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop))
    spans = [Span(name, entry.start - base, entry.stop - base) for name, entry in placed]
    complete = len(entries) == len(document) and not repeated(document)
    problems += faults_of_spans(spans, nbytes - base, complete=complete)
    return Inspection(Header(dict(placed), metadata, nbytes), tuple(problems), complete)


def _fault_of_fields(name: str, fields: Any) -> Problem | None:
    """What keeps an entry from being understood."""
    if not is_text(name):
        return _malformed(f"the name {name!r} is no text")
    if not isinstance(fields, dict) or fields.keys() != _FIELDS or repeated(fields):
        found = repeated(fields) or (sorted(fields) if isinstance(fields, dict) else type(fields).__name__)
        return _malformed(
            f"{name!r} needs dtype, shape and data_offsets, once each, and nothing else, got {_short(found)}"
        )
    return _fault_of_values(name, fields["dtype"], fields["shape"], fields["data_offsets"])


def _fault_of_values(name: str, dtype: Any, shape: Any, offsets: Any) -> Problem | None:
    if not isinstance(dtype, str) or dtype not in DTYPES:
        torch_lacks = isinstance(dtype, str) and dtype in PACKED
        reason = "which torch cannot hold" if torch_lacks else f"which is none of {', '.join(DTYPES)}"
        return Problem(ProblemKind.UNKNOWN_DTYPE, f"{name!r} has the dtype {_short(dtype)}, {reason}")
    if not _are_sizes(shape):
        return _malformed(f"{name!r} has a shape that is no list of whole numbers from 0 on: {_short(shape)}")
    if not _are_sizes(offsets) or len(offsets) != 2:
        return _malformed(f"{name!r} has data_offsets that are not two whole numbers from 0 on: {_short(offsets)}")
    if offsets[0] > offsets[1]:
        return Problem(ProblemKind.OUT_OF_RANGE, f"{name!r} ends before it starts: its data_offsets are {offsets!r}")
    # torch counts strides of empty tensors as if no dim were 0
    if math.prod(length or 1 for length in shape) * DTYPES[dtype].itemsize > _LARGEST:
        return Problem(ProblemKind.WRONG_SIZE, f"{name!r} is larger than any tensor can be: {_short(shape)}")
    return None


def _are_sizes(values: Any) -> bool:
    # type(), as True is an int
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= _LARGEST for value in values)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _malformed(text: str) -> Problem:
    return Problem(ProblemKind.MALFORMED, text)
