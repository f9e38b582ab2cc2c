from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

Cli = Callable[..., tuple[int, str, str]]


def written(name: str) -> dict[str, Any]:
    with Image.open(f"there/{name}.png") as image:
        assert image.format == "PNG"
    return dict(json.loads(Path(f"there/{name}.json").read_text()))


def test_drift_of_a_run(cli: Cli, fedafd_run: Path) -> None:
    code, out, err = cli("drift", fedafd_run, "--samples", 8, "--method", "pca", "--out", "there")
    assert (code, err) == (0, "")
    assert "run: drift of image" in out
    content = written("drift")
    assert (content["samples"], content["method"]) == (8, "pca")
    text = content["modalities"]["text"]
    assert text["participants"] == ["paired-0", "paired-1", "server"]
    assert text["means"]["different"] == {"pairs": 0, "distance": None, "cka": None}
    assert text["means"]["all"]["cka"] == text["cka"][0][1]


def test_features_of_a_run(cli: Cli, fedafd_run: Path) -> None:
    code, out, err = cli("features", fedafd_run, "--client", "image", "--method", "pca", "--out", "there")
    assert (code, err) == (0, "")
    assert "features of image" in out
    content = written("features")
    assert list(content["features"]) == ["local", "global", "fused"]
    assert set(content["features"]["fused"]) == {"silhouette", "ratio", "nearest_mean", "head"}


def test_weights_of_a_run(cli: Cli, fedafd_run: Path) -> None:
    code, out, err = cli("weights", fedafd_run, "--at", "3,1", "--round", 1, "--out", "there")
    assert (code, err) == (0, "")
    assert "Effective number of clients" in out
    assert written("weights")["channels"]["image"]["chosen"] == [3, 1]


def test_traffic_of_two_runs(cli: Cli, fedafd_run: Path, tiny_run: Path) -> None:
    code, out, err = cli("traffic", fedafd_run, tiny_run, "--out", "there")
    assert (code, err) == (0, "")
    assert "run (fedavg): weights" in out
    assert [run["method"] for run in written("traffic")["runs"]] == ["fedafd", "fedavg"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("drift", "FEDAVG"), "clients of 'fedavg' keep no model"),
        (("drift", "RUN", "--method", "umap"), "method 'umap'; valid: pca, tsne"),
        (("drift", "RUN", "--model", "worst"), "has no model 'worst'"),
        (("drift", "nothing"), "is no run folder"),
        (("features", "RUN", "--client", "paired-1"), "not client 'paired-1' of"),
        (("weights", "FEDAVG"), "has no aggregation weights"),
        (("weights", "RUN", "--at", "1,x"), "--at 1,x: 'x' is no whole number"),
        (("traffic", "RUN", "nothing"), "'nothing' is no run folder"),
    ],
)
def test_bad_input_is_named(
    cli: Cli, fedafd_run: Path, tiny_run: Path, arguments: tuple[str, ...], message: str
) -> None:
    places = {"FEDAVG": str(tiny_run), "RUN": str(fedafd_run)}
    code, out, err = cli(*(places.get(argument, argument) for argument in arguments), "--out", "there")
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert not list(Path("there").glob("*")) if Path("there").exists() else True
