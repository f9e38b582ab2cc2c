"""Heads of classes, of one embedding and of several."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from polyfed.models.heads import FusedHead, NonNegativeHead, SimilarityHead
from polyfed.models.model import Model


def test_non_negative_head_uses_positive_weights_and_scale():
    head = NonNegativeHead(2, 2)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[1.0, -1.0], [0.5, 2.0]]))
    # scale 128: 128 * (1 * 2 + 0 * 3) and 128 * (0.5 * 2 + 2 * 3)
    assert head(torch.tensor([[2.0, 3.0]])).tolist() == [[256.0, 896.0]]
    assert head.positive_weight.tolist() == [[1.0, 0.0], [0.5, 2.0]]


def test_every_weight_of_the_non_negative_head_can_learn_from_the_start():
    head = NonNegativeHead(16, 5, scale=1.0)
    F.cross_entropy(head(torch.randn(8, 16)), torch.arange(8) % 5).backward()
    assert (head.weight > 0).all()
    assert (head.weight.grad != 0).all()


def test_cosines_with_classes_are_in_full_precision_under_autocast():
    vectors, x = F.normalize(torch.randn(30, 64) + 2, dim=-1), torch.randn(8, 64) + 1
    head = SimilarityHead(vectors, 0.01)
    with torch.autocast("cpu", torch.bfloat16):
        scores = head(x)
        halves = SimilarityHead(vectors.bfloat16(), 0.01)(x.bfloat16())
    torch.testing.assert_close(scores, F.normalize(x, dim=-1) @ vectors.T / 0.01)
    torch.testing.assert_close(halves, F.normalize(x.bfloat16().float(), dim=-1) @ vectors.bfloat16().float().T / 0.01)


def normed(row):
    """Zero mean, unit variance, in float64."""
    mean = sum(row) / len(row)
    variance = sum((x - mean) ** 2 for x in row) / len(row)
    return [(x - mean) / math.sqrt(variance + 1e-5) for x in row]


def naive(head, embeddings):
    """Logits by a loop over samples, from the formula."""
    weights = [(layer.weight.double().tolist(), layer.bias.double().tolist()) for layer in (head.hidden, head.output)]
    result = []
    for rows in zip(*(e.double().tolist() for e in embeddings), strict=True):
        parts = [normed(row) for row in rows]
        product = [math.prod(values) for values in zip(*parts, strict=True)]
        joined = [x for part in parts for x in part]
        h = {"product": product, "concat": joined, "both": joined + product}[head.fusion]
        if len(parts) == 1:
            h = parts[0]
        (w1, b1), (w2, b2) = weights
        z = [sum(a * x for a, x in zip(row, h, strict=True)) + b for row, b in zip(w1, b1, strict=True)]
        z = [0.5 * x * (1 + math.erf(x / math.sqrt(2))) for x in z]
        result.append([sum(a * x for a, x in zip(row, z, strict=True)) + b for row, b in zip(w2, b2, strict=True)])
    return torch.tensor(result)


@pytest.mark.parametrize("fusion", ["product", "concat", "both"])
@pytest.mark.parametrize("modalities", [1, 2, 3])
def test_logits_equal_a_loop_over_the_samples(fusion, modalities):
    torch.manual_seed(0)
    head = FusedHead(6, modalities, 4, fusion=fusion, hidden=5)
    embeddings = [torch.randn(3, 6) * (k + 1) for k in range(modalities)]
    logits = head(embeddings)
    assert logits.shape == (3, 4)
    assert head.answers == 4
    torch.testing.assert_close(logits, naive(head, embeddings).float(), rtol=1e-4, atol=1e-5)


def test_dropout_is_active_in_training_only():
    torch.manual_seed(3)
    head = FusedHead(16, 2, 3, fusion="both", hidden=16, dropout=0.5)
    pair = [torch.randn(4, 16), torch.randn(4, 16)]
    assert not torch.equal(head(pair), head(pair))
    head.eval()
    assert torch.equal(head(pair), head(pair))


def test_gradients_reach_every_embedding_and_every_weight():
    torch.manual_seed(4)
    head = FusedHead(6, 2, 3, fusion="both", hidden=4)
    pair = [torch.randn(5, 6, requires_grad=True) for _ in range(2)]
    nn.functional.cross_entropy(head(pair), torch.tensor([0, 1, 2, 0, 1])).backward()
    assert all(value.grad is not None and value.grad.abs().sum() > 0 for value in (*pair, *head.parameters()))


def test_what_a_model_exchanges_follows_changes_of_its_parts():
    model = Model({"image": nn.Linear(2, 2)}, {}, 2)
    for change in (
        lambda: None,
        lambda: model.encoders.update({"image": nn.Linear(2, 3)}),
        lambda: model.extras.update({"more": nn.PReLU()}),
    ):
        change()
        live = {name: id(value) for name, value in model.exchanged(live=True).items()}
        assert live == {name: id(value) for name, value in model.state_dict(keep_vars=True).items()}
