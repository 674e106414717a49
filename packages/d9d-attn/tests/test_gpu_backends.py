"""Backends on CUDA against eager in fp64 on the same inputs: errors at the level of the dtype (case 49)."""

import attrs
import pytest
import torch

from d9d.attn import (
    AttentionMask,
    AttentionNeed,
    Documents,
    EagerAttentionConfig,
    Feature,
    FlashAttention2Config,
    FlashAttention4Config,
    FlexAttentionConfig,
    GroupedQueryAttention,
    GroupedQueryAttentionConfig,
    RotaryConfig,
    RotaryEmbedding,
    TorchAttentionConfig,
    attention_backends,
)

pytestmark = pytest.mark.gpu
B, S, H, G = 2, 192, 8, 2
EAGER = EagerAttentionConfig().build()
CONFIGS = {
    c.kind: c for c in (TorchAttentionConfig(), FlexAttentionConfig(), FlashAttention2Config(), FlashAttention4Config())
}
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1.5e-3, torch.float32: 2e-3}


@attrs.frozen(kw_only=True)
class Case:
    mask: dict
    dims: tuple[int, int] = (64, 64)
    dtype: torch.dtype = torch.bfloat16
    sinks: bool = False
    soft_cap: float | None = None
    keys: int = S
    key_heads: int = G


def documents(name):
    return {
        "all": lambda: Documents.from_lengths([[50, 142], [192]], device="cuda"),
        "padded": lambda: Documents(torch.tensor([0, 100, 192, 250], dtype=torch.int32, device="cuda"), 100),
    }[name]()


def bias(name):
    padded = (torch.arange(S, device="cuda") >= torch.tensor([[40], [S]], device="cuda"))[:, None, None, :]
    return padded if name == "padding" else torch.zeros(B, 1, 1, S, device="cuda").masked_fill(~padded, -torch.inf)


