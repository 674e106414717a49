import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

from d9d.loop.optim import AdamW, AdamWConfig, _adamw, decay_groups
from d9d.mesh.testing import run_world


def parameters(dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a.weight": (5, 3), "a.bias": (5,), "scale": (), "b.weight": (2, 3, 4), "empty": (0, 4)}
    return {
        name: parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        for name, shape in shapes.items()
    }


def parameter(tensor):
    """A parameter whose gradient may have another dtype, as GradientSync leaves it."""
    made = nn.Parameter(tensor)
    made.grad_dtype = None
    return made


def random_gradients(named, step, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1000 + step)
    for parameter in named.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype)


HYPER = {"lr": 3e-2, "betas": (0.9, 0.97), "eps": 1e-7}


@pytest.mark.parametrize("chunk_bytes", [256 << 20, 40])
def test_equals_torch_in_fp64_whatever_the_chunks(monkeypatch, chunk_bytes):
    monkeypatch.setattr(_adamw, "_CHUNK_BYTES", chunk_bytes)
    ours, theirs = parameters(), parameters()
    optimizer = AdamW(decay_groups(ours.items(), 0.3), **HYPER)
    oracle = torch.optim.AdamW(decay_groups(theirs.items(), 0.3), **HYPER)
    for step in range(25):
        random_gradients(ours, step)
        random_gradients(theirs, step)
        if step % 5 == 3:
            ours["a.bias"].grad = theirs["a.bias"].grad = None
        optimizer.step()
        oracle.step()
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter, theirs[name], rtol=1e-12, atol=1e-14)


def test_only_matrices_that_are_trained_decay():
    named = parameters()
    named["b.weight"].requires_grad_(requires_grad=False)
    groups = decay_groups(named.items(), 0.3)
    assert [(group["weight_decay"], [name for name, _ in group["params"]]) for group in groups] == [
        (0.3, ["a.weight", "empty"]),
        (0.0, ["a.bias", "scale"]),
    ]


def test_bf16_parameters_are_the_rounding_of_an_exact_fp32_run():
    narrow, wide = parameters(torch.bfloat16), parameters(torch.bfloat16)
    wide = {name: nn.Parameter(parameter.detach().float()) for name, parameter in wide.items()}
    optimizer = AdamW(narrow.items(), lr=1e-6, weight_decay=0.1)
    oracle = AdamW(wide.items(), lr=1e-6, weight_decay=0.1)
    for step in range(50):
        random_gradients(narrow, step, torch.float32)
        random_gradients(wide, step, torch.float32)
        optimizer.step()
        oracle.step()
    for name, parameter in narrow.items():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, wide[name].bfloat16())
        assert torch.equal(optimizer.named_state()[f"{name}.master"], wide[name])


def test_a_thousand_updates_below_the_resolution_of_bf16_add_up():
    weight = parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = AdamW([("x", weight)], lr=1e-4, weight_decay=0.0)
    for _ in range(1000):
        weight.grad = torch.ones(4, dtype=torch.float32)
        optimizer.step()
    torch.testing.assert_close(weight.float(), torch.full((4,), 0.9), rtol=0, atol=2**-9)


@pytest.mark.parametrize("moments", ["bfloat16", "float32", "float64"])
def test_moments_are_kept_in_the_dtype_asked_for(moments):
    named, exact = parameters(torch.float32), parameters(torch.float32)
    optimizer = AdamWConfig(moments=moments).build(named.items())
    oracle = AdamWConfig().build(exact.items())
    for step in range(10):
        random_gradients(named, step, torch.float32)
        random_gradients(exact, step, torch.float32)
        optimizer.step()
        oracle.step()
    kept = {value.dtype for name, value in optimizer.named_state().items() if "exp" in name}
    assert kept == {getattr(torch, moments)}
    for name, parameter in named.items():
        torch.testing.assert_close(parameter, exact[name], rtol=0, atol=1e-4 if moments == "bfloat16" else 1e-6)


