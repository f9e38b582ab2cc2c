"""Every command of ``polyfed analyse``: what it prints and writes, and what it says of bad input."""

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
from polyfed.lab.analysis.results import AnalysisResult
from polyfed.reporting.tables import TextTable
from polyfed.runs.records import RunRecords

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


# ---- of a run


def test_landscape(analyse: Cli, tiny_run: Path) -> None:
    options = ("--samples", 16, "--grid", 3, "--steps", 8, "--out", "there")
    code, out, err = analyse("landscape", tiny_run, *options)
    assert (code, err) == (0, "")
    assert "eigenvalue 1" in out
    content = written("landscape-samples16-grid3-steps8")
    assert content["data"] == "public set (scenes, train)"
    assert content["losses"][1][1] == content["loss"]


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
@pytest.mark.usefixtures("unrendered")
def test_drift(analyse: Cli, fedafd_run: Path) -> None:
    code, out, err = analyse("drift", fedafd_run, "--samples", 8, "--method", "pca", "--out", "there")
    assert (code, err) == (0, "")
    assert "run: drift of image" in out
    content = written("drift-samples8-methodpca")
    assert (content["samples"], content["method"]) == (8, "pca")
    text = content["modalities"]["text"]
    assert text["participants"] == ["paired-0", "paired-1", "server"]
    assert text["means"]["different"] == {"pairs": 0, "distance": None, "cka": None}
    assert text["means"]["all"]["cka"] == text["cka"][0][1]


@pytest.mark.usefixtures("unrendered")
def test_features(analyse: Cli, fedafd_run: Path) -> None:
    code, out, err = analyse("features", fedafd_run, "--client", "image", "--method", "pca", "--out", "there")
    assert (code, err) == (0, "")
    assert "features of image" in out
    content = written("features-clientimage-methodpca")
    assert list(content["features"]) == ["local", "global", "fused"]
    assert set(content["features"]["fused"]) == {"silhouette", "ratio", "nearest_mean", "head"}


@pytest.mark.usefixtures("unrendered")
def test_weights(analyse: Cli, fedafd_run: Path) -> None:
    code, out, err = analyse("weights", fedafd_run, "--at", "3,1", "--round", 1, "--out", "there")
    assert (code, err) == (0, "")
    assert "Effective number of clients" in out
    assert written("weights-number1-at3,1")["channels"]["image"]["chosen"] == [3, 1]


@pytest.mark.slow
def test_cost(analyse: Cli, config: Path) -> None:
    short = ("--set", "algorithm.name=local", "--set", "run.rounds=1")
    code, out, err = analyse("cost", config, *short, "--out", "there")
    assert (code, err) == (0, "")
    assert "GFLOP" in out
    measured = {cost["kind"]: cost for cost in read("there/cost.json")["costs"]}
    assert measured["image"]["flops"] > 0 < measured["image"]["size"]["trained"]


# ---- of a simulation


def test_retrain(analyse: Cli, fedavg_run: Path) -> None:
    arguments = ("--layers", "shallow", "--depth", "image=2,text=1", "--on", "union", "--steps", 2)
    code, out, err = analyse("retrain", fedavg_run, *arguments, "--out", "there")
    assert (code, err) == (0, "")
    assert "run: R@1 at each client" in out
    name = "retrain-layersshallow-depthimage=2,text=1-onunion-steps2"
    content = written(name)
    assert (content["layers"], content["depth"], content["steps"]) == ("shallow", {"image": 2, "text": 1}, 2)
    assert [(row["of"], row["on"]) for row in content["rows"]] == [("server", "union")]


def test_distortion(analyse: Cli, fedavg_run: Path) -> None:
    code, out, err = analyse("distortion", fedavg_run, "--steps", 1, "--lr", 0.001, "--seed", 3, "--out", "there")
    assert (code, err) == (0, "")
    assert "distortion by local training" in out
    assert written("distortion-steps1-lr0.001-seed3")["steps"] == {"paired-0": 1, "paired-1": 1}


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


def test_partition_of_a_run(analyse: Cli, tiny_run: Path) -> None:
    code, out, err = analyse("partition", tiny_run, "--out", "there")
    assert (code, err) == (0, "")
    holdings = written("partition")
    for client, holding in RunRecords.load(tiny_run).holdings.items():
        assert holdings[client]["labels"] == holding.labels
        assert client in out


# ---- bad input

RUN, EXCHANGE, LAYERS = "tiny_run", "fedafd_run", "fedavg_run"
REFUSALS = [
    (f"landscape {RUN} --grid 10", "grid 10 has no middle"),
    (f"landscape {RUN} --extent 0", "extent 0.0 must be positive"),
    (f"landscape {RUN} --device warp", "'warp' is not usable here"),
    ("landscape nothing", "no run folder"),
    (f"centres {RUN} --by shape", "by 'shape'; valid: class, data"),
    (f"centres {RUN} --data scenes,privat", "did you mean 'private'"),
    (f"centres {RUN} --out CONFIG", "cannot create folder"),
    (f"drift {RUN}", "clients of 'fedavg' keep no model"),
    (f"drift {EXCHANGE} --method umap", "method 'umap'; valid: pca, tsne"),
    (f"drift {EXCHANGE} --model worst", "has no model 'worst'"),
    ("drift nothing", "is no run folder"),
    (f"features {EXCHANGE} --client paired-1", "not client 'paired-1' of"),
    (f"weights {RUN}", "has no aggregation weights"),
    (f"weights {EXCHANGE} --at 1,x", "--at 1,x: 'x' is no whole number"),
    ("cost nothing", "no preset or file 'nothing'"),
    (f"retrain {LAYERS} --depth two", "--depth two: 'two' says not how many layers"),
    (f"retrain {LAYERS} --depth image=x", "--depth image=x: 'image=x' says not how many layers"),
    (f"retrain {LAYERS} --lr 0", "lr: Input should be greater than 0 (got 0.0)"),
    (f"retrain {LAYERS} --layers top", "--layers top; "),
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
