"""Every flavour of the layer against a plain loop over tokens and experts in fp64, on one process and on gloo ranks."""

import attrs
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from d9d.mesh.testing import run_world
from d9d.moe import (
    BalanceLoss,
    ClampedSwiGLU,
    GroupedSwiGLU,
    GroupLimited,
    MoELayer,
    PlainGatedActivation,
    SelectedSoftmaxScoring,
    SigmoidScoring,
    SoftmaxScoring,
    SwiGLU,
    TopKRouter,
    ZLoss,
)

torch.set_num_threads(1)
HIDDEN, INTERMEDIATE, EXPERTS = 6, 5, 8
SCALE, BALANCE, Z = 2.5, 0.3, 0.1


# What is built


def qwen3(top_k):
    return MoELayer(TopKRouter(HIDDEN, EXPERTS, top_k), GroupedSwiGLU(EXPERTS, HIDDEN, INTERMEDIATE))


def mixtral_with_losses(top_k):
    losses = [BalanceLoss(coefficient=BALANCE), ZLoss(coefficient=Z)]
    router = TopKRouter(HIDDEN, EXPERTS, top_k, scoring=SoftmaxScoring(renormalize=False), losses=losses)
    return MoELayer(router, GroupedSwiGLU(EXPERTS, HIDDEN, INTERMEDIATE, fused=False))


def qwen2(top_k):
    shared = SwiGLU(HIDDEN, 4, fused=True)
    return MoELayer(
        TopKRouter(HIDDEN, EXPERTS, top_k, scoring=SoftmaxScoring(renormalize=False)),
        GroupedSwiGLU(EXPERTS, HIDDEN, INTERMEDIATE),
        shared=shared,
        shared_gate=True,
    )


def deepseek(top_k):
    router = TopKRouter(
        HIDDEN,
        EXPERTS,
        top_k,
        scoring=SigmoidScoring(),
        selection=GroupLimited(groups=4, top_groups=4 if top_k > 4 else 2),
        scale=SCALE,
        expert_bias=True,
        losses=[BalanceLoss(coefficient=BALANCE)],
        logits_in_fp32=True,
    )
    router.expert_bias.normal_(std=0.3)
    return MoELayer(router, GroupedSwiGLU(EXPERTS, HIDDEN, INTERMEDIATE), shared=SwiGLU(HIDDEN, 4))


def gpt_oss(top_k, *, fused=True):
    router = TopKRouter(HIDDEN, EXPERTS, top_k, scoring=SelectedSoftmaxScoring(), bias=True)
    activation = PlainGatedActivation(ClampedSwiGLU(limit=0.4), interleaved=True)
    experts = GroupedSwiGLU(EXPERTS, HIDDEN, INTERMEDIATE, activation=activation, bias=True, fused=fused)
    return MoELayer(router, experts)


def gpt_oss_apart(top_k):
    return gpt_oss(top_k, fused=False)


FLAVOURS = {f.__name__: f for f in (qwen3, mixtral_with_losses, qwen2, deepseek, gpt_oss, gpt_oss_apart)}


def build(flavour, top_k):
    torch.manual_seed(5)
    layer = FLAVOURS[flavour](top_k).double()
    with torch.no_grad():  # logits far enough apart for the loads to be uneven
        layer.router.weight.mul_(3)
    return layer


# What it is to compute: per token, without any of the package


def highest(values, count, among):
    return sorted(among, key=lambda e: -values[e].item())[:count]


