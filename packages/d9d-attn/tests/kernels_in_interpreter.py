"""The Triton kernels in their interpreter, on the CPU: `test_kernels` starts this in a process of its own.

The interpreter cuts where hardware rounds to bf16, so exactness is asked of fp32 here, and of bf16 on a GPU.
"""

# ruff: noqa: FBT003 - operators take no keywords
import gc
import itertools
import sys
import weakref
from pathlib import Path

import pytest
import torch
import torch._dynamo
import torch.utils.checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from d9d.attn import _kernel_choice, add_rms_norm, apply_rotary, norm_and_rotate, rms_norm
from d9d.attn._norm import _launch as norm_launch
from d9d.attn._norm import _operators as norm_operators
from d9d.attn._norm_rotary import _launch as rotary_launch
from d9d.attn._norm_rotary import _operators as rotary_operators

sys.path.insert(0, str(Path(__file__).parent))
from norm_rotary_oracles import attended, normed

torch.set_num_threads(1)
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}
DTYPES = st.sampled_from(list(TOLERANCE))
few = settings(max_examples=8, deadline=None, derandomize=True)


@pytest.fixture(autouse=True, scope="module")
def kernels_everywhere():
    patch = pytest.MonkeyPatch()
    patch.setattr(_kernel_choice, "has_kernels", lambda device_type: device_type == "cpu")
    for module in (norm_launch, rotary_launch):
        patch.setattr(module, "_MAX_LEAVES", 64)  # to save time
    yield
    patch.undo()


def check(found, expected, dtype):
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        assert a.dtype == dtype
        assert (a.double() - b).norm() <= TOLERANCE[dtype] * b.norm()


def leaf(x):
    return x.detach().requires_grad_()


def strided(*shape, dtype):
    """Rows that do not touch."""
    return torch.randn(*shape[:-1], shape[-1] + 3).to(dtype)[..., : shape[-1]]


# Norm


