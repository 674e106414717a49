"""A vocabulary split over the ranks of a job on CUDA against the whole one: `test_vocabulary_gpu` starts this."""

import itertools
import os
import sys

import torch
import torch.distributed as dist

from d9d.models import TritonLinearCrossEntropyConfig, VocabularyShard, linear_cross_entropy

TOKENS, CLASSES = 300, 1003
SIZES = (64, 256)  # in chunks, and in the memory of the weight's gradient
OPTIONS = [{}, {"label_smoothing": 0.1, "z_loss": 1e-2, "soft_cap": 3.0}]
BACKENDS = ["torch", TritonLinearCrossEntropyConfig(), TritonLinearCrossEntropyConfig(rounds_weight_gradient=True)]


def draw(size, dtype):
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, size, device="cuda").to(dtype)
    weight = (torch.randn(CLASSES, size, device="cuda") * 0.1).to(dtype)
    labels = torch.randint(CLASSES, (TOKENS,), device="cuda")
    labels[::7] = -100
    return hidden, weight, labels, torch.rand(TOKENS, device="cuda")


def gradients(hidden, weight, labels, weights, **chosen):
    inputs = [x.clone().requires_grad_() for x in (hidden, weight)]
    loss = linear_cross_entropy(*inputs, labels, token_weights=weights, max_logits_bytes=1 << 17, **chosen)
    return loss.sum, *torch.autograd.grad(loss.sum, inputs)


torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group(sys.argv[1])
shard = VocabularyShard(dist.group.WORLD, CLASSES)
mine = slice(shard.start, shard.start + shard.held)
for options, size in itertools.product(OPTIONS, SIZES):
    hidden, weight, labels, weights = draw(size, torch.bfloat16)
    total, grad_hidden, grad_weight = gradients(hidden.double(), weight.double(), labels, weights.double(), **options)
    for backend in BACKENDS:
        chosen = options | {"backend": backend, "shard": shard}
        found = gradients(hidden, weight[mine], labels, weights, **chosen)
        torch.testing.assert_close(found[0].double(), total, rtol=1e-3, atol=0)
        for a, b in zip(found[1:], (grad_hidden, grad_weight[mine])):
            error = (a.double() - b).norm() / b.norm()
            assert error < 2**-7, (options, size, backend, error)  # a rounding of bf16 is 2⁻⁹
dist.destroy_process_group()
