"""What a dry run says, beside the run itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from masked_runs import federation
from polyfed import run
from polyfed.lab.analysis.forecast import Forecast
from polyfed.runs.config_files import merged
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


@pytest.mark.parametrize(
    ("change", "share"),
    [
        ({"aggregation": {"secure": "pairwise_masks"}}, 1),
        ({"aggregation": {"robust": {"name": "median", "tolerated": 1}}}, 1),
        ({"run": {"min_clients": 4}}, 1),
        ({"run": {"pace": {"name": "buffered", "replies": 3}}}, 0.5),
        ({"run": {"pace": {"name": "buffered", "replies": 3}}, "aggregation": {"secure": "pairwise_masks"}}, 0.5),
        ({"run": {"pace": "async"}}, 1 / 6),
    ],
)
def test_one_client_of_a_kind_stands_for_rounds_of_several(change: dict[str, Any], share: float) -> None:
    own = federation(None, 6)
    waiting = Forecast.of(Experiment.parse(own), 0.0)
    forecast = Forecast.of(Experiment.parse(merged(own, change)), 0.0)
    for direction in ("down", "up"):
        assert forecast.moved(direction) == pytest.approx(share * waiting.moved(direction), rel=0.02)


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
