"""Loading a checkpoint into the tensors of a model, in place."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from ._local import local_part
from ._mapper import Mapper
from ._plan import PlanError, plan
from ._source import Source
from ._spec import TensorSpec


@torch.no_grad()
def load(
    source: Source,
    mapper: Mapper,
    state: Mapping[str, Tensor],
    *,
    target: Mapping[str, TensorSpec] | None = None,
    waive: Collection[str] = (),
) -> None:
    """Fills `state` from a checkpoint, group by group, reading only the regions that this rank holds.

    Not a collective: each rank may call it for the tensors it has. Everything is checked before the first is written.

    Args:
        source: The checkpoint.
        mapper: From names of the checkpoint to names of the model.
        state: Plain tensors or DTensors by name. Names may share a tensor.
        target: The whole model, where `state` is only a part of it (a pipeline stage); by default `state` is whole.
        waive: Names or patterns of tensors in the checkpoint that may stay unused.

    Raises:
        PlanError: The mapper does not make exactly `target`, or `state` is not a part of it; all problems are listed.
    """
    specs = {name: TensorSpec.of(tensor) for name, tensor in state.items()}
    planned = plan(source, mapper, specs if target is None else target, select=state.keys(), waive=waive)
    differing = [
        f"{name!r} is {spec}, but in the target {planned.outputs[name]}"
        for name, spec in specs.items()
        if spec != planned.outputs[name]
    ]
    if differing:
        raise PlanError(differing)
    for group in planned.groups:
        for name in group.outputs:
            if name not in state:
                continue
            local, want = local_part(name, state[name])
            if want.numel:
                regions = group.needs(want, source)
                local.copy_(group.make(want, {region: source.read(region) for region in regions}))
