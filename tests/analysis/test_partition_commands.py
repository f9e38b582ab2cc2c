from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from polyfed.runs.records import RunRecords

Cli = Callable[..., tuple[int, str, str]]


def test_an_experiment_is_counted_and_drawn_without_training(
    cli: Cli, tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polyfed.data.views.pixels.Pixels.open", lambda *_: pytest.fail("a picture was decoded"))
    tiny["clients"]["image"] |= {"count": 3, "test": "dealt"}
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(tiny))
    partition = '{"name": "natural", "of": ["topic", "label"]}'
    code, out, err = cli("partition", path, "--set", f"clients.image.partition={partition}")
    assert (code, err) == (0, "")
    assert "image: items by column" in out
    assert "paired: sizes" in out
    found = json.loads(Path("runs/tiny-partition/partition.json").read_text())
    assert set(found) == {"paired-0", "paired-1", "image-0", "image-1", "image-2"}
    images = [found[f"image-{k}"] for k in range(3)]
    assert sum(entry["items"] for entry in images) == 24
    assert sum(entry["test"]["items"] for entry in images) == 8
    assert all(sum(entry["columns"]["topic"].values()) == entry["items"] for entry in images)
    assert not any("index" in entry or "index" in (entry["test"] or {}) for entry in found.values())
    with Image.open("runs/tiny-partition/partition.png") as image:
        assert image.format == "PNG"


def test_a_run_is_counted_from_its_folder(cli: Cli, tiny_run: Path) -> None:
    code, out, err = cli("partition", tiny_run, "--out", "there")
    assert (code, err) == (0, "")
    found = json.loads(Path("there/partition.json").read_text())
    for client, holding in RunRecords.load(tiny_run).holdings.items():
        assert found[client]["labels"] == holding.labels
        assert client in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("RUN", "--set", "run.seed=1"), "is a run that is over; give its config.yaml instead"),
        ((".",), "'.' is no run folder"),
        (("BEGUN",), "has no partition.json"),
        (("tiny.yaml", "--set", "clients={}"), "has no clients of its own to deal items out to"),
        (("tiny.yaml", "--set", "clients.image.partition={name: iid, of: [lable]}"), "image.partition.of: 'lable'"),
        (("no-such-preset",), "no preset or file 'no-such-preset'"),
    ],
)
def test_what_cannot_be_counted_is_told(
    cli: Cli, tiny: dict[str, Any], tiny_run: Path, arguments: tuple[str, ...], message: str
) -> None:
    Path("tiny.yaml").write_text(yaml.safe_dump(tiny))
    Path("BEGUN").mkdir()
    Path("BEGUN/config.yaml").write_text("name: begun\n")
    code, _, err = cli("partition", *(tiny_run if argument == "RUN" else argument for argument in arguments))
    assert code == 2
    assert message in err
