"""A block is one graph under torch.compile, equal to eager, and not compiled again for other lengths."""

import attrs
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from d9d.attn import (
    AttentionMask,
    Documents,
    EagerAttentionConfig,
    FlashAttention2Config,
    FlashAttention4Config,
    FlexAttentionConfig,
    GroupedQueryAttention,
    GroupedQueryAttentionConfig,
    RotaryConfig,
    RotaryEmbedding,
)

torch.set_num_threads(1)
CONFIG = GroupedQueryAttentionConfig(hidden_size=16, num_heads=4, num_kv_heads=2, head_dim=8, qk_norm=True)
LENGTHS = (8, 12, 6, 20, 10)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def documents(length):
    return Documents(torch.tensor([0, 3, length, 2 * length], dtype=torch.int32), length)


def left_padding(length):
    return (torch.arange(length) >= 2)[None, None, None, :]


CASES = {
    "plain": (CONFIG, lambda _: AttentionMask()),
    "documents": (CONFIG, lambda length: AttentionMask(documents=documents(length))),
    "window of the block": (attrs.evolve(CONFIG, window=3), lambda _: AttentionMask()),
    "bias": (CONFIG, lambda length: AttentionMask(bias=left_padding(length))),
    "everything": (
        attrs.evolve(
            CONFIG,
            fused_qkv=True,
            qkv_bias=True,
            output_bias=True,
            output_gate=True,
            zero_centered_norm=True,
            value_head_dim=4,
            window=5,
            sinks=True,
            soft_cap=3.0,
        ),
        lambda length: AttentionMask(documents=documents(length)),
    ),
}


@pytest.mark.parametrize(
    "name",
    ["everything", *(pytest.param(name, marks=pytest.mark.long) for name in CASES if name != "everything")],
)
def test_one_graph_equals_eager_and_serves_all_lengths(name):
    config, make_mask = CASES[name]
    torch.manual_seed(0)
    block = GroupedQueryAttention(config).double()
    rotary = RotaryEmbedding(RotaryConfig(head_dim=8))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, fullgraph=True, backend=counter)
    for length in LENGTHS:
        x = torch.randn(2, length, 16, dtype=torch.float64)
        upstream = torch.randn(2, length, 16, dtype=torch.float64)
        cos, sin = rotary(torch.arange(length).expand(2, -1))
        found = []
        for attend in (block, compiled):
            mask = make_mask(length)
            x_ = x.clone().requires_grad_()
            for tensor in (x_, cos, sin):
                torch._dynamo.mark_dynamic(tensor, 1)
            if mask.bias is not None:
                torch._dynamo.mark_dynamic(mask.bias, 3)
            out = attend(x_, cos=cos, sin=sin, mask=mask)
            found.append((out, *torch.autograd.grad(out, (x_, *block.parameters()), upstream)))
        torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)
        if length == LENGTHS[1]:
            settled = counter.frame_count
    # A number on the host, such as the longest document, is dynamic from its second value on.
    assert settled <= 2
    assert counter.frame_count == settled


def test_layers_of_other_windows_are_one_graph():
    blocks = torch.nn.Sequential(
        GroupedQueryAttention(attrs.evolve(CONFIG, window=3)), GroupedQueryAttention(CONFIG)
    ).double()

    def model(x, cos, sin, mask):
        for block in blocks:
            x = x + block(x, cos=cos, sin=sin, mask=mask)
        return x

    cos, sin = RotaryEmbedding(RotaryConfig(head_dim=8))(torch.arange(7)[None])
    x = torch.randn(1, 7, 16, dtype=torch.float64)
    mask = AttentionMask(documents=Documents.from_lengths([[4, 3]]))
    expected = model(x, cos, sin, mask)
    found = torch.compile(model, fullgraph=True, backend="aot_eager")(x, cos, sin, mask)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_blocks_keep_their_own_backends():
    x, table = torch.randn(1, 5, 16), torch.ones(1, 5, 8)
    counter = CompileCounterWithBackend("eager")
    for backend, sinks in (("eager", False), ("torch", False), ("eager", True)):
        block = GroupedQueryAttention(attrs.evolve(CONFIG, backend=backend, sinks=sinks))
        found = torch.compile(block, fullgraph=True, backend=counter)(x, cos=table, sin=table, mask=AttentionMask())
        torch.testing.assert_close(found, block(x, cos=table, sin=table, mask=AttentionMask()))
    calls = ["scaled_dot_product_attention" in graph.code for graph in counter.graphs]
    assert calls == [False, True, False]


