"""Rotary tables against transformers, and rotations against complex numbers."""

import math
import sys
from pathlib import Path
from typing import ClassVar

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.glm import modeling_glm
from transformers.models.llama import modeling_llama
from transformers.models.llama.configuration_llama import LlamaConfig

from d9d.attn import (
    LinearScaling,
    Llama3Scaling,
    NTKScaling,
    RotaryConfig,
    RotaryEmbedding,
    RotaryScaling,
    YarnScaling,
    apply_rotary,
    norm_and_rotate,
)

torch.set_num_threads(1)
few = settings(max_examples=30, deadline=None, derandomize=True)

factors = st.sampled_from([1.0, 1.1, 4.0, 8.0, 32.0, 40.0])
lengths = st.sampled_from([64, 512, 4096, 8192])
SCALINGS = st.one_of(
    st.none(),
    st.builds(LinearScaling, factor=factors),
    st.builds(NTKScaling, factor=factors, original_length=lengths),
    st.builds(
        YarnScaling,
        factor=factors,
        original_length=lengths,
        beta_fast=st.sampled_from([32.0, 24.0, 8.0]),
        beta_slow=st.sampled_from([1.0, 0.5]),
        truncate=st.booleans(),
        fixed_attention_factor=st.sampled_from([None, 0.8]),
        mscale=st.sampled_from([None, 1.0, 0.707]),
        mscale_all_dim=st.sampled_from([None, 1.0, 0.9]),
    ),
    st.builds(
        Llama3Scaling,
        factor=factors,
        original_length=lengths,
        low_frequency_factor=st.sampled_from([1.0, 2.0]),
        high_frequency_factor=st.sampled_from([4.0, 3.0]),
    ),
)

sys.path.insert(0, str(Path(__file__).parent))
from norm_rotary_oracles import attended, rotate  # noqa: E402 - it lies beside this file


