"""What is certified, in the form in which it travels to other processes."""

import pickle
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from d9d.mesh import DistContext, materialize
from d9d.mesh.testing import Reference

from .._loss import LossSum
from .._stage import StageInfo
from ..pipeline import Schedule
from ._protocols import Optimizer, Step

_SEED = 0
# Names that wrappers put between those of the user.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


@attrs.frozen(kw_only=True)
class Subject:
    """A model, what lays it out, and the loop that trains it."""

    functions: Mapping[str, Reference]
    """The user's, by what they are for."""

    batch: bytes
    """Pickled; readable once the functions' files are loaded."""

    dtype: torch.dtype
    """Of parameters, and of floating-point tensors in the batch."""

    microbatches: Sequence[int]
    """In how many parts a data rank takes its share, one run for each."""

    max_norms: Sequence[float | None]
    """To which the gradient is clipped, one step for each."""

    schedules: Sequence[Schedule]
    """Of pipelines, one run for each; none where the model was not given in stages."""

    rtol: float
    """Largest relative error."""

    def load(self) -> "LoadedSubject":
        """Find the functions, then the batch that may be made of classes in their files."""
        functions = {role: reference.resolve() for role, reference in self.functions.items()}
        batch = pickle.loads(self.batch)  # noqa: S301 - from our own process
        return LoadedSubject(self, functions, tree_map_only(Tensor, self._cast, batch))

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor


@attrs.frozen
class LoadedSubject:
    """A subject in the process that runs it."""

    subject: Subject
    functions: Mapping[str, Any]
    batch: Any

    def build(self) -> nn.Module:
        """The model as the user's factory builds it, from the same random numbers in every process."""
        torch.manual_seed(_SEED)
        module: nn.Module = self.functions["model"]()
        return module.to(self.subject.dtype)

    def build_stage(self, stage: StageInfo) -> nn.Module:
        """A part of the model, as the user's factory of stages builds it."""
        module: nn.Module = self.functions["stage"](stage)
        return module.to(self.subject.dtype)

    def initialize(self, module: nn.Module) -> None:
        """Give a module its weights if the factory left that to `materialize`."""
        if any(t.is_meta for t in (*module.parameters(), *module.buffers())):
            materialize(module, device=torch.device("cpu"), seed=_SEED)

    def parallelize(self, module: nn.Module, context: DistContext) -> None:
        """Lay the module out."""
        self.functions["parallelize"](module, context)

    def loss(self, module: nn.Module, batch: Any) -> LossSum:
        """The summed loss."""
        found: LossSum = self.functions["loss"](module, batch)
        return found

    def part(self, index: int, count: int) -> Any:
        """The index-th of ``count`` parts of the batch."""
        return self.functions["split"](self.batch, index, count)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """A new optimizer."""
        found: Optimizer = self.functions["optimizer"](parameters)
        return found

    def loop(self, module: nn.Module, loss: Any, context: DistContext) -> Step[Any]:
        """The user's loop on a module that is laid out."""
        step: Step[Any] = self.functions["loop"](module, loss, self.optimizer(module.parameters()), context)
        return step


def named_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """All parameters under all their names, without what wrappers put in."""
    found = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")  # noqa: PLW2901
        found[name] = parameter
    return found


def ties(parameters: Mapping[str, nn.Parameter]) -> list[list[str]]:
    """Names that mean one parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in parameters.items():
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """All of a tensor as this rank sees it; collective for what is split over ranks."""
    full: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach()
