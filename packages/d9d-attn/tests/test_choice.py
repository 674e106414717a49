"""Which backend is chosen, and what is refused."""

import contextlib
import copy
import pickle
import sys
import types
from typing import ClassVar

import attrs
import pytest
import torch

from d9d.attn import (
    AttentionBackendConfig,
    AttentionMask,
    AttentionNeed,
    Capabilities,
    Documents,
    EagerAttentionConfig,
    Feature,
    FlashAttention2Config,
    FlashAttention4Config,
    GroupedQueryAttention,
    GroupedQueryAttentionConfig,
    TorchAttentionConfig,
    _sdpa,
    _selection,
    attention_backends,
)
from d9d.attn._installed import is_installed

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
        ("troch", r"unknown attention backend 'troch', known are \['eager', .*'torch'\]; did you mean 'torch'\?"),
        ("{", "neither a kind nor JSON"),
        ('{"kernels": []}', "unknown attention backend None"),
        ('{"kind": "torch", "kernel": "math"}', "do not fit the attention backend 'torch'.*'kernel'"),
        ('{"kind": "torch", "kernels": ["fast"]}', r"kernels must name some of .*found \('fast',\)"),
        ('{"kind": "torch", "kernels": "fast"}', r"kernels must name some of .*found \('fast',\)"),
        (
            '{"kind": "torch", "varlen": "no"}',
            r"do not fit the attention backend 'torch': .*'varlen' must be <class 'bool'>",
        ),
    ],
)
def test_bad_environment_is_one_clear_error(monkeypatch, text, message):
    monkeypatch.setenv("D9D_ATTN_BACKEND", text)
    with pytest.raises(ValueError, match=message):
        GroupedQueryAttention(GroupedQueryAttentionConfig(**SHAPE))


def test_automatic_choice_falls_back_by_features_and_says_why():
    choice = choose(features=frozenset({Feature.SINKS}), device_type="cpu")
    assert choice.config == EagerAttentionConfig()
    assert "'torch' has no sinks" in choice.reason
    assert "'flex' runs on ['cuda'] only" in choice.reason
    with pytest.raises(ValueError, match=r"install 'd9d-attn\[flash-attn-4\]'"):
        attention_backends.choose("flash_attention_4", AttentionNeed(device_type="cuda"))
    assert choose(features=frozenset({Feature.SINKS}), device_type="cpu", head_dim=512).config.kind == "eager"


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


@pytest.mark.parametrize(
    "module", ["absent_package", "absent_package.part", "json.absent", "json.decoder.absent", "sys.x"]
)
def test_looking_for_what_is_absent_raises_nothing_and_imports_nothing(module):
    assert not is_installed(module)


def test_looking_for_a_submodule_imports_no_parent(tmp_path, monkeypatch):
    package = tmp_path / "breaks_on_import"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError")
    (package / "part.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert is_installed("breaks_on_import.part")
    assert not is_installed("breaks_on_import.other")
    assert is_installed("json.decoder")
    monkeypatch.setitem(sys.modules, "stands_in", types.ModuleType("stands_in"))  # has no spec
    assert is_installed("stands_in")
    assert not is_installed("stands_in.part")


@pytest.mark.parametrize(
    ("versions", "chosen"),
    [
        ({"flash_attn": "2.8.3"}, "torch"),  # brings an older flash_attn/cute
        ({"flash_attn_4": "4.0.0b9"}, "torch"),
        ({"flash_attn_4": "4.0.0b36"}, "flash_attention_4"),
        ({"flash_attn_4": "4.0.0", "flash_attn": "2.8.3"}, "flash_attention_4"),
    ],
)
def test_a_package_is_known_by_its_name_and_version_not_by_its_folder(
    write_versions, tmp_path, monkeypatch, versions, chosen
):
    if is_installed("flash_attn"):
        pytest.skip("flash_attn is installed, and would be found beside the folder of its name that this test makes")
    package = write_versions(tmp_path, **versions) / "flash_attn" / "cute"
    package.mkdir(parents=True)
    (package.parent / "flash_attn_interface.py").write_text("")
    (package / "__init__.py").write_text("import a_package_that_is_missing")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    need = {"device_type": "cuda", "dtype": torch.bfloat16}
    assert choose(**need).config.kind == chosen
    if chosen != "flash_attention_4":
        with pytest.raises(ValueError, match=r"needs 'flash-attn-4>=4.0.0b36', which is not installed; install 'd9d"):
            choose("flash_attention_4", **need)
    if "flash_attn" not in versions:
        with pytest.raises(ValueError, match="needs 'flash-attn>=2.8', which is not installed"):
            choose("flash_attention_2", **need)


def test_a_folder_overwritten_by_flash_attention_2_says_what_to_do(flash_packages, monkeypatch):
    monkeypatch.setattr(
        sys.modules["flash_attn.cute.interface"], "_flash_attn_bwd", lambda q, k, v, out, dout, lse: None
    )
    with pytest.raises(ImportError, match="found the one that flash-attn 2 brings; install flash-attn-4 after"):
        FlashAttention4Config().build()


@pytest.mark.parametrize("config", [FlashAttention2Config(), FlashAttention4Config()])
def test_building_what_is_not_installed_says_what_to_install(config):
    if is_installed(config.capabilities.requires):
        pytest.skip("it is installed")
    with pytest.raises(ImportError, match=r"install 'd9d-attn\[flash-attn"):
        config.build()


def test_a_flash_implementation_of_torch_is_refused_where_it_is_missing():
    with pytest.raises(ValueError, match="must be in"):
        TorchAttentionConfig(flash_implementation="FA5")
    assert {"FA3", "FA4"} <= set(torch.nn.attention.list_flash_attention_impls())
    if not is_installed("flash_attn.cute"):
        with pytest.raises(ValueError, match="needs 'flash_attn.cute' for 'FA4', which is not installed"):
            choose(TorchAttentionConfig(flash_implementation="FA4"))


def test_a_flash_implementation_that_torch_cannot_take_is_refused(flash_packages, monkeypatch):
    config = TorchAttentionConfig(flash_implementation="FA4")
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    with pytest.raises(ValueError, match=r"torch 2.11.0\+cu130 knows older ones only; use 'flash_attention_4'"):
        choose(config)
    monkeypatch.setattr(torch, "__version__", "2.15.0")
    assert choose(config).config is config


def test_a_flash_implementation_of_torch_is_activated_and_comes_first(monkeypatch):
    activated, orders = [], []
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activated.append)
    monkeypatch.setattr(_sdpa, "_kernels", lambda kernels, *_, **__: orders.append(kernels) or contextlib.nullcontext())
    q = torch.randn(1, 3, 2, 8)
    TorchAttentionConfig(flash_implementation="FA4").build()(q, q, q, AttentionMask(), scale=1.0)
    TorchAttentionConfig().build()(q, q, q, AttentionMask(), scale=1.0)
    assert activated == ["FA4"]
    assert orders == [("flash", "cudnn", "efficient", "math"), None]