def parameters_of(config):
    """The settings as transformers names them, and its longest context."""
    scaling, found = config.scaling, {"rope_theta": config.base}
    if config.rotary_dim is not None:
        found["partial_rotary_factor"] = config.rotary_dim / config.head_dim
    length = 4096
    match scaling:
        case None:
            return found | {"rope_type": "default"}, length
        case LinearScaling():
            return found | {"rope_type": "linear", "factor": scaling.factor}, length
        case NTKScaling():
            return found | {"rope_type": "dynamic", "factor": scaling.factor}, scaling.original_length
        case YarnScaling():
            named = {"attention_factor": scaling.fixed_attention_factor}
            named |= {name: getattr(scaling, name) for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")}
            found |= {name: value for name, value in named.items() if value is not None}
            found |= {"rope_type": "yarn", "truncate": scaling.truncate}
        case Llama3Scaling():
            found |= {"rope_type": "llama3", "low_freq_factor": scaling.low_frequency_factor}
            found |= {"high_freq_factor": scaling.high_frequency_factor}
    found |= {"factor": scaling.factor, "original_max_position_embeddings": scaling.original_length}
    return found, int(scaling.original_length * scaling.factor)


def tables_of_transformers(config, positions):
    parameters, length = parameters_of(config)
    theirs = LlamaConfig(
        hidden_size=4 * config.head_dim,
        num_attention_heads=4,
        head_dim=config.head_dim,
        max_position_embeddings=length,
        rope_parameters=parameters,
    )
    return modeling_llama.LlamaRotaryEmbedding(theirs)(torch.zeros(1), positions)


@few
@given(
    SCALINGS,
    st.sampled_from([1e4, 5e5, 1e6]),
    st.sampled_from([(128, None), (64, None), (80, 20), (64, 32)]),
    st.sampled_from([0, 60, 500, 5000, 131_000, 2_000_000]),
)
def test_tables_are_those_of_transformers_bit_for_bit(scaling, base, dims, offset):
    config = RotaryConfig(
        head_dim=dims[0], rotary_dim=dims[1] if scaling is not None else None, base=base, scaling=scaling
    )
    positions = torch.stack([torch.arange(9) + offset, torch.arange(9) % 4])  # the second restarts (case 37)
    found = RotaryEmbedding(config)(positions)
    for a, b in zip(found, tables_of_transformers(config, positions), strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a, b)


def test_yarn_of_a_short_original_length_is_finite_and_clamped():  # case 38
    for original_length, truncate in ((64, True), (64, False), (4, True), (1, False)):
        scaling = YarnScaling(factor=40.0, original_length=original_length, truncate=truncate)
        frequency = scaling.frequencies(128, 1e4, torch.zeros(1, 1, dtype=torch.int64))
        usual = 1e4 ** -(torch.arange(0, 128, 2) / 128)
        assert frequency.isfinite().all()
        share = frequency / usual
        assert (share <= 1 + 1e-6).all()
        assert (share >= 1 / 40 - 1e-6).all()
        torch.testing.assert_close(share[-1].item(), 1 / 40)  # the slowest are interpolated, whatever the length
    cos, _ = RotaryEmbedding(RotaryConfig(head_dim=128, scaling=YarnScaling(factor=40.0, original_length=64)))(
        torch.arange(2560)[None]
    )
    torch.testing.assert_close(cos.max().item(), 0.1 * math.log(40) + 1)


def test_ends_of_a_yarn_ramp_that_coincide_do_not_divide_by_zero():  # case 38
    # Both ends beyond the last pair, and both before the first.
    for scaling in (
        YarnScaling(factor=4.0, original_length=10**9, beta_fast=1.0, beta_slow=1.0),
        YarnScaling(factor=4.0, original_length=1, beta_fast=1.0, beta_slow=1.0),
        YarnScaling(factor=4.0, original_length=4096, beta_fast=2.0, beta_slow=2.0, truncate=False),
    ):
        config = RotaryConfig(head_dim=16, scaling=scaling)
        assert all(table.isfinite().all() for table in RotaryEmbedding(config)(torch.arange(4)[None]))


def test_ntk_changes_nothing_within_the_original_length_and_remembers_nothing():
    scaled = RotaryEmbedding(RotaryConfig(head_dim=16, scaling=NTKScaling(factor=8.0, original_length=64)))
    plain = RotaryEmbedding(RotaryConfig(head_dim=16))
    short, long = torch.arange(64)[None], torch.arange(65)[None]
    for positions, same in ((short, True), (long, False), (short, True)):
        assert torch.equal(scaled(positions)[0], plain(positions)[0]) == same


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        LinearScaling(factor=2.0),
        NTKScaling(factor=2.0, original_length=8),
        YarnScaling(factor=4.0, original_length=64),
        Llama3Scaling(factor=8.0, original_length=64),
    ],
)
def test_frequencies_survive_dtypes_and_meta_and_compile_to_one_graph(scaling):  # case 39
    config = RotaryConfig(head_dim=16, scaling=scaling)
    positions = torch.arange(5, 25)[None]
    expected = RotaryEmbedding(config)(positions)
    with torch.device("meta"):
        rotary = RotaryEmbedding(config)
    rotary = rotary.to_empty(device="cpu").to(torch.bfloat16)
    assert not rotary.state_dict()
    compiled = torch.compile(rotary, backend="eager", fullgraph=True)
    assert [table.shape for table in rotary(positions[:, :0])] == [(1, 0, 16)] * 2
    for made in (rotary(positions), compiled(positions)):
        for a, b in zip(made, expected, strict=True):
            assert a.dtype == torch.float32
            assert torch.equal(a, b)


