"""DTensors for the world, local tensors for the module that computes with them."""

from collections.abc import Callable
from functools import cache
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

_GRAD_PLACEMENTS = "_d9d_grad_placements"
_LAID_OUT_AS = "_d9d_laid_out_as"
_LEAF = "_d9d_leaf"


@attrs.frozen
class Layout:
    """How one parameter lies on a mesh."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    grad_placements: tuple[Placement, ...]
    """What backward leaves on each mesh dim: Partial where ranks hold addends, else as the parameter."""


def lay_out(module: nn.Module, layout_of: Callable[[nn.Parameter], Layout | None]) -> set[nn.Parameter]:
    """Replace parameters of a module by DTensors, of which the module's own code sees the local tensors.

    ``module.weight`` becomes a property that gives the local tensor, whoever reads it; ``parameters()``,
    ``state_dict()`` and optimizers see the DTensor. Nothing is swapped around a forward call, so a failed one leaves
    nothing behind, and a recomputed block sees what it saw the first time.

    Values come from the first rank of each mesh dim. A parameter that several modules share stays shared, also if
    they are laid out in several calls.

    Args:
        module: Changed in place.
        layout_of: The layout of a parameter; ``None`` leaves it alone.

    Returns:
        The parameters that the module holds now and that this call or an earlier one laid out.
    """
    laid_out: set[nn.Parameter] = set()
    for owner in list(module.modules()):
        views: dict[str, tuple[Placement, ...]] = {}
        for name, parameter in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            # The old parameter remembers: a module of a later call may still hold it.
            distributed: nn.Parameter | None = vars(parameter).get(_LAID_OUT_AS)
            if distributed is None:
                if (layout := layout_of(parameter)) is None:
                    continue
                distributed = _distribute(parameter, layout)
                setattr(parameter, _LAID_OUT_AS, distributed)
            setattr(owner, name, distributed)
            laid_out.add(distributed)
            views[name] = vars(distributed)[_GRAD_PLACEMENTS]
        if views:
            # mypy takes nn.Module's __hash__ for that of its class
            owner.__class__ = _with_local_views(type(owner), frozenset(views.items()))  # type: ignore[arg-type]
    return laid_out


def is_laid_out(parameter: nn.Parameter) -> bool:
    """Whether `lay_out` made the parameter, and nothing has taken it over since."""
    return _GRAD_PLACEMENTS in vars(parameter)


def grad_placements(parameter: DTensor) -> tuple[Placement, ...] | None:
    """What backward leaves on each dim of the parameter's mesh; ``None`` where no function of ours laid it out."""
    found: tuple[Placement, ...] | None = vars(parameter).get(_GRAD_PLACEMENTS)
    return found


def local_tensor(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, without a graph."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            local: Tensor = tensor.to_local()
            return local
    return tensor.detach()


def laid_out_as(parameter: DTensor, local: Tensor) -> DTensor:
    """This rank's part of a tensor as a DTensor that lies as a parameter does, without communication."""
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


class LocalLeaf:
    """A leaf of autograd in the memory of a laid-out parameter, which modules use in its place.

    Backward accumulates into the leaf's ``grad`` without a DTensor on the way. Neither a copy nor a pickle of the
    parameter has it.

    Args:
        parameter: Its modules use this leaf from now on, until `release` or the next leaf.
    """

    def __init__(self, parameter: DTensor) -> None:
        self.tensor: Tensor | None = local_tensor(parameter).detach().requires_grad_()
        setattr(parameter, _LEAF, self)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def release(self) -> None:
        """Have modules use the parameter again."""
        self.tensor = None

    def is_used(self, parameter: DTensor) -> bool:
        """Whether the parameter's modules use the leaf: a conversion such as ``module.to()`` ends that too."""
        return getattr(parameter, _LEAF, None) is self


def _distribute(parameter: nn.Parameter, layout: Layout) -> nn.Parameter:
    distributed = distribute_tensor(parameter.detach(), layout.mesh, layout.placements)
    new = nn.Parameter(distributed, requires_grad=parameter.requires_grad)
    vars(new).update(vars(parameter))
    setattr(new, _GRAD_PLACEMENTS, layout.grad_placements)
    return new


@cache
def _with_local_views(base: type[nn.Module], views: frozenset[tuple[str, tuple[Placement, ...]]]) -> type[nn.Module]:
    """A subclass whose named parameters read as local tensors, as `fully_shard` makes one for its modules."""
    properties: dict[str, Any] = {name: property(_local_view(name, placements)) for name, placements in views}
    return type(f"Parallel{base.__name__}", (base,), properties)


def _local_view(name: str, placements: tuple[Placement, ...]) -> Callable[[nn.Module], Tensor | None]:
    def local(module: nn.Module) -> Tensor | None:
        if name not in module._parameters:  # noqa: SLF001 - where nn.Module keeps what this property hides
            raise AttributeError(name)  # it was deleted: nn.Module goes on to look elsewhere
        parameter = module._parameters[name]  # noqa: SLF001
        # What `fully_shard` has sharded further has more mesh dims until it is gathered, and is not computed with.
        if not isinstance(parameter, DTensor) or len(parameter.placements) != len(placements):
            return parameter
        leaf: LocalLeaf | None = getattr(parameter, _LEAF, None)
        if leaf is not None and leaf.tensor is not None and parameter.requires_grad:
            return leaf.tensor
        view: Tensor = parameter.to_local(grad_placements=placements)
        return view

    return local
