"""Replacements for the embedding of a modality that a sample lacks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from polyfed.core.errors import ConfigError
from polyfed.tasks.classification import Classification
from polyfed.tasks.imputations import Imputer, LeaveOut, Neighbour, Placeholder, PresentEmbeddings, Zero, embeddings_of

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
    from test_classification_task import labelled

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
