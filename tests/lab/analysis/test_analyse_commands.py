"""Every command of ``polyfed analyse``: what it prints and writes, where to, and what it says of bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from matplotlib.figure import Figure
from PIL import Image

from polyfed.cli.analyse import show_result
from polyfed.core.errors import RunError
from polyfed.lab.analysis.questions import QUESTIONS
from polyfed.lab.analysis.results import AnalysisResult
from polyfed.reporting.tables import TextTable

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def config(three_groups: dict[str, Any], tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(three_groups))
    return path


@pytest.fixture
def unrendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are drawn, but an empty picture is written: the tests of legends render these."""

    def save(drawing: Figure, path: Path) -> Path:
        Image.new("L", (1, 1)).save(path)
        return path

    monkeypatch.setattr("polyfed.reporting.figures.save", save)


def read(path: Path | str) -> dict[str, Any]:
    return dict(json.loads(Path(path).read_text()))


def written(name: str) -> dict[str, Any]:
    """Content of the JSON file, beside which there is a picture."""
    path = Path(f"there/{name}.png")
    with Image.open(path) as image:
        assert image.format == "PNG"
    assert path.stat().st_size < 300_000
    return read(f"there/{name}.json")


# ---- what is asked

RUN, EXCHANGE, LAYERS = "tiny_run", "fedafd_run", "fedavg_run"
COMMANDS: list[tuple[str, str, str, dict[str, Any]]] = [
    # command and options, file, what is printed, and some of what is written
    (
        f"landscape {RUN} --samples 16 --grid 3 --steps 8",
        "landscape-samples16-grid3-steps8",
        "eigenvalue 1",
        {"data": "public set (scenes, train)"},
    ),
    (
        f"drift {EXCHANGE} --samples 8 --method pca",
        "drift-samples8-methodpca",
        "run: drift of image",
        {"samples": 8, "method": "pca"},
    ),
    (
        f"features {EXCHANGE} --client image --method pca",
        "features-clientimage-methodpca",
        "features of image",
        {"client": "image"},
    ),
    (f"weights {EXCHANGE} --at 3,1 --round 1", "weights-number1-at3,1", "Effective number of clients", {}),
    (
        f"retrain {LAYERS} --layers shallow --depth image=2,text=1 --on union --steps 2",
        "retrain-layersshallow-depthimage=2,text=1-onunion-steps2",
        "run: R@1 at each client",
        {"layers": "shallow", "depth": {"image": 2, "text": 1}, "steps": 2},
    ),
    (
        f"distortion {LAYERS} --steps 1 --lr 0.001 --seed 3",
        "distortion-steps1-lr0.001-seed3",
        "distortion by local training",
        {"steps": {"paired-0": 1, "paired-1": 1}},
    ),
    (f"partition {RUN}", "partition", "paired-0", {}),
]


@pytest.mark.usefixtures("unrendered")
@pytest.mark.parametrize(("arguments", "name", "shown", "content"), COMMANDS)
def test_a_command_prints_tables_and_writes_its_answer_and_a_picture(
    analyse: Cli, request: pytest.FixtureRequest, arguments: str, name: str, shown: str, content: dict[str, Any]
) -> None:
    command, run, *options = arguments.split()
    code, out, err = analyse(command, request.getfixturevalue(run), *options, "--out", "there")
    assert (code, err) == (0, "")
    assert shown in out
    answer = written(name)
    assert {key: answer[key] for key in content} == content


@pytest.mark.slow
@pytest.mark.usefixtures("unrendered")
def test_centres_of_two_runs_side_by_side(analyse: Cli, tiny_run: Path, classifier_run: Path) -> None:
    code, out, err = analyse("centres", tiny_run, classifier_run, "--data", "scenes,private", "--out", "there")
    assert (code, err) == (0, "")
    assert out.count("distances of centres") == 2
    first, second = written("centres-datascenes,private")["runs"]
    assert len(first["groups"]) == 4
    assert second["groups"] == ["image: scenes", "image: private"]
    code, out, _ = analyse("centres", tiny_run, "--by", "class", "--samples", 12, "--out", "there")
    assert code == 0
    assert "more are in the JSON file" in out


@pytest.mark.slow
def test_cost(analyse: Cli, config: Path) -> None:
    code, out, err = analyse("cost", config, "--set", "algorithm.name=local", "--set", "run.rounds=1", "--out", "there")
    assert (code, err, "GFLOP" in out) == (0, "", True)
    measured = {cost["kind"]: cost for cost in read("there/cost.json")["costs"]}
    assert measured["image"]["flops"] > 0 < measured["image"]["size"]["trained"]


# ---- who holds what