def test_large_heads_and_old_devices_are_refused(registered, monkeypatch):
    registered(make_config(max_head_dim=128, cuda_capability=(9, 0)))
    assert choose(head_dim=128).config.kind == "planned"
    with pytest.raises(ValueError, match="takes head dims up to 128 only, not 192"):
        choose("planned", head_dim=192)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    with pytest.raises(ValueError, match=r"needs compute capability \(9, 0\), found \(8, 6\)"):
        choose("planned", device_type="cuda")
    assert choose("planned", device_type="cpu").config.kind == "planned"


def test_a_block_says_what_it_needs_of_its_backend():
    plain = GroupedQueryAttentionConfig(hidden_size=8, num_heads=2, num_kv_heads=2, head_dim=4)
    assert plain.need() == AttentionNeed(head_dim=4)
    full = attrs.evolve(plain, num_kv_heads=1, value_head_dim=6, window=3, sinks=True, soft_cap=1.0, dropout=0.1)
    assert full.need() == AttentionNeed(
        head_dim=6,
        features=frozenset(
            {
                Feature.GROUPED_QUERY,
                Feature.VALUE_DIM,
                Feature.WINDOW,
                Feature.SINKS,
                Feature.SOFT_CAP,
                Feature.DROPOUT,
            }
        ),
    )


def test_a_mask_that_the_backend_cannot_do_is_refused_in_the_call_and_counts_in_the_automatic_choice(registered):
    registered(make_config(features=frozenset(Feature) - {Feature.DOCUMENTS}))
    x, table = torch.randn(1, 3, 8), torch.ones(1, 3, 4)
    mask = AttentionMask(documents=Documents.from_lengths([[1, 2]]))
    asked = GroupedQueryAttention(GroupedQueryAttentionConfig(**SHAPE, backend="planned"))
    asked(x, cos=table, sin=table, mask=AttentionMask(window=2))
    with pytest.raises(ValueError, match="'planned', asked for in the configuration, has no packed documents"):
        asked(x, cos=table, sin=table, mask=mask)
    GroupedQueryAttention(GroupedQueryAttentionConfig(**SHAPE))(x, cos=table, sin=table, mask=mask)


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


def test_a_copy_of_a_block_chooses_anew(monkeypatch):
    x, table = torch.randn(1, 3, 8), torch.ones(1, 3, 4)
    block = GroupedQueryAttention(GroupedQueryAttentionConfig(**SHAPE, backend="eager"))
    expected = block(x, cos=table, sin=table, mask=AttentionMask())
    text = pickle.dumps(block)
    monkeypatch.setattr(_selection, "_built", [])  # as in another process
    for other in (pickle.loads(text), copy.deepcopy(block)):
        assert torch.equal(other(x, cos=table, sin=table, mask=AttentionMask()), expected)


def test_cuda_without_a_device_is_refused_not_an_exception(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    choice = choose(features=frozenset({Feature.SINKS}), device_type="cuda")
    assert choice.config == EagerAttentionConfig()
    assert "'flex' needs a CUDA device, found none" in choice.reason


def test_flash_attention_4_takes_smaller_heads_on_blackwell(flash_packages, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, refused in (((9, 0), False), ((10, 0), True), ((12, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda found=capability: found)
        refusal = FlashAttention4Config().refusal(AttentionNeed(device_type="cuda", head_dim=192))
        assert (refusal is not None) == refused
        refusal = FlashAttention4Config().refusal(AttentionNeed(device_type="cuda", head_dim=128))
        assert (refusal is not None) == (capability == (12, 0))  # whose sinks have no gradient


def test_what_is_no_configuration_is_refused():
    with pytest.raises(TypeError, match="must be a configuration or its kind, found {'kind': 'torch'}"):
        choose({"kind": "torch"})


def test_a_kind_is_registered_once(registered):
    registered(make_config())
    with pytest.raises(ValueError, match=r"which <class .*PlannedConfig'> already is; choose another kind"):
        attention_backends.register(make_config())
