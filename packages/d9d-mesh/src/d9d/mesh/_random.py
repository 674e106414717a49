"""The random streams of a rank: which ranks draw the same, and what a checkpoint keeps."""

import importlib
import random
import sys
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

Json: TypeAlias = bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"] | None


def seed_rank(mesh: DeviceMesh, *, seed: int, step: int = 0, agree: Collection[str] = ("tp",)) -> None:
    """Seed the global random streams of torch (host and CUDA), Python and, if it is loaded, numpy.

    Ranks draw different numbers, so that those with different data have different dropout masks, apart from ranks
    that differ only in dims that have to agree: ranks that share a layer see the same activations, and must drop the
    same ones. The streams of a rank depend on nothing but the arguments and its place.

    Args:
        mesh: With named dims, all of them of the whole job; the "batch" domain of a `DistContext`.
        seed: Picks the streams.
        step: Picks others: a run that goes on without its old streams shall not draw the numbers of its first steps.
        agree: Dims whose ranks draw the same numbers.
    """
    place = "/".join(f"{dim}={mesh.get_local_rank(dim)}" for dim in mesh.mesh_dim_names or () if dim not in agree)
    digest = blake2b(f"{seed}/{step}/{place}".encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "little", signed=True))
    random.seed(digest)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed([int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")])


class RandomState:
    """The states of the global random streams of torch, Python and, if it is loaded, numpy, to save and to restore.

    Args:
        device: Whose stream counts, next to the host's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def state_dict(self) -> dict[str, Tensor | Json]:
        """Tensors on the CPU, and values that JSON gives back as they are."""
        version, (*words, position), gauss = random.getstate()
        state: dict[str, Tensor | Json] = {
            "torch": torch.get_rng_state(),
            "python": torch.tensor(words),
            "python.rest": [version, position, gauss],
        }
        if self._device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self._device)
        if (numpy := sys.modules.get("numpy")) is not None:
            kind, words, *rest = numpy.random.get_state()
            state |= {"numpy": torch.tensor(words.tolist()), "numpy.rest": [kind, *rest]}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor | Json]) -> None:
        """Take back what `state_dict` gave.

        A stream that is not in it, such as that of a device that there was not, goes on as it is; numpy is imported
        where it is in it.

        Raises:
            TypeError: It is not what `state_dict` gives.
            ImportError: numpy's state was saved, and it is not installed.
        """
        match state:
            case {"torch": Tensor() as host, "python": Tensor() as words, "python.rest": [version, position, gauss]}:
                torch.set_rng_state(host)
                random.setstate((version, (*words.tolist(), position), gauss))
            case _:
                raise TypeError(f"a random state holds torch, python and python.rest, and this has {sorted(state)}")
        match state:
            case {"numpy": Tensor() as words, "numpy.rest": [kind, *rest]}:
                numpy: Any = importlib.import_module("numpy")
                numpy.random.set_state((kind, words.tolist(), *rest))
        if self._device.type == "cuda" and isinstance(stream := state.get("cuda"), Tensor):
            torch.cuda.set_rng_state(stream, self._device)

    @contextmanager
    def preserved(self) -> Generator[None]:
        """Whatever the body draws, the streams go on afterwards as if it had drawn nothing."""
        before = self.state_dict()
        try:
            yield
        finally:
            self.load_state_dict(before)