def test_partition_of_an_experiment_counts_and_draws_without_training(
    analyse: Cli, tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polyfed.data.views.pixels.Pixels.open", lambda *_: pytest.fail("a picture was decoded"))
    tiny["clients"]["image"] |= {"count": 3, "test": "dealt"}
    Path("tiny.yaml").write_text(yaml.safe_dump(tiny))
    partition = '{"name": "natural", "of": ["topic", "label"]}'
    code, out, err = analyse(
        "partition", "tiny.yaml", "--set", f"clients.image.partition={partition}", "--out", "there"
    )
    assert (code, err) == (0, "")
    assert "image: items by column" in out
    assert "paired: sizes" in out
    holdings = written("partition")
    assert set(holdings) == {"paired-0", "paired-1", "image-0", "image-1", "image-2"}
    images = [holdings[f"image-{k}"] for k in range(3)]
    assert sum(entry["items"] for entry in images) == 24
    assert sum(entry["test"]["items"] for entry in images) == 8
    assert all(sum(entry["columns"]["topic"].values()) == entry["items"] for entry in images)
    assert not any("index" in entry or "index" in (entry["test"] or {}) for entry in holdings.values())


# ---- bad input

REFUSALS = [
    (f"landscape {RUN} --grid 10", "grid 10 has no middle"),
    (f"landscape {RUN} --extent 0", "extent 0.0 must be positive"),
    (f"landscape {RUN} --device warp", "'warp' is not usable here"),
    (f"landscape {RUN} --samples 1", "the loss needs at least 2"),
    (f"landscape {RUN} --steps 1", "in 1 steps"),
    ("landscape nothing", "no run folder"),
    (f"centres {RUN} --by shape", "by 'shape'; valid: class, data"),
    (f"centres {RUN} --data scenes,privat", "did you mean 'private'"),
    (f"centres {RUN} --data scenes,scenes", "'scenes' is named 2 times"),
    (f"centres {RUN} --split dev", "no split 'dev'"),
    (f"centres {RUN} --out CONFIG", "cannot create folder"),
    (f"drift {RUN}", "clients of 'fedavg' keep no model"),
    (f"drift {EXCHANGE} --method umap", "method 'umap'; valid: pca, tsne"),
    (f"drift {EXCHANGE} --model worst", "has no model 'worst'"),
    ("drift nothing", "is no run folder"),
    (f"features {EXCHANGE} --client paired-1", "not client 'paired-1' of"),
    (f"features {EXCHANGE} --client images", "no client 'images' took part"),
    (f"features {EXCHANGE} --method umap", "method 'umap'"),
    (f"leakage {RUN} --attacks canary", "--attacks canary: "),
    (f"leakage {RUN} --shadows 5", "--shadows 5: give 0, or an even number from 4 on"),
    (f"leakage {RUN} --shadows 2", "--shadows 2"),
    (f"weights {RUN}", "has no aggregation weights"),
    (f"weights {EXCHANGE} --round 9", "has no weights; valid: 1"),
    (f"weights {EXCHANGE} --at 0,80", "sample 80 of 'image' was not recorded; valid: 0 to 79"),
    (f"weights {EXCHANGE} --at 1,x", "--at 1,x: 'x' is no whole number"),
    ("cost nothing", "no preset or file 'nothing'"),
    (f"retrain {LAYERS} --depth two", "--depth two: 'two' says not how many layers"),
    (f"retrain {LAYERS} --depth image=x", "--depth image=x: 'image=x' says not how many layers"),
    (f"retrain {LAYERS} --lr 0", "lr: Input should be greater than 0 (got 0.0)"),
    (f"retrain {LAYERS} --layers top", "--layers top; "),
    (f"retrain {LAYERS} --on paired-2", "did you mean 'paired-"),
    (f"retrain {LAYERS} --on image", "--on image: no client of the task of 'server'"),
    (f"retrain {LAYERS} --of each", "keep no models; give --of server"),
    (f"retrain {LAYERS} --layers deep --depth 3", "--depth 3: the encoder of 'image' has 2 layers"),
    (f"retrain {LAYERS} --of paired-0", "has no model of that name"),
    (f"distortion {LAYERS} --of image", "encodes 'image' only"),
    ("distortion nothing", "is no run folder"),
    (f"partition {RUN} --set run.seed=1", "is a run that is over; give its config.yaml instead"),
    ("partition .", "'.' is no run folder"),
    ("partition BEGUN", "has no partition.json"),
    ("partition CONFIG --set clients={}", "has no clients of its own to deal items out to"),
    ("partition CONFIG --set clients.image.partition={name:_iid,of:_[lable]}", "image.partition.of: 'lable'"),
    ("partition no-such-preset", "no preset or file 'no-such-preset'"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSALS)
def test_bad_input_is_named_before_any_work(
    analyse: Cli, config: Path, request: pytest.FixtureRequest, arguments: str, message: str
) -> None:
    Path("BEGUN").mkdir()
    Path("BEGUN/config.yaml").write_text("name: begun\n")
    command, *words = arguments.split()
    places = {name: request.getfixturevalue(name) for name in (RUN, EXCHANGE, LAYERS) if name in words}
    given = [places.get(word, config if word == "CONFIG" else word.replace(":_", ": ")) for word in words]
    out = [] if "--out" in words else ["--out", "there"]
    code, printed, err = analyse(command, *given, *out)
    assert (code, printed) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert not list(Path("there").glob("*"))
    assert not Path("cells").exists()


def test_results_are_seen_where_they_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "none").write_text("a file")
    result = AnalysisResult({"loss": 1.5}, [TextTable("Hours of work", ("", "value"), [("loss", "1.5")])])
    with pytest.raises(RunError, match="cannot write"):
        show_result(result, tmp_path / "none", "there")
    assert "Hours of work" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("question", "options", "name"),
    [
        ("landscape", {"grid": 21, "model": "last"}, "landscape"),
        ("landscape", {"grid": 5, "model": "best"}, "landscape-grid5-modelbest"),
        ("centres", {"data": ["a", "b"]}, "centres-dataa,b"),
        ("leakage", {"passes": 7}, "leakage"),
    ],
)
def test_a_name_has_the_options_that_differ(question: str, options: dict[str, Any], name: str) -> None:
    assert QUESTIONS[question].stem(options) == name


def test_options_that_no_file_name_can_have_stand_there_as_digests() -> None:
    given = [{"data": [name]} for name in ("a/b", "a_b", "../a", "a\0", "ä", "CON:", "x" * 300)]
    given += [{"data": [f"d{number}" for number in range(count)]} for count in (99, 100)]
    names = [QUESTIONS["centres"].stem(options) for options in given]
    assert len(set(names)) == len(names)
    assert all(name.isascii() and "/" not in name and len(name) <= 150 for name in names)
