from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import yaml
from PIL import Image

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def config(three_groups: dict[str, Any], tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(three_groups))
    return path


def read(path: str) -> dict[str, Any]:
    return dict(json.loads(Path(path).read_text()))


def is_small_png(path: str) -> bool:
    with Image.open(path) as image:
        return image.format == "PNG" and Path(path).stat().st_size < 300_000


def test_shapley_runs_prints_and_writes(cli: Cli, config: Path, started: list[str]) -> None:
    options = ("shapley", config, "--players", "image,text", "--set", "name=mine")
    code, out, err = cli(*options)
    assert (code, err) == (0, "")
    assert started == ["none-seed0", "image-seed0", "text-seed0", "image+text-seed0"]
    assert "run 4 of 4: image+text, seed 0: started; watch it with" in out
    assert "share of r1_sum" in out
    content = read("runs/mine-shapley/shapley.json")
    means = {label: found["mean"] for label, found in content["utilities"].items()}
    gain = means["image+text"] - means["none"]
    assert sum(found["mean"] for found in content["values"].values()) == pytest.approx(gain)
    assert content["values"]["image"]["std"] is None
    assert is_small_png("runs/mine-shapley/shapley.png")
    first = Path("runs/mine-shapley/shapley.png").read_bytes()
    code, out, _ = cli(*options)
    assert (code, len(started)) == (0, 4)
    assert out.count("(was complete)") == 4
    assert Path("runs/mine-shapley/shapley.png").read_bytes() == first


def test_an_interrupted_series_says_how_to_go_on(cli: Cli, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("polyfed.analysis.series.run", interrupted)
    code, _, err = cli("shapley", config, "--players", "text")
    assert (code, err) == (130, "interrupted; continue with the same command\n")


def test_scaling_runs_prints_and_writes(cli: Cli, config: Path) -> None:
    code, out, err = cli("scaling", config, "--groups", "image+text", "--seeds", "0,1", "--out", "there")
    assert (code, err) == (0, "")
    assert "1: image and text" in out
    content = read("there/scaling.json")
    assert content["steps"] == [["image", "text"]]
    assert set(content["values"]["1-image+text"]["by_seed"]) == {"0", "1"}
    assert is_small_png("there/scaling.png")


def test_gap_of_a_run(cli: Cli, tiny_run: Path) -> None:
    code, out, err = cli(
        "gap", tiny_run, "--between", "scenes,private", "--normalise", "--samples", 9, "--out", "there"
    )
    assert (code, err) == (0, "")
    assert "scenes - private, image" in out
    content = read("there/gap.json")
    assert (content["anchor"], content["normalise"], content["split"]) == ("scenes", True, "train")
    assert content["total"] == pytest.approx(sum(content["gaps"]["private"].values()))


def test_gap_of_encoders_in_a_file(cli: Cli, three_groups: dict[str, Any]) -> None:
    image = {"image": three_groups["server"]["model"]["encoders"]["image"]}
    settings = {"data": three_groups["data"], "model": {"dim": 4, "encoders": image}}
    Path("clip.yaml").write_text(yaml.safe_dump(settings))
    code, _, err = cli("gap", "clip.yaml", "--between", "scenes,private", "--device", "cpu")
    assert (code, err) == (0, "")
    assert list(read("gap.json")["gaps"]["private"]) == ["image"]


def test_landscape_of_a_run(cli: Cli, tiny_run: Path) -> None:
    options = ("--samples", 16, "--grid", 3, "--steps", 8, "--out", "there")
    code, out, err = cli("landscape", tiny_run, *options)
    assert (code, err) == (0, "")
    assert "eigenvalue 1" in out
    content = read("there/landscape.json")
    grid = safetensors.torch.load_file("there/landscape.safetensors")
    assert content["data"] == "public set (scenes, train)"
    assert float(grid["values"][1, 1]) == content["loss"]
    assert grid["axis"].tolist() == [-0.5, 0.0, 0.5]
    assert is_small_png("there/landscape.png")


def test_centres_of_two_runs_side_by_side(cli: Cli, tiny_run: Path, classifier_run: Path) -> None:
    code, out, err = cli("centres", tiny_run, classifier_run, "--data", "scenes,private", "--out", "there")
    assert (code, err) == (0, "")
    assert out.count("distances of centres") == 2
    first, second = read("there/centres.json")["runs"]
    assert len(first["groups"]) == 4
    assert second["groups"] == ["image: scenes", "image: private"]
    assert is_small_png("there/centres.png")
    code, out, _ = cli("centres", tiny_run, "--by", "class", "--samples", 12, "--out", "there")
    assert code == 0
    assert "more are in the JSON file" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("shapley", "CONFIG", "--players", "images"), "players: no group 'images' under 'clients'; did you mean"),
        (("shapley", "CONFIG", "--players", "image,,text"), "--players image,,text: has an empty name"),
        (("shapley", "CONFIG", "--players", "image", "--seeds", "0,x"), "--seeds 0,x: 'x' is no whole number"),
        (("shapley", "CONFIG", "--players", "image", "--set", "runs=1"), "unknown key 'runs'; did you mean 'run'"),
        (("shapley", "CONFIG", "--players", "image,text,paired"), "no client is left"),
        (("shapley", "nothing", "--players", "a"), "no preset or file 'nothing'"),
        (("scaling", "CONFIG", "--groups", "image,sound"), "groups: no group 'sound'"),
        (("scaling", "CONFIG", "--groups", "image", "--set", "server=null"), "has no server model"),
        (("gap", "RUN", "--between", "scenes"), "--between scenes: needs two sources"),
        (("gap", "RUN", "--between", "scenes,nothing"), "no source 'nothing' in data.sources"),
        (("gap", "nothing", "--between", "a,b"), "no preset or file 'nothing'"),
        (("gap", "RUN", "--between", "scenes,private", "--model", "worst"), "has no model 'worst'; it has: best, last"),
        (("landscape", "RUN", "--grid", "10"), "grid 10 has no middle"),
        (("landscape", "RUN", "--extent", "0"), "extent 0.0 must be positive"),
        (("landscape", "RUN", "--device", "warp"), "'warp' is not usable here"),
        (("landscape", "nothing"), "no run folder"),
        (("centres", "RUN", "--by", "shape"), "by 'shape'; valid: class, data"),
        (("centres", "RUN", "--data", "scenes,privat"), "did you mean 'private'"),
        (("centres", "RUN", "--out", "CONFIG"), "cannot create folder"),
    ],
)
def test_bad_input_is_named_before_any_work(
    cli: Cli, config: Path, tiny_run: Path, started: list[str], arguments: tuple[str, ...], message: str
) -> None:
    places = {"CONFIG": str(config), "RUN": str(tiny_run)}
    code, out, err = cli(*(places.get(argument, argument) for argument in arguments))
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert started == []
    assert not (tiny_run / "analysis" / "landscape.json").exists()