@few
@given(st.sampled_from([(16, 16), (24, 12), (16, 2)]), st.sampled_from(["", "q", "qk"]), st.booleans(), st.booleans())
def test_rotations_turn_complex_numbers(dims, norms, zero_centered, interleaved):
    torch.manual_seed(0)
    q, k = torch.randn(2, 3, 4, dims[0]).double(), torch.randn(2, 3, 2, dims[0]).double()
    weights = [torch.randn(dims[0]).double() if name in norms else None for name in "qk"]
    cos, sin = RotaryEmbedding(RotaryConfig(head_dim=dims[0], rotary_dim=dims[1]))(torch.tensor([[0, 1, 2], [7, 0, 1]]))
    kept = {"eps": 1e-5, "zero_centered": zero_centered, "interleaved": interleaved}
    found = norm_and_rotate(q, k, cos, sin, q_weight=weights[0], k_weight=weights[1], **kept)
    for a, b in zip(found, attended(q, k, cos.double(), sin.double(), *weights, **kept), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


def test_interleaved_and_partial_rotation_equals_glm():
    q, k = torch.randn(1, 5, 4, 16), torch.randn(1, 5, 2, 16)
    cos, sin = RotaryEmbedding(RotaryConfig(head_dim=16, rotary_dim=8))(torch.arange(5)[None])
    expected = modeling_glm.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
    for a, b in zip(apply_rotary(q, k, cos, sin, interleaved=True), expected, strict=True):
        torch.testing.assert_close(a, b)


def test_one_rounding_for_norm_and_rotation():
    q, weight = torch.randn(1, 7, 4, 16).bfloat16(), torch.randn(16).bfloat16()
    cos, sin = RotaryEmbedding(RotaryConfig(head_dim=16))(torch.arange(7)[None])
    found, rotated = norm_and_rotate(q, q, cos, sin, q_weight=weight)
    exact, _ = norm_and_rotate(q.double(), q.double(), cos, sin, q_weight=weight.double())
    assert torch.equal(found, exact.bfloat16())
    assert torch.equal(rotated, rotate(q.double(), cos.double(), sin.double(), interleaved=False).bfloat16())


def test_a_third_party_joins_the_scalings():
    @attrs.frozen(kw_only=True)
    class Halved(RotaryScaling):
        kind: ClassVar[str] = "halved"

        def frequencies(self, dim, base, position_ids_BS):
            return LinearScaling(factor=2.0).frequencies(dim, base, position_ids_BS)

    try:
        assert RotaryScaling.kinds()["halved"] is Halved
        assert {"linear", "ntk", "yarn", "llama3"} < RotaryScaling.kinds().keys()
        with pytest.raises(ValueError, match="has the kind 'halved', which .* already has"):

            @attrs.frozen(kw_only=True)
            class Again(RotaryScaling):
                kind: ClassVar[str] = "halved"

    finally:
        del RotaryScaling._members["halved"]


def test_what_cannot_be_is_refused():
    with pytest.raises(TypeError, match=r"one such as YarnScaling\(...\), found {'rope_type': 'yarn'}"):
        RotaryConfig(head_dim=16, scaling={"rope_type": "yarn"})
    for rotary_dim in (5, 18, 0):
        with pytest.raises(ValueError, match=f"no more than head_dim=16, found {rotary_dim}"):
            RotaryConfig(head_dim=16, rotary_dim=rotary_dim)
    with pytest.raises(ValueError, match="above low_frequency_factor, found 1.0 and 4.0"):
        Llama3Scaling(factor=8.0, original_length=64, low_frequency_factor=4.0, high_frequency_factor=1.0)
    for base in (1.0, 0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="'base' must be > 1.0"):
            RotaryConfig(head_dim=16, base=base)
    with pytest.raises(ValueError, match="beta_fast must not be below beta_slow, found 1.0 and 32.0"):
        YarnScaling(factor=4.0, original_length=64, beta_fast=1.0, beta_slow=32.0)
    with pytest.raises(ValueError, match="rotary dim above 2"):
        RotaryEmbedding(RotaryConfig(head_dim=2, scaling=NTKScaling(factor=2.0, original_length=8)))(torch.ones(1, 1))
    q, table = torch.ones(1, 2, 3, 8), torch.ones(1, 2, 8)
    with pytest.raises(ValueError, match="last dim of cos even and no larger"):
        apply_rotary(q, q, torch.ones(1, 2, 10), torch.ones(1, 2, 10))
    with pytest.raises(ValueError, match=r"both must be \(batch, positions, dim\)"):
        apply_rotary(q, q, table, table[0])
    for shape in ((3, 2, 8), (1, 1, 8), (1, 3, 8)):
        with pytest.raises(ValueError, match="cos must be of the same positions"):
            apply_rotary(q, q, torch.ones(shape), torch.ones(shape))
    with pytest.raises(ValueError, match=r"both must be \(batch, positions, dim\)"):
        apply_rotary(q, q, torch.tensor(1.0), torch.tensor(1.0))
    with pytest.raises(ValueError, match="of the same batch and positions"):
        apply_rotary(q, q[:, :1], table, table)
    with pytest.raises(ValueError, match=r"k_weight has the shape \(4,\); it must be \(8,\)"):
        norm_and_rotate(q, q, table, table, k_weight=torch.ones(4))
