# ruff: noqa: SLF001 (torch's multi-tensor operations have underscored names only)
"""AdamW over local tensors: parameters may be DTensors and plain tensors mixed, and narrower than their gradients."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, overload

import attrs
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

_CHUNK_BYTES = 256 << 20
"""Bound on one multi-tensor call's weights in the computing dtype; its temporaries are at most four times that."""


class AdamW(Optimizer):
    """AdamW (Loshchilov and Hutter, 2019) with bias correction, as `torch.optim.AdamW` computes it.

    A parameter narrower than fp32 gets an fp32 master weight: the update is made on the master, the parameter is its
    rounding, so that updates below the parameter's resolution add up instead of being lost. All other parameters are
    updated in their own dtype. A parameter whose ``grad`` is None is skipped, as torch does.

    State exists from construction on, so that a checkpoint is loaded into something: per parameter ``step`` (0-dim
    fp32 on CPU), ``exp_avg``, ``exp_avg_sq``, and ``master`` where there is one. It takes the device, the mesh and the
    placements of the parameter. Construct the optimizer when the parameters have their values: the masters copy them.

    Args:
        params: Named parameters, or groups of them (``{"params": [(name, parameter), …], "weight_decay": …}``).
        lr: Learning rate.
        betas: Decay rates of the first and second moment.
        eps: Added to the root of the second moment, after its bias correction.
        weight_decay: Decoupled; a step first multiplies the weight by 1 − lr · weight_decay.
        moment_dtype: Storage of the moments, computed in fp32 or wider; None is fp32, or the parameter's dtype if
            wider. With bf16, rounding to nearest loses changes of a moment below 2⁻⁹ of it: keep betas ≤ 0.99.

    Raises:
        ValueError: If a parameter has no name, that of another one, or no floating dtype; if a beta is not in [0, 1).
    """

    def __init__(
        self,
        params: Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        moment_dtype: torch.dtype | None = None,
    ) -> None:
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"betas={betas!r}: both must be at least 0 and less than 1")
        self._moment_dtype = moment_dtype
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of named parameters, and their state.

        Raises:
            ValueError: If a parameter has no name, that of another one, or no floating dtype.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if "param_names" not in group:
            raise ValueError("AdamW got parameters without names; pass module.named_parameters()")
        taken = {name for earlier in self.param_groups[:-1] for name in earlier["param_names"]}
        for name, parameter in zip(group["param_names"], group["params"]):
            if name in taken:
                raise ValueError(f"AdamW got two parameters called {name!r}; a checkpoint could hold the state of one")
            taken.add(name)
            if not parameter.is_floating_point():
                raise ValueError(f"AdamW cannot train {name!r} of dtype {parameter.dtype!r}; leave it out")
            self.state[parameter] = _initial_state(parameter, self._moment_dtype)

    def named_state(self) -> dict[str, Tensor]:
        """All state by ``parameter name.state name``: the tensors that the optimizer works on, to load in place."""
        return {f"{name}.{key}": value for name, state in self._states() for key, value in state.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave, in place and uncast (torch's own casts masters to the parameter's dtype).

        Raises:
            ValueError: If groups or the states of a parameter differ.
        """
        ours = dict(self.state)
        super().load_state_dict({**state_dict, "state": {}})
        self.state.update(ours)
        for index, (name, state) in enumerate(self._states()):
            saved = state_dict["state"].get(index, {})
            if saved.keys() != state.keys():
                raise ValueError(f"the state of {name!r} has {sorted(state)!r}, the one to load {sorted(saved)!r}")
            for key, value in saved.items():
                state[key].copy_(value)

    def _states(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Names and states of all parameters, in the order of `state_dict`."""
        for group in self.param_groups:
            for name, parameter in zip(group["param_names"], group["params"]):
                yield name, self.state[parameter]

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters that have a gradient.

        Raises:
            ValueError: If a gradient is not laid out like its parameter (`GradientSync.finish` lays it out); nothing
                is updated then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        by_group = [
            [
                _operands(name, parameter, self.state[parameter])
                for name, parameter in zip(group["param_names"], group["params"])
                if parameter.grad is not None
            ]
            for group in self.param_groups
        ]
        for group, operands in zip(self.param_groups, by_group):
            for operand in operands:
                operand.step.add_(1)
            for chunk in _chunks(operands):
                _update(chunk, lr=group["lr"], betas=group["betas"], eps=group["eps"], decay=group["weight_decay"])
        return loss


@attrs.frozen
class _Operands:
    """The local tensors, of one shape, of (a slice of) one parameter, and its own 0-dim step."""

    parameter: Tensor
    grad: Tensor
    master: Tensor | None
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor

    @property
    def weight(self) -> Tensor:
        return self.parameter if self.master is None else self.master

    def narrow(self, start: int, length: int) -> "_Operands":
        def cut(x: Tensor) -> Tensor:
            return x.narrow(0, start, length)

        return _Operands(
            cut(self.parameter),
            cut(self.grad),
            None if self.master is None else cut(self.master),
            cut(self.exp_avg),
            cut(self.exp_avg_sq),
            self.step,
        )


def _initial_state(parameter: Tensor, moment_dtype: torch.dtype | None) -> dict[str, Tensor]:
    computing = torch.promote_types(parameter.dtype, torch.float32)
    weight = parameter.detach()
    state = {
        "step": torch.zeros((), dtype=torch.float32),
        "exp_avg": torch.zeros_like(weight, dtype=moment_dtype or computing),
        "exp_avg_sq": torch.zeros_like(weight, dtype=moment_dtype or computing),
    }
    if computing != parameter.dtype:
        state["master"] = weight.to(computing)
    return state


def _operands(name: str, parameter: nn.Parameter, state: dict[str, Tensor]) -> _Operands:
    grad = parameter.grad
    assert grad is not None
    if _layout(grad) != _layout(parameter):
        raise ValueError(
            f"the gradient of {name!r} is laid out as {_layout(grad)!r}, the parameter as {_layout(parameter)!r}; "
            "call GradientSync.finish() before the optimizer's step"
        )
    return _Operands(
        _local(parameter),
        _local(grad),
        _local(state["master"]) if "master" in state else None,
        _local(state["exp_avg"]),
        _local(state["exp_avg_sq"]),
        state["step"],
    )


def _layout(x: Tensor) -> object:
    return (x.device_mesh, x.placements) if isinstance(x, DTensor) else "a plain tensor"


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _chunks(operands: list[_Operands]) -> Iterator[list[_Operands]]:
    """Lists of bounded size, of one device and one set of dtypes each; a large parameter is cut along dim 0."""
    by_kind: dict[object, list[_Operands]] = {}
    for whole in operands:
        kind = (whole.weight.device, whole.parameter.dtype, whole.grad.dtype, whole.exp_avg.dtype)
        by_kind.setdefault(kind, []).extend(_slices(whole))
    for slices in by_kind.values():
        chunk: list[_Operands] = []
        filled = 0
        for piece in slices:
            if chunk and filled + piece.weight.nbytes > _CHUNK_BYTES:
                yield chunk
                chunk, filled = [], 0
            chunk.append(piece)
            filled += piece.weight.nbytes
        if chunk:
            yield chunk


def _slices(whole: _Operands) -> Iterator[_Operands]:
    nbytes = whole.weight.nbytes
    if nbytes <= _CHUNK_BYTES:
        yield from [whole] if nbytes else []
        return
    rows = whole.weight.shape[0]
    stride = max(1, rows * _CHUNK_BYTES // nbytes)
    for start in range(0, rows, stride):
        yield whole.narrow(start, min(stride, rows - start))


def _update(chunk: list[_Operands], *, lr: float, betas: tuple[float, float], eps: float, decay: float) -> None:
    """One multi-tensor update, in the dtype of the weights."""
    beta1, beta2 = betas
    weights = [x.weight for x in chunk]
    computing = weights[0].dtype
    grads = [x.grad.to(computing) for x in chunk]
    stored = [x.exp_avg for x in chunk], [x.exp_avg_sq for x in chunk]
    exp_avgs, exp_avg_sqs = ([x.to(computing) for x in moments] for moments in stored)

    torch._foreach_lerp_(exp_avgs, grads, 1 - beta1)
    torch._foreach_mul_(exp_avg_sqs, beta2)
    torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - beta2)

    roots = torch._foreach_sqrt(exp_avg_sqs)
    torch._foreach_div_(roots, [(1 - beta2 ** x.step.item()) ** 0.5 for x in chunk])
    torch._foreach_add_(roots, eps)
    if decay:
        torch._foreach_mul_(weights, 1 - lr * decay)
    torch._foreach_addcdiv_(weights, exp_avgs, roots, [-lr / (1 - beta1 ** x.step.item()) for x in chunk])

    for moments, computed in zip(stored, (exp_avgs, exp_avg_sqs)):
        if moments[0].dtype != computing:
            torch._foreach_copy_(moments, computed)
    if chunk[0].master is not None:
        torch._foreach_copy_([x.parameter for x in chunk], weights)
