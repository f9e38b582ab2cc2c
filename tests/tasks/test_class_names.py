"""Classification by the names of classes: a plain loop, what it reads of samples, and what it refuses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from task_samples import make_samples
from torch import Tensor
from torch.nn import functional as F

from polyfed.core.errors import ConfigError
from polyfed.data.samples import Batch, Samples
from polyfed.data.view import DataContext
from polyfed.models.heads import NamesHead
from polyfed.models.model import ModelSettings
from polyfed.tasks.classification import Classification
from polyfed.tasks.task import Joint
from small_federations import bag, resnet, words

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
