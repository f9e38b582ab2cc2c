"""Dry runs compared with the runs themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from grids import mostly_slow
from masked_runs import federation
from polyfed import run
from polyfed.data.scenery import captions, png
from polyfed.data.sources import scenes
from polyfed.lab.analysis.cost import DryRun
from polyfed.runs.config_files import merged
from polyfed.runs.experiment import Experiment

Cli = Callable[..., tuple[int, str, str]]


def moved(result: DryRun, direction: str) -> float:
    return sum(result.a_round(direction).values())


LATE = {"name": "change_distillation", "warmup_rounds": 1, "local_epochs": 2, "public": {"samples": 12}}
METHODS = [{"name": name, "local_epochs": 1} for name in ("creamfl", "fedafd", "fedmd")]


@pytest.mark.parametrize("algorithm", mostly_slow([LATE, *METHODS, {"name": "scaffold", "local_steps": 4}], LATE))
def test_bytes_and_clients_are_those_of_the_run(tiny: dict[str, Any], tmp_path: Path, algorithm: Any) -> None:
    for participant in (tiny["server"], *tiny["clients"].values()):
        participant["training"]["batch_size"] = 4  # fewer than the public samples
    tiny["run"] |= {"rounds": 1 + algorithm.get("warmup_rounds", 0), "evaluate_clients": False}
    experiment = Experiment.parse(tiny | {"algorithm": algorithm})
    result = DryRun.of(experiment)
    records = run(experiment, tmp_path / "run", quiet=True).records
    assert {client.id for client in result.clients} == set(records.holdings)
    crossed = records.frame("traffic").query(f"round == {experiment.algorithm.rounds_without_clients + 1}")
    crossed = crossed[~crossed.step.str.startswith("evaluate:")]
    for direction in ("down", "up"):
        of_way = crossed[crossed.direction == direction]
        for kind, total in result.a_round(direction).items():
            # messages name their client and count its samples, in as many digits
            crossed_bytes = of_way[of_way.kind == kind].bytes.sum()
            assert total == pytest.approx(crossed_bytes, rel=0.3 if "public" in algorithm else 0.02), (direction, kind)
        assert moved(result, direction) > 0


@pytest.mark.parametrize(
    ("change", "share"),
    [
        ({"aggregation": {"secure": "pairwise_masks"}}, 1),
        ({"aggregation": {"robust": {"name": "median", "tolerated": 1}}}, 1),
        ({"run": {"exchange": {"min_clients": 4}}}, 1),
        ({"run": {"pace": {"name": "buffered", "replies": 3}}}, 0.5),
        ({"run": {"pace": {"name": "buffered", "replies": 3}}, "aggregation": {"secure": "pairwise_masks"}}, 0.5),
        ({"run": {"pace": {"name": "buffered", "replies": 1}}}, 1 / 6),
    ],
)
def test_one_client_of_a_kind_stands_for_rounds_of_several(change: dict[str, Any], share: float) -> None:
    own = federation(None, 6)
    waiting, result = DryRun.of(Experiment.parse(own)), DryRun.of(Experiment.parse(merged(own, change)))
    for direction in ("down", "up"):
        assert moved(result, direction) == pytest.approx(share * moved(waiting, direction), rel=0.02)


def test_a_batch_is_trained_however_long_a_round_is(tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    monkeypatch.setattr("polyfed.federation.trainer.Trainer.step", lambda *_: steps.append("step"))
    for length in ({"local_epochs": 500}, {"local_steps": 500}):
        DryRun.of(Experiment.parse(tiny | {"algorithm": {"name": "fedavg"} | length}))
    assert len(steps) == 2 * 2  # lengths, and kinds of clients


def test_few_are_drawn_and_none_cached(tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny["data"]["cache_dir"] = str(tmp_path / "cache")
    tiny["data"]["sources"]["scenes"]["train"] = 3000
    tiny["data"]["sources"]["scenes"]["seed"] = 77  # columns of texts outlive other tests
    drawn, captioned = list[int](), list[int]()
    monkeypatch.setattr(scenes.scenery, "png", lambda pixels: drawn.append(1) or png(pixels))
    monkeypatch.setattr(scenes.scenery, "captions", lambda *scene: captioned.append(1) or captions(*scene))
    rows = {one.unit: one for counts in DryRun.of(Experiment.parse(tiny)).accounts.values() for one in counts}
    assert 0 < len(drawn) < 100
    assert "tokens (text) of the first 500 items" in rows
    assert 500 <= len(captioned) < 700, "public, counted, and of the batches"
    assert not (tmp_path / "cache").exists()


def test_an_authors_mistake_is_shown_with_its_traceback_before_the_line(
    cli: Cli, tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mistaken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("no\x1b[2J batches")

    monkeypatch.setattr("polyfed.federation.client.Client.fit", mistaken)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny))
    code, _, err = cli("run", tmp_path / "tiny.yaml", "--dry-run")
    shown, error, line = err.partition("\nerror: round 1: client '")
    assert (code, shown.startswith("Traceback (most recent call last):"), bool(error)) == (2, True, True)
    assert ("in mistaken" in shown, "\x1b" in shown, line.count("\n")) == (True, False, 1)


def test_the_command_writes_nothing(cli: Cli, tiny: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny))
    code, out, err = cli("run", tmp_path / "tiny.yaml", "--dry-run", "--rounds", 7)
    assert (code, err) == (0, "")
    assert "7 rounds" in out
    assert "parameters" in out
    assert not Path("runs").exists()
    wrong = "data.sources.private={name: parquet, path: nowhere, columns: {image: image}, targets: {label: label}}"
    code, _, err = cli("run", tmp_path / "tiny.yaml", "--dry-run", "--set", wrong)
    reason = "source 'private': 'nowhere' is not next to the file that names it, and no data folder is set"
    assert (code, reason in err) == (2, True), err
