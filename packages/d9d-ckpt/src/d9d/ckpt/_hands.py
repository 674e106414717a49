"""What one reading thread owns and does: bytes of a file into the memory of a tensor."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import attrs
import torch
from torch import Tensor

from ._extent import Block, Extent, bridged, contiguous_strides, find_runs, run_nbytes
from ._memory import memory_of
from ._spec import Region

PIECE = 4 << 20
"""Bytes of a staging buffer, and of what is read between two looks at failures."""
_SHORT_RUN = 2048
"""Below this, a copy within memory is faster than so many buffers of a read."""
_SERIAL = 32_767
"""Elements that torch copies without its threads, of which each of ours would start its own."""
_MAX_BUFFERS = min(1024, os.sysconf("SC_IOV_MAX"))


class ReadError(OSError):
    """The bytes of a tensor cannot be read: the message names the tensor, the file and the place in it."""


class ChecksumError(ValueError):
    """The bytes of a tensor are not those that were written."""


@attrs.frozen
class Fill:
    """An extent and the memory that it goes to, a tensor of the extent's shape."""

    extent: Extent
    into: Tensor


class Hands:
    """An open file and staging buffers, for one thread at a time. To be closed."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._descriptor = -1
        self._staging: dict[bool, Tensor] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._gap = bytearray()

    def close(self) -> None:
        """Closes the file."""
        if self._path is not None:
            os.close(self._descriptor)
            self._path = None

    @torch.inference_mode()  # tensors made in it may be written to, and no version counts
    def fill(self, fill: Fill) -> None:
        """Reads an extent, of `PIECE` bytes at most, into its tensor.

        Raises:
            ReadError: The file ends too early, or is not the one that was opened, or cannot be read.
        """
        extent, into = fill.extent, fill.into
        if _is_direct(extent, into):
            self._read(extent.block, extent.part, into)
        else:
            staged = self._stage(extent, pinned=into.is_cuda)
            self._read(extent.block, extent.part, staged)
            self._copy(staged, into)

    @torch.inference_mode()
    def fill_checked(self, fill: Fill) -> None:
        """Reads an extent of any size; the first time of its block, reads all of that to compare its checksum.

        Raises:
            ChecksumError: The block is damaged. A part of it may be in the tensor.
            ReadError: As `fill`.
        """
        extent, into = fill.extent, fill.into
        check = extent.block.check
        assert check is not None, "for blocks with checksums"
        with check.lock:  # others that want of this block wait
            if not check.done:
                found = self._scan(extent, into)
                if found != check.crc32:
                    raise ChecksumError(
                        f"{extent.part.name!r} is damaged: its data in {str(extent.block.path)!r} has the checksum "
                        f"{found:#010x}, not {check.crc32:#010x}; remove this checkpoint to go on from an earlier one"
                    )
                check.done = True
                return
        for piece in extent.cut(PIECE):
            self.fill(Fill(attrs.evolve(extent, part=piece), into[piece.within(extent.part)]))

    def _scan(self, extent: Extent, into: Tensor) -> int:
        """Reads all of the block, piece by piece, and returns its CRC-32."""
        block = attrs.evolve(extent, part=Region.whole(extent.part.name, extent.block.spec))
        crc = 0
        for piece in block.cut(PIECE):
            part = attrs.evolve(block, part=piece)
            wanted = piece.intersect(extent.part)
            target = None if wanted is None else into[wanted.within(extent.part)]
            if target is not None and wanted == piece and target.is_contiguous() and _is_direct(part, target):
                self._read(block.block, piece, target)
                crc = zlib.crc32(memory_of(target), crc)
                continue
            staged = self._stage(part, pinned=into.is_cuda)
            self._read(block.block, piece, staged)
            crc = zlib.crc32(memory_of(staged), crc)
            if wanted is not None and target is not None:
                self._copy(staged[wanted.within(piece)], target)
        return crc

    def _stage(self, extent: Extent, *, pinned: bool) -> Tensor:
        """A staging tensor for an extent; it is overwritten by the next."""
        nbytes = extent.nbytes
        staging = self._staging.get(pinned)
        if staging is None or staging.numel() < nbytes:  # larger than a piece only where an element is
            staging = torch.empty(PIECE if nbytes > PIECE // 8 else PIECE // 8, dtype=torch.uint8, pin_memory=pinned)
            self._staging[pinned] = staging
        return staging[:nbytes].view(extent.block.spec.dtype).reshape(extent.part.shape)

    def _copy(self, staged: Tensor, into: Tensor) -> None:
        if not into.is_cuda:
            _copy_serially(staged, into)
            return
        if into.device not in self._streams:
            self._streams[into.device] = torch.cuda.Stream(into.device)
        stream = self._streams[into.device]
        with torch.cuda.stream(stream):
            if staged.dtype != into.dtype or not into.is_contiguous():  # torch would convert on the CPU
                staged = staged.to(into.device, non_blocking=True)
            into.copy_(staged, non_blocking=True)
        stream.synchronize()  # others of our threads read meanwhile

    def _read(self, block: Block, part: Region, into: Tensor) -> None:
        """Reads a part of a block into CPU memory that no two elements share."""
        descriptor = self._open(block, part)
        memory = memory_of(into)
        runs = find_runs(block.spec.shape, part.offset, part.shape, into.stride(), block.spec.dtype.itemsize)
        for start, buffers in bridged(runs, _MAX_BUFFERS):
            views = [self._gap_view(nbytes) if at < 0 else memory[at : at + nbytes] for at, nbytes in buffers]
            _read_all(descriptor, views, block.start + start, block, part)

    def _gap_view(self, nbytes: int) -> memoryview:
        if len(self._gap) < nbytes:
            self._gap = bytearray(nbytes)
        return memoryview(self._gap)[:nbytes]

    def _open(self, block: Block, part: Region) -> int:
        if block.path != self._path:
            self.close()
            try:
                self._descriptor = os.open(block.path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise _failed(block, part, block.start, error.strerror or str(error), error.errno) from error
            self._path = block.path
            found = os.fstat(self._descriptor).st_size
            if found != block.file_nbytes:
                raise _failed(
                    block, part, block.start, f"the file has {found} bytes, when it was opened {block.file_nbytes}"
                )
        return self._descriptor


def _read_all(descriptor: int, views: list[memoryview], position: int, block: Block, part: Region) -> None:
    left = sum(map(len, views))
    while left:
        try:
            count = os.preadv(descriptor, views, position)
        except OSError as error:
            raise _failed(block, part, position, error.strerror or str(error), error.errno) from error
        if count == 0:
            raise _failed(block, part, position, f"the file ends here, {left} bytes too early: was it cut while open?")
        left -= count
        position += count
        while left and count:  # a read may stop short, at 2 GiB or at a signal
            if count >= len(views[0]):
                count -= len(views.pop(0))
            else:
                views[0] = views[0][count:]
                count = 0


def _failed(block: Block, part: Region, position: int, reason: str, errno: int | None = None) -> ReadError:
    place = f"cannot read {part.name!r} at byte {position} of {str(block.path)!r}"
    return ReadError(errno, f"{place}: {reason}") if errno else ReadError(f"{place}: {reason}")


def _is_direct(extent: Extent, into: Tensor) -> bool:
    """Whether a read can go to the tensor's own memory, and is better off so."""
    spec, shape = extent.block.spec, extent.part.shape
    plain = type(into) is Tensor and into.device.type == "cpu" and into.layout is torch.strided
    if not plain or into.dtype != spec.dtype or into.is_conj() or into.is_neg():
        return False
    if any(stride == 0 and length > 1 for stride, length in zip(into.stride(), shape)):
        return False  # the copy refuses it
    run = run_nbytes(spec.shape, shape, into.stride(), spec.dtype.itemsize)
    return run >= _SHORT_RUN or run == run_nbytes(spec.shape, shape, contiguous_strides(shape), spec.dtype.itemsize)


def _copy_serially(source: Tensor, target: Tensor) -> None:
    if source.numel() <= _SERIAL:
        target.copy_(source)
        return
    dim = max(range(source.ndim), key=source.shape.__getitem__)
    step = max(1, source.shape[dim] * _SERIAL // source.numel())
    for some, where in zip(source.split(step, dim), target.split(step, dim)):
        _copy_serially(some, where)
