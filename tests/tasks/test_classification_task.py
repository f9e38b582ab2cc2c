from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from task_samples import identity_model, make_samples
from torch import nn
from torch.nn import functional as F

from polyfed.core.errors import ConfigError, DataError
from polyfed.losses.classification import class_separation, margin_cross_entropy
from polyfed.models.heads import LinearHead, NonNegativeHead
from polyfed.tasks.classification import Classification


def labelled(labels, *, modalities=("image",), names=None, dim=6, target="label"):
    labels = torch.tensor(labels)
    rows = torch.arange(len(labels))
    generator = torch.Generator().manual_seed(0)
    inputs = {name: torch.randn(len(labels), dim, generator=generator) for name in modalities}
    classes = {target: names} if names else {}
    return make_samples(inputs, dict.fromkeys(modalities, rows), rows, {target: labels}, classes)


def fixed_head(weight):
    head = LinearHead(weight.shape[1], weight.shape[0], bias=False)
    head.weight.data.copy_(weight)
    return head


def test_scale_of_a_linear_head_is_refused():
    with pytest.raises(ConfigError, match="scale has no effect with non_negative: false; it is 128"):
        Classification(scale=128)


@pytest.mark.parametrize(
    ("task", "names", "classes"),
    [(Classification(), None, 4), (Classification(), (*"abcde",), 5), (Classification(classes=9), (*"abcde",), 9)],
)
def test_number_of_classes(task, names, classes):
    assert task.head(6, labelled([0, 3, 1], names=names)).weight.shape == (classes, 6)


def test_head_kinds():
    samples = labelled([0, 1])
    head = Classification(non_negative=True, scale=128, bias=False).head(6, samples)
    assert isinstance(head, NonNegativeHead)
    assert (head.scale, head.bias) == (128, None)
    assert isinstance(Classification().head(6, samples), LinearHead)


def test_loss_is_the_margin_loss_of_the_raw_embedding_plus_separation():
    samples = labelled([0, 2, 1, 1])
    model, batch = identity_model("image"), samples.batch(torch.arange(4))
    task = Classification(margin=4, separation=0.5)
    head = task.head(6, samples)
    expected = margin_cross_entropy(head(batch.inputs["image"]), batch.targets["label"], 4.0)
    expected = expected + 0.5 * class_separation(head.weight)
    loss = task.loss(model, head, batch)
    assert loss.item() == pytest.approx(expected.item())
    loss.backward()
    assert model.encoders["image"].weight.grad is not None
    assert head.weight.grad is not None


def test_several_modalities_are_averaged():
    samples = labelled([0, 1, 2], modalities=("image", "text"))
    batch, head = samples.batch(torch.arange(3)), fixed_head(torch.eye(3, 6))
    mean = (batch.inputs["image"] + batch.inputs["text"]) / 2
    model = identity_model("image", "text")
    loss = Classification().loss(model, head, batch).item()
    assert loss == pytest.approx(F.cross_entropy(head(mean), batch.targets["label"]).item())
    only = Classification(modality="text").loss(model, head, batch).item()
    assert only == pytest.approx(F.cross_entropy(head(batch.inputs["text"]), batch.targets["label"]).item())


def test_a_sample_counts_by_the_modalities_that_it_has():
    samples = labelled([0, 1, 2], modalities=("image", "text"))
    samples = replace(samples, rows={"image": torch.tensor([0, -1, 2]), "text": torch.tensor([0, 1, -1])})
    model, batch = identity_model("image", "text"), samples.batch(torch.arange(3))
    image, text = batch.inputs["image"], batch.inputs["text"]
    expected = torch.stack([(image[0] + text[0]) / 2, text[1], image[2]])
    assert torch.allclose(Classification().feature(model, Classification().head(6, samples), batch), expected)
    assert torch.equal(Classification(modality="image").feature(model, None, batch.having("image")), image[[0, 2]])


def test_metrics_equal_a_loop_over_the_samples():
    labels = [0, 1, 1, 2, 2, 2, 3, 0]
    samples = labelled(labels)
    weight = torch.randn(4, 6, generator=torch.Generator().manual_seed(5))
    metrics = Classification().evaluate(identity_model("image"), fixed_head(weight), samples, batch_size=3)
    logits = (samples.inputs["image"].values @ weight.T).tolist()
    hits = [p == t for p, t in zip([row.index(max(row)) for row in logits], labels, strict=True)]
    losses = [math.log(sum(math.exp(z) for z in row)) - row[t] for row, t in zip(logits, labels, strict=True)]
    assert metrics["accuracy"] == pytest.approx(100 * sum(hits) / 8)
    assert metrics["loss"] == pytest.approx(sum(losses) / 8, rel=1e-5)
    by_class = [[h for h, t in zip(hits, labels, strict=True) if t == c] for c in range(4)]
    assert metrics["balanced_accuracy"] == pytest.approx(100 * sum(sum(h) / len(h) for h in by_class) / 4)
    assert (metrics["n"], metrics["classes"]) == (8.0, 4.0)
    assert "top5" not in metrics


def test_top5_from_ten_classes_on():
    samples = labelled([0, 9, 3], dim=10)
    model, head = identity_model("image", dim=10), fixed_head(torch.eye(10))
    metrics = Classification().evaluate(model, head, samples, batch_size=2)
    expected = [t in row.topk(5).indices for row, t in zip(samples.inputs["image"].values, [0, 9, 3], strict=True)]
    assert metrics["top5"] == pytest.approx(100 * sum(expected) / 3)


def test_constant_head_scores_nothing_and_nan_neither():
    samples, model = labelled([0, 1, 0, 0]), identity_model("image")
    assert Classification().evaluate(model, fixed_head(torch.zeros(2, 6)), samples, batch_size=4)["accuracy"] == 0
    metrics = Classification().evaluate(model, fixed_head(torch.full((2, 6), math.nan)), samples, batch_size=4)
    assert metrics["accuracy"] == 0
    assert math.isnan(metrics["loss"])


def test_model_and_head_are_left_in_their_modes_and_only_the_modality_is_loaded():
    samples = labelled([0, 1, 2], modalities=("image", "text"))
    model, head = identity_model("image", "text"), nn.Sequential(nn.Dropout(0.9))
    head.weight = nn.Parameter(torch.zeros(6, 6))
    model.eval()
    first = Classification(modality="text").evaluate(model, head, samples, batch_size=2)
    assert Classification(modality="text").evaluate(model, head, samples, batch_size=2) == first
    assert head.training
    assert head[0].training
    assert not model.training
    assert samples.inputs["image"].asked == []


def test_errors_name_what_is_wrong():
    samples, model = labelled([0, 1, 5]), identity_model("image")
    empty = samples.subset(torch.empty(0, dtype=torch.int64))
    for task, given, message in (
        (Classification(target="answer"), samples, r"target 'answer' is not among .*'label'"),
        (Classification(modality="text"), samples, r"cannot use \['text'\] of samples"),
        (Classification(classes=3), samples, "labels from 0 to 5"),
        (Classification(), labelled([0, -1]), "labels from -1"),
    ):
        with pytest.raises(ConfigError, match=message):
            task.head(6, given)
    for head, given, error, message in (
        (fixed_head(torch.zeros(3, 6)), samples, DataError, "label 5, but the head has 3"),
        (fixed_head(torch.zeros(6, 6)), empty, DataError, "no samples"),
        (None, samples, TypeError, "head"),
    ):
        with pytest.raises(error, match=message):
            Classification().evaluate(model, head, given, batch_size=2)
