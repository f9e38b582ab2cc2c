"""What a dry run says, beside the run itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyfed import run
from polyfed.lab.analysis.forecast import Forecast
from polyfed.runs.experiment import Experiment

Cli = Callable[..., tuple[int, str, str]]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["creamfl", "fedmd", "fedavg"])
def test_bytes_and_clients_are_those_of_the_run(tiny: dict[str, Any], tmp_path: Path, algorithm: str) -> None:
    experiment = Experiment.parse(tiny | {"algorithm": {"name": algorithm, "local_epochs": 1}})
    forecast = Forecast.of(experiment)
    finished = run(experiment, tmp_path / "run")
    records = finished.records
    crossed = records.frame("traffic").query(f"round == {forecast.measured.round}")
    crossed = crossed[~crossed.step.str.startswith("evaluate:")]
    infos = {client.id for client in forecast.measured.clients}
    assert infos == set(records.holdings)
    for direction in ("down", "up"):
        moved = crossed[crossed.direction == direction].bytes.sum()
        # messages name their client and count its samples, in as many digits
        assert forecast.moved(direction) == pytest.approx(moved, rel=0.02)
    assert forecast.seconds > 0


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "creamfl", "local_epochs": 3},
        {"name": "creamfl_averaged", "local_steps": 5},
        {"name": "change_distillation", "warmup_rounds": 1, "local_epochs": 3},
        {"name": "fedafd"},
        {"name": "scaffold", "local_steps": 4},
    ],
    ids=lambda algorithm: algorithm["name"],
)
def test_a_round_that_is_cut_short_sends_what_a_whole_one_does(tiny: dict[str, Any], algorithm: dict[str, Any]) -> None:
    experiment = Experiment.parse(tiny | {"algorithm": algorithm})
    brief, whole = (Forecast.of(experiment, seconds) for seconds in (0.0, float("inf")))
    assert brief.measured.round == whole.measured.round
    for direction in ("down", "up"):
        assert brief.moved(direction) == pytest.approx(whole.moved(direction), rel=0.02)
    rounds, resting = experiment.run.rounds, algorithm.get("warmup_rounds", 0)
    clients = brief.seconds - brief.server.seconds
    assert brief.total_seconds == pytest.approx(rounds * brief.server.seconds + (rounds - resting) * clients)


def test_the_command_writes_nothing(cli: Cli, tiny: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny))
    code, out, err = cli("run", tmp_path / "tiny.yaml", "--dry-run", "--rounds", 7)
    assert (code, err) == (0, "")
    assert "7 rounds" in out
    assert "parameters" in out
    assert not Path("runs").exists()
    wrong = "data.sources.private={name: parquet, path: nowhere, columns: {image: image}, targets: {label: label}}"
    code, _, err = cli("run", tmp_path / "tiny.yaml", "--dry-run", "--set", wrong)
    assert code == 2
    assert "source 'private': path 'nowhere' is relative and no data folder is set" in err
