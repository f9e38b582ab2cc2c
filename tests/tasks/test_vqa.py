"""Answers to questions: head, loss and metrics; and in runs: as the server's task, a client's, and of a saved model."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from task_samples import identity_model, make_samples
from torch import nn
from torch.nn import functional as F

from polyfed import Experiment, run
from polyfed.core.errors import ConfigError, DataError
from polyfed.data.sources.questions import OTHER
from polyfed.models.heads import FusedHead
from polyfed.models.model import CachedModel, Model
from polyfed.runs.evaluation import evaluate_model
from polyfed.runs.opened import open_run
from polyfed.tasks.vqa import VQA, answer_loss, vote_scores
from small_federations import tiny_experiment

NAMES = ("yes", "no", "red", OTHER)
KINDS = ("truth", "colour", "other")


def asked(labels, *, kinds=None, modalities=("image", "text"), names=NAMES, guesses=None, votes=None, dim=6):
    """Two questions for each image, which share its row."""
    generator = torch.Generator().manual_seed(len(labels))
    n = len(labels)
    questions = torch.arange(n)
    rows = {name: questions if k else questions // 2 for k, name in enumerate(modalities)}
    inputs = {
        name: torch.randn(int(place.max()) + 1 if n else 1, dim, generator=generator) for name, place in rows.items()
    }
    targets, classes = {"answer": torch.tensor(labels)}, {"answer": names}
    if kinds is not None:
        targets |= {"kind": torch.tensor(kinds)}
        classes |= {"kind": KINDS}
    if guesses is not None:
        targets |= {"prior": torch.zeros(n, dtype=torch.int64), "kind_prior": torch.tensor(guesses)}
    if votes is not None:
        targets |= {"votes": torch.tensor(votes)}
    return make_samples(inputs, rows, questions // 2, targets, classes)


def built(task, samples, dim=6, seed=0):
    torch.manual_seed(seed)
    return task.head(dim, samples)


def evaluated(samples):
    return VQA().evaluate(identity_model("image", "text"), built(VQA(), samples), samples, batch_size=2)


@pytest.mark.parametrize("use", [[], ["text", "text"]])
def test_modalities_that_are_used_are_different_and_some(use):
    with pytest.raises(ConfigError, match="at least one"):
        VQA(use=use)


@pytest.mark.parametrize(("names", "answers"), [(NAMES, 3), (("yes", "no"), 2), ((OTHER, "no"), 2)])
def test_the_head_has_an_output_for_every_answer_but_not_for_all_others(names, answers):
    head = built(VQA(), asked([0, 1], names=names))
    assert isinstance(head, FusedHead)
    assert head.answers == answers


@pytest.mark.parametrize("use", [None, ("image",), ("text",), ("text", "image")])
def test_logits_are_those_of_the_head_on_the_embeddings_that_are_used(use):
    samples = asked([0, 1, 2, 0])
    task, model = VQA(use=use), identity_model("image", "text")
    head, batch = built(task, samples), samples.batch(torch.arange(4))
    expected = head([batch.inputs[name] for name in use or ("image", "text")])
    torch.testing.assert_close(task.scores(model, head, batch), expected)


def test_what_a_question_lacks_is_zeros_in_training_and_when_it_is_judged():
    samples = asked([0, 1, 1, 0])
    samples = replace(samples, rows=dict(samples.rows) | {"image": torch.tensor([0, -1, 1, -1])})
    task, model = VQA(hidden=8, fusion="both"), identity_model("image", "text")
    head, batch = built(task, samples).eval(), samples.batch(torch.arange(4))
    expected = head([batch.inputs["image"] * torch.tensor([1.0, 0.0, 1.0, 0.0])[:, None], batch.inputs["text"]])
    torch.testing.assert_close(task.scores(model, head, batch), expected)
    actual = task.evaluate(model, head, samples, batch_size=3)["loss"]
    assert actual == pytest.approx(float(F.cross_entropy(expected, samples.targets["answer"])), rel=1e-5)


def test_the_loss_equals_a_loop_over_answerable_questions():
    logits = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
    labels = [0, 3, 2, 1, 3, -1]
    losses = [
        math.log(sum(math.exp(z) for z in row)) - row[label]
        for row, label in zip(logits.double().tolist(), labels, strict=True)
        if 0 <= label < 3
    ]
    actual = answer_loss(logits, torch.tensor(labels))
    assert actual.item() == pytest.approx(sum(losses) / 3, rel=1e-5)
    order = torch.tensor([5, 3, 1, 0, 2, 4])
    assert answer_loss(logits[order], torch.tensor(labels)[order]).item() == pytest.approx(actual.item(), rel=1e-5)


def test_a_batch_without_answers_teaches_nothing():
    logits = torch.randn(2, 3, generator=torch.Generator().manual_seed(1)).requires_grad_()
    loss = answer_loss(logits, torch.tensor([3, 3]))
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(logits.grad, torch.zeros(2, 3))


def test_the_loss_is_in_full_precision_under_autocast():
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert answer_loss(logits, torch.tensor([0, 1, 2, 3])).dtype == torch.float32


def test_metrics_equal_a_loop_over_the_questions():
    labels, kinds, guesses = [0, 1, 2, 3, 2, 0, 1, 3, 0], [0, 0, 1, 1, 1, 0, 0, 2, 0], [1, 1, 2, 2, 2, 1, 1, 3, 1]
    samples, task = asked(labels, kinds=kinds, guesses=guesses), VQA()
    model, head = identity_model("image", "text"), built(VQA(), samples)
    metrics = task.evaluate(model, head, samples, batch_size=4)
    logits = task.scores(model, head, samples.batch(torch.arange(9))).double().tolist()
    right = [s == t for s, t in zip([row.index(max(row)) for row in logits], labels, strict=True)]
    guessed = [g == t != 3 for g, t in zip(guesses, labels, strict=True)]
    losses = [math.log(sum(map(math.exp, row))) - row[t] for row, t in zip(logits, labels, strict=True) if t != 3]
    assert 0 < sum(right) < 7
    expected = {
        "accuracy": 100 * sum(right) / 9,
        "prior": 100 * labels.count(0) / 9,
        "accuracy_of_constant": 100 * max(labels.count(k) for k in range(3)) / 9,
        "answerable": 100 * 7 / 9,
        "loss": sum(losses) / 7,
        "n": 9,
        "items": 5,
        "answers": 3,
    }
    for number, name in enumerate(KINDS):
        own = [k for k in range(9) if kinds[k] == number]
        expected[f"accuracy_{name}"] = 100 * sum(right[k] for k in own) / len(own)
        expected[f"prior_{name}"] = 100 * sum(guessed[k] for k in own) / len(own)
        expected[f"n_{name}"] = len(own)
    assert metrics == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("agreeing", "all_of_ten", "leaving_one_out"),
    [(0, 0, 0), (1, 1 / 3, 0.3), (2, 2 / 3, 0.6), (3, 1, 0.9), (4, 1, 1), (10, 1, 1)],
)
def test_votes_of_ten_annotators_by_hand(agreeing, all_of_ten, leaving_one_out):
    votes = torch.tensor([[5] * agreeing + [7] * (10 - agreeing)])
    predicted = torch.tensor([5])
    assert vote_scores(predicted, votes, "all").item() == pytest.approx(all_of_ten)
    assert vote_scores(predicted, votes, "leave_one_out").item() == pytest.approx(leaving_one_out)


def left_out_scores(predicted, votes):
    """The mean over every set of all annotators but one, as it is defined."""
    votes = [vote for vote in votes if vote >= 0]
    left = [votes[:k] + votes[k + 1 :] for k in range(len(votes))]
    return sum(min(others.count(predicted) / 3, 1) for others in left) / len(left) if predicted >= 0 else 0.0


def test_scores_equal_loops_over_annotators_of_questions_that_have_different_numbers_of_them():
    generator = torch.Generator().manual_seed(2)
    votes = torch.randint(0, 3, (200, 10), generator=generator)
    votes = votes.where(torch.arange(10) < torch.randint(1, 11, (200, 1), generator=generator), -1)
    predicted = torch.randint(-1, 3, (200,), generator=generator)
    rows = list(zip(predicted.tolist(), votes.tolist(), strict=True))
    expected = [left_out_scores(one, own) for one, own in rows]
    assert vote_scores(predicted, votes, "leave_one_out").tolist() == pytest.approx(expected)
    expected = [min(own.count(one) / 3, 1) if one >= 0 else 0 for one, own in rows]
    assert vote_scores(predicted, votes, "all").tolist() == pytest.approx(expected)
    order = torch.randperm(10, generator=generator)
    assert torch.equal(vote_scores(predicted, votes[:, order], "all"), vote_scores(predicted, votes, "all"))


@pytest.mark.parametrize("which", ["all", "leave_one_out"])
def test_soft_accuracy_equals_a_loop_over_questions_also_by_kind(which):
    labels, kinds, guesses = [0, 1, 2, 3, 2, 0], [0, 0, 1, 1, 1, 0], [1, 1, 2, 2, 2, 1]
    votes = [[0, 0, 2, 1], [1, 1, 1, -1], [2, 2, 0, 0], [3, 3, 3, 1], [2, 1, 1, 2], [0, 3, 3, 2]]
    samples, task = asked(labels, kinds=kinds, guesses=guesses, votes=votes), VQA(votes=which)
    model, head = identity_model("image", "text"), built(task, samples)
    metrics = task.evaluate(model, head, samples, batch_size=4)
    predicted = task.scores(model, head, samples.batch(torch.arange(6))).argmax(1).tolist()

    def score(answers, rows):
        scores = [min(votes[k].count(answers[k]) / 3, 1) for k in rows]
        if which == "leave_one_out":
            scores = [left_out_scores(answers[k], votes[k]) for k in rows]
        return 100 * sum(scores) / len(scores)

    assert metrics["soft_accuracy"] == pytest.approx(score(predicted, range(6)))
    assert metrics["soft_prior"] == pytest.approx(score([0] * 6, range(6)))
    for number, name in enumerate(KINDS[:2]):
        rows = [k for k in range(6) if kinds[k] == number]
        assert metrics[f"soft_accuracy_{name}"] == pytest.approx(score(predicted, rows))
        assert metrics[f"soft_prior_{name}"] == pytest.approx(score(guesses, rows))
    plain = VQA().evaluate(model, head, samples, batch_size=4)
    assert plain == {name: value for name, value in metrics.items() if not name.startswith("soft_")}
    assert task.primary == "soft_accuracy"


def constants(head):
    """The head with all its numbers 0, and then NaN."""
    for value in (0.0, math.nan):
        for parameter in head.parameters():
            nn.init.constant_(parameter, value)
        yield head


def test_votes_for_an_answer_outside_the_table_count_for_none_and_ties_score_nothing():
    samples = asked([3, 3], kinds=[0, 0], guesses=[3, 3], votes=[[3, 3, 3, 3], [3, 3, 3, 3]])
    task, model = VQA(votes="all"), identity_model("image", "text")
    head = built(task, samples)
    metrics = task.evaluate(model, head, samples, batch_size=2)
    assert (metrics["soft_accuracy"], metrics["soft_prior_truth"]) == (0, 0)
    tied = asked([0, 0], votes=[[0, 0, 0, 0], [0, 0, 0, 0]])
    for constant in constants(head):
        assert task.evaluate(model, constant, tied, batch_size=2)["soft_accuracy"] == 0


def test_kinds_and_priors_are_reported_where_samples_have_them():
    metrics = evaluated(asked([0, 1]))
    assert set(metrics) == {"accuracy", "accuracy_of_constant", "answerable", "loss", "n", "items", "answers"}
    metrics = evaluated(asked([0, 1], kinds=[0, 0]))
    assert {name for name in metrics if "_" in name} == {"accuracy_of_constant", "accuracy_truth", "n_truth"}


def test_ties_and_nan_count_against_the_model():
    samples, model = asked([0, 1, 2, 0]), identity_model("image", "text")
    for constant in constants(built(VQA(), samples)):
        assert VQA().evaluate(model, constant, samples, batch_size=4)["accuracy"] == 0


def test_without_an_answerable_question_accuracy_is_0_and_loss_is_absent():
    metrics = evaluated(asked([3, 3]))
    assert (metrics["accuracy"], metrics["answerable"]) == (0, 0)
    assert "loss" not in metrics


def test_each_image_is_encoded_once_and_unused_modalities_are_not_loaded():
    samples, model = asked([0, 1, 2, 0, 1, 2]), identity_model("image", "text")
    VQA().evaluate(model, built(VQA(), samples), samples, batch_size=2)
    assert samples.inputs["image"].asked == [0, 1, 2]
    blind = VQA(use=("text",))
    before = list(samples.inputs["image"].asked)
    blind.evaluate(model, built(blind, samples), samples, batch_size=2)
    assert samples.inputs["image"].asked == before


class Noisy(nn.Module):
    """Batch statistics and dropout, which differ between training and evaluation."""

    def __init__(self):
        super().__init__()
        self.norm, self.dropout, self.linear = nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 6)

    def forward(self, x):
        return self.linear(self.dropout(self.norm(x)))


def noisy_model():
    torch.manual_seed(0)
    return Model({"image": Noisy(), "text": Noisy()}, {}, 6)


@pytest.mark.parametrize("wrapped", [False, True])
def test_frozen_encoders_learn_nothing_and_keep_their_statistics(wrapped):
    samples, task, model = asked([0, 1, 2, 0]), VQA(encoders="frozen"), noisy_model()
    head = built(task, samples)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.train()
    batch = samples.batch(torch.arange(4))
    loss = task.loss(CachedModel(model) if wrapped else model, head, batch)
    loss.backward()
    assert all(value.grad is None for value in model.parameters())
    assert all(value.grad is not None for value in head.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(part.training for part in model.modules())
    assert task.loss(model, head, batch).item() == loss.item()  # no dropout either
    VQA().loss(model, head, batch).backward()
    assert any(value.grad is not None for value in model.parameters())
    assert model.encoders["image"].norm.num_batches_tracked == 1


def test_a_frozen_task_leaves_the_gradients_of_other_losses_alone():
    samples, task, model = asked([0, 1, 2, 0]), VQA(encoders="frozen"), noisy_model()
    once, batch = CachedModel(model), samples.batch(torch.arange(4))
    (task.loss(once, built(task, samples), batch) + once.embed("image", batch.inputs["image"]).sum()).backward()
    assert model.encoders["image"].linear.weight.grad is not None
    assert model.encoders["text"].linear.weight.grad is None


class Wrapped:
    """Something that embeds and is neither a model nor a memo of one."""

    device = torch.device("cpu")

    def embed(self, modality, x):
        return x

    represent = embed


def test_encoders_that_cannot_be_frozen_are_refused():
    samples = asked([0, 1, 2, 0])
    head, batch = built(VQA(), samples), samples.batch(torch.arange(4))
    assert VQA().loss(Wrapped(), head, batch).isfinite()
    with pytest.raises(ConfigError, match=r"'frozen' cannot be combined .* Wrapped"):
        VQA(encoders="frozen").loss(Wrapped(), head, batch)


def test_errors_name_what_is_wrong():
    samples, model = asked([0, 1, 2]), identity_model("image", "text")
    head = built(VQA(), samples)
    for task, given, message in (
        (VQA(use=("sound",)), samples, r"cannot use \['sound'\] of samples with \['image', 'text'\]"),
        (VQA(target="reply"), samples, r"target 'reply' is not among .*'answer'"),
        (VQA(), asked([0, 1], names=()), "no class names"),
        (VQA(votes="all"), asked([0, 1]), r"task\.votes 'all' needs .* several: majority"),
    ):
        with pytest.raises(ConfigError, match=message):
            task.head(6, given)
    with pytest.raises(DataError, match="has 2 answers, but the head has 3"):
        VQA().evaluate(model, head, asked([0, 1], names=("yes", "no", OTHER)), batch_size=2)
    with pytest.raises(DataError, match="no questions"):
        VQA().evaluate(model, head, samples.subset(torch.empty(0, dtype=torch.int64)), batch_size=2)
    with pytest.raises(TypeError, match="head"):
        VQA().loss(model, None, samples.batch(torch.arange(2)))


# ---- in whole runs


Config = dict[str, Any]
OF_QUESTIONS = [{"name": "count", "question": "^how many"}, {"name": "truth", "answer": "yes|no"}]


def asking(tiny: Config, algorithm: object, **task: object) -> Config:
    """``tiny``, whose server and paired clients answer questions on generated scenes."""
    scenes = tiny["data"]["sources"]["scenes"] | {"columns": {"image": "image", "text": "questions"}}
    tiny["data"]["sources"]["scenes"] = {"name": "questions", "of": scenes, "most": 12, "kinds": OF_QUESTIONS}
    for participant in (tiny["server"], tiny["clients"]["paired"]):
        participant["task"] = {"name": "vqa", "hidden": 8} | task
    tiny["run"]["rounds"] = 1
    return tiny | {"algorithm": algorithm}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    content = asking(tiny_experiment(), {"name": "creamfl", "local_epochs": 1, "task": {"order": "joint"}})
    return run(Experiment.load(content), tmp_path_factory.mktemp("vqa") / "run", quiet=True).folder


def test_creamfl_trains_a_server_that_answers_and_its_saved_model_agrees(finished: Path) -> None:
    actual = evaluate_model(finished, "scenes", which="last")
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    recorded = next(line for line in reversed(lines) if line["kind"] == "test" and line["participant"] == "server")
    assert actual.metrics == pytest.approx(recorded["metrics"])
    assert {"accuracy", "prior", "accuracy_count", "prior_count", "n_truth", "answerable"} <= set(actual.metrics)
    assert actual.metrics["answers"] == 12
    assert 0 < actual.metrics["answerable"] < 100
    clients = [line["metrics"] for line in lines if line["participant"].startswith("paired") and line["kind"] == "test"]
    assert all(0 <= metrics["accuracy"] <= 100 for metrics in clients)
    assert len(clients) == 2


def test_the_table_is_saved_with_the_model_and_another_is_refused(finished: Path, tmp_path: Path) -> None:
    saved = open_run(finished).server_model("last")
    table = saved.config["samples"]["classes"]["answer"]
    assert len(table) == 13
    assert table[-1] == OTHER
    assert saved.head.answers == 12
    other = shutil.copytree(finished, tmp_path / "other")
    path = other / "models" / "last" / "config.json"
    config = json.loads(path.read_text())
    config["samples"]["classes"]["answer"][:2] = reversed(table[:2])
    path.write_text(json.dumps(config))
    with pytest.raises(DataError, match="classes of 'answer'"):
        evaluate_model(other, "scenes", which="last")


def test_answering_is_a_task_of_clients_that_average_their_weights(tiny: Config, tmp_path: Path) -> None:
    result = run(Experiment.load(asking(tiny, "fedavg")), tmp_path / "run", quiet=True)
    assert result.metrics("paired-0")["answers"] == 12
    assert result.metrics("paired-0") == result.metrics("paired-1")
