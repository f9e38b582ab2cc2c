from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from task_samples import captioned, identity_model, make_samples
from torch import nn

from polyfed.core.errors import ConfigError, DataError
from polyfed.core.randomness import generator
from polyfed.losses.info_nce import InfoNCE, info_nce
from polyfed.losses.soft_contrastive import SoftContrastive
from polyfed.models.model import Model
from polyfed.tasks.retrieval import PairRetrieval


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.1}, "temperature has no effect"),
        ({"objective": "info_nce", "shift": 3}, "shift has no effect"),
        ({"between": ("image", "image")}, "twice"),
        ({"cutoffs": (5, 10)}, "lack 1"),
        ({"folds": (5, 5)}, "different numbers"),
        ({"folds": 0}, "at least 1"),
        ({"folds": ()}, "folds"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        PairRetrieval(**settings)


def test_heads_are_the_losses_with_their_scalars():
    samples = captioned(3, 1)
    soft = PairRetrieval(shift=2.0, scale=3.0).head(6, samples)
    assert isinstance(soft, SoftContrastive)
    assert {name: value.item() for name, value in soft.named_parameters()} == {"shift": 2.0, "scale": 3.0}
    fixed = PairRetrieval(objective="info_nce", temperature=0.5, learn_temperature=False).head(6, samples)
    assert isinstance(fixed, InfoNCE)
    assert not list(fixed.parameters())
    assert float(fixed.scale) == pytest.approx(2.0)


def test_loss_is_that_of_the_representations():
    samples = captioned(4, 2, noise=0.5)
    batch = samples.batch(torch.arange(8))
    model = identity_model("image", "text")
    task = PairRetrieval(objective="info_nce", temperature=0.5)
    u, v = (nn.functional.normalize(batch.inputs[name], dim=1) for name in ("image", "text"))
    assert task.loss(model, task.head(6, samples), batch).item() == pytest.approx(info_nce(u, v, 2.0).item())
    masked = PairRetrieval(objective="info_nce", temperature=0.5, mask_siblings=True)
    expected = info_nce(u, v, 2.0, samples.items)
    loss = masked.loss(model, masked.head(6, samples), batch)
    assert loss.item() == pytest.approx(expected.item())
    assert expected.item() < info_nce(u, v, 2.0).item()
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_perfect_model_scores_100_with_its_context():
    metrics = PairRetrieval().evaluate(identity_model("image", "text"), None, captioned(20, 5), batch_size=7)
    # the five equal captions of an image are all positives of it, so they do not compete
    recalls = {f"{way}_r@{k}": 100.0 for way in ("image_to_text", "text_to_image") for k in (1, 5, 10)}
    sizes = {"gallery_text": 100.0, "gallery_image": 20.0, "folds": 1.0, "r1_sum": 200.0}
    positives = {"image_to_text_positives_per_query": 5.0, "text_to_image_positives_per_query": 1.0}
    assert metrics == recalls | sizes | positives


def test_each_distinct_row_is_encoded_once_in_the_evaluation_view():
    samples = captioned(6, 5)
    PairRetrieval().evaluate(identity_model("image", "text"), None, samples, batch_size=4)
    assert samples.inputs["image"].asked == list(range(6))
    assert samples.inputs["text"].asked == list(range(30))
    assert samples.inputs["image"].training_views == 0


def test_folds_are_means_over_contiguous_items():
    samples, model = captioned(10, 2, noise=2.0), identity_model("image", "text")
    metrics = PairRetrieval(folds=(1, 2), cutoffs=(1,)).evaluate(model, None, samples, batch_size=8)
    parts = [samples.subset(part) for part in (torch.arange(10), torch.arange(10, 20))]
    halves = [PairRetrieval(cutoffs=(1,)).evaluate(model, None, part, batch_size=8) for part in parts]
    for name in ("image_to_text_r@1", "text_to_image_r@1", "gallery_text", "image_to_text_positives_per_query"):
        assert metrics[f"{name}_2fold"] == pytest.approx(sum(half[name] for half in halves) / 2)
    assert metrics["gallery_text_full"] == 20.0
    assert metrics["gallery_text_2fold"] == 10.0
    assert metrics["folds_2fold"] == 2.0
    firsts = [value for name, value in metrics.items() if "_r@1_" in name]
    assert len(firsts) == 4
    assert metrics["r1_sum"] == pytest.approx(sum(firsts))


def test_fold_seed_shuffles_items_reproducibly():
    samples, model = captioned(40, 1, noise=2.0), identity_model("image", "text")

    def score(seed):
        return PairRetrieval(folds=8, fold_seed=seed).evaluate(model, None, samples, batch_size=40)

    assert score(1) == score(1)
    assert len({score(seed)["r1_sum"] for seed in (None, 1, 2, 3)}) > 1


def test_model_and_batch_norm_are_left_as_they_were():
    norm = nn.BatchNorm1d(6)
    model = Model({"image": nn.Sequential(nn.Dropout(0.5), norm), "text": nn.Identity()}, {}, 6)
    model.encoders["text"].weight = nn.Parameter(torch.zeros(1))
    model.train()
    norm.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    PairRetrieval().evaluate(model, None, captioned(5, 2), batch_size=4)
    assert model.training
    assert model.encoders["image"][0].training
    assert not norm.training
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())


def test_any_two_modalities_will_do():
    values = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    rows = torch.arange(5)
    samples = make_samples({"audio": values, "imu": values}, {"audio": rows, "imu": rows}, rows)
    model = identity_model("audio", "imu")
    metrics = PairRetrieval(between=("audio", "imu")).evaluate(model, None, samples, batch_size=2)
    assert metrics["imu_to_audio_r@1"] == 100.0
    assert metrics["gallery_imu"] == 5.0


