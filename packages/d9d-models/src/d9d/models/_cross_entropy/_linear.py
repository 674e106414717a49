"""Cross-entropy of a linear layer's output, for all of which it takes no memory."""

import torch
import torch.nn.functional as F
from torch import Tensor

from d9d.parallel import LossSum

from ._backend import (
    LinearCrossEntropyConfig,
    built,
    index_of,
)
from ._options import LossOptions
from ._products import under_autocast, wide, without_autocast
from ._vocabulary import VocabularyShard

MAX_LOGITS_BYTES = 512 << 20


def linear_cross_entropy(
    hidden: Tensor,
    weight_VH: Tensor,
    labels: Tensor,
    *,
    bias_V: Tensor | None = None,
    token_weights: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    shift: bool = False,
    shard: VocabularyShard | None = None,
    backend: LinearCrossEntropyConfig | str | None = None,
    max_logits_bytes: int = MAX_LOGITS_BYTES,
) -> LossSum:
    """Sum over tokens of ``-log softmax(hidden · weightᵀ + bias)[label]``, without memory for all logits.

    Logits exist for one chunk of tokens at a time, or for all tokens in the memory of the weight's gradient, where that
    has room until it is made. Their gradient is known as soon as they are, up to the gradient of the sum,
    which is one number: so forward computes the gradients of ``hidden``, ``weight`` and ``bias``, and backward
    multiplies them by that number. That takes three matrix products, where recomputing logits in backward takes four.

    By default all but the factors of products is fp32 where it could lose something, or fp64 for fp64 inputs; see the
    backend's settings. Autocast narrows these factors, as it does for `torch.nn.Linear`, and nothing else.

    Sums over chunks are rounded to the dtype of the weight, unless its ``grad_dtype`` takes them as they are.

    Args:
        hidden: (..., H).
        weight_VH: (V, H), of the same dtype, or fp32, and then rounded to it for products; its gradient is not.
        labels: (...), int64 or int32; class of each token, or ``ignore_index``.
        bias_V: (V,), added to the logits.
        token_weights: (...), a factor for the loss of each label, with which it is shifted; without gradient.
        ignore_index: Tokens with this label add neither loss nor weight.
        label_smoothing: Share of the target that is spread evenly over the vocabulary.
        z_loss: Factor of ``logsumexp(logits)²``, which is added to the loss of each token.
        soft_cap: Logits become ``soft_cap · tanh(logit / soft_cap)``.
        shift: Whether ``labels`` are the tokens themselves: position i is to predict label i + 1 along the last dim of
            ``labels``, and the last position nothing.
        shard: Where the vocabulary is split over ranks: ``weight_VH`` and ``bias_V`` are this rank's part, labels are
            of the whole, hidden states are equal on all ranks and get their whole gradient. Collective.
        backend: Settings or kind; without it the environment variable ``D9D_LINEAR_CE_BACKEND`` says, else "torch".
        max_logits_bytes: Memory for the logits of one chunk, of at least one token. What backends need besides is in
            proportion.

    Returns:
        The sum, and the number of labels that are not ignored (int64), or the sum of their weights (fp64).

    Raises:
        ValueError: Shapes or dtypes do not go together, an option is out of its range, or the backend lacks something.
    """
    options = LossOptions(ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss, soft_cap=soft_cap)
    hidden, weight_VH = under_autocast(hidden, weight_VH)
    check_operands(hidden, weight_VH, bias_V, labels, shard)
    if token_weights is not None:
        shape, device = tuple(token_weights.shape), token_weights.device
        if shape != labels.shape or device != labels.device:
            raise ValueError(
                f"token_weights are {shape} on {device}, labels {tuple(labels.shape)} on {labels.device}: give each one"
            )
    if shift:
        if not labels.ndim:
            raise ValueError("shift=True needs labels of at least one dim, along which a token follows another")
        labels = F.pad(labels[..., 1:], (0, 1), value=ignore_index)
        token_weights = None if token_weights is None else F.pad(token_weights[..., 1:], (0, 1))
    features = {
        "bias": bias_V is not None,
        "label_smoothing": bool(label_smoothing),
        "z_loss": bool(z_loss),
        "soft_cap": soft_cap is not None,
        "token_weights": token_weights is not None,
        "vocabulary_shard": shard is not None,
    }
    asked = tuple(name for name, is_asked in features.items() if is_asked)
    need = (hidden.device.type, hidden.dtype, asked)
    index = (
        backend.index_if_fit(id(backend), *need)
        if isinstance(backend, LinearCrossEntropyConfig)
        else index_of(backend, *need)
    )
    compute = built[index]
    labels_N = labels.flatten()
    kept = labels_N != ignore_index
    weights_N = None if token_weights is None else token_weights.detach().flatten().to(wide(hidden.dtype))
    with without_autocast(hidden.device.type):
        total = compute(
            hidden.reshape(-1, hidden.shape[-1]),
            weight_VH,
            bias_V,
            labels_N,
            weights_N,
            options=options,
            shard=shard,
            max_logits_bytes=max_logits_bytes,
        )
    return LossSum(total, kept.sum() if weights_N is None else weights_N.double().where(kept, 0.0).sum())


def check_operands(
    hidden: Tensor, weight_VH: Tensor, bias_V: Tensor | None, labels: Tensor | None, shard: VocabularyShard | None
) -> None:
    """Raise a ValueError that names what does not go together."""
    labels_shape = hidden.shape[:-1] if labels is None else labels.shape
    if hidden.shape[:-1] != labels_shape or hidden.shape[-1:] != weight_VH.shape[1:]:
        raise ValueError(
            f"hidden of shape {tuple(hidden.shape)} needs labels {tuple(hidden.shape[:-1])} and a weight (V, "
            f"{hidden.shape[-1]}), got labels {tuple(labels_shape)} and a weight {tuple(weight_VH.shape)}"
        )
    if labels is not None and labels.dtype not in {torch.int64, torch.int32}:
        raise ValueError(f"labels are {labels.dtype}: give them as int64 or int32")
    if not hidden.is_floating_point():
        raise ValueError(f"hidden is {hidden.dtype}: give it in a floating dtype")
    if weight_VH.dtype not in {hidden.dtype, wide(hidden.dtype)}:
        raise ValueError(f"hidden is {hidden.dtype} and the weight is {weight_VH.dtype}: cast one to the other's dtype")
    for name, operand in {"weight": weight_VH, "bias": bias_V, "labels": labels}.items():
        if operand is not None and operand.device != hidden.device:
            raise ValueError(f"hidden is on {hidden.device}, {name} on {operand.device}: bring them together")
    if bias_V is not None and bias_V.shape != weight_VH.shape[:1]:
        raise ValueError(f"a weight of {weight_VH.shape[0]} classes needs a bias of as many, got {tuple(bias_V.shape)}")
    if shard is not None and shard.held != weight_VH.shape[0]:
        raise ValueError(
            f"rank {shard.group.rank()} of {shard.group.size()} holds {shard.held} of {shard.total} classes, "
            f"got a weight of {weight_VH.shape[0]}"
        )
