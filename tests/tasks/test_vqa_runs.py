"""VQA in whole runs: as the server's task, as a client's, and of a saved model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from polyfed import Experiment, run
from polyfed.core.errors import DataError
from polyfed.data.sources.questions import OTHER
from polyfed.runs.evaluation import evaluate_model
from polyfed.runs.opened import open_run
from small_federations import tiny_experiment

Config = dict[str, Any]
KINDS = [{"name": "count", "question": "^how many"}, {"name": "truth", "answer": "yes|no"}]


def asking(tiny: Config, algorithm: object, **task: object) -> Config:
    """``tiny``, whose server and paired clients answer questions on generated scenes."""
    scenes = tiny["data"]["sources"]["scenes"] | {"columns": {"image": "image", "text": "questions"}}
    tiny["data"]["sources"]["scenes"] = {"name": "questions", "of": scenes, "most": 12, "kinds": KINDS}
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
