"""A sink added to attention that is done, by its log-sum-exp.

Softmax over the scores and a sink is the softmax over the scores times the share that the scores have of both:
``exp(lse) / (exp(lse) + exp(sink)) = sigmoid(lse − sink)`` (Agarwal et al., gpt-oss, 2025, arXiv:2508.10925).
"""

import torch
from torch import Tensor


def add_sinks(out_BSHE: Tensor, lse_BHS: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp as if ``sinks_H`` had been among the scores; differentiable in all three."""
    sink_BHS = sinks_H.to(lse_BHS.dtype)[:, None].expand_as(lse_BHS)
    share_BSH1 = (lse_BHS - sink_BHS).sigmoid().transpose(1, 2)[..., None]
    return (out_BSHE * share_BSH1).to(out_BSHE.dtype), torch.logaddexp(lse_BHS, sink_BHS)
