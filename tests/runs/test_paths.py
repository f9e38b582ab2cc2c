"""Run folders and reports say nothing of the machine: where its data lie, and whose it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from PIL import Image

from polyfed import Experiment
from polyfed.export.model import export_model
from polyfed.reporting.reported import run
from small_federations import Config


def pictures(folder: Path) -> Path:
    folder.mkdir(parents=True)
    names = [f"{number}.png" for number in range(16)]
    for number, name in enumerate(names):
        Image.new("RGB", (16, 16), (15 * number, 0, 0)).save(folder / name)
    lines = [f"{name},{'ab'[number % 2]},{'train' if number < 12 else 'test'}" for number, name in enumerate(names)]
    (folder / "captions.csv").write_text("file_name,label,split\n" + "\n".join(lines))
    return folder


def texts_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("place", ["work", "elsewhere"])
def test_no_path_of_the_machine_is_in_what_is_handed_on(
    tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    data = pictures(tmp_path / place / "photos")
    (tmp_path / "work").mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path / "work")
    source = {"name": "folder", "path": str(data), "columns": {"image": "image"}, "targets": {"label": "label"}}
    tiny["data"]["sources"]["private"] = source
    tiny["data"]["cache_dir"] = str(tmp_path / place / "cache")
    folder = run(Experiment.parse(tiny), tmp_path / "work" / "runs" / "first").folder
    export_model(folder, tmp_path / "work" / "exported")
    handed = texts_below(folder) | texts_below(tmp_path / "work" / "exported")
    named = {name for name, content in handed.items() if str(tmp_path).encode() in content}
    if place == "elsewhere":  # the run could not be run again without it
        assert named == {"config.yaml"}
        return
    assert named == set()
    settings = yaml.safe_load(handed["config.yaml"])["data"]
    assert (settings["sources"]["private"]["path"], settings["cache_dir"]) == ("photos", "cache")
    again = run(Experiment.load(folder / "config.yaml"), tmp_path / "work" / "runs" / "again").folder
    for name in ("config.yaml", "metrics.jsonl", "ledger.jsonl"):
        assert (again / name).read_bytes() == handed[name]
