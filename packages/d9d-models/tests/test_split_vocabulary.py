"""A vocabulary split over ranks gives each of them the numbers of the whole."""

import sys
from pathlib import Path

import attrs
import pytest
import torch
import torch.distributed as dist

from d9d.mesh.testing import run_world
from d9d.models import VocabularyShard, linear_cross_entropy, token_cross_entropy, token_entropies, top_k_log_probs

sys.path.insert(0, str(Path(__file__).parent))
from loss_cases import case, logits_of, oracle, weighted_sum


def split_vocabulary(cases):
    """Every rank's numbers of several cases, each on the whole and on this rank's part."""
    group = dist.group.WORLD
    found = []
    for classes, size, options in cases:
        sample = case((7,), classes, size=size, bias=True, weighted=True)
        shard = VocabularyShard(group, classes)
        held = slice(shard.start, shard.start + shard.held)
        part = attrs.evolve(
            sample,
            weight=sample.weight.detach()[held].requires_grad_(),
            bias=sample.bias.detach()[held].requires_grad_(),
        )
        kept = {"bias_V": part.bias, "shard": shard, "max_logits_bytes": 3 * 8 * shard.length}
        loss = linear_cross_entropy(
            part.hidden, part.weight, part.labels, token_weights=part.token_weights, **kept, **options
        )
        whole = weighted_sum(oracle(sample, **options), sample)
        torch.testing.assert_close(loss.sum, whole, rtol=1e-12, atol=1e-12)
        assert_parts(loss.sum, whole, part, sample, held)
        losses = token_cross_entropy(part.hidden, part.weight, part.labels, **kept, **options)
        entropies = token_entropies(part.hidden, part.weight, **kept, soft_cap=options.get("soft_cap"))
        log_probs = logits_of(sample, options.get("soft_cap")).log_softmax(-1)
        upstream = torch.arange(1.0, 8, dtype=torch.float64)
        assert_parts(losses @ upstream, oracle(sample, **options) @ upstream, part, sample, held)
        assert_parts(entropies @ upstream, -(log_probs.exp() * log_probs).sum(-1) @ upstream, part, sample, held)
        best = top_k_log_probs(part.hidden, part.weight, 3, **kept, soft_cap=options.get("soft_cap"))
        torch.testing.assert_close(best.log_probs, log_probs.topk(3).values.detach())
        assert torch.equal(best.classes, log_probs.topk(3).indices)
        found.append(loss.sum.item())
    return found


def assert_parts(found, wanted, part, sample, held):
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    of_hidden, *of_part = torch.autograd.grad(found, part.operands)
    expected, *of_whole = torch.autograd.grad(wanted, sample.operands)
    torch.testing.assert_close(of_hidden, expected, rtol=1e-10, atol=1e-12)
    for mine, all_of_it in zip(of_part, of_whole, strict=True):
        torch.testing.assert_close(mine, all_of_it[held], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_vocabulary_split_over_ranks_is_the_whole(ranks):
    everything = {"label_smoothing": 0.1, "z_loss": 1e-2, "soft_cap": 3.0}
    # 5 classes on 4 ranks: two, two, one, none
    sizes = (6, 9)  # in chunks, and in the memory of the weight's gradient
    cases = [(classes, size, options) for classes in (5, 12, 13) for size in sizes for options in ({}, everything)]
    found = run_world(ranks, split_vocabulary, cases)
    assert all(rank == found[0] for rank in found)


def ranks_apart():
    """Ranks whose parts' gradients have memory of other kinds, or none, for the logits of all tokens."""
    group = dist.group.WORLD
    for is_apart in ({"transposed": True}, {"frozen": True}):
        sample = case((7,), 5, size=9)
        shard = VocabularyShard(group, 5)
        held = slice(shard.start, shard.start + shard.held)
        weight = sample.weight.detach()[held]
        if "transposed" in is_apart:  # a rank's one class, and none, are in one piece all the same
            weight = weight.T.contiguous().T
        part = attrs.evolve(sample, weight=weight.requires_grad_("frozen" not in is_apart or shard.held > 1))
        kept = {"shard": shard, "max_logits_bytes": 3 * 8 * shard.length}
        found = linear_cross_entropy(part.hidden, part.weight, part.labels, **kept).sum
        wanted = oracle(sample).sum()
        of_hidden, *of_part = torch.autograd.grad(found, part.operands)
        expected, of_whole = torch.autograd.grad(wanted, sample.operands)
        torch.testing.assert_close((found, of_hidden), (wanted, expected), rtol=1e-10, atol=1e-12)
        assert all(torch.allclose(x, of_whole[held], rtol=1e-10, atol=1e-12) for x in of_part)


def test_ranks_meet_though_some_have_memory_for_all_logits_and_others_not():
    run_world(4, ranks_apart)


def test_a_part_of_another_size_is_refused():
    [message] = run_world(1, refused_part)
    assert "rank 0 of 1 holds 4 of 4 classes, got a weight of 5" in message


def refused_part():
    shard = VocabularyShard(dist.group.WORLD, 4)
    try:
        linear_cross_entropy(torch.ones(2, 3), torch.ones(5, 3), torch.zeros(2).long(), shard=shard)
    except ValueError as error:
        return str(error)
    return ""