@few
@given(
    DTYPES,
    st.sampled_from([(1,), (3, 2), (0,), (18,)]),
    st.sampled_from([3, 37, 1030]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_norm_is_right(dtype, rows, columns, zero_centered, has_residual, has_contiguous_rows):
    torch.manual_seed(0)
    make = (lambda *s, dtype: torch.randn(*s).to(dtype)) if has_contiguous_rows else strided
    x, residual, *upstream = (make(*rows, columns, dtype=dtype) for _ in range(4))
    weight = leaf(torch.randn(columns).to(dtype))
    inputs = [leaf(x), leaf(residual)] if has_residual else [leaf(x)]
    apply = add_rms_norm if has_residual else lambda *given, **kept: (rms_norm(*given, **kept),)
    found = apply(*inputs, weight, eps=1e-5, zero_centered=zero_centered)
    upstream = upstream[: len(found)]
    exact = [leaf(v.double()) for v in (*inputs, weight)]
    expected = normed(exact[:-1], exact[-1], eps=1e-5, zero_centered=zero_centered)
    check(found, expected, dtype)
    gradients = torch.autograd.grad(found, [*inputs, weight], upstream)
    check(gradients, torch.autograd.grad(expected, exact, [u.double() for u in upstream]), dtype)


def test_norm_takes_a_weight_of_another_dtype():
    x, weight = leaf(torch.randn(5, 24).half()), leaf(torch.randn(24))
    y = rms_norm(x, weight)
    of_x, of_weight = torch.autograd.grad(y.float().square().sum(), (x, weight))
    exact = [leaf(v.double()) for v in (x, weight)]
    (expected,) = normed(exact[:1], exact[1], eps=1e-6, zero_centered=False)
    check([y], [expected], torch.float16)
    gradients = torch.autograd.grad(expected.square().sum(), exact)
    check([of_x], gradients[:1], torch.float16)
    assert of_weight.dtype == torch.float32
    assert (of_weight - gradients[1]).norm() < 2**-9 * gradients[1].norm()


def test_only_the_sum_has_a_gradient_where_only_the_sum_is_used():
    x, residual, weight = leaf(torch.randn(3, 8)), leaf(torch.randn(3, 8)), leaf(torch.randn(8))
    _, total = add_rms_norm(x, residual, weight)
    for gradient in torch.autograd.grad(total.sum(), (x, residual), retain_graph=True):
        assert torch.equal(gradient, torch.ones(3, 8))


def test_norm_gradients_do_not_depend_on_the_launch():
    torch.manual_seed(0)
    x, dy, rstd, weight = torch.randn(70, 40), torch.randn(70, 40), torch.rand(70), torch.randn(40)
    geometries = [
        norm_launch.Geometry(leaves=leaves, forward_warps=4, backward_warps=4, stages=stages)
        for leaves, stages in ((1, 1), (2, 3), (5, 2))
    ]
    made = [
        norm_launch.differentiate(
            dy, None, x, weight, rstd, zero_centered=False, inputs=True, weights=True, geometry=geometry
        )
        for geometry in geometries
    ]
    for dx, dweight in made:
        assert torch.equal(dx, made[0][0])
        assert torch.equal(dweight, made[0][1])


# Rotation


@few
@given(
    DTYPES,
    st.sampled_from([(2, 3), (1, 9), (3, 0)]),
    st.sampled_from([(4, 1), (3, 3), (1, 2)]),
    st.sampled_from([(16, 16), (24, 12), (16, 2), (12, 12)]),
    st.sampled_from(["", "q", "k", "qk"]),
    st.booleans(),
    st.booleans(),
)
def test_norm_and_rotation_are_right(dtype, tokens, heads, dims, norms, zero_centered, interleaved):
    torch.manual_seed(0)
    fused = torch.randn(*tokens, sum(heads) + 1, dims[0]).to(dtype)  # values after keys
    q, k = leaf(fused[:, :, : heads[0]]), leaf(fused[:, :, heads[0] : -1])
    weights = [leaf(torch.randn(dims[0]).to(dtype)) if name in norms else None for name in "qk"]
    cos, sin = torch.randn(2, tokens[0], tokens[1], dims[1] // 2).repeat(1, 1, 1, 2).unbind()
    kept = {"eps": 1e-5, "zero_centered": zero_centered, "interleaved": interleaved}
    found = norm_and_rotate(q, k, cos, sin, q_weight=weights[0], k_weight=weights[1], **kept)
    exact = [None if x is None else leaf(x.double()) for x in (q, k, *weights)]
    expected = attended(*exact[:2], cos.double(), sin.double(), *exact[2:], **kept)
    check(found, expected, dtype)
    upstream = [torch.randn(x.transpose(1, 2).shape).to(dtype).transpose(1, 2) for x in found]  # as attention gives it
    operands, exact = ([x for x in given if x is not None] for given in ((q, k, *weights), exact))
    gradients = torch.autograd.grad(found, operands, upstream)
    check(gradients, torch.autograd.grad(expected, exact, [u.double() for u in upstream]), dtype)


def test_many_heads_are_taken_in_blocks(monkeypatch):
    monkeypatch.setattr(rotary_launch, "_FORWARD_TILE", 64)
    monkeypatch.setattr(rotary_launch, "_BACKWARD_TILE", 64)
    q, k, weight = leaf(torch.randn(1, 3, 9, 16)), leaf(torch.randn(1, 3, 2, 16)), leaf(torch.randn(16))
    cos, sin = torch.randn(2, 1, 3, 4).repeat(1, 1, 1, 2).unbind()
    kept = {"eps": 1e-6, "zero_centered": False, "interleaved": False}
    found = norm_and_rotate(q, k, cos, sin, q_weight=weight, k_weight=weight, **kept)
    exact = [leaf(x.double()) for x in (q, k, weight)]
    expected = attended(*exact[:2], cos.double(), sin.double(), exact[2], exact[2], **kept)
    check(found, expected, torch.float32)
    gradients = torch.autograd.grad([x.square().sum() for x in found], (q, k, weight))
    check(gradients, torch.autograd.grad([x.square().sum() for x in expected], exact), torch.float32)


def test_a_rotation_alone_keeps_neither_q_nor_k():
    q, k = leaf(torch.randn(1, 3, 2, 8)), leaf(torch.randn(1, 3, 1, 8))
    cos, sin = torch.randn(2, 1, 3, 8).unbind()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape) or x, lambda x: x):
        apply_rotary(q, k, cos, sin)
    assert set(kept) == {cos.shape}


def test_rotary_gradients_do_not_depend_on_the_launch():
    torch.manual_seed(0)
    q, k, dq, dk = (torch.randn(1, 41, heads, 8) for heads in (3, 2, 3, 2))
    cos, sin, weight = torch.randn(1, 41, 8), torch.randn(1, 41, 8), torch.randn(8)
    flavour = rotary_launch.Flavour(eps=1e-6, zero_centered=False, interleaved=False)
    made = [
        rotary_launch.differentiate(
            *(dq, dk, q, k, cos, sin, weight, weight, flavour), inputs=True, weights=True, geometry=geometry
        )
        for geometry in (rotary_launch.Geometry(), rotary_launch.Geometry(leaves=3, stages=1))
    ]
    for found in made:
        for a, b in zip(itertools.chain(*found), itertools.chain(*made[0]), strict=True):
            assert torch.equal(a, b)


# Operators


def norm_case():
    x, residual, weight = leaf(torch.randn(2, 3, 16)), leaf(torch.randn(2, 3, 16)), leaf(torch.randn(16))
    return (x, residual), (weight,), lambda: add_rms_norm(x, residual, weight)


def rotary_case():
    q, k = leaf(torch.randn(1, 3, 2, 8)), leaf(torch.randn(1, 3, 1, 8))
    cos, sin, *weights = torch.randn(1, 3, 8), torch.randn(1, 3, 8), leaf(torch.randn(8)), leaf(torch.randn(8))
    return (q, k), weights, lambda: norm_and_rotate(q, k, cos, sin, q_weight=weights[0], k_weight=weights[1])


@pytest.mark.parametrize(
    ("module", "make"), [(norm_launch, norm_case), (rotary_launch, rotary_case)], ids=["norm", "rotary"]
)
def test_a_split_backward_computes_each_gradient_once_and_a_whole_one_reads_once(module, make, monkeypatch):
    asked, original = [], module.differentiate

    def count(*given, inputs, weights, **kept):
        asked.append((inputs, weights))
        return original(*given, inputs=inputs, weights=weights, **kept)

    monkeypatch.setattr(module, "differentiate", count)
    inputs, weights, forward = make()
    outputs = forward()
    upstream = [torch.randn_like(x) for x in outputs]
    whole = torch.autograd.grad(outputs, (*inputs, *weights), upstream, retain_graph=True)
    assert asked == [(True, True)]
    of_inputs = torch.autograd.grad(outputs, inputs, upstream, retain_graph=True)
    of_weights = torch.autograd.grad(outputs, weights, upstream)
    assert asked == [(True, True), (True, False), (False, True)]
    for a, b in zip(whole, (*of_inputs, *of_weights), strict=True):
        assert torch.equal(a, b)
    torch.autograd.backward(forward(), upstream)
    assert asked[3:] == [(True, True)]
    for x, gradient in zip((*inputs, *weights), whole):
        assert torch.equal(x.grad, gradient)


@pytest.mark.parametrize("make", [norm_case, rotary_case], ids=["norm", "rotary"])
@pytest.mark.parametrize("has_frozen_weights", [False, True])
def test_a_second_derivative_is_an_error(make, has_frozen_weights):
    inputs, weights, forward = make()
    for weight in weights:
        weight.requires_grad_(not has_frozen_weights)
    with pytest.raises(RuntimeError, match="create_graph=True asks for|no autograd formula was registered"):  # noqa: PT012
        first = torch.autograd.grad([x.sum() for x in forward()], inputs, create_graph=True)
        torch.autograd.grad(sum(x.square().sum() for x in first), inputs)


def test_checkpoints_recompute_it_and_graphs_free_themselves():
    (x, residual), (weight,), _ = norm_case()

    def block(x):
        return add_rms_norm(rms_norm(x, weight).sin(), residual, weight)[0].cos()

    again = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
    for a, b in zip(*(torch.autograd.grad(y.sum(), (x, residual, weight)) for y in (block(x), again)), strict=True):
        assert torch.equal(a, b)
    gc.disable()
    try:
        y = rms_norm(x, weight)
        y.sum().backward()
        nodes = [weakref.ref(node) for node in (y.grad_fn, *(node for node, _ in y.grad_fn.next_functions))]
        del y
        assert [node() for node in nodes] == [None] * 3
    finally:
        gc.enable()


CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


@pytest.mark.parametrize(
    "checks", [CHECKS, pytest.param(("test_aot_dispatch_dynamic",), marks=pytest.mark.long)], ids=["", "compiled"]
)
def test_operators_are_registered_as_torch_wants_them(checks):
    (x, residual), (weight,), _ = norm_case()
    (q, k), (q_weight, k_weight), _ = rotary_case()
    tables = torch.randn(1, 3, 8), torch.randn(1, 3, 8)

    def check(operator, *operands):
        torch.library.opcheck(operator.registered, operands, test_utils=checks)

    for given_residual in (None, residual):
        check(norm_operators.rms_norm_operator, x, given_residual, weight, 1e-6, True)
    operands = (v.detach() for v in (x, residual, x, weight))
    check(norm_operators.rms_norm_backward_operator, *operands, torch.rand(2, 3), False, True, True)
    for weights in ((q_weight, k_weight), (None, None)):
        check(rotary_operators.norm_and_rotate_operator, q, k, *tables, *weights, 1e-6, False, False)
    operands = (*(v.detach() for v in (q, k, q, k)), *tables, *(v.detach() for v in (q_weight, k_weight)))
    check(rotary_operators.norm_and_rotate_backward_operator, *operands, 1e-6, False, False, False, True)


@torch._dynamo.config.patch(error_on_recompile=True)
def test_one_graph_serves_all_numbers_of_tokens():
    weight, q_weight = leaf(torch.randn(16)), leaf(torch.randn(8))

    def block(x, cos, sin):
        y, total = add_rms_norm(x, rms_norm(x, weight), weight)
        q, k = norm_and_rotate(y.unflatten(-1, (2, 8)), x.unflatten(-1, (2, 8)), cos, sin, q_weight=q_weight)
        return q.flatten(-2) * k.flatten(-2) + total

    compiled = torch.compile(block, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (3, 5, 4, 9, 6):
        x, cos, sin = leaf(torch.randn(2, tokens, 16)), torch.randn(2, tokens, 8), torch.randn(2, tokens, 8)
        operands = (x, weight, q_weight)
        if tokens not in {3, 6}:  # the first and the last are compared, the others only compiled
            compiled(x, cos, sin).sum().backward()
            continue
        for a, b in zip(
            torch.autograd.grad(compiled(x, cos, sin).square().sum(), operands),
            torch.autograd.grad(block(x, cos, sin).square().sum(), operands),
        ):
            torch.testing.assert_close(a, b)
