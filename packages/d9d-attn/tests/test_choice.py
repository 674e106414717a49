"""Which backend is chosen, and what is refused."""

from typing import ClassVar

import attrs
import pytest
import torch

from d9d.attn import (
    AttentionBackendConfig,
    AttentionMask,
    AttentionNeed,
    Capabilities,
    EagerAttentionConfig,
    Feature,
    GroupedQueryAttention,
    GroupedQueryAttentionConfig,
    TorchAttentionConfig,
    attention_backends,
)

SHAPE = {"hidden_size": 8, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4}


def choose(explicit=None, **need):
    return attention_backends.choose(explicit, AttentionNeed(**need))


@pytest.fixture
def registered():
    """Register a backend for one test."""
    added = []

    def register(config_class):
        attention_backends.register(config_class)
        added.append(config_class.kind)

    yield register
    for kind in added:
        del attention_backends._classes[kind]


def make_config(**capabilities):
    @attrs.frozen(kw_only=True)
    class PlannedConfig(AttentionBackendConfig):
        kind: ClassVar[str] = "planned"
        priority: ClassVar[int | None] = 99
        capabilities: ClassVar[Capabilities]

        def build(self):
            return EagerAttentionConfig().build()

    PlannedConfig.capabilities = Capabilities(**{"features": frozenset(Feature), **capabilities})
    return PlannedConfig


def test_explicit_goes_before_environment_before_automatic(monkeypatch):
    assert choose().config == TorchAttentionConfig()
    monkeypatch.setenv("D9D_ATTN_BACKEND", "eager")
    choice = choose()
    assert choice.config == EagerAttentionConfig()
    assert choice.reason == "asked for by D9D_ATTN_BACKEND='eager'"
    assert choose("torch").config == TorchAttentionConfig()
    assert choose(TorchAttentionConfig(kernels=("math",))).config.kernels == ("math",)


def test_environment_may_hold_settings(monkeypatch):
    monkeypatch.setenv("D9D_ATTN_BACKEND", '{"kind": "torch", "kernels": ["flash", "math"]}')
    assert choose().config == TorchAttentionConfig(kernels=("flash", "math"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("troch", r"unknown attention backend 'troch', known are \['eager', 'torch'\]; did you mean 'torch'\?"),
        ("{", "neither a kind nor JSON"),
        ('{"kernels": []}', "unknown attention backend None"),
        ('{"kind": "torch", "kernel": "math"}', "do not fit the attention backend 'torch'.*'kernel'"),
        ('{"kind": "torch", "kernels": ["fast"]}', r"kernels must name some of .*found \('fast',\)"),
    ],
)
def test_bad_environment_is_one_clear_error(monkeypatch, text, message):
    monkeypatch.setenv("D9D_ATTN_BACKEND", text)
    with pytest.raises(ValueError, match=message):
        GroupedQueryAttention(GroupedQueryAttentionConfig(**SHAPE))


def test_automatic_choice_falls_back_by_features_and_says_why():
    choice = choose(features=frozenset({Feature.SINKS}))
    assert choice.config == EagerAttentionConfig()
    assert "'torch' has no sinks" in choice.reason


def test_a_backend_that_cannot_is_refused_when_the_block_is_built(registered):
    registered(make_config(features=frozenset()))
    with pytest.raises(ValueError, match="'planned', asked for in the configuration, has no fewer key heads"):
        GroupedQueryAttention(GroupedQueryAttentionConfig(**SHAPE, backend="planned"))
    GroupedQueryAttention(GroupedQueryAttentionConfig(**SHAPE))


@pytest.mark.parametrize("package", ["absent_package", "absent_package.submodule"])
def test_an_absent_package_is_refused_by_name_and_passed_over_in_silence(registered, package):
    registered(make_config(requires=package, install="d9d-attn[absent]"))
    choice = choose()
    assert choice.config == TorchAttentionConfig()
    assert f"'planned' needs '{package}', which is not installed" in choice.reason
    with pytest.raises(ValueError, match=r"install 'd9d-attn\[absent\]'"):
        choose("planned")


def test_device_and_dtype_count_once_known(registered):
    registered(make_config(device_types=frozenset({"cuda"}), dtypes=frozenset({torch.bfloat16})))
    assert choose().config.kind == "planned"
    assert choose(device_type="cpu").config.kind == "torch"
    assert choose(dtype=torch.float64).config.kind == "torch"
    with pytest.raises(ValueError, match="not on 'cpu'"):
        choose("planned", device_type="cpu")


def test_a_block_chooses_by_device_and_dtype_and_logs_the_reason(registered, caplog):
    registered(make_config(device_types=frozenset({"cuda"})))
    block = GroupedQueryAttention(GroupedQueryAttentionConfig(**SHAPE))
    x, table = torch.randn(1, 3, 8), torch.ones(1, 3, 4)
    with caplog.at_level("DEBUG", logger="d9d.attn"):
        block(x, cos=table, sin=table, mask=AttentionMask())
        block(x, cos=table, sin=table, mask=AttentionMask())
    (record,) = caplog.records
    assert "TorchAttentionConfig" in record.message
    assert "'planned' runs on ['cuda'] only, not on 'cpu'" in record.message


def test_a_kind_is_registered_once(registered):
    registered(make_config())
    with pytest.raises(ValueError, match=r"which <class .*PlannedConfig'> already is; choose another kind"):
        attention_backends.register(make_config())
