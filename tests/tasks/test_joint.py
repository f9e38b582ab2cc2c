from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from task_samples import captioned, identity_model

from polyfed import Experiment, open_run, run
from polyfed.core.errors import ConfigError
from polyfed.data.samples import Samples
from polyfed.tasks.classification import Classification
from polyfed.tasks.retrieval import PairRetrieval
from polyfed.tasks.task import Joint

BOTH = Joint(tasks=(PairRetrieval(cutoffs=(1,)), Classification(modality="image")), weights=(1.0, 0.5))


def labelled() -> Samples:
    samples = captioned(6, 2, noise=0.5)
    samples.targets["label"] = samples.items % 3  # type: ignore[index]
    return samples


def test_losses_add_with_their_weights() -> None:
    samples, model = labelled(), identity_model("image", "text")
    head, batch = BOTH.head(6, samples), samples.batch(torch.arange(12))
    own = [task.loss(model, head[name], batch) for name, task in BOTH.by_name.items()]
    assert list(head) == ["retrieval", "classification"]
    assert torch.allclose(BOTH.loss(model, head, batch), own[0] + 0.5 * own[1])


def test_metrics_carry_the_names_of_their_tasks() -> None:
    samples, model = labelled(), identity_model("image", "text")
    head = BOTH.head(6, samples)
    actual = BOTH.evaluate(model, head, samples, batch_size=5)
    for name, task in BOTH.by_name.items():
        alone = task.evaluate(model, head[name], samples, batch_size=5)
        assert {f"{name}_{metric}": value for metric, value in alone.items()}.items() <= actual.items()
    assert set(actual) <= set(BOTH.metric_names)
    assert BOTH.primary == "retrieval_r1_sum" in actual
    assert {"retrieval_r1_sum", "classification_accuracy"} <= actual.intervals().keys()


def test_tasks_of_one_name_have_distinct_names() -> None:
    labels = [Classification(target=target) for target in ("label", "topic")]
    names = ["classification-label", "classification-topic", "retrieval"]
    assert list(Joint(tasks=(*labels, PairRetrieval())).by_name) == names
    assert list(Joint(tasks=(labels[0], labels[0])).by_name) == ["classification-label-1", "classification-label-2"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tasks": ["retrieval"]}, "at least 2"),
        ({"tasks": ["retrieval", BOTH]}, "list its tasks here"),
        ({"tasks": ["retrieval", "classification"], "weights": [1]}, "2 numbers above 0"),
        ({"tasks": ["retrieval", "classification"], "weights": [1, 0]}, "2 numbers above 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Joint(**settings)


def test_a_participant_learns_several_tasks(tiny: dict[str, Any], tmp_path: Path) -> None:
    for participant in (tiny["server"], tiny["clients"]["paired"]):
        participant["task"] = ["retrieval", {"name": "classification", "modality": "image"}]
    tiny["clients"].pop("image")
    tiny["run"] |= {"rounds": 1, "evaluate_clients": True}
    finished = run(Experiment.load(tiny), tmp_path / "run")
    assert {"retrieval_r1_sum", "classification_accuracy"} <= set(finished.records.metric_names("paired-0"))
    again = open_run(tmp_path / "run")
    assert isinstance(again.server_model().task, Joint)
    (before,) = again.federation.server_model().heads.values()
    (after,) = again.server_model().model.heads.values()
    learnt = {name for name, value in after.state_dict().items() if not torch.equal(value, before.state_dict()[name])}
    assert {name.partition(".")[0] for name in learnt} == {"retrieval", "classification"}
