"""Norm and rotation kernels on CUDA against fp64 on the same inputs: errors at the level of the dtype (case 49)."""

import sys
from pathlib import Path

import pytest
import torch

from d9d.attn import add_rms_norm, apply_rotary, norm_and_rotate, rms_norm

sys.path.insert(0, str(Path(__file__).parent))
from norm_rotary_oracles import attended, normed

pytestmark = pytest.mark.gpu
ERROR = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-19}


def randn(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda").to(dtype)


def leaf(x):
    return x.detach().requires_grad_()


def check(found, expected, dtype):
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == dtype
        assert a.isfinite().all()
        assert (a.double() - b).norm() <= ERROR[dtype] * b.norm()


@pytest.mark.parametrize(
    ("dtype", "zero_centered", "rows", "columns"),
    [
        (torch.bfloat16, False, 300, 2048),
        (torch.bfloat16, True, 5000, 100),
        (torch.float16, False, 33, 8192),
        (torch.float16, True, 1, 4096),
        (torch.float32, True, 9, 32768),
        (torch.float32, False, 70, 7),
    ],
)
def test_norm(dtype, zero_centered, rows, columns):
    torch.manual_seed(0)
    # Neither the first nor the gradient has contiguous rows.
    x, residual = leaf(randn(columns, rows, dtype=dtype).t()), leaf(randn(rows, columns + 9, dtype=dtype)[:, :columns])
    weight = leaf(randn(columns, dtype=dtype))
    upstream = [randn(rows, columns + 1, dtype=dtype)[:, 1:], 3 * randn(rows, columns, dtype=dtype)]
    found = add_rms_norm(x, residual, weight, zero_centered=zero_centered)
    exact = [leaf(v.double()) for v in (x, residual, weight)]
    expected = normed(exact[:2], exact[2], eps=1e-6, zero_centered=zero_centered)
    check(found, expected, dtype)
    assert torch.equal(found[1], x + residual)
    torch.testing.assert_close(found[0], rms_norm(found[1], weight, zero_centered=zero_centered))
    gradients = torch.autograd.grad(found, (x, residual, weight), upstream)
    expected = torch.autograd.grad(expected, exact, [u.double() for u in upstream])
    for a, b in zip(gradients, expected):
        assert (a.double() - b).norm() <= 2 * ERROR[dtype] * b.norm()  # the sum has been rounded


@pytest.mark.parametrize(
    ("dtype", "interleaved", "heads", "dims", "has_norm"),
    [
        (torch.bfloat16, False, (32, 4), (128, 128), True),
        (torch.bfloat16, True, (2, 2), (256, 64), True),
        (torch.bfloat16, False, (80, 8), (96, 96), False),
        (torch.float16, False, (5, 1), (64, 16), True),
        (torch.float16, True, (32, 4), (128, 128), False),
        (torch.float32, True, (80, 8), (96, 96), True),
        (torch.float32, False, (2, 2), (256, 64), False),
    ],
)
def test_norm_and_rotation(dtype, interleaved, heads, dims, has_norm):
    torch.manual_seed(0)
    batch, length = 2, 517
    fused = randn(batch, length, sum(heads) + heads[1], dims[0], dtype=dtype)
    q, k = leaf(fused[:, :, : heads[0]]), leaf(fused[:, :, heads[0] : sum(heads)])
    weights = [leaf(randn(dims[0], dtype=dtype)) if has_norm else None for _ in range(2)]
    angle = torch.randn(1, length, dims[1] // 2, device="cuda").repeat(1, 1, 2).expand(batch, -1, -1)
    cos, sin = angle.cos(), angle.sin()
    kept = {"eps": 1e-6, "zero_centered": True, "interleaved": interleaved}
    found = norm_and_rotate(q, k, cos, sin, q_weight=weights[0], k_weight=weights[1], **kept)
    exact = [None if x is None else leaf(x.double()) for x in (q, k, *weights)]
    expected = attended(*exact[:2], cos.double(), sin.double(), *exact[2:], **kept)
    check(found, expected, dtype)
    if dtype == torch.bfloat16:  # one rounding, of what is known to many more digits
        assert (found[0] == expected[0].bfloat16()).double().mean() > 0.99
    upstream = [2 * randn(*x.transpose(1, 2).shape, dtype=dtype).transpose(1, 2) for x in found]
    operands, exact = ([x for x in given if x is not None] for given in ((q, k, *weights), exact))
    gradients = torch.autograd.grad(found, operands, upstream)
    check(gradients, torch.autograd.grad(expected, exact, [u.double() for u in upstream]), dtype)


def test_gradients_are_the_same_in_every_run_and_from_every_launch():
    from d9d.attn._norm import _launch as norm_launch  # noqa: PLC0415 - without Triton too, this file is collected
    from d9d.attn._norm_rotary import _launch as rotary_launch  # noqa: PLC0415

    torch.manual_seed(0)
    x, dy, weight, rstd = randn(5000, 4096), randn(5000, 4096), randn(4096), torch.rand(5000, device="cuda")
    q, k, dq, dk = (randn(2, 2000, heads, 128) for heads in (32, 4, 32, 4))
    cos, sin, head_weight = torch.rand(2, 2000, 128, device="cuda"), torch.rand(2, 2000, 128, device="cuda"), randn(128)
    flavour = rotary_launch.Flavour(eps=1e-6, zero_centered=False, interleaved=False)

    usual = rotary_launch.Geometry()

    def of_norm(geometry=None):
        return norm_launch.differentiate(
            dy, None, x, weight, rstd, zero_centered=False, inputs=False, weights=True, geometry=geometry
        )[1:]

    def of_rotary(geometry=usual):
        return rotary_launch.differentiate(
            *(dq, dk, q, k, cos, sin, head_weight, head_weight, flavour), inputs=True, weights=True, geometry=geometry
        )[1]

    other = norm_launch.Geometry(leaves=3, forward_warps=4, backward_warps=8, stages=1)
    for compute, geometry in ((of_norm, other), (of_rotary, rotary_launch.Geometry(leaves=3, stages=1))):
        first = compute()
        for found in (compute(geometry), *(compute() for _ in range(20))):
            for a, b in zip(found, first, strict=True):
                assert torch.equal(a, b)


def test_the_host_never_waits():
    x, residual, weight = leaf(randn(64, 2048)), leaf(randn(64, 2048)), leaf(randn(2048))
    q, k, head_weight = leaf(randn(1, 64, 8, 64)), leaf(randn(1, 64, 2, 64)), leaf(randn(64))
    cos, sin = torch.rand(1, 64, 64, device="cuda"), torch.rand(1, 64, 64, device="cuda")

    def step():
        made = [
            rms_norm(x, weight),
            *add_rms_norm(x, residual, weight),
            *norm_and_rotate(q, k, cos, sin, q_weight=head_weight, k_weight=head_weight),
            *apply_rotary(q, k, cos, sin, interleaved=True),
        ]
        torch.stack([y.sum() for y in made]).sum().backward()

    step()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_kernels_run_on_the_device_of_their_operands():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    x, weight = randn(3, 64), randn(64)
    q, table = randn(1, 3, 2, 64), torch.rand(1, 3, 64, device="cuda")
    expected = rms_norm(x, weight), *norm_and_rotate(q, q, table, table, q_weight=weight)
    x, weight, q, table = (v.to("cuda:1") for v in (x, weight, q, table))
    found = rms_norm(x, weight), *norm_and_rotate(q, q, table, table, q_weight=weight)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a.to("cuda:0"), b)


def test_more_elements_than_int32_counts():  # case 24's
    columns, heads = 4096, 16
    rows = 2**31 // columns + 3
    x, dy, weight = leaf(randn(rows, columns)), randn(rows, columns), leaf(randn(columns))
    y = rms_norm(x, weight)
    (dx,) = torch.autograd.grad(y, x, dy)
    last = leaf(x[-2:])
    assert torch.equal(y[-2:], rms_norm(last, weight))
    assert torch.equal(dx[-2:], torch.autograd.grad(rms_norm(last, weight), last, dy[-2:])[0])
    del y, dx
    q = x.detach().view(1, rows, heads, 256)
    cos, sin = torch.rand(1, rows, 64, device="cuda"), torch.rand(1, rows, 64, device="cuda")
    q_out, _ = norm_and_rotate(q, q[:, :, :1], cos, sin, q_weight=weight[:256])
    again, _ = norm_and_rotate(q[:, -2:], q[:, -2:, :1], cos[:, -2:], sin[:, -2:], q_weight=weight[:256])
    assert torch.equal(q_out[:, -2:], again)


def test_a_compiled_block_equals_an_eager_one():
    weight, q_weight = leaf(randn(2048, dtype=torch.float32)), leaf(randn(128, dtype=torch.float32))

    def block(x, cos, sin):
        y, total = add_rms_norm(x, rms_norm(x, weight), weight)
        q, k = norm_and_rotate(y.unflatten(-1, (16, 128)), x.unflatten(-1, (16, 128)), cos, sin, q_weight=q_weight)
        return q.flatten(-2) * k.flatten(-2) + total

    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    for tokens in (30, 50, 70):
        x = leaf(randn(2, tokens, 2048, dtype=torch.float32))
        cos, sin = torch.rand(2, tokens, 128, device="cuda"), torch.rand(2, tokens, 128, device="cuda")
        operands = (x, weight, q_weight)
        for a, b in zip(
            torch.autograd.grad(compiled(x, cos, sin).square().sum(), operands),
            torch.autograd.grad(block(x, cos, sin).square().sum(), operands),
        ):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * b.abs().max().item())
