"""What tests of the loss share: cases, their loss by torch on whole logits, and the size of what operations make."""

import attrs
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from d9d.models import linear_cross_entropy, token_cross_entropy

OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "label_smoothing": st.sampled_from([0.1, 0.7]),
        "z_loss": st.sampled_from([1e-2, 0.5]),
        "soft_cap": st.sampled_from([0.7, 5.0]),
        "ignore_index": st.sampled_from([-1, 2]),
    },
)


@attrs.frozen
class Case:
    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    labels: torch.Tensor
    token_weights: torch.Tensor | None

    @property
    def operands(self):
        return [x for x in (self.hidden, self.weight, self.bias) if x is not None and x.requires_grad]

    def as_dtype(self, dtype):
        cast = [
            None if x is None else x.detach().to(dtype).requires_grad_(x.requires_grad) for x in attrs.astuple(self)[:3]
        ]
        return Case(*cast, self.labels, self.token_weights)


def case(shape, classes, *, size=6, ignored=0.3, index=-100, bias=False, weighted=False):
    draw = torch.Generator().manual_seed(0)
    kwargs = {"dtype": torch.float64, "generator": draw}
    labels = torch.randint(classes, shape, generator=draw)
    labels[torch.rand(shape, generator=draw) < ignored] = index
    return Case(
        torch.randn(*shape, size, **kwargs).requires_grad_(),
        torch.randn(classes, size, **kwargs).requires_grad_(),
        torch.randn(classes, **kwargs).requires_grad_() if bias else None,
        labels,
        torch.rand(shape, **kwargs) if weighted else None,
    )


def logits_of(sample, soft_cap=None):
    logits = sample.hidden.flatten(0, -2) @ sample.weight.T
    logits = logits if sample.bias is None else logits + sample.bias
    return logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)


def oracle(sample, *, label_smoothing=0.0, z_loss=0.0, soft_cap=None, ignore_index=-100):
    """The loss of each token, of whole logits."""
    logits, labels = logits_of(sample, soft_cap), sample.labels.flatten()
    loss = F.cross_entropy(logits, labels, label_smoothing=label_smoothing, ignore_index=ignore_index, reduction="none")
    return loss + z_loss * logits.logsumexp(-1).square() * (labels != ignore_index)


def weighted_sum(losses, sample):
    return losses.sum() if sample.token_weights is None else (losses * sample.token_weights.flatten()).sum()


class Largest(TorchDispatchMode):
    """Keeps the size of the largest tensor that an operation returned, and the most bytes that one made."""

    numel = 0
    made = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.numel = max(self.numel, out.numel())
            if not any(isinstance(x, torch.Tensor) and x.data_ptr() == out.data_ptr() for x in args):
                self.made = max(self.made, out.nbytes)
        return out


def summed(*args, **kwargs):
    return linear_cross_entropy(*args, **kwargs).sum


def each_summed(*args, **kwargs):
    return token_cross_entropy(*args, **kwargs).sum()
