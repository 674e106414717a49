"""Initial weights that do not depend on the layout."""

import hashlib
from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor


def materialize(module: nn.Module, *, device: torch.device, seed: int) -> None:
    """Give a module built on ``meta`` its memory and its initial weights.

    The weights depend on ``seed`` and on the names of the parameters only. Every module that owns parameters or
    buffers gets a random stream of its own, keyed by seed and module name; `reset_parameters` fills one full copy
    of that one module, of which each rank keeps its shard. So any layout and any split into stages holds the same
    model, and no more than one module is ever held whole.

    Parameters are replaced by new ones (with the attributes of the old): make optimizers afterwards. A parameter
    or buffer that several modules share stays shared; the first of them initializes a parameter.

    Args:
        module: Its parameters are plain tensors or DTensors, on any device; names of modules are those of the whole
            model, also in a part of it.
        device: Where the weights shall be.
        seed: Picks the weights.

    Raises:
        TypeError: A module owns parameters or buffers and has no `reset_parameters`; nothing was changed then.
    """
    replaced: dict[int, Tensor] = {}
    # Old tensors are kept alive until the end, or a new one could get the id of one that is gone.
    kept = [*module.parameters(), *module.buffers()]
    for name, owner in _resettable_owners(module):
        with _random_stream(f"{seed}/{name}", device):
            _materialize_one(owner, device, replaced)
    del kept


@runtime_checkable
class _Resettable(Protocol):
    def reset_parameters(self) -> None: ...


def _resettable_owners(module: nn.Module) -> list[tuple[str, _Resettable]]:
    """Every module that directly owns parameters or buffers, by name."""
    found: list[tuple[str, _Resettable]] = []
    helpless: list[str] = []
    for name, owner in module.named_modules():
        if not [*owner.parameters(recurse=False), *owner.buffers(recurse=False)]:
            continue
        if isinstance(owner, _Resettable):
            found.append((name, owner))
        else:
            helpless.append(f"{name or 'the root'} ({type(owner).__name__})")
    if helpless:
        raise TypeError(
            f"cannot initialize {', '.join(helpless)}: a module that owns parameters or buffers needs a "
            "reset_parameters() that sets all of them"
        )
    return found


def _materialize_one(owner: _Resettable, device: torch.device, replaced: dict[int, Tensor]) -> None:
    assert isinstance(owner, nn.Module)
    old = dict(owner.named_parameters(recurse=False, remove_duplicate=False))
    for name, parameter in old.items():
        full = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        setattr(owner, name, nn.Parameter(full, requires_grad=parameter.requires_grad))
    for name, buffer in list(owner.named_buffers(recurse=False, remove_duplicate=False)):
        if id(buffer) not in replaced:
            replaced[id(buffer)] = torch.empty_like(buffer, device=device)
        setattr(owner, name, replaced[id(buffer)])
    owner.reset_parameters()
    full_ones = dict(owner.named_parameters(recurse=False, remove_duplicate=False))
    for name, parameter in old.items():
        if id(parameter) not in replaced:
            new = nn.Parameter(_part_of(full_ones[name].detach(), parameter), requires_grad=parameter.requires_grad)
            vars(new).update(vars(parameter))
            replaced[id(parameter)] = new
        setattr(owner, name, replaced[id(parameter)])


def _part_of(full: Tensor, parameter: nn.Parameter) -> Tensor:
    """``full`` laid out as ``parameter`` is, without communication."""
    if not isinstance(parameter, DTensor):
        return full
    placed = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
    if all(isinstance(p, Replicate) for p in placed.placements):
        return placed
    # A shard may be a view that would keep the full tensor alive. The local tensor is cloned, as DTensor plans each
    # operator anew for every shape and layout, which is slow.
    local = placed.to_local().clone()
    return DTensor.from_local(
        local, placed.device_mesh, placed.placements, run_check=False, shape=placed.shape, stride=placed.stride()
    )


@contextmanager
def _random_stream(key: str, device: torch.device) -> Generator[None]:
    """Draw from a stream of its own, and go on with the old one afterwards."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big", signed=True)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
