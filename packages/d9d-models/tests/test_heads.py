"""Heads against what they are made of, written out."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from d9d.mesh import DistContext, MeshConfig, materialize
from d9d.mesh.testing import run_world
from d9d.models import (
    EmbeddingHead,
    HeadConfig,
    LanguageModelingHead,
    SegmentedLanguageModelingHead,
    SegmentedTokenEmbedding,
    SequenceClassificationHead,
    TokenClassificationHead,
    TokenEmbedding,
    contrastive_loss,
    pool,
    token_entropies,
    token_log_probs,
)
from d9d.parallel import GradientSync, ShardPolicy, parallelize_fsdp, parallelize_replicate

SEGMENTS = {"base": 7, "added": 3}
POOLINGS = ["first", "last", "mean"]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def labels_of(*shape, classes):
    labels = torch.randint(classes, shape)
    labels.view(-1)[0] = -100
    return labels


def test_segments_are_one_vocabulary():
    segmented, whole = SegmentedLanguageModelingHead(4, SEGMENTS), LanguageModelingHead(4, 10)
    whole.weight.data = torch.cat([segment.weight.data for segment in segmented.segments.values()])
    assert [name for name, _ in segmented.named_parameters()] == ["segments.base.weight", "segments.added.weight"]
    hidden, labels = torch.randn(2, 5, 4), labels_of(2, 5, classes=10)
    torch.testing.assert_close(segmented(hidden, None).logits, whole(hidden, None).logits)
    found, wanted = segmented(hidden, labels).loss, whole(hidden, labels).loss
    torch.testing.assert_close(found.sum, wanted.sum)
    found.sum.backward()
    wanted.sum.backward()
    gradient = torch.cat([segment.weight.grad for segment in segmented.segments.values()])
    torch.testing.assert_close(gradient, whole.weight.grad)


def test_a_segmented_embedding_is_one_embedding_and_may_be_the_head():
    embedding, head = SegmentedTokenEmbedding(SEGMENTS, 4), SegmentedLanguageModelingHead(4, SEGMENTS)
    head.tie(embedding)
    ids = torch.arange(10)[None]
    table = torch.cat([segment.weight for segment in embedding.segments.values()])
    torch.testing.assert_close(embedding(ids), table[None])
    head(embedding(ids), ids).loss.sum.backward()
    whole = table.detach().requires_grad_()
    F.cross_entropy(F.embedding(ids[0], whole) @ whole.T, ids[0], reduction="sum").backward()
    gradient = torch.cat([segment.weight.grad for segment in embedding.segments.values()])
    torch.testing.assert_close(gradient, whole.grad)
    with pytest.raises(ValueError, match=r"the embedding has the segments \['x'\], the head \['base', 'added'\]"):
        head.tie(SegmentedTokenEmbedding({"x": 10}, 4))


@pytest.mark.parametrize("wrong", [-1, 10])
def test_ids_of_no_segment_are_refused(wrong):
    with pytest.raises(IndexError, match="index out of range"):
        SegmentedTokenEmbedding(SEGMENTS, 4)(torch.tensor([0, wrong]))


def test_labels_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"logits \(2, 5, 3\) need labels \(2, 5\), got \(5, 2\)"):
        TokenClassificationHead(4, 3)(torch.randn(2, 5, 4), torch.zeros(5, 2).long())


def test_scores_and_loss_of_a_head_are_capped_alike():
    config = HeadConfig(soft_cap=2.0, z_loss=0.1, label_smoothing=0.2, max_logits_bytes=100)
    head = LanguageModelingHead(4, 9, config=config)
    nn.init.normal_(head.weight)
    hidden, labels = torch.randn(2, 5, 4), labels_of(2, 5, classes=9)
    logits = head(hidden, None).logits
    torch.testing.assert_close(logits, 2.0 * torch.tanh(hidden @ head.weight.T / 2.0))
    wanted = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.2, reduction="sum")
    wanted += 0.1 * logits.logsumexp(-1).square()[labels != -100].sum()
    torch.testing.assert_close(head(hidden, labels).loss.sum, wanted)


@settings(deadline=None, max_examples=60)
@given(
    batch=st.integers(1, 4),
    length=st.integers(1, 6),
    seed=st.integers(0, 99),
    pooling=st.sampled_from(POOLINGS),
    masked=st.booleans(),
)
def test_pools_what_the_mask_counts(batch, length, seed, pooling, masked):
    torch.manual_seed(seed)
    hidden = torch.randn(batch, length, 3, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(batch, length) < 0.5 if masked else torch.ones(batch, length, dtype=torch.bool)
    with torch.no_grad():
        hidden[~mask] = torch.nan  # what does not count is not looked at
    rows = []
    for states, counts in zip(hidden.detach(), mask):
        counted = states[counts]
        row = {"first": counted[:1], "last": counted[-1:], "mean": counted}[pooling]
        rows.append(row.mean(0) if len(row) else torch.zeros(3, dtype=torch.float64))
    found = pool(hidden, mask if masked else None, pooling)
    torch.testing.assert_close(found, torch.stack(rows))
    [gradient] = torch.autograd.grad(found.sum(), hidden)
    torch.testing.assert_close(gradient.sum((1, 2)), mask.any(1) * torch.tensor(3.0, dtype=torch.float64))


@pytest.mark.parametrize("wrong", [torch.ones(2, 4, dtype=torch.bool), torch.ones(2, 5)])
def test_other_masks_are_refused(wrong):
    with pytest.raises(ValueError, match=r"hidden of shape \(2, 5, 3\) needs a bool mask \(2, 5\), got"):
        pool(torch.ones(2, 5, 3), wrong, "last")


def test_tokens_are_classified():
    head = TokenClassificationHead(4, 3)
    hidden, labels = torch.randn(2, 5, 4), labels_of(2, 5, classes=3)
    found = head(hidden, labels)
    torch.testing.assert_close(found.logits, head.scores(hidden))
    assert head(hidden).loss is None
    wanted = F.cross_entropy(found.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(found.loss.sum, wanted)
    assert found.loss.weight == 9
    assert head.to(torch.bfloat16)(hidden.bfloat16(), labels).loss.sum.dtype == torch.float32


@pytest.mark.parametrize("pooling", POOLINGS)
def test_sequences_are_classified_without_their_padding(pooling):
    head = SequenceClassificationHead(4, 3, pooling=pooling)
    hidden, labels = torch.randn(2, 5, 4), torch.tensor([2, 0])
    mask = torch.tensor([[True] * 3 + [False] * 2, [False] + [True] * 4])
    found = head(hidden, labels, mask_BS=mask)
    parts = [head(hidden[:1, :3], labels[:1]), head(hidden[1:, 1:], labels[1:])]
    torch.testing.assert_close(found.logits, torch.cat([part.logits for part in parts]))
    torch.testing.assert_close(found.loss.sum, parts[0].loss.sum + parts[1].loss.sum)
    assert found.loss.weight == 2


def test_dropout_is_for_training():
    head = SequenceClassificationHead(4, 3, dropout=0.9)
    hidden = torch.randn(2, 5, 4)
    torch.testing.assert_close(head.eval()(hidden).logits, head.scores(hidden[:, -1]))
    assert not torch.equal(head.train()(hidden).logits, head.eval()(hidden).logits)


def test_sequences_are_embedded():
    head = EmbeddingHead(4, projection=3, pooling="mean")
    hidden = torch.randn(2, 5, 4)
    torch.testing.assert_close(head(hidden), F.normalize(head.projection(hidden.mean(1)), dim=-1))
    assert list(EmbeddingHead(4).parameters()) == []
    plain = EmbeddingHead(4, normalize=False, pooling="last")
    torch.testing.assert_close(plain(hidden), hidden[:, -1])
    nothing = torch.zeros(2, 5, dtype=torch.bool)
    assert not EmbeddingHead(4)(hidden, mask_BS=nothing).any()


def test_the_contrastive_loss_is_the_cross_entropy_of_scores():
    queries, documents = (torch.randn(n, 4, dtype=torch.float64, requires_grad=True) for n in (3, 5))
    scores = queries @ documents.T / 0.1
    found = contrastive_loss(queries, documents, temperature=0.1)
    wanted = F.cross_entropy(scores, torch.arange(3), reduction="sum")
    torch.testing.assert_close(found.sum, wanted)
    torch.testing.assert_close(
        torch.autograd.grad(found.sum, (queries, documents)), torch.autograd.grad(wanted, (queries, documents))
    )
    chosen = torch.tensor([4, -100, 0])
    found = contrastive_loss(queries, documents, chosen, temperature=0.1)
    torch.testing.assert_close(found.sum, F.cross_entropy(scores, chosen, reduction="sum"))
    assert found.weight == 2
    with pytest.raises(ValueError, match="temperature=0 must be greater than 0"):
        contrastive_loss(queries, documents, temperature=0)


class Tied(nn.Module):
    def __init__(self, segments):
        super().__init__()
        self.embedding = SegmentedTokenEmbedding(segments, 4) if segments else TokenEmbedding(10, 4)
        self.head = SegmentedLanguageModelingHead(4, segments) if segments else LanguageModelingHead(4, 10)
        self.head.tie(self.embedding)

    def forward(self, ids):
        return self.head(self.embedding(ids), ids).loss


def tied_gradients(segments):
    """Of one model, laid out in ways that keep a step's gradient."""
    found = []
    for kind in ("replicate", "shard"):
        with DistContext.launch(MeshConfig(**{kind: 2}), "cpu") as context:
            with torch.device("meta"):
                model = Tied(segments).double()
            dense = context.mesh("dense")
            if kind == "shard":
                policy = ShardPolicy(compute_dtype=None, reduce_dtype=None)
                parallelize_fsdp(model, dense["dp_cp_shard"], policy=policy)
            else:
                parallelize_replicate(model, dense["dp_replicate"])
            materialize(model, device=torch.device("cpu"), seed=0)
            ids = torch.arange(10).view(2, 5)[context.rank :][:1]
            if kind == "shard":
                model(ids).sum.backward()
            else:
                sync = GradientSync([list(model.parameters())], grad_dtype=torch.float64)
                with sync.microbatch(0, last=True):
                    model(ids).sum.backward()
                sync.finish()
            found.append({name: p.grad.full_tensor() for name, p in model.named_parameters()})
            weights = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
    return found, weights


