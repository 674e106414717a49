"""bf16 on CUDA against fp64 on the same inputs: errors at the level of the dtype (case 49)."""

import pytest
import torch

from d9d.attn import (
    AttentionMask,
    Documents,
    EagerAttentionConfig,
    GroupedQueryAttention,
    GroupedQueryAttentionConfig,
    RMSNorm,
    RotaryConfig,
    RotaryEmbedding,
    TorchAttentionConfig,
)

pytestmark = pytest.mark.gpu
B, S = 2, 192
MASKS = (
    "causal",
    "full",
    "window",
    "documents",
    "padding at the end",
    "left padding",
    "additive",
    "additive with empty rows",
)


def masks():
    torch.manual_seed(1)
    padded = torch.arange(S) >= torch.tensor([[40], [0]])
    return {
        "causal": AttentionMask(),
        "full": AttentionMask(causal=False),
        "window": AttentionMask(window=50),
        "documents": AttentionMask(documents=Documents.from_lengths([[50, 142], [192]], device="cuda")),
        "padding at the end": AttentionMask(
            documents=Documents(torch.tensor([0, 100, 192, 250], dtype=torch.int32, device="cuda"), 100)
        ),
        "left padding": AttentionMask(bias=padded[:, None, None, :].cuda()),
        "additive": AttentionMask(bias=torch.randn(1, 8, S, S, device="cuda")),
        "additive with empty rows": AttentionMask(
            bias=torch.zeros(B, 1, 1, S, device="cuda").masked_fill(~padded[:, None, None, :].cuda(), -torch.inf)
        ),
    }


def run(backend, inputs, mask, upstream):
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = backend(*inputs, mask, scale=0.1)
    return out, *torch.autograd.grad(out, inputs, upstream)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(
    ("kernels", "dims", "dtype"),
    [
        ({}, (128, 128), torch.bfloat16),
        ({}, (96, 64), torch.bfloat16),
        ({}, (64, 64), torch.float32),
        ({"varlen": False}, (64, 64), torch.bfloat16),
        (
            {"kernels": ("flash", "efficient", "math"), "masked_kernels": ("math",), "varlen": False},
            (128, 128),
            torch.float16,
        ),
    ],
)
def test_torch_backend_on_cuda(name, kernels, dims, dtype):
    torch.manual_seed(0)
    head_dim, value_dim = dims

    def randn(heads, dim):
        return torch.randn(B, heads, S, dim, device="cuda", dtype=dtype).transpose(1, 2)  # not contiguous

    inputs, upstream = (randn(8, head_dim), randn(2, head_dim), randn(2, value_dim)), randn(8, value_dim)
    mask = masks()[name]
    found = run(TorchAttentionConfig(**kernels).build(), inputs, mask, upstream)
    expected = run(EagerAttentionConfig().build(), [x.double() for x in inputs], mask, upstream.double())
    for a, b in zip(found, expected):
        assert a.dtype == dtype
        assert a.isfinite().all()
        error = (a.double() - b).norm() / b.norm()
        assert error < (8e-3 if dtype == torch.bfloat16 else 2e-3)


@pytest.mark.parametrize("name", ["window", "left padding"])
def test_scores_far_below_zero_have_finite_gradients_under_a_mask(name):
    """cuDNN fails here for lengths of 64 beyond a multiple of 128, such as S (pytorch#196678)."""
    q, k, v = (torch.randn(B, S, 1, 64, device="cuda", dtype=torch.bfloat16) * 0.1 for _ in range(3))
    q[..., 0], k[..., 0] = 1.0, -1200.0
    upstream = torch.randn(B, S, 1, 64, device="cuda", dtype=torch.bfloat16)
    for x in run(TorchAttentionConfig(varlen=False).build(), (q, k, v), masks()[name], upstream):
        assert x.isfinite().all()


def test_plain_causal_attention_runs_on_cudnn_on_hopper():
    if torch.cuda.get_device_capability()[0] != 9 or (torch.backends.cudnn.version() or 0) <= 91500:
        pytest.skip("torch prefers cuDNN on Hopper from cuDNN 9.15.1 on")
    q, k, v = (torch.randn(B, S, h, 128, device="cuda", dtype=torch.bfloat16) for h in (8, 2, 2))
    default, cudnn = (
        TorchAttentionConfig(kernels=kernels).build()(q, k, v, AttentionMask(), scale=0.1)
        for kernels in (None, ["cudnn"])
    )
    assert torch.equal(default, cudnn)


@pytest.mark.parametrize("zero_centered", [False, True])
def test_norm_on_cuda(zero_centered):
    norm = RMSNorm(2048, zero_centered=zero_centered).cuda().bfloat16()
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(2048, 300, device="cuda", dtype=torch.bfloat16).t().requires_grad_()
    upstream = torch.randn(300, 2048, device="cuda", dtype=torch.bfloat16)
    out = norm(x)
    found = out, *torch.autograd.grad(out, (x, norm.weight), upstream)
    x64, weight64 = x.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    out64 = x64 / (x64.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (weight64 + zero_centered)
    expected = out64, *torch.autograd.grad(out64, (x64, weight64), upstream.double())
    for a, b in zip(found, expected):
        assert (a.double() - b).norm() / b.norm() < 4e-3


def test_a_block_never_waits_for_the_device():
    config = GroupedQueryAttentionConfig(hidden_size=256, num_heads=8, num_kv_heads=2, head_dim=64, qk_norm=True)
    block = GroupedQueryAttention(config).cuda().bfloat16()
    rotary = RotaryEmbedding(RotaryConfig(head_dim=64))
    x = torch.randn(B, S, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    positions = torch.arange(S, device="cuda").expand(B, S)
    all_masks = masks()
    cos, sin = rotary(positions)
    block(x, cos=cos, sin=sin, mask=AttentionMask()).sum().backward()  # library handles are made in the first call
    try:
        torch.cuda.set_sync_debug_mode("error")
        for mask in all_masks.values():
            cos, sin = rotary(positions)
            block(x, cos=cos, sin=sin, mask=mask).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
