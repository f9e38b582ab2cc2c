"""``polyfed study``: what it prints, writes and refuses."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from lab.studies.conftest import tiny_study
from paper_studies import STUDIES
from polyfed.cli.main import main
from small_federations import tiny_experiment


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with an experiment ``tiny.yaml`` and a study of it, ``mine.yaml``."""
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(yaml.safe_dump(tiny_experiment()))
    Path("mine.yaml").write_text(yaml.safe_dump(tiny_study()))
    return tmp_path


def test_a_study_from_file_to_tables(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = {"data.sources.scenes.columns": {"image": "image", "text": "nowhere"}}  # which only the data show
    rows = {"tiny": {}, "wrong": {"set": nowhere, "main": False}}
    Path("mine.yaml").write_text(yaml.safe_dump(tiny_study(rows=rows, claims={"method": ["tiny > wrong on r1"]})))
    assert main(["study", "run", "mine.yaml", "--seeds", "1", "--jobs", "1"]) == 1
    printed = capsys.readouterr()
    assert "study: runs/studies/mine-small" in printed.out
    assert "1/2" in printed.out
    assert "not run" in printed.out  # the claim
    assert "1 cells failed; the same command tries them again" in printed.err
    assert main(["study", "show", "mine-small"]) == 0
    assert "wrong, seed 0" in capsys.readouterr().out
    assert main(["study", "export", "runs/studies/mine-small"]) == 0
    assert {path.name for path in Path("runs/studies/mine-small/export").iterdir()} >= {"tables.md", "figures.csv"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "nothing"], "no study file 'nothing'"),
        (["run", "mine.yaml", "--scale", "big"], "--scale big: valid: small, smoke"),
        (["run", "mine.yaml", "--only", "tidy"], "--only tidy: no such row"),
        (["run", "mine.yaml", "--engine", "cloud"], "unknown engine"),
        (["show", "nothing"], "no study in 'nothing'"),
        (["export", "nothing"], "no study in 'nothing'"),
    ],
)
def test_refusals(folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["study", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not Path("runs").exists()


def test_list_names_all(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "list"]) == 0  # those of the clone
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert [Path(name).resolve() for name in listed] == list(STUDIES.values())
    (folder / "mine").mkdir()
    shutil.copy("mine.yaml", "mine/one.yaml")
    shutil.copy("tiny.yaml", "mine/tiny.yaml")
    assert main(["study", "list", "mine"]) == 0
    assert capsys.readouterr().out == "mine/one.yaml  tiny\n"
    assert main(["study", "list", "yours"]) == 2
    assert "no folder 'yours'; paper studies are in polyfed's repository" in capsys.readouterr().err