def chosen_by(flavour, logits, top_k, expert_bias):
    everyone = range(EXPERTS)
    if flavour != "deepseek":
        return highest(logits, top_k, everyone)
    biased = logits.sigmoid() + expert_bias
    groups = [[e for e in everyone if e // 2 == g] for g in range(4)]
    of_group = torch.stack([sum(biased[e] for e in group) for group in groups])  # groups of 2: both count
    best = highest(of_group, 4 if top_k > 4 else 2, range(4))
    return highest(biased, top_k, [e for g in best for e in groups[g]])


def weighed(flavour, logits, chosen):
    match flavour:
        case "qwen3" | "gpt_oss" | "gpt_oss_apart":
            return logits[chosen].exp() / logits[chosen].exp().sum()
        case "mixtral_with_losses" | "qwen2":
            return logits[chosen].exp() / logits.exp().sum()
        case "deepseek":
            return SCALE * logits.sigmoid()[chosen] / logits.sigmoid()[chosen].sum()


def silu(x):
    return x / (1 + (-x).exp())


def expert_of(p, e, token):
    """An expert without weighing."""
    if "experts.down_bias" in p:
        if "experts.gate_up_proj" in p:
            both = p["experts.gate_up_proj"][e] @ token + p["experts.gate_up_bias"][e]
            gate, up = both[0::2], both[1::2]
        else:
            gate = p["experts.gate_proj"][e] @ token + p["experts.gate_bias"][e]
            up = p["experts.up_proj"][e] @ token + p["experts.up_bias"][e]
        gate, up = gate.clamp(max=0.4), up.clamp(-0.4, 0.4)
        hidden = gate / (1 + (-1.702 * gate).exp()) * (up + 1)
        return p["experts.down_proj"][e] @ hidden + p["experts.down_bias"][e]
    if "experts.gate_up_proj" in p:
        both = p["experts.gate_up_proj"][e] @ token
        gate, up = both[:INTERMEDIATE], both[INTERMEDIATE:]
    else:
        gate, up = p["experts.gate_proj"][e] @ token, p["experts.up_proj"][e] @ token
    return p["experts.down_proj"][e] @ (silu(gate) * up)


def shared_of(p, token):
    if "shared.gate_up_proj.weight" in p:
        gate, up = (p["shared.gate_up_proj.weight"] @ token).chunk(2)
        weight = 1 / (1 + (-(p["shared_gate.weight"][0] @ token)).exp())
    else:
        gate, up, weight = p["shared.gate_proj.weight"] @ token, p["shared.up_proj.weight"] @ token, 1.0
    return weight * (p["shared.down_proj.weight"] @ (silu(gate) * up))


def by_loop(flavour, p, x_BSH, top_k, *, mask_BS, ids_BSK=None, expert_bias=None):
    """The output, the sum of auxiliary losses, and the load."""
    load = torch.zeros(EXPERTS, dtype=torch.int64)
    rows, losses = [], [x_BSH.new_zeros(())]
    for b, sequence in enumerate(x_BSH):
        taken, mass = torch.zeros(EXPERTS, dtype=torch.float64), torch.zeros(EXPERTS, dtype=torch.float64)
        for s, token in enumerate(sequence):
            seen = token * mask_BS[b, s]
            row = shared_of(p, seen) if "shared.down_proj.weight" in p else torch.zeros_like(token)
            if mask_BS[b, s]:
                logits = p["router.weight"] @ token + p.get("router.bias", 0.0)
                chosen = chosen_by(flavour, logits, top_k, expert_bias) if ids_BSK is None else ids_BSK[b, s].tolist()
                for e, weight in zip(chosen, weighed(flavour, logits, chosen)):
                    row = row + weight * expert_of(p, e, token)
                    taken[e] += 1
                scores = logits.sigmoid() if flavour == "deepseek" else logits.exp()
                mass = mass + scores / scores.sum()
                if flavour == "mixtral_with_losses":
                    losses.append(Z * logits.exp().sum().log() ** 2)
            rows.append(row)
        if flavour in {"mixtral_with_losses", "deepseek"} and mask_BS[b].any():
            length = int(mask_BS[b].sum())
            losses.append(BALANCE * length * (EXPERTS / (top_k * length) * taken * mass / length).sum())
        load += taken.long()
    out = torch.stack(rows).view_as(x_BSH) if rows else x_BSH * 0
    return out, torch.stack(losses).sum(), load


def expected_of(flavour, layer, x, upstream, top_k, **options):
    """Output, load, and gradients by name, the input's as ''."""
    p = {name: w.detach().clone().requires_grad_() for name, w in layer.named_parameters()}
    leaves = {"": x.detach().clone().requires_grad_(), **p}
    out, auxiliary, load = by_loop(flavour, p, leaves[""], top_k, expert_bias=layer.router.expert_bias, **options)
    # What no token reached has no part in the output; its gradient is zero.
    total = (out * upstream).sum() + auxiliary + sum(0 * leaf.sum() for leaf in leaves.values())
    found = torch.autograd.grad(total, list(leaves.values()))
    return out.detach(), load, dict(zip(leaves, found))


def close(found, expected, name):
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, msg=lambda m: f"{name}: {m}")


# One process, experts chosen by the router


@pytest.mark.parametrize("flavour", FLAVOURS)
@settings(max_examples=8, deadline=None)
@given(
    top_k=st.integers(1, EXPERTS),
    batch=st.integers(1, 2),
    length=st.integers(1, 4),
    padding=st.sampled_from([0.0, 0.4, 1.0]),
    seed=st.integers(0, 99),
)
def test_layer_equals_a_loop(flavour, top_k, batch, length, padding, seed):
    layer = build(flavour, top_k)
    torch.manual_seed(seed)
    x = torch.randn(batch, length, HIDDEN, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(batch, length) >= padding
    upstream = torch.randn_like(x)
    out = layer(x, mask=mask) if padding else layer(x)
    out.backward(upstream)
    expected_out, load, gradients = expected_of(flavour, layer, x, upstream, top_k, mask_BS=mask)
    close(out, expected_out, "output")
    assert torch.equal(layer.expert_load, load)
    for name, parameter in [("", x), *layer.named_parameters()]:
        close(parameter.grad, gradients[name], name or "input")


# Ranks, with any routing


@attrs.frozen
class Case:
    flavour: str
    top_k: int
    tokens: tuple[int, ...]  # of each rank
    pattern: str
    padding: float
    seed: int

    def ids(self):
        """(all tokens, K)."""
        generator = torch.Generator().manual_seed(self.seed)
        total = sum(self.tokens)
        match self.pattern:
            case "all to the last experts":
                return torch.arange(EXPERTS - self.top_k, EXPERTS).expand(total, self.top_k)
            case "all to the first experts":
                return torch.arange(self.top_k).flip(0).expand(total, self.top_k)
        rows = [torch.randperm(EXPERTS, generator=generator)[: self.top_k] for _ in range(total)]
        return torch.stack(rows) if rows else torch.empty(0, self.top_k, dtype=torch.int64)


def cases(ranks):
    few = st.integers(0, 3)
    return st.builds(
        Case,
        flavour=st.sampled_from(sorted(FLAVOURS)),
        top_k=st.sampled_from([1, 2, 3, EXPERTS]),
        tokens=st.one_of(
            st.tuples(*[few] * ranks),
            st.integers(0, ranks - 1).map(lambda r: tuple(int(rank == r) for rank in range(ranks))),  # one token in all
        ),
        pattern=st.sampled_from(["any", "all to the last experts", "all to the first experts"]),
        padding=st.sampled_from([0.0, 0.5]),
        seed=st.integers(0, 99),
    )


def spread(layer):
    """Keep this rank's experts."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for name, parameter in list(layer.experts.named_parameters()):
        setattr(layer.experts, name, nn.Parameter(parameter.detach().chunk(ranks)[rank].clone()))
    layer.set_expert_group(dist.group.WORLD)


def check_on_ranks(batch):
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for case in batch:
        whole, layer = build(case.flavour, case.top_k), build(case.flavour, case.top_k)
        spread(layer)
        torch.manual_seed(case.seed)
        total = sum(case.tokens)
        x, ids = torch.randn(total, HIDDEN, dtype=torch.float64), case.ids()
        mask, upstream = torch.rand(total) >= case.padding, torch.randn_like(x)
        share = [tensor.split(case.tokens)[rank] for tensor in (x, mask, ids, upstream)]
        mine = share[0].clone().requires_grad_()
        out = layer(mine[None], mask=share[1][None], ids_TK=share[2])
        out.backward(share[3][None])

        # Each rank's tokens are one sequence; the loop's gradients add up over them.
        sums, load = {}, torch.zeros(EXPERTS, dtype=torch.int64)
        for r, parts in enumerate(zip(*(tensor.split(case.tokens) for tensor in (x, mask, ids, upstream)))):
            options = {"mask_BS": parts[1][None], "ids_BSK": parts[2][None]}
            expected = expected_of(case.flavour, whole, parts[0][None], parts[3][None], case.top_k, **options)
            if r == rank:
                close(out, expected[0], f"{case}: output")
                close(mine.grad, expected[2].pop("")[0], f"{case}: input")
            load += expected[1]
            for name in dict(whole.named_parameters()):
                sums[name] = sums.get(name, 0.0) + expected[2][name]
        for name, parameter in layer.named_parameters():
            if name.startswith("experts."):
                close(parameter.grad, sums[name].chunk(ranks)[rank], f"{case}: {name}")
            else:
                dist.all_reduce(parameter.grad)
                close(parameter.grad, sums[name], f"{case}: {name}")
        dist.all_reduce(layer.expert_load)
        assert torch.equal(layer.expert_load, load), case


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_any_routing_on_ranks_equals_a_loop(ranks):
    @settings(max_examples=2, deadline=None)
    @given(st.lists(cases(ranks), min_size=12, max_size=12))
    def run(batch):
        run_world(ranks, check_on_ranks, batch)

    run()