@pytest.mark.parametrize("segments", [None, SEGMENTS])
def test_tied_heads_train_replicated_and_sharded(segments):
    for gradients, weights in run_world(2, tied_gradients, segments):
        table = torch.cat(list(weights.values())).requires_grad_()
        ids = torch.arange(10)
        F.cross_entropy(F.embedding(ids, table) @ table.T, ids, reduction="sum").backward()
        for found in gradients:
            torch.testing.assert_close(torch.cat(list(found.values())), table.grad, rtol=1e-12, atol=1e-12)


def fp32_gradient_of_a_bf16_head():
    """As `GradientSync` sums it, and the same in fp64."""
    with DistContext.launch(MeshConfig(), "cpu") as context:
        torch.manual_seed(0)
        head = LanguageModelingHead(32, 50, config=HeadConfig(max_logits_bytes=1 << 11)).bfloat16()
        parallelize_replicate(head, context.mesh("dense")["dp_replicate"])
        hidden, labels = torch.randn(64, 32).bfloat16(), torch.randint(50, (64,))
        sync = GradientSync([list(head.parameters())])
        for last in (False, True):
            with sync.microbatch(0, last=last):
                head(hidden, labels).loss.sum.backward()
        sync.finish()
        exact = head.weight.detach().double().requires_grad_()
        (2 * F.cross_entropy(hidden.double() @ exact.T, labels, reduction="sum")).backward()
        [weight] = head.parameters()
        return weight.grad.full_tensor(), exact.grad