def test_state_exists_before_the_first_step_and_a_loaded_one_continues_bit_equal():
    """Case 31: a fresh optimizer is a full template."""
    first, second = parameters(torch.bfloat16), parameters(torch.bfloat16, seed=1)
    one, two = AdamW(first.items()), AdamW(second.items())
    assert len(two.named_state()) == 4 * len(second)
    for step in range(3):
        random_gradients(first, step, torch.float32)
        one.step()
    for name, value in one.named_state().items():
        two.named_state()[name].copy_(value)
    for name, parameter in first.items():
        second[name].data.copy_(parameter.data)
    for named, optimizer in ((first, one), (second, two)):
        random_gradients(named, 3, torch.float32)
        optimizer.step()
    assert all(torch.equal(parameter, second[name]) for name, parameter in first.items())


def test_state_dict_round_trips_without_rounding_the_masters():
    first, second = parameters(torch.bfloat16), parameters(torch.bfloat16)
    one, two = AdamW(first.items(), lr=0.5), AdamW(second.items())
    random_gradients(first, 0, torch.float32)
    one.step()
    two.load_state_dict(one.state_dict())
    assert two.param_groups[0]["lr"] == 0.5
    for name, value in one.named_state().items():
        assert torch.equal(two.named_state()[name], value)
        assert two.named_state()[name].dtype == value.dtype
    with pytest.raises(ValueError, match=r"the state of 'a.weight' has"):
        two.load_state_dict({**one.state_dict(), "state": {}})


def test_parameters_without_names_and_integers_are_refused():
    with pytest.raises(ValueError, match="named_parameters"):
        AdamW(list(parameters().values()))
    with pytest.raises(ValueError, match=r"cannot train 'ids' of dtype torch.int64"):
        AdamW([("ids", torch.zeros(3, dtype=torch.int64))])


def sharded_and_plain():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    placements = {"a.weight": (Replicate(), Shard(0)), "b.weight": (Shard(2), Shard(1)), "a.bias": (Shard(0), Shard(0))}

    def place(name, tensor):
        return distribute_tensor(tensor, mesh, placements[name]) if name in placements else tensor

    whole = parameters()
    ours = {name: nn.Parameter(place(name, parameter.detach().clone())) for name, parameter in whole.items()}
    optimizer, oracle = AdamW(ours.items(), **HYPER), torch.optim.AdamW(whole.items(), weight_decay=0.1, **HYPER)
    for step in range(4):
        random_gradients(whole, step)
        for name, parameter in ours.items():
            parameter.grad = place(name, whole[name].grad.clone())
        optimizer.step()
        oracle.step()
    differences = {
        name: (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).sub(whole[name]).abs().sum()
        for name, parameter in ours.items()
    }
    layouts_follow = all(
        optimizer.named_state()[f"{name}.{key}"].placements == ours[name].placements
        for name in placements
        for key in ("exp_avg", "exp_avg_sq")
    )
    ours["a.weight"].grad = ours["a.weight"].grad.redistribute(placements=(Replicate(), Replicate()))
    try:
        optimizer.step()
    except ValueError as error:
        refused = str(error)
    return max(map(float, differences.values())), layouts_follow, refused


def test_dtensors_on_two_dims_uneven_and_plain_parameters_mixed():
    for difference, layouts_follow, refused in run_world(4, sharded_and_plain):
        assert difference < 1e-12
        assert layouts_follow
        assert "the gradient of 'a.weight' is laid out as" in refused


def test_two_parameters_of_one_name_are_refused():  # one would be missing from every checkpoint
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    with pytest.raises(ValueError, match="two parameters called 'w'"):
        AdamW([("w", parameter) for parameter in parameters])
    with pytest.raises(ValueError, match="two parameters called 'w'"):
        AdamW([{"params": [("w", parameter)]} for parameter in parameters])


def test_betas_outside_of_their_range_are_refused():
    with pytest.raises(ValueError, match=r"betas=\(0.9, 1.0\)"):
        AdamW([("w", nn.Parameter(torch.zeros(2)))], betas=(0.9, 1.0))
    with pytest.raises(ValueError, match="'betas' must be < 1.0"):
        AdamWConfig(betas=(1.0, 0.9))
