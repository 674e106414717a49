"""What goes wrong on one rank is an error on all, and leaves nothing behind."""

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from d9d.ckpt import Identity, JobCheckpoints, Parallel, PeerError, Rename, convert, export, open_checkpoint
from d9d.ckpt._files import TensorFileWriter
from d9d.mesh.testing import run_world

sys.path.insert(0, str(Path(__file__).parent))
from sharded_states import WIDE, wide_tensors


def failing_rank(root: Path, what: str) -> str:
    state = {"w": torch.ones(4)}
    if dist.get_rank() == 2:
        state["w"] = torch.ones(5) if what == "layout" else torch.ones(4)
        if what == "meta":  # a tensor that only this rank has, and others would wait for
            state["x"] = torch.ones(4, device="meta")
    original = TensorFileWriter.write
    if what == "write" and dist.get_rank() == 0:

        def full(self, name, tensor):
            raise OSError(28, "No space left on device")

        TensorFileWriter.write = full
    errors = []
    try:
        for operation in (
            lambda: export(state, Identity(), root / "export", max_shard_bytes=1),
            lambda: JobCheckpoints(root / "job").save(1, state, shared={}, per_rank={"rank": dist.get_rank()}),
        ):
            try:
                operation()
            except (OSError, ValueError, PeerError) as error:
                errors.append(f"{type(error).__name__}: {error}")
    finally:
        TensorFileWriter.write = original
    dist.barrier()
    return "\n".join([*errors, *sorted(path.name for path in root.rglob("*"))])


@pytest.mark.parametrize("what", ["write", "layout", "meta"])
def test_an_error_on_one_rank_is_an_error_on_all(tmp_path, what):  # case 33
    first, *others = run_world(4, failing_rank, tmp_path, what)
    for text in (first, *others):
        lines = text.splitlines()
        if what == "write":
            prefix = "OSError: " if text is first else "PeerError: rank 0 failed: OSError: "
            assert lines == [f"{prefix}[Errno 28] No space left on device"] * 2 + ["job"]
        elif what == "meta":
            assert text.count("tensors on meta have no data to write: ['x']") == 2
            assert lines[2:] == []
        else:
            assert text.count("'w' is [5] float32 on rank 2, [4] float32 on a lower one") == 2


def failing_convert(root: Path) -> str:
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 2:
            patch.setattr(os, "preadv", failing_read)
        with pytest.raises((OSError, PeerError)) as caught:
            convert(open_checkpoint(root / "source"), WIDE, root / "out", max_shard_bytes=1)
    return f"{caught.type.__name__}: {caught.value}"


def failing_read(*_: object) -> int:
    raise OSError(5, "Input/output error")


def test_a_failed_read_on_one_rank_is_an_error_on_all(tmp_path):
    (tmp_path / "source").mkdir()
    save_file(wide_tensors(), tmp_path / "source" / "model.safetensors")
    errors = run_world(4, failing_convert, tmp_path)
    assert errors.pop(2).startswith("ReadError: ")
    assert all(error.startswith("PeerError: rank 2 failed: ReadError: ") for error in errors)
    assert all("Input/output error" in error for error in errors)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def other_mappers(root: Path) -> list[str]:
    tensors = {"a": torch.ones(4), "b": torch.ones(4)}
    save_once(root / "source", tensors)
    odd = dist.get_rank() == 3
    errors = []
    for mapper, options in (
        (Parallel(Rename("a", "x" if odd else "y"), Identity("b")), {}),
        (Identity(), {"max_shard_bytes": 32 if odd else 16}),
        (Identity(), {"dtype": torch.bfloat16 if odd else None}),
    ):
        for write, source in ((export, tensors), (convert, open_checkpoint(root / "source"))):
            with pytest.raises(ValueError, match="ranks would write different things") as caught:
                write(source, mapper, root / "out", **options)
            errors.append(str(caught.value))
    return errors


def save_once(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    if dist.get_rank() == 0:
        directory.mkdir()
        save_file(tensors, directory / "model.safetensors")
    dist.barrier()


def test_ranks_with_other_mappers_or_options_are_told(tmp_path):
    first, *others = run_world(4, other_mappers, tmp_path)
    assert all(errors == first for errors in others)
    assert all("rank 0 'a' as [4] float32 into" in error for error in first[2:])
    assert "rank 0 'y' as" in first[0]
    assert "rank 3 'x' as" in first[0]
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