def test_gradient_sync_gets_the_fp32_sum_of_a_bf16_head_unrounded():
    [(found, wanted)] = run_world(1, fp32_gradient_of_a_bf16_head)
    assert found.dtype == torch.float32
    assert (found.double() - wanted).norm() < 2**-8 * wanted.norm()
    assert not torch.equal(found, found.bfloat16().float())


class Scored(nn.Module):
    """Scores of each token, in one unit with its weight."""

    def __init__(self):
        super().__init__()
        self.head = LanguageModelingHead(4, 10)

    def forward(self, hidden, labels):
        log_probs = token_log_probs(hidden, self.head.weight, labels)
        return log_probs.sum() - 0.3 * token_entropies(hidden, self.head.weight).sum()


def sharded_token_gradients():
    with DistContext.launch(MeshConfig(shard=2), "cpu") as context:
        with torch.device("meta"):
            model = Scored().double()
        policy = ShardPolicy(compute_dtype=None, reduce_dtype=None)
        parallelize_fsdp(model, context.mesh("dense")["dp_cp_shard"], policy=policy)
        materialize(model, device=torch.device("cpu"), seed=0)
        torch.manual_seed(0)
        hidden = torch.randn(2, 7, 4, dtype=torch.float64, requires_grad=True)
        labels = torch.randint(10, (2, 7))
        model(hidden[context.rank], labels[context.rank]).backward()
        [weight] = model.parameters()
        exact = weight.full_tensor().detach().requires_grad_()
        log_probs = (hidden @ exact.T).log_softmax(-1)
        total = log_probs.gather(-1, labels[..., None]).sum() + 0.3 * (log_probs.exp() * log_probs).sum()
        wanted = torch.autograd.grad(total, [hidden, exact])
        return hidden.grad[context.rank], wanted[0][context.rank], weight.grad.full_tensor(), wanted[1]


def test_tokens_are_scored_under_a_sharded_weight():
    for of_hidden, wanted_of_hidden, of_weight, wanted_of_weight in run_world(2, sharded_token_gradients):
        torch.testing.assert_close(of_hidden, wanted_of_hidden, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(of_weight, wanted_of_weight, rtol=1e-12, atol=1e-12)
