from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import safetensors.torch
import torch
import yaml

from polyfed.cli.analyse import _stem
from polyfed.core.errors import RunError
from polyfed.lab.downstream.suite import Suite, opened_model, suites
from polyfed.runs.opened import open_run

Cli = Callable[..., tuple[int, str, str]]

SMALL = {
    "sources": {"more": {"name": "scenes", "train": 30, "validation": 8, "test": 12, "size": 16, "seed": 9}},
    "tasks": {
        "shapes": {"name": "few_shot", "source": "more", "shares": [1.0], "draws": 2},
        "clients": {"name": "retrieval", "batch": 16, "draws": 2},
    },
}


def written(path: Path | str, content: Any) -> Path:
    Path(path).write_text(yaml.safe_dump(content))
    return Path(path)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return written(tmp_path / "small.yaml", SMALL)


def read(folder: Path | str, stem: str = "small") -> dict[str, Any]:
    return dict(json.loads((Path(folder) / f"{stem}.json").read_text()))


def test_the_suite_on_a_run_end_to_end(cli: Cli, tiny_run: Path) -> None:
    suite = Suite.load("scenes")
    quick = suite.model_dump(mode="json")
    quick["tasks"] = {name: task | {"draws": 1} for name, task in quick["tasks"].items()}
    code, out, err = cli(tiny_run, "--suite", written("scenes.yaml", quick), "--out", "there")
    assert code == 0
    assert "the best model by validation is that of round 0" not in err, "of a tie the trained one"
    content = read("there", "scenes")
    assert content["tasks"].keys() == suite.tasks.keys()
    assert content["left_out"] == {}
    assert (content["suite"], content["seed"]) == ("scenes", 42)
    assert "best server model (round" in content["subject"]
    for task, result in content["tasks"].items():
        assert f"{task} ({result['probe']}, " in out
        assert result["rows"]
    clients = {row["on"]: row["metrics"] for row in content["tasks"]["clients"]["rows"]}
    assert list(clients) == ["paired-0", "paired-1", "mean over clients", "worst client", "disparity"]
    assert [path.name for path in Path("there").iterdir()] == ["scenes.json"]


@pytest.mark.slow
def test_results_are_the_same_again_and_lie_in_the_run(cli: Cli, typed_run: Path, small: Path) -> None:
    for _ in range(2):
        assert cli(typed_run, "--suite", small, "--client", "paired-1")[0] == 0
    first = (typed_run / "downstream" / "paired-1" / "small.json").read_bytes()
    assert cli(typed_run, "--suite", small, "--client", "paired-1", "--out", "again")[0] == 0
    assert Path("again/small.json").read_bytes() == first
    assert cli(typed_run, "--suite", small, "--client", "paired-1", "--seed", 7, "--out", "other")[0] == 0
    assert read("other", "small-seed-7")["tasks"] != read("again")["tasks"]


def test_files_of_other_options_have_other_names() -> None:
    assert _stem("a", None, 42) == "a"
    assert _stem("a", "last", 7) == "a-model-last-seed-7"


# ---- which model


def weights(path: Path, prefix: str) -> dict[str, torch.Tensor]:
    result = safetensors.torch.load_file(path)
    return {name.removeprefix(prefix): value for name, value in result.items() if name.startswith(prefix)}


def same(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> bool:
    state = model.state_dict()
    return state.keys() == tensors.keys() and all(torch.equal(value, tensors[name]) for name, value in state.items())


@pytest.mark.parametrize("which", ["best", "last"])
def test_the_server_model_of_a_run(tiny_run: Path, which: str) -> None:
    result = opened_model(open_run(tiny_run), which).subject
    assert same(result.model, dict(open_run(tiny_run).server_model(which).weights))
    assert f"{which} server model" in result.name
    assert not result.model.training
    assert not any(value.requires_grad for value in result.model.parameters())


def test_the_kept_model_of_a_client(local_run: Path) -> None:
    result = opened_model(open_run(local_run), client="paired-0").subject
    (path,) = (local_run / "checkpoints" / "clients" / "paired-0").glob("*.safetensors")
    assert same(result.model, weights(path, "model/"))
    assert list(result.clients()) == ["paired-0", "paired-1", "image"]


def test_the_global_model_of_a_clients_type(typed_run: Path) -> None:
    result = opened_model(open_run(typed_run), client="image").subject
    assert same(result.model, weights(max((typed_run / "checkpoints").glob("round-*.safetensors")), "weights:image/"))
    assert "global model of image (round 1)" in result.name


# ---- rubbish


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--suite", "scnes"], "no suite or file 'scnes'; did you mean 'scenes'"),
        ([], "--suite is missing; give scenes, or a YAML file"),
        (["--suite", "scenes", "--client", "paired-9"], "no client 'paired-9'"),
        (["--suite", "scenes", "--client", "paired-0", "--model", "best"], "--model best is the server's"),
        (["--suite", "scenes", "--model", "worst"], "no model 'worst'"),
        (["--suite", "nowhere.yaml"], "cannot read config 'nowhere.yaml'"),
    ],
)
def test_wrong_options(cli: Cli, tiny_run: Path, options: list[str], message: str) -> None:
    code, _, err = cli(tiny_run, *options, "--out", "there")
    assert (code, message in err) == (2, True), err
    assert "\n" not in err.strip()
    assert not Path("there").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tasks": {"a": {"name": "fewshot"}}}, "tasks.a: unknown probe 'fewshot'; did you mean 'few_shot'"),
        ({"tasks": {"a": {"name": "few_shot", "source": "mroe"}}}, "no source 'mroe' in the suite or the run"),
        ({"tasks": {"a": {"name": "few_shot", "source": "more", "target": "lable"}}}, "did you mean 'label'"),
        ({"tasks": {}}, "at least 1 item"),
    ],
)
def test_wrong_suites_are_refused_before_any_file(cli: Cli, tiny_run: Path, change: Any, message: str) -> None:
    code, _, err = cli(tiny_run, "--suite", written("wrong.yaml", {**SMALL, **change}), "--out", "there")
    assert (code, message in err) == (2, True), err
    assert not list(Path("there").glob("*"))


def test_a_run_without_a_server_names_its_clients(local_run: Path) -> None:
    with pytest.raises(RunError, match=r"it has no server, .* averages no weights, .* --client paired-0$"):
        opened_model(open_run(local_run))


def test_an_interruption_writes_nothing(cli: Cli, tiny_run: Path, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyfed.lab.downstream.probe.FewShot.run", Mock(side_effect=KeyboardInterrupt))
    code, _, err = cli(tiny_run, "--suite", small, "--out", "there")
    assert (code, err.splitlines()[-1]) == (130, "interrupted; nothing was written")
    assert not list(Path("there").glob("*"))


@pytest.mark.parametrize("name", suites())
def test_suites_that_come_with_polyfed_are_valid(name: str) -> None:
    suite = Suite.load(name)
    assert suite.description
    assert {"few_shot", "retrieval"} <= {probe.component_name() for probe in suite.tasks.values()}
    named = [getattr(probe, "source", None) for probe in suite.tasks.values()]
    used = {each for entry in named for each in ((entry,) if isinstance(entry, str) else entry or ())}
    assert used <= set(suite.sources)
