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
from ._groups import groups_of_job


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
        group: The ranks of the pipeline. Every rank of the job must make one for its pipeline at the same time.

    Raises:
        ValueError: Copies differ in shape, dtype or placements, or some are frozen and others not.
    """

    def __init__(self, stages: Mapping[int, nn.Module], group: ProcessGroup) -> None:
        held: dict[str, dict[int, tuple[str, nn.Parameter]]] = {}
        for stage, module in sorted(stages.items()):
            if isinstance(module, SupportsTies):
                parameters = dict(module.named_parameters())
                for tie, name in module.tied_parameters().items():
                    held.setdefault(tie, {})[stage] = name, parameters[name]
        mine = {tie: {stage: (name, _kind(p)) for stage, (name, p) in copies.items()} for tie, copies in held.items()}
        found = all_gather_objects(mine, group)
        ranks = dist.get_process_group_ranks(group)
        holders: dict[str, dict[int, int]] = {}
        for rank, of_rank in enumerate(found):
            for tie, copies in of_rank.items():
                holders.setdefault(tie, {}).update(dict.fromkeys(copies, rank))
        members = {tie: tuple(sorted({ranks[rank] for rank in of_tie.values()})) for tie, of_tie in holders.items()}
        groups = groups_of_job({of_tie for of_tie in members.values() if len(of_tie) > 1})
        self._ties: list[_Tie] = []
        self.copies: dict[str, str] = {}
        """Names of this rank's parameters for which a lower stage's stands, and the name of that one."""
        stand_ins: list[nn.Parameter] = []
        for tie, of_tie in sorted(holders.items()):
            _check(tie, {stage: found[rank][tie][stage][1] for stage, rank in of_tie.items()})
            lowest = min(of_tie)
            original, _ = found[of_tie[lowest]][tie][lowest]
            for stage, (name, parameter) in held.get(tie, {}).items():
                if stage != lowest:
                    self.copies[name] = original
                    stand_ins.append(parameter)
            if tie in held and len(of_tie) > 1:
                local = [parameter for _, parameter in held[tie].values()]
                self._ties.append(_Tie(local, groups.get(members[tie]), ranks[of_tie[lowest]]))
        self.stand_ins: frozenset[nn.Parameter] = frozenset(stand_ins)
        """The parameters that `copies` names: not to be counted in the norm."""
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


def _kind(parameter: nn.Parameter) -> str:
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
