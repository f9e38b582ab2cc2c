"""Metrics with their conditions and chance."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from polyfed.data.samples import Samples
from polyfed.models.model import Model
from polyfed.reporting.metrics import chance_of, chance_recall, find_recalls, is_context, scale_of
from polyfed.tasks.classification import Classification
from polyfed.tasks.retrieval import PairRetrieval


@given(gallery=st.integers(1, 60), data=st.data())
def test_chance_is_the_hypergeometric_share(gallery, data):
    positives = data.draw(st.integers(1, gallery))
    cutoff = data.draw(st.integers(1, gallery))
    misses = math.comb(gallery - positives, cutoff) / math.comb(gallery, cutoff)
    assert chance_recall(gallery, positives, cutoff) == pytest.approx(100 * (1 - misses))


def test_chance_of_known_protocols():
    assert chance_recall(5000, 1, 10) == pytest.approx(0.2)
    assert chance_recall(25_000, 5, 1) == pytest.approx(0.02)
    assert chance_recall(3, 1, 10) == 100.0
    assert math.isnan(chance_recall(math.nan, 1, 1))


def evaluate(task, labels=None):
    rows = torch.arange(8)
    values = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    look_up = type("Rows", (), {"__call__": lambda self, rows, generator=None: values[rows]})()
    samples = Samples(
        inputs={"image": look_up, "my_text": look_up},
        rows={"image": rows // 2, "my_text": rows},
        items=rows // 2,
        targets={"label": rows % 3 if labels is None else labels},
        ids=[],
        classes={},
    )
    model = Model({"image": nn.Linear(4, 4), "my_text": nn.Linear(4, 4)}, {}, 4)
    return task.evaluate(model, task.head(4, samples), samples, batch_size=8)


@pytest.mark.parametrize("folds", [(1,), (2,), (2, 1)])
def test_every_recall_of_the_retrieval_task_is_found_with_its_context(folds):
    metrics = evaluate(PairRetrieval(between=("image", "my_text"), folds=folds, cutoffs=(1, 3)))
    result = find_recalls(metrics)
    assert [recall.name for recall in result] == [name for name in metrics if "_r@" in name]
    assert len(result) == 4 * len(folds)
    for recall in result:
        assert recall.folds == {"": folds[0], "full": 1, "2fold": 2}[recall.protocol]
        gallery, positives = {"image to my_text": (8, 2), "my_text to image": (4, 1)}[recall.direction]
        assert (recall.gallery, recall.positives) == (gallery / recall.folds, positives)
        assert recall.times_chance == pytest.approx(recall.value / recall.chance)
    assert {name for name in metrics if not is_context(name)} == {"r1_sum", *(recall.name for recall in result)}


def test_context_of_classification():
    metrics = evaluate(Classification(modality="image"))
    constants = {f"{one}_of_constant" for one in ("accuracy", "balanced_accuracy", "macro_f1")}
    assert {name for name in metrics if is_context(name)} == {"n", "items", "classes"} | constants


def test_recall_without_context_has_no_chance():
    (recall,) = find_recalls({"a_to_b_r@5": 20.0, "accuracy": 3.0})
    assert (recall.direction, recall.cutoff, recall.protocol) == ("a to b", 5, "")
    assert math.isnan(recall.chance)
    assert math.isnan(recall.times_chance)


def test_recalls_in_batches_are_found_with_their_own_gallery():
    metrics = evaluate(PairRetrieval(between=("image", "my_text"), cutoffs=(1,), in_batch=4))
    result = {recall.name: recall for recall in find_recalls(metrics)}
    assert set(result) == {name for name in metrics if "_r@" in name}
    inside = result["image_to_my_text_r@1_batch4"]
    assert (inside.protocol, inside.gallery) == ("batch4", 4.0)
    assert inside.positives == metrics["image_to_my_text_positives_per_query_batch4"]


def test_chance_of_classification_is_the_best_constant_on_that_test_set():
    metrics = evaluate(Classification(modality="image"), torch.tensor([3] * 6 + [40, 700]))
    assert chance_of("accuracy", metrics) == pytest.approx(75)
    assert chance_of("balanced_accuracy", metrics) == pytest.approx(100 / 3)
    assert chance_of("classification_accuracy", {f"classification_{name}": v for name, v in metrics.items()}) == 75


@pytest.mark.parametrize(
    ("metric", "metrics", "scale"),
    [
        ("accuracy", {}, 100),
        ("r1_sum", {"a_to_b_r@1": 1.0, "a_to_b_r@5": 1.0, "b_to_a_r@1": 1.0}, 200),
        ("retrieval_r1_sum", {"retrieval_a_to_b_r@1": 1.0, "retrieval_gallery_b": 3.0, "accuracy": 3.0}, 100),
    ],
)
def test_a_sum_of_recalls_is_on_a_scale_of_its_own(metric, metrics, scale):
    assert scale_of(metric, metrics) == scale