CASES = {
    "full, sinks, more keys than queries": Case(mask={"causal": False}, sinks=True, keys=S + 70),
    "fp16, window, soft cap, other head dims": Case(
        mask={"window": 50}, dims=(96, 64), dtype=torch.float16, soft_cap=2.0
    ),
    "padded documents, sinks, soft cap": Case(mask={"documents": "padded"}, sinks=True, soft_cap=2.0, dims=(128, 128)),
    "documents, window, odd head dims": Case(mask={"documents": "all", "window": 30}, dims=(36, 20)),
    "as many key heads, odd head dims": Case(mask={}, dims=(36, 20), key_heads=H),
    "as many key heads, small head dims": Case(mask={"window": 30}, dims=(32, 32), key_heads=H),
    "rows without a key by a boolean bias, sinks": Case(mask={"bias": "padding"}, sinks=True),
    "fp32, rows without a key by an additive bias": Case(mask={"bias": "additive"}, dtype=torch.float32),
}


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Each case is a compilation of flex attention of its own."""
    yield
    torch._dynamo.reset()


def make_mask(spec):
    parts = dict(spec)
    if "documents" in parts:
        parts["documents"] = documents(parts["documents"])
    if "bias" in parts:
        parts["bias"] = bias(parts["bias"])
    return AttentionMask(**parts)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", CONFIGS)
def test_values_and_gradients_are_right_to_the_level_of_the_dtype(kind, name):
    case, config = CASES[name], CONFIGS[kind]
    mask = make_mask(case.mask)
    features = {*mask.features} | ({Feature.GROUPED_QUERY} if case.key_heads < H else set())
    features |= ({Feature.SINKS} if case.sinks else set()) | ({Feature.SOFT_CAP} if case.soft_cap else set())
    need = AttentionNeed(features=frozenset(features), device_type="cuda", dtype=case.dtype, head_dim=max(case.dims))
    if (refusal := config.refusal(need)) is not None:
        pytest.skip(refusal)
    torch.manual_seed(0)
    head_dim, value_dim = case.dims

    def randn(length, heads, dim):
        return torch.randn(B, heads, length, dim, device="cuda", dtype=case.dtype).transpose(1, 2)  # not contiguous

    inputs = [randn(S, H, head_dim), randn(case.keys, case.key_heads, head_dim)]
    inputs.append(randn(case.keys, case.key_heads, value_dim))
    if case.sinks:
        inputs.append(torch.randn(H, device="cuda"))
    upstream = randn(S, H, value_dim) * 3
    backend = config.build()

    def run(backend, inputs, upstream):
        *inputs, sinks = [x.detach().requires_grad_() for x in inputs] + ([] if case.sinks else [None])
        options = {"scale": 0.15, "sinks_H": sinks, "soft_cap": case.soft_cap}
        has_lse = Feature.LSE in config.capabilities.features
        if has_lse:
            out, lse = backend.with_lse(*inputs, mask, **options)
        else:
            out, lse = backend(*inputs, mask, **options), None
        operands = [*inputs, sinks] if case.sinks else inputs
        return lse, out, *torch.autograd.grad(out, operands, upstream)

    lse, *found = run(backend, inputs, upstream)
    of_eager, *expected = run(EAGER, [x.double() for x in inputs], upstream.double())
    for a, b in zip(found, expected, strict=True):
        assert a.isfinite().all()
        assert (a.double() - b).norm() / b.norm() < TOLERANCE[case.dtype]
    blind = expected[0].abs().sum(-1) == 0
    assert (found[0][blind] == 0).all()
    if lse is not None:
        assert lse.dtype == torch.float32
        torch.testing.assert_close(lse.double(), of_eager, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("kind", CONFIGS)
def test_what_is_rare_is_right(kind):
    """A gradient through the log-sum-exp alone and beside the result, more queries than keys, and nothing to attend."""
    config = CONFIGS[kind]
    if (refusal := config.refusal(AttentionNeed(device_type="cuda", dtype=torch.bfloat16))) is not None:
        pytest.skip(refusal)
    torch.manual_seed(0)
    backend, mask = config.build(), AttentionMask()

    def make(batch, queries, keys):
        shapes = ((batch, queries, H, 64), (batch, keys, G, 64), (batch, keys, G, 64))
        return [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]

    for lengths in (0, 5, 5), (1, 0, 5), (1, 5, 0):
        for of_nothing in mask, AttentionMask(window=3):
            out = backend(*(empty := make(*lengths)), of_nothing, scale=0.15)
            assert all((x == 0).all() for x in (out, *torch.autograd.grad(out.sum(), empty)))

    inputs = make(B, S + 70, S)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    found, expected = (which(*of, mask, scale=0.15) for which, of in ((backend, inputs), (EAGER, exact)))
    assert (found[:, :70] == 0).all()
    assert (found - expected).norm() / expected.norm() < TOLERANCE[torch.bfloat16]
    if Feature.LSE_GRADIENT not in config.capabilities.features:
        return
    found, expected = (which.with_lse(*of, mask, scale=0.15) for which, of in ((backend, inputs), (EAGER, exact)))
    upstream = [torch.randn_like(x) for x in found]
    for parts in (slice(2), slice(1, 2)):  # both, the log-sum-exp
        of_found = torch.autograd.grad(found[parts], inputs[:2], upstream[parts], retain_graph=True)
        gradients = [x.double() for x in upstream[parts]]
        of_expected = torch.autograd.grad(expected[parts], exact[:2], gradients, retain_graph=True)
        for a, b in zip(of_found, of_expected, strict=True):
            assert (a.double() - b).norm() / b.norm() < 2 * TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("implementation", ["FA3", "FA4"])
def test_what_torch_puts_in_place_of_flash_attention_2_is_right(implementation):
    config = TorchAttentionConfig(flash_implementation=implementation)
    if (refusal := config.refusal(AttentionNeed(device_type="cuda", dtype=torch.bfloat16))) is not None:
        pytest.skip(refusal)
    torch.manual_seed(0)
    inputs = [
        torch.randn(B, S, heads, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for heads in (H, G, G)
    ]
    upstream = torch.randn_like(inputs[0])
    backend = config.build()
    try:
        for mask in AttentionMask(), AttentionMask(documents=documents("padded"), window=50):
            (out, *found), (exact, *expected) = (
                (result, *torch.autograd.grad(result, of, upstream.to(result.dtype)))
                for which, of in ((backend, inputs), (EAGER, [x.detach().double().requires_grad_() for x in inputs]))
                for result in [which(*of, mask, scale=0.15)]
            )
            for a, b in zip((out, *found), (exact, *expected), strict=True):
                assert (a.double() - b).norm() / b.norm() < TOLERANCE[torch.bfloat16]
    finally:
        torch.nn.attention.restore_flash_attention_impl()


@pytest.mark.parametrize("kind", ["torch", "flash_attention_2", "flash_attention_4"])
def test_gradients_are_the_same_in_every_run_where_torch_is_told_so(kind):
    config = CONFIGS[kind]
    if (refusal := config.refusal(AttentionNeed(device_type="cuda", dtype=torch.bfloat16))) is not None:
        pytest.skip(refusal)
    torch.manual_seed(0)
    inputs = [torch.randn(B, 1024, h, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (H, G, G)]
    upstream, backend = torch.randn_like(inputs[0]), config.build()
    try:
        torch.use_deterministic_algorithms(mode=True)
        first, *others = (
            torch.autograd.grad(backend(*inputs, AttentionMask(), scale=0.1), inputs, upstream) for _ in range(5)
        )
    finally:
        torch.use_deterministic_algorithms(mode=False)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("kind", CONFIGS)
def test_documents_hold_no_mask_of_queries_and_keys(kind):
    config = CONFIGS[kind]
    if (refusal := config.refusal(AttentionNeed(device_type="cuda", dtype=torch.bfloat16))) is not None:
        pytest.skip(refusal)
    backend, length = config.build(), 16384
    q, k, v = (torch.randn(1, length, 1, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    def step():
        mask = AttentionMask(documents=Documents.from_lengths([[length // 4] * 4], device="cuda"))
        backend(q, k, v, mask, scale=0.1).sum().backward()

    step()  # compiles, and makes workspaces
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    assert torch.cuda.max_memory_allocated() - before < length * length // 4


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_block_never_waits_for_the_device(kind):
    config = GroupedQueryAttentionConfig(
        hidden_size=256, num_heads=8, num_kv_heads=2, head_dim=64, qk_norm=True, window=100, backend=CONFIGS[kind]
    )
    need = attrs.evolve(config.need(), device_type="cuda", dtype=torch.bfloat16)
    if (refusal := CONFIGS[kind].refusal(need)) is not None:
        pytest.skip(refusal)
    block = GroupedQueryAttention(config).cuda().bfloat16()
    rotary = RotaryEmbedding(RotaryConfig(head_dim=64))
    x = torch.randn(B, S, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    positions = torch.arange(S, device="cuda").expand(B, S)
    all_documents = [documents("all"), documents("padded")]

    def step():
        for of_mask in all_documents:
            cos, sin = rotary(positions)
            block(x, cos=cos, sin=sin, mask=AttentionMask(documents=of_mask)).sum().backward()

    step()
    try:
        torch.cuda.set_sync_debug_mode("error")
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", ["flex", "flash_attention_2", "flash_attention_4"])
def test_the_compiled_block_equals_the_eager_one(kind):
    config = GroupedQueryAttentionConfig(
        hidden_size=256, num_heads=8, num_kv_heads=2, head_dim=64, qk_norm=True, sinks=True, backend=CONFIGS[kind]
    )
    if (refusal := CONFIGS[kind].refusal(attrs.evolve(config.need(), device_type="cuda"))) is not None:
        pytest.skip(refusal)
    block = GroupedQueryAttention(config).cuda().bfloat16()
    x = torch.randn(B, S, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    cos, sin = RotaryEmbedding(RotaryConfig(head_dim=64))(torch.arange(S, device="cuda").expand(B, S))
    mask = AttentionMask(documents=documents("all"))
    found, expected = (
        (out, *torch.autograd.grad(out.float().square().sum(), (x, *block.parameters())))
        for attend in (torch.compile(block, fullgraph=True), block)
        for out in [attend(x, cos=cos, sin=sin, mask=mask)]
    )
    for a, b in zip(found, expected):
        assert (a.float() - b.float()).norm() / b.float().norm() < 2e-2


def test_sinks_on_cuda_are_chosen_a_backend_that_is_not_the_reference():
    need = AttentionNeed(features=frozenset({Feature.SINKS}), device_type="cuda", dtype=torch.bfloat16, head_dim=64)
    assert attention_backends.choose(None, need).config.kind in {"flash_attention_4", "flash_attention_2", "flex"}