def test_errors_name_what_is_missing():
    samples = captioned(3, 1)
    empty = samples.subset(torch.empty(0, dtype=torch.int64))
    with pytest.raises(ConfigError, match="needs 'text'"):
        PairRetrieval().head(6, samples.only(["image"]))
    with pytest.raises(DataError, match="3 items cannot make 5 folds"):
        PairRetrieval(folds=5).evaluate(identity_model("image", "text"), None, samples, batch_size=2)
    with pytest.raises(DataError, match="0 items"):
        PairRetrieval().evaluate(identity_model("image", "text"), None, empty, batch_size=2)


# ---- right answers beyond the item, and recalls within batches


def matching(samples, matches):
    return replace(samples, matches=torch.tensor(matches))


def test_samples_that_match_are_right_answers_and_no_negatives():
    """Six images with pairwise equal texts: each is right for both, and neither is pushed from the other."""
    values = torch.eye(6)[torch.tensor([0, 0, 1, 1, 2, 2])]
    rows = torch.arange(6)
    samples = make_samples({"image": values, "text": values}, {"image": rows, "text": rows}, rows)
    model = identity_model("image", "text")
    assert PairRetrieval(folds=2).evaluate(model, None, samples, batch_size=4)["r1_sum"] < 200  # ties
    same = matching(samples, [5, 5, 3, 3, 9, 9])
    metrics = PairRetrieval().evaluate(model, None, same, batch_size=4)
    assert metrics["r1_sum"] == 200.0
    assert metrics["image_to_text_positives_per_query"] == 2.0
    batch = same.batch(torch.arange(6))
    task = PairRetrieval(objective="info_nce", temperature=0.5, mask_siblings=True)
    expected = info_nce(values, values, 2.0, same.matches)
    assert task.loss(model, task.head(6, same), batch).item() == pytest.approx(expected.item())


def test_folds_stay_over_items():
    """Siblings by ``matches`` may fall into different folds; each still has its own item there."""
    samples = matching(captioned(6, 1, noise=1.0), [0, 1, 2, 0, 1, 2])
    metrics = PairRetrieval(folds=2).evaluate(identity_model("image", "text"), None, samples, batch_size=4)
    assert metrics["gallery_text"] == 3.0
    assert metrics["image_to_text_positives_per_query"] == 1.0


def in_batches(samples, order, size):
    """Recalls at 1 both ways, each block of samples on its own, by loops; and the mean gallery."""
    unit = {name: nn.functional.normalize(inputs.values, dim=1) for name, inputs in samples.inputs.items()}
    sides = {name: unit[name][samples.rows[name]] for name in unit}
    blocks = [order[start : start + size] for start in range(0, len(order), size)]
    if len(blocks[-1]) < 2:
        blocks[-2:] = [blocks[-2] + blocks[-1]]
    hits, compared = {"image": 0, "text": 0}, 0
    for block in blocks:
        for source, target in (("image", "text"), ("text", "image")):
            for i in block:
                scores = {j: float(sides[source][i] @ sides[target][j]) for j in block}
                right = [scores[j] for j in block if samples.matches[j] == samples.matches[i]]
                wrong = [scores[j] for j in block if samples.matches[j] != samples.matches[i]]
                hits[source] += max(right) > max(wrong, default=-2.0)
        compared += len(block) ** 2
    return {name: 100 * count / len(order) for name, count in hits.items()}, compared / len(order)


@pytest.mark.parametrize(("size", "seed"), [(4, None), (5, 3), (3, None), (50, None), (12, 1)])
def test_recalls_within_batches_equal_loops(size, seed):
    samples = captioned(13, 1, noise=1.5)
    if size == 5:
        samples = matching(captioned(7, 2, noise=1.5), [0, 0, 1, 1, 2, 2, 0, 0, 4, 4, 5, 5, 6, 6])
    task = PairRetrieval(in_batch=size, fold_seed=seed, cutoffs=(1, 2))
    metrics = task.evaluate(identity_model("image", "text"), None, samples, batch_size=4)
    order = torch.randperm(len(samples), generator=generator(seed or 0, "batches")).tolist()
    recalls, gallery = in_batches(samples, order, size)
    assert metrics[f"image_to_text_r@1_batch{size}"] == pytest.approx(recalls["image"])
    assert metrics[f"text_to_image_r@1_batch{size}"] == pytest.approx(recalls["text"])
    for name in ("image", "text"):
        assert metrics[f"gallery_{name}_batch{size}"] == pytest.approx(gallery)
    assert metrics[f"image_to_text_r@2_batch{size}"] >= metrics[f"image_to_text_r@1_batch{size}"]
    assert metrics["r1_sum"] == pytest.approx(metrics["image_to_text_r@1"] + metrics["text_to_image_r@1"])


def test_samples_that_lack_one_of_both_modalities_are_left_out():
    full = captioned(6, 2, noise=0.5)
    text = full.rows["text"].clone()
    text[[1, 6]] = -1
    task, model = PairRetrieval(), identity_model("image", "text")
    lacking, complete = replace(full, rows={**full.rows, "text": text}), full.subset((text >= 0).nonzero()[:, 0])
    assert task.evaluate(model, None, lacking, batch_size=4) == task.evaluate(model, None, complete, batch_size=4)
    head = task.head(6, full)
    loss, expected = (task.loss(model, head, each.batch(torch.arange(len(each)))) for each in (lacking, complete))
    assert torch.equal(loss, expected)
