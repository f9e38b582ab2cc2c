"""Run folders and reports name nothing of the machine: where its data lie, and whose it is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

import zoo
from misbehaving import contents, cut_short
from polyfed import Experiment, load_model, open_run, resume
from polyfed.core.errors import DataError
from polyfed.deploy.settings import SiteConfig
from polyfed.export.model import export_model
from polyfed.reporting.api import run
from small_federations import Config


def pictures(folder: Path) -> Path:
    names = [f"{number}.png" for number in range(16)]
    for number, name in enumerate(names):
        zoo.image(folder / name, number)
    lines = [f"{name},{'ab'[number % 2]},{'train' if number < 12 else 'test'}" for number, name in enumerate(names)]
    (folder / "captions.csv").write_text("file_name,label,split\n" + "\n".join(lines))
    return folder


def texts_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("place", ["work", "elsewhere"])
def test_no_own_path_is_handed_on(tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
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


def with_relative_places(tiny: Config) -> Config:
    source = {"name": "folder", "path": "one", "columns": {"image": "image"}, "targets": {"label": "label"}}
    tiny["data"] |= {"dir": "photos", "weights_dir": "weights", "cache_dir": "cache"}
    tiny["data"]["sources"]["private"] = source
    tiny["run"]["rounds"] = 3
    return tiny


@pytest.mark.parametrize("out", [pytest.param("runs/one", marks=pytest.mark.slow), "../elsewhere/one"])
def test_a_run_goes_on_elsewhere(tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str) -> None:
    pictures(tmp_path / "work" / "photos" / "one")
    monkeypatch.chdir(tmp_path / "work")
    complete = run(Experiment.parse(with_relative_places(tiny)), "runs/whole", quiet=True)
    folder = cut_short(tiny, Path(out)).resolve()
    monkeypatch.chdir("/")
    assert contents(resume(folder, quiet=True)) == contents(tmp_path / "work" / complete.folder)
    assert str(tmp_path) not in (folder / "config.yaml").read_text()
    copy = shutil.copytree(folder, tmp_path / "handed" / "one", ignore=shutil.ignore_patterns(".start"))
    with pytest.raises(DataError, match="no folder 'one'"):
        open_run(copy).federation.data.split("private", "test")
    for data in (tmp_path / "work" / "photos", str(tmp_path / "work" / "photos")):
        assert len(open_run(copy, data_dir=data).federation.data.split("private", "test")) == 4
    monkeypatch.chdir(tmp_path / "work")  # where its relative paths are
    assert len(open_run(copy).federation.data.split("private", "test")) == 4
    assert load_model(copy, data_dir="photos", weights_dir="weights").dim == 8


def test_paths_of_settings_are_whole_once_read(tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny = with_relative_places(tiny)
    tiny["run"]["engine"] = {"name": "flower", "superlink": "h:1", "sites": ["a"], "root_certificates": "ca.crt"}
    tiny["privacy"] = {"reply": {"weights": 1.0, "noise_multiplier": 1.0}, "metrics": "clear", "secret": "../secret"}
    for folder in ("below", "other"):
        (tmp_path / folder).mkdir()
    (tmp_path / "below" / "a.yaml").write_text(yaml.safe_dump(tiny))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    read = Experiment.read("below/a.yaml", ["data.cache_dir=~/cache"])
    monkeypatch.chdir("other")
    assert (read.data.dir, read.data.weights_dir) == (tmp_path / "below" / "photos", tmp_path / "below" / "weights")
    assert (read.data.cache_dir, read.start) == (tmp_path / "home" / "cache", tmp_path)
    assert read.privacy.secret == read.site().secret == tmp_path.parent / "secret"
    assert read.run.engine.root_certificates == tmp_path / "below" / "ca.crt"  # next to the file
    assert Experiment.parse(tiny).run.engine.root_certificates == tmp_path / "other" / "ca.crt"
    site = {"name": "image", "secret": "secret", "roster": "roster.yaml"}
    kept = {"data": tiny["data"], "clients": {"image": tiny["clients"]["image"]}}
    (tmp_path / "below" / "site.yaml").write_text(yaml.safe_dump(site | kept))
    seen = SiteConfig.load(Path("../below/site.yaml"))
    spots = (seen.secret, seen.roster, seen.state_dir, seen.data.dir)
    assert spots == tuple(tmp_path / "below" / name for name in ("secret", "roster.yaml", "state", "photos"))
