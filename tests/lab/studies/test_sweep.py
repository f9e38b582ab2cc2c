"""``polyfed run --sweep``: the study that it writes and runs."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml

from polyfed.cli.main import main
from small_federations import tiny_experiment

EPOCHS = "algorithm.local_epochs=1,2"


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working folder next to that of the experiment ``tiny.yaml``."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "tiny.yaml").write_text(yaml.safe_dump(tiny_experiment()))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


def test_a_sweep_is_a_study_that_its_last_line_runs_again(capsys: pytest.CaptureFixture[str]) -> None:
    widths = "clients.image.model.encoders.image.widths=[4,8],[8,8]"
    sweep = ["run", "../own/tiny.yaml", "--rounds", "1", "--sweep", EPOCHS, "--sweep", widths]
    assert main(sweep) == 0
    printed = capsys.readouterr().out
    study = yaml.safe_load(Path("runs/studies/tiny-sweep/sweep.yaml").read_text())
    assert (study["base"], study["set"], study["seeds"]) == ("../../../../own/tiny.yaml", {"run.rounds": 1}, [0])
    assert [axis["values"] for axis in study["axes"].values()] == [[1, 2], [[4, 8], [8, 8]]]
    assert all(part in printed for part in ("r1_sum", "MiB", "2, [8, 8]", "study: runs/studies/tiny-sweep"))
    assert len(list(Path("runs/studies/cells").glob("*/figures.json"))) == 4
    words = shlex.split(printed.splitlines()[-1].partition("again")[2].partition(": ")[2])
    assert main(words[1:]) == 0
    assert len(list(Path("runs/studies/cells").glob("*/figures.json"))) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sweep", "local_epochs"], "--sweep local_epochs: needs the form KEY=VALUE,VALUE"),
        (["--sweep", "algorithm.local_epochs=1"], "give two values or more"),
        (["--sweep", "algorithm.local_epochs=1,[2"], "not values of YAML"),
        (["--sweep", "algorithm.local_epochs=1,1.0"], "has 1 twice"),
        (["--sweep", "algorithm.local_epoch=1,2"], "algorithm: unknown key 'local_epoch'; did you mean 'local_epochs'"),
        (["--sweep", "algorithm.local_epochs=1,-2"], "-2"),
        (["--sweep", "algorithm=fedavg,fedprx"], "did you mean 'fedprox'"),
        (["--sweep", EPOCHS, "--sweep", EPOCHS], "algorithm.local_epochs is set by another"),
        (["--sweep", EPOCHS, "--set", "algorithm.local_epochs=3"], "algorithm.local_epochs is set by another"),
        (["--sweep", "algorithm=fedavg,local", "--set", "algorithm.local_epochs=3"], "local_epochs is set by another"),
        (["--sweep", "run.rounds=1,2", "--rounds", "3"], "run.rounds is set by another"),
        (["--sweep", "run.seed=1,2"], "run.seed is set by a study (seeds are --seeds"),
        (["--sweep", EPOCHS, "--twin", "local"], "--sweep does not go with --twin"),
        (["--sweep", EPOCHS, "--dry-run"], "--sweep does not go with"),
        (["--sweep", EPOCHS, "--out", "../own"], "--out ../own: exists"),
    ],
)
def test_bad_sweeps(capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    assert main(["run", "../own/tiny.yaml", *options]) == 2
    printed = capsys.readouterr()
    assert (message in printed.err, printed.out) == (True, "")
    assert list(Path().iterdir()) == []
