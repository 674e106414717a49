"""Backends that go chunk by chunk: how their sum becomes differentiable, for autograd and for torch.compile."""

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor

from ._chunk_sizes import rows_within
from ._gradients import dtype_for
from ._labels import check_labels
from ._options import LossOptions
from ._products import wide
from ._second_derivative import refuse_second_derivative
from ._three_products import ChunkFunctions, Precision, sum_and_gradients
from ._vocabulary import VocabularyShard, plain

CHUNK_FUNCTIONS: dict[str, Callable[[], ChunkFunctions]] = {}
"""By the name under which the operator finds them: its arguments are tensors and plain values. Called to load one."""


@attrs.frozen(kw_only=True)
class ChunkedLinearCrossEntropy:
    """See `LinearCrossEntropy`."""

    functions: str
    """A key of `CHUNK_FUNCTIONS`."""

    rounds_logits: bool = False
    """Whether logits are rounded to the dtype of the hidden states, as those of `torch.nn.Linear` are."""

    rounds_weight_gradient: bool = False
    """Whether the gradients of weight and bias are summed over chunks in the dtype of the weight."""

    def __call__(
        self,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        labels_N: Tensor,
        weights_N: Tensor | None,
        *,
        options: LossOptions,
        shard: VocabularyShard | None,
        max_logits_bytes: int,
    ) -> Tensor:
        """Make the sum and its gradients, and hand the gradients out in backward."""
        exact = wide(hidden_NH.dtype)
        weight_gradient_dtype = weight_VH.dtype if self.rounds_weight_gradient else exact
        logits_dtype = hidden_NH.dtype if self.rounds_logits else exact
        operands = (hidden_NH, weight_VH, bias_V)
        needs = [x is not None and x.requires_grad and torch.is_grad_enabled() for x in operands]
        made = _linear_cross_entropy(
            hidden_NH.detach(),
            weight_VH.detach(),
            None if bias_V is None else bias_V.detach(),
            labels_N,
            weights_N,
            options.ignore_index,
            options.label_smoothing,
            options.z_loss,
            options.soft_cap,
            *plain(shard),
            rows_within(max_logits_bytes, weight_VH, shard, logits_dtype),
            needs,
            self.functions,
            logits_dtype,
            weight_gradient_dtype,
        )
        # Each gradient has a node of its own, which adds 0 to the sum: a split backward pass runs those it is to run.
        total: Tensor = made[0]
        for operand, gradient, is_needed in zip(operands, made[1:], needs):
            if operand is not None and is_needed:
                dtype = dtype_for(operand, gradient.dtype)
                total = total + _Gradient.apply(operand, gradient, made[0], dtype, self.functions)
        return total


class _Gradient(torch.autograd.Function):
    """A 0 that depends on an operand, with a gradient that is known up to a factor."""

    @staticmethod
    def forward(  # noqa: PLR0917 - of autograd, which takes no keywords
        ctx: Any, operand: Tensor, gradient: Tensor, like: Tensor, dtype: torch.dtype, functions: str
    ) -> Tensor:
        del operand
        ctx.save_for_backward(gradient)
        ctx.dtype, ctx.functions = dtype, functions
        return torch.zeros_like(like)

    @staticmethod
    def backward(ctx: Any, *factors: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        factor = factors[0].view(1)  # a number of no dims would be rounded to the dtype of the gradient
        if torch.compiler.is_compiling():
            return (gradient * factor).to(ctx.dtype), None, None, None, None
        refuse_second_derivative()
        if gradient.dtype == ctx.dtype and _is_last_backward():  # there may be no memory for another
            CHUNK_FUNCTIONS[ctx.functions]().scale_(gradient, factor)
            return gradient, None, None, None, None
        made = torch.empty_like(gradient, dtype=ctx.dtype)
        return torch.mul(gradient, factor, out=made), None, None, None, None


def _is_last_backward() -> bool:
    """Whether autograd frees the graph as it goes, so that nobody will read saved tensors again."""
    engine: Any = torch._C  # noqa: SLF001 - it tells nobody else
    return not engine._autograd._get_current_graph_task_keep_graph()  # noqa: SLF001


# One operator, opaque to torch.compile: its loop depends on the number of tokens, and it may talk to other ranks.
@torch.library.custom_op("d9d::linear_cross_entropy", mutates_args=())
def _linear_cross_entropy(  # noqa: PLR0917 - operators take no keywords from autograd
    hidden_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    labels_N: Tensor,
    weights_N: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    soft_cap: float | None,
    group_name: str | None,
    classes: int,
    chunk: int,
    needs: list[bool],
    functions: str,
    logits_dtype: torch.dtype,
    weight_gradient_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shard = VocabularyShard.of(group_name, classes)
    wrong_N = check_labels(labels_N, len(weight_VH) if shard is None else classes, ignore_index)
    total, gradients = sum_and_gradients(
        hidden_NH,
        weight_VH,
        bias_V,
        labels_N,
        weights_N,
        options=LossOptions(
            ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss, soft_cap=soft_cap
        ),
        shard=shard,
        chunk=chunk,
        needs=(needs[0], needs[1], needs[2]),
        functions=CHUNK_FUNCTIONS[functions](),
        precision=Precision(logits=logits_dtype, weight_gradient=weight_gradient_dtype),
    )
    return total.masked_fill_(wrong_N.any(), torch.nan), *gradients.or_empty(hidden_NH)


@_linear_cross_entropy.register_fake
def _(  # noqa: PLR0917
    hidden_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    labels_N: Tensor,
    weights_N: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    soft_cap: float | None,
    group_name: str | None,
    classes: int,
    chunk: int,
    needs: list[bool],
    functions: str,
    logits_dtype: torch.dtype,
    weight_gradient_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    del bias_V, labels_N, weights_N, ignore_index, label_smoothing, z_loss, soft_cap, group_name, classes, chunk
    del functions, logits_dtype
    total = hidden_NH.new_empty((), dtype=wide(hidden_NH.dtype))
    of_hidden = torch.empty_like(hidden_NH) if needs[0] else hidden_NH.new_empty(0)
    weight_like = torch.empty_like(weight_VH, dtype=weight_gradient_dtype)
    of_weight = weight_like if needs[1] else hidden_NH.new_empty(0)
    of_bias = torch.empty_like(weight_like[:, 0]) if needs[2] else hidden_NH.new_empty(0)
    return total, of_hidden, of_weight, of_bias
