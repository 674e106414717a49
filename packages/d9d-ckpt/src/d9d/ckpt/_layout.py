"""Which rank holds which part of each tensor."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
from torch import Tensor
from torch.distributed import ProcessGroup

from ._collective import all_gather, together
from ._local import local_part, require_data, require_tensors
from ._names import natural_key
from ._spec import Region, TensorSpec


@attrs.frozen
class Piece:
    """A non-empty region and the ranks that hold a copy of it, in ascending order."""

    region: Region
    holders: tuple[int, ...]


@attrs.frozen
class Layout:
    """The tensors of all ranks. Equal on all ranks; names are in natural order."""

    specs: Mapping[str, TensorSpec]
    pieces: Mapping[str, tuple[Piece, ...]]
    """Disjoint pieces that cover each tensor."""
    device_type: str
    """Type of the device of all tensors; "cpu" where they differ."""


def gather_layout(state: Mapping[str, Tensor], group: ProcessGroup | None) -> Layout:
    """The layout of `state`, whose names may differ between ranks; a plain tensor is one piece. Collective.

    Raises:
        ValueError: Ranks disagree on a tensor, hold only a part of it together, or have one on meta or a sparse one.
    """
    with together(group):
        require_tensors(state)
        require_data(state)  # found out on the way, it would leave other ranks waiting
        mine = {
            name: (TensorSpec.of(tensor), local_part(name, tensor)[1], tensor.device.type)
            for name, tensor in state.items()
        }
    specs: dict[str, TensorSpec] = {}
    holders: dict[str, dict[Region, list[int]]] = {}
    device_types: set[str] = set()
    problems: list[str] = []
    for rank, held in enumerate(all_gather(mine, group)):
        for name, (spec, region, device_type) in held.items():
            device_types.add(device_type)
            if specs.setdefault(name, spec) != spec:
                problems.append(f"{name!r} is {spec} on rank {rank}, {specs[name]} on a lower one")
            copies = holders.setdefault(name, {})
            if region.numel:
                copies.setdefault(region, []).append(rank)
    for name, spec in specs.items():
        held_elements = sum(region.numel for region in holders[name])
        if held_elements != spec.numel:
            problems.append(f"{name!r} has {spec.numel} elements, the ranks hold {held_elements} different ones")
    if problems:
        raise ValueError("\n  ".join(["the ranks' tensors do not fit together:", *problems]))
    names = sorted(specs, key=natural_key)
    return Layout(
        {name: specs[name] for name in names},
        {name: tuple(Piece(region, tuple(ranks)) for region, ranks in holders[name].items()) for name in names},
        device_types.pop() if len(device_types) == 1 else "cpu",
    )
