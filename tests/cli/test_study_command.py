"""``polyfed study``: what it prints, writes and refuses."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import yaml

import polyfed
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


def test_a_study_from_file_to_tables_and_frames(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
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
    assert main(["study", "export", "mine", "--format", "markdown,latex"]) == 0
    assert {path.name for path in Path("runs/studies/mine-small/export").iterdir()} == {"tables.md", "tables.tex"}
    named = ["mine.yaml", "mine-small", "runs/studies/mine", folder / "runs" / "studies" / "mine-small"]
    assert {polyfed.open_study(name).folder.resolve() for name in named} == {folder / "runs" / "studies" / "mine-small"}
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    study = polyfed.open_study(os.path.relpath(folder / "mine.yaml"))
    assert study.runs["tiny, seed 0"].metrics()["r1_sum"] == study.to_pandas("cells")["r1"].item()
    assert "<td" in study._repr_html_()
    monkeypatch.chdir(folder)
    shutil.copytree("runs/studies/mine-small", "runs/studies/mine-two-small")
    assert main(["study", "show", "mine"]) == 0
    assert main(["study", "show", "yours"]) == 2
    assert "in runs/studies: mine-small, mine-two-small" in capsys.readouterr().err
    shutil.copytree("runs/studies/mine-small", "runs/studies/mine-paper")
    assert main(["study", "show", "mine"]) == 2
    several = "several studies 'mine': runs/studies/mine-paper, runs/studies/mine-small; give one of them"
    assert several in capsys.readouterr().err


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
