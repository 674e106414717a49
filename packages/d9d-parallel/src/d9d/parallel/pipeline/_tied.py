"""Parameters that several stages hold, such as an embedding that is the head too."""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from d9d.mesh import all_gather_objects

from .._layout import local_tensor


@runtime_checkable
class SupportsTies(Protocol):
    """A stage that shares parameters with others."""

    def tied_parameters(self) -> Mapping[str, str]:
        """The names of this stage's copies, by a name that all holders of one use; may be empty."""


@attrs.frozen
class _Tie:
    copies: Sequence[nn.Parameter]
    """On this rank, lowest stage first."""
    group: ProcessGroup | None
    """Ranks that hold copies; ``None`` where it is this one alone."""
    source: int
    """Global rank of the lowest stage."""


class TiedParameters:
    """Keeps copies of a parameter on several stages equal.

    All copies start from the value of the lowest stage, get the sum of all their gradients, and take equal optimizer
    steps. The lowest stage's copy stands for all of them in the norm and in checkpoints.

    Args:
        stages: This rank's stages by number; those with a method ``tied_parameters`` are asked. All of them are laid
            out alike and have their memory.
        group: The ranks of the pipeline, each of which must make one; collective.

    Raises:
        ValueError: Copies differ in shape, dtype or placements, or some are frozen and others not.
    """

    def __init__(self, stages: Mapping[int, nn.Module], group: ProcessGroup) -> None:
        held: dict[str, dict[int, nn.Parameter]] = {}
        for stage, module in sorted(stages.items()):
            if isinstance(module, SupportsTies):
                parameters = dict(module.named_parameters())
                for name, own_name in module.tied_parameters().items():
                    held.setdefault(name, {})[stage] = parameters[own_name]
        described = {name: {s: _description(p) for s, p in copies.items()} for name, copies in held.items()}
        found = all_gather_objects(described, group)
        ranks = dist.get_process_group_ranks(group)
        groups: dict[tuple[int, ...], ProcessGroup] = {}
        self._ties: list[_Tie] = []
        standing_in: list[nn.Parameter] = []
        for name in sorted({name for rank in found for name in rank}):
            holders = {stage: rank for rank, stages_of in enumerate(found) for stage in stages_of.get(name, {})}
            _check(name, {stage: found[rank][name][stage] for stage, rank in holders.items()})
            copies = held.get(name, {})
            standing_in += [parameter for stage, parameter in copies.items() if stage != min(holders)]
            members = tuple(sorted({ranks[rank] for rank in holders.values()}))
            if not copies or len(holders) == 1:
                continue
            if len(members) > 1 and members not in groups:
                # Only the holders call, in the order of names.
                made = dist.new_group(list(members), use_local_synchronization=True)
                assert isinstance(made, ProcessGroup)
                groups[members] = made
            self._ties.append(_Tie(list(copies.values()), groups.get(members), ranks[holders[min(holders)]]))
        self.copies: frozenset[nn.Parameter] = frozenset(standing_in)
        """Parameters of this rank for which a lower stage's stands: not to be counted, saved or exported again."""
        self._start_equal()

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Give every copy the sum of the gradients of all of them; after `GradientSync.finish`, collective."""
        for tie in self._ties:
            gradients = [_local_gradient(parameter) for parameter in tie.copies if parameter.requires_grad]
            if not gradients:
                continue
            total = gradients[0]
            for gradient in gradients[1:]:
                total += gradient
            if tie.group is not None:
                dist.all_reduce(total, group=tie.group)
            for gradient in gradients[1:]:
                gradient.copy_(total)

    @torch.no_grad()
    def _start_equal(self) -> None:
        for tie in self._ties:
            first, *others = [local_tensor(parameter) for parameter in tie.copies]
            if tie.group is not None:
                dist.broadcast(first, tie.source, group=tie.group)
            for other in others:
                other.copy_(first)


def _description(parameter: nn.Parameter) -> str:
    local = local_tensor(parameter)
    kind = "trained" if parameter.requires_grad else "frozen"
    return f"{kind} {parameter.dtype} of shape {tuple(parameter.shape)}, {tuple(local.shape)} of it on a rank"


def _check(name: str, copies: Mapping[int, str]) -> None:
    if len(set(copies.values())) > 1:
        listed = "; ".join(f"stage {stage}: {description}" for stage, description in sorted(copies.items()))
        raise ValueError(f"the copies of the tied parameter {name!r} differ, so they cannot be one: {listed}")


def _local_gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return local_tensor(parameter.grad)
