"""Classification by learnt heads, by names of classes, and with replacements for missing modalities."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from task_samples import identity_model, make_samples
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.core.errors import ConfigError, DataError
from polyfed.data.samples import Batch, Samples
from polyfed.data.view import DataContext
from polyfed.losses.classification import class_separation, margin_cross_entropy
from polyfed.models.heads import LinearHead, NamesHead, NonNegativeHead
from polyfed.models.model import ModelSettings
from polyfed.tasks.classification import Classification
from polyfed.tasks.imputations import Imputer, LeaveOut, Neighbour, Placeholder, PresentEmbeddings, Zero, embeddings_of
from polyfed.tasks.task import Joint
from small_federations import bag, resnet, words


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


# ---- by the names of classes


NAMES = ("dog", "night_owl", "cat")
TASK = Classification.model_validate({"names": {"template": "a drawing of a {}!", "temperature": 0.5}, "margin": 0.25})


def samples_of(x: Tensor, labels: list[int], names: tuple[str, ...] | None = NAMES) -> Samples:
    rows, classes = torch.arange(len(labels)), {} if names is None else {"label": names}
    return make_samples({"image": x}, {"image": rows}, rows, {"label": torch.tensor(labels)}, classes)


def model_and_head(folder: Path, samples: Samples) -> Any:
    settings: Any = {"dim": 8, "encoders": {"image": resnet(), "text": bag(words(8, 200))}}
    torch.manual_seed(0)
    head = TASK.head(8, samples)
    return ModelSettings.model_validate(settings).build({"own": head}, DataContext(folder)).eval(), head


def test_scores_are_cosines_with_the_texts_of_the_classes(tmp_path: Path) -> None:
    samples = samples_of(torch.randn(5, 3, 16, 16), [0, 2, 1, 1, 0])
    model, head = model_and_head(tmp_path, samples)
    assert head.texts == ("a drawing of a dog!", "a drawing of a night owl!", "a drawing of a cat!")
    assert not head.state_dict()
    batch: Batch = samples.batch(torch.arange(5))
    scores = TASK.scores(model, head, batch)
    for row, x in enumerate(model.embed("image", batch.inputs["image"])):
        for number in range(3):
            text = model.embed("text", head.inputs[number : number + 1])[0]
            cosine = float((x * text).sum() / (x.norm() * text.norm()))
            assert float(scores[row, number]) == pytest.approx(cosine / 0.5, abs=1e-5)
    labels = samples.targets["label"]
    raised = scores - 0.25 * F.one_hot(labels, 3)
    losses = [-math.log(float(one.softmax(0)[label])) for one, label in zip(raised, labels, strict=True)]
    assert float(TASK.loss(model, head, batch)) == pytest.approx(sum(losses) / 5, rel=1e-5)
    metrics = TASK.evaluate(model, head, samples, batch_size=2)
    assert metrics["classes"] == 3
    assert metrics["accuracy"] == pytest.approx(100 * float((scores.argmax(1) == labels).double().mean()))
    TASK.loss(model, head, batch).backward()
    assert all(value.grad is not None for name, value in model.named_parameters() if "text" in name)


def test_samples_may_lack_the_modality_of_names() -> None:
    assert TASK.own_modalities == {"text"}
    assert not Classification().own_modalities
    joint: Any = {"tasks": [TASK, "retrieval"]}
    assert not Joint.model_validate(joint).own_modalities  # the other reads texts of samples
    assert TASK.is_per_sample


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"names": {"template": "a photo"}}, r"names\.template: template 'a photo' has no {} for"),
        ({"names": {}, "non_negative": True}, "non_negative"),
        ({"names": {}, "separation": 0.5}, "separation"),
        ({"names": {}, "bias": False}, "bias"),
        ({"names": {}, "classes": 4}, "classes"),
        ({"names": {}, "modality": "text"}, r"modality is 'text', which reads names \(names.modality\)"),
    ],
)
def test_settings_without_effect_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Classification(**settings)


def test_classes_need_names_and_the_model_an_encoder_for_them(tmp_path: Path) -> None:
    x = torch.randn(2, 3, 16, 16)
    with pytest.raises(ConfigError, match=r"task\.names: target 'label' has no names of classes"):
        TASK.head(8, samples_of(x, [0, 1], None))
    settings: Any = {"dim": 8, "encoders": {"image": resnet()}}
    with pytest.raises(ConfigError, match=r"task\.names\.modality is 'text', of which the model has no encoder"):
        ModelSettings.model_validate(settings).build({"own": NamesHead(NAMES, "text", 1.0)}, DataContext(tmp_path))


# ---- replacements for the embedding of a modality that a sample lacks


IMAGE = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 3.0]])
TEXT = torch.tensor([[4.0, 2.0], [0.0, 6.0]])
THERE = {"image": (IMAGE, [0, 1, 3]), "text": (TEXT, [0, 2])}
PARTS = {name: PresentEmbeddings(x, torch.tensor(samples)) for name, (x, samples) in THERE.items()}
"""Four samples: the first has both, the second and fourth an image, the third a text."""
BOTH = ("image", "text")


def made(imputation: object) -> Imputer:
    torch.manual_seed(0)
    return imputation.imputer(2, BOTH)  # type: ignore[attr-defined, no-any-return]


def test_left_out_is_the_mean_of_what_is_there_and_zero_halves_it() -> None:
    expected = torch.stack([(IMAGE[0] + TEXT[0]) / 2, IMAGE[1], TEXT[1], IMAGE[2]])
    assert torch.equal(made(LeaveOut())(PARTS, 4), expected)
    assert torch.equal(made(Zero())(PARTS, 4), expected / torch.tensor([[1.0], [2.0], [2.0], [2.0]]))


@pytest.mark.parametrize("imputation", [LeaveOut(), Zero(), Placeholder()])
def test_of_samples_that_lack_nothing_it_is_the_plain_mean(imputation: object) -> None:
    complete = {name: PresentEmbeddings(x, torch.arange(2)) for name, x in (("image", IMAGE[:2]), ("text", TEXT))}
    assert torch.equal(made(imputation)(complete, 2), torch.stack([IMAGE[:2], TEXT]).mean(0))


def test_a_placeholder_is_learnt() -> None:
    imputer = made(Placeholder())
    with torch.no_grad():
        imputer.get_parameter("vectors.text").copy_(torch.tensor([8.0, -2.0]))
    mean = imputer(PARTS, 4)
    assert torch.equal(mean[1], (IMAGE[1] + torch.tensor([8.0, -2.0])) / 2)
    assert torch.equal(mean[2], TEXT[1] / 2)
    mean.sum().backward()
    assert imputer.get_parameter("vectors.text").grad.tolist() == [1.0, 1.0]  # two samples, each halved
    assert imputer.get_parameter("vectors.image").grad.tolist() == [0.5, 0.5]


class Identity(torch.nn.Module):
    device = torch.device("cpu")

    def embed(self, modality: str, x: Tensor) -> Tensor:
        return x.float()

    represent = embed


def samples(image: Tensor, text: Tensor, labels: list[int], rows: dict[str, list[int]] | None = None):
    made = labelled(labels, modalities=BOTH)
    made.inputs["image"].values, made.inputs["text"].values = image, text
    return made if rows is None else replace(made, rows={name: torch.tensor(row) for name, row in rows.items()})


def test_the_nearest_public_sample_lends_its_other_side() -> None:
    imputer = made(Neighbour())
    public = samples(torch.tensor([[1.0, 1.0], [0.0, 5.0]]), torch.tensor([[7.0, 0.0], [1.0, 1.0]]), [0, 1])
    imputer.prepare(Identity(), public, 1)
    mean = imputer(PARTS, 4)
    torch.testing.assert_close(mean[1], (IMAGE[1] + torch.tensor([1.0, 1.0])) / 2)  # 0, 5 is nearest to 0, 2
    torch.testing.assert_close(mean[3], (IMAGE[2] + torch.tensor([7.0, 0.0])) / 2)
    torch.testing.assert_close(mean[2], (TEXT[1] + torch.tensor([0.0, 5.0])) / 2)
    assert not imputer.state_dict()
    with pytest.raises(ConfigError, match="imputation nearest takes a public set"):
        imputer.prepare(Identity(), None, 1)


def test_dropout_takes_one_modality_from_samples_that_have_several() -> None:
    imputer = made(LeaveOut(dropout=0.5)).train()
    embeddings = {"image": torch.ones(4000, 2), "text": torch.zeros(4000, 2)}
    values = imputer({name: PresentEmbeddings(x, torch.arange(4000)) for name, x in embeddings.items()}, 4000)[:, 0]
    counts = {value: int((values == value).sum()) for value in (0.0, 0.5, 1.0)}
    assert sum(counts.values()) == 4000
    assert counts[0.5] == pytest.approx(2000, abs=150)
    assert counts[0.0] == pytest.approx(1000, abs=120)
    assert torch.equal(imputer(PARTS, 4)[1:], made(LeaveOut())(PARTS, 4)[1:])
    assert torch.equal(imputer.eval()(PARTS, 4), made(LeaveOut())(PARTS, 4))


# ---- in the task


def test_the_head_of_the_task_has_the_imputer() -> None:
    task = Classification(imputation=Placeholder())
    data = samples(torch.randn(3, 2), torch.randn(3, 2), [0, 1, 2], {"image": [0, 1, -1], "text": [0, -1, 2]})
    head = task.head(2, data)
    batch = data.batch(torch.arange(3))
    parts = embeddings_of(Identity(), batch, BOTH)
    expected = F.cross_entropy(F.linear(head.imputer(parts, 3), head.weight, head.bias), batch.targets["label"])
    torch.testing.assert_close(task.loss(Identity(), head, batch), expected)
    assert not hasattr(Classification(modality="image").head(2, data), "imputer")


def test_samples_that_lack_what_is_classified_are_left_out() -> None:
    task = Classification(modality="image")
    data = samples(torch.eye(3, 2), torch.eye(3, 2), [0, 1, 0], {"image": [0, -1, 2], "text": [0, 1, 2]})
    head = task.head(2, data)
    assert task.evaluate(Identity(), head, data, batch_size=2)["n"] == 2
    batch = data.batch(torch.tensor([0, 1, 2]))
    expected = F.cross_entropy(head(batch.inputs["image"][[0, 2]]), torch.tensor([0, 0]))
    torch.testing.assert_close(task.loss(Identity(), head, batch), expected)
    nothing = task.loss(Identity(), head, data.batch(torch.tensor([1])))
    assert (float(nothing), nothing.requires_grad) == (0.0, False)


def test_metrics_are_given_by_pattern_of_modalities_and_by_each_alone() -> None:
    right, wrong = [5.0, 0.0], [0.0, 5.0]
    image, text = torch.tensor([right, right, wrong, wrong]), torch.tensor([right, right, wrong, right])
    data = samples(image, text, [0, 0, 0, 0], {"image": [0, 1, -1, 3], "text": [0, -1, 2, -1]})
    task, each = Classification(), Classification(given="each")
    head = Classification(classes=2).head(2, data)
    with torch.no_grad():
        head.weight.copy_(torch.eye(2))
        head.bias.zero_()
    actual = task.evaluate(Identity(), head, data, batch_size=3)
    assert actual["accuracy"] == 50.0
    expected = {"accuracy": {"image_text": 100.0, "image": 50.0, "text": 0.0}}
    expected["n"] = {"image_text": 1.0, "image": 2.0, "text": 1.0}
    given = {f"{name}_given_{pattern}": value for name, own in expected.items() for pattern, value in own.items()}
    assert {name: value for name, value in actual.items() if "given" in name} == given
    actual = each.evaluate(Identity(), head, data, batch_size=3)
    assert (actual["accuracy_given_image"], actual["n_given_image"]) == (pytest.approx(200 / 3), 3.0)
    assert (actual["accuracy_given_text"], actual["n_given_text"]) == (50.0, 2.0)


def test_a_setting_of_several_modalities_has_no_effect_on_one() -> None:
    with pytest.raises(ConfigError, match="imputation has no effect with modality: image"):
        Classification(modality="image", imputation=Zero())