def of_unknown_end(length):
    return Documents(torch.tensor([0, 3, length, 2 * length - 1], dtype=torch.int32), length)


def check_one_graph(backend, *, needs_gradient, documents=of_unknown_end):
    """Sinks, documents with padding, a window and a soft cap, over lengths."""

    def attend(backend, q, k, v, sinks, packed):
        mask = AttentionMask(documents=packed, window=4)
        return backend(q, k, v, mask, scale=0.4, sinks_H=sinks, soft_cap=2.0)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    for length in LENGTHS:
        inputs = [torch.randn(2, length, h, d, dtype=torch.float64) for h, d in ((4, 8), (2, 8), (2, 6))]
        for x in inputs:
            torch._dynamo.mark_dynamic(x, 1)
        inputs.append(torch.randn(4, dtype=torch.float64))
        for x in inputs:
            x.requires_grad_(needs_gradient)
        packed = documents(length)
        found = []
        for run, which in ((compiled, backend), (attend, EagerAttentionConfig().build())):
            out = run(which, *inputs, packed)
            found.append((out, *torch.autograd.grad(out.square().sum(), inputs)) if needs_gradient else (out,))
        torch.testing.assert_close(*found, rtol=1e-7, atol=1e-7)  # flex attention's constants are fp32
    assert counter.frame_count <= 2


@pytest.mark.long
def test_flex_is_part_of_the_graph():
    check_one_graph(FlexAttentionConfig().build(), needs_gradient=False)  # which torch has not on CPU


def test_documents_of_a_known_end_leave_lengths_dynamic(flash_packages):
    backend = FlashAttention4Config().build()
    check_one_graph(
        backend,
        needs_gradient=True,
        documents=lambda length: Documents.from_lengths([[length - 3, 3], [length]]),
    )


@pytest.mark.long
def test_flash_attention_4_is_part_of_the_graph(flash_packages):
    check_one_graph(FlashAttention4Config().build(), needs_gradient=True)


@pytest.mark.long
def test_flash_attention_2_is_part_of_the_graph(flash_packages, monkeypatch):
    """Its operators are custom operators; so are the stand-ins here."""
    backend = FlashAttention2Config().build()
    tensors = "Tensor q, Tensor k, Tensor v"
    lengths = "Tensor cu_q, Tensor cu_k, SymInt max_q, SymInt max_k"
    common = "float dropout_p, float softmax_scale, bool causal, int window_size_left, int window_size_right"
    rest = "float softcap, Tensor? alibi_slopes"
    with torch.library._scoped_library("d9d_attn_test", "DEF") as library:
        library.define(
            f"forward({tensors}, {lengths}, *, {common}, {rest}, bool return_softmax)"
            " -> (Tensor, Tensor, Tensor, Tensor)"
        )
        library.define(
            "backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor(a!) dq, Tensor(b!) dk, "
            f"Tensor(c!) dv, {lengths}, *, {common}, {rest}, bool deterministic, Tensor? rng_state) -> Tensor"
        )
        library.impl("forward", backend.operators._flash_attn_varlen_forward, "CPU")
        library.impl("backward", backend.operators._flash_attn_varlen_backward, "CPU")

        def fake_forward(q, *_, **__):
            shapes = ([q.shape[1], q.shape[0]], [0])
            lse, nothing = (q.new_empty(shape) for shape in shapes)
            return torch.empty_like(q), lse, nothing, q.new_empty(1, dtype=torch.int64)

        library.impl("forward", fake_forward, "Meta")
        library.impl("backward", lambda dout, *_, **__: dout.new_empty(0), "Meta")
        operators = torch.ops.d9d_attn_test
        monkeypatch.setattr(backend.operators, "_flash_attn_varlen_forward", operators.forward)
        monkeypatch.setattr(backend.operators, "_flash_attn_varlen_backward", operators.backward)
        check_one_graph(backend, needs_gradient=True)
