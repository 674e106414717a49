"""Fused operations of d9d-attn in a pipeline's split backward pass."""

import torch

from d9d.attn._weight_branch import branched
from d9d.parallel.pipeline import backward_inputs


def scaled_sum(x, y, weight, log):
    """(x + y) · weight and x + y, whose gradients are noted as they are computed."""

    def backward(upstream, saved, *, inputs, weights):
        log.append((inputs, weights, len(upstream)))
        total, weight = saved
        dx = sum(g for g in (None if upstream[0] is None else upstream[0] * weight, *upstream[1:]) if g is not None)
        return (dx, dx) if inputs else (None, None), ((upstream[0] * total).sum(0) if weights else None,)

    with torch.no_grad():
        total = x + y
        outputs = [total * weight, total]
    return branched(
        outputs, inputs=[x, y], weights=[weight], saved=[total, weight], backward=backward, read_by_weights=1
    )


def test_the_input_pass_computes_no_weight_gradient_and_the_weight_pass_no_other():
    torch.manual_seed(0)
    x, weights = torch.randn(3, 4, requires_grad=True), [torch.randn(4, requires_grad=True) for _ in range(2)]

    def run(log):
        first, total = scaled_sum(x, x.detach() * 2, weights[0], log)
        second, total = scaled_sum(first, total, weights[1], log)
        return second * total

    log = []
    y = run(log)
    upstream = torch.randn_like(y)
    expected = torch.autograd.grad(y, (x, *weights), upstream)
    assert log == [(True, True, 2)] * 2

    log.clear()
    y = run(log)
    [of_x], rest = backward_inputs([y], [upstream], [x])
    assert log == [(True, False, 2)] * 2
    log.clear()
    rest.run()
    assert log == [(False, True, 1)] * 2
    for found, wanted in zip((of_x, *(w.grad for w in weights)), expected, strict=True):
        torch.testing.assert_close(found, wanted)
