"""A package that is none of ours adds a choice of each kind; users name it as they name ours."""

import importlib.util
import sys
from pathlib import Path

import attrs
import pytest
import torch

from d9d.attn import (
    AttentionMask,
    GroupedQueryAttention,
    GroupedQueryAttentionConfig,
    RotaryConfig,
    RotaryEmbedding,
    attention_backends,
)
from d9d.ckpt import mapper_from_toml
from d9d.loop.config import ConfigError, load
from d9d.loop.track import TrackerConfig
from d9d.moe import DispatchNeed, GroupedSwiGLU, MoELayer, TopKRouter, dispatchers
from d9d.parallel.pipeline import Schedule, derive, simulate


@pytest.fixture(scope="module")
def extras():
    path = Path(__file__).parent / "third_party" / "extras.py"
    spec = importlib.util.spec_from_file_location("extras", path)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:  # other tests see our own choices only
        for registry, name in (
            (attention_backends, "_classes"),
            (dispatchers, "_classes"),
            (Schedule, "_members"),
            (TrackerConfig, "_members"),
        ):
            patch.setattr(registry, name, dict(getattr(registry, name)))
        patch.setitem(sys.modules, "extras", module)
        spec.loader.exec_module(module)
        yield module


@attrs.frozen(kw_only=True)
class Config:
    schedule: Schedule
    trackers: tuple[TrackerConfig, ...]


def test_a_schedule_and_a_tracker_from_a_config_file(extras, tmp_path):
    path = tmp_path / "config.toml"
    path.write_text('schedule.kind = "timid"\ntrackers = [{kind = "list"}]\n')
    config = load(Config, path, [])
    assert config == Config(schedule=extras.Timid(), trackers=(extras.ListConfig(),))
    simulation = simulate(derive(config.schedule.program(ranks=2, microbatches=4)))
    assert simulation.step_time > 0
    tracker = config.trackers[0].open(tmp_path, done=0, steps=1)
    tracker.log(1, {"loss": 2.0})
    assert extras.LOGGED == [(1, {"loss": 2.0})]
    path.write_text('schedule.kind = "timit"\ntrackers = []\n')
    with pytest.raises(ConfigError, match="timid"):
        load(Config, path, [])


def test_an_attention_backend_by_its_kind(extras, monkeypatch):
    monkeypatch.setenv("D9D_ATTN_BACKEND", "selfish")
    sizes = {"hidden_size": 8, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4}
    attention = GroupedQueryAttention(GroupedQueryAttentionConfig(**sizes))
    x = torch.randn(2, 3, 8)
    cos, sin = RotaryEmbedding(RotaryConfig(head_dim=4))(torch.arange(3).expand(2, 3))
    found = attention(x, cos=cos, sin=sin, mask=AttentionMask())
    torch.testing.assert_close(found, attention.o_proj(attention.v_proj(x).repeat(1, 1, 2)))
    with pytest.raises(ValueError, match="'selfish'.* has no soft cap"):
        GroupedQueryAttention(GroupedQueryAttentionConfig(**sizes, soft_cap=2.0))


def test_a_dispatcher_by_its_kind(extras, monkeypatch):
    monkeypatch.setenv("D9D_DISPATCHER", "dense")
    layer = MoELayer(TopKRouter(8, 4, 2), GroupedSwiGLU(4, 8, 6)).double()
    x = torch.randn(5, 8, dtype=torch.float64)
    expected = layer(x)
    layer.dispatcher = dispatchers.choose(None, DispatchNeed(ranks=1)).config.build(4, None)
    assert isinstance(layer.dispatcher, extras.DenseDispatcher)
    torch.testing.assert_close(layer(x), expected)
    with pytest.raises(ValueError, match="'dense'.* has all experts on one rank"):
        dispatchers.choose(None, DispatchNeed(ranks=2))


def test_a_leaf_of_the_state_graph_by_its_import_path(extras):
    mapper = mapper_from_toml('[[step]]\nkind = "extras:Negate"\nname = "a"\n')
    [group] = mapper.bind(["a", "b"])
    tensors = {"a": torch.ones(2)}
    assert torch.equal(group.mapper.apply(tensors)["a"], -torch.ones(2))
