from __future__ import annotations

from pathlib import Path

import pytest

from polyfed.core.errors import RunError
from polyfed.lab.analysis.traffic import Traffic, traffic_of_runs
from polyfed.runs.opened import Run, open_run
from polyfed.runs.records import RunRecords, Transfer


def moved(number: int, client: str, direction: str, kind: str, size: int, step: str = "fit") -> Transfer:
    return Transfer(number, client, direction, step, kind, kind, "float32", size)


LEDGER = (
    moved(1, "a", "down", "weights", 100),
    moved(1, "a", "up", "weights", 50),
    moved(1, "b", "down", "rows", 7),
    moved(1, "b", "up", "rows", 3, step="tell"),
    moved(3, "a", "down", "weights", 100),
    moved(3, "a", "up", "rows", 40),
    moved(3, "b", "up", "framing", 5, step="evaluate:assess"),
    moved(0, "b", "up", "weights", 9, step="setup:initial"),
)


def test_sums_by_hand() -> None:
    found = Traffic.of(RunRecords(Path("runs/mine"), transfers=LEDGER, config={"algorithm": {"name": "fedmd"}}))
    assert found.label == "mine (fedmd)"
    assert (found.total("down"), found.total("up"), found.beside, found.rounds) == (207, 93, 14, 2)
    assert found.by_kind == {"weights": {"down": 200, "up": 50}, "rows": {"down": 7, "up": 43}}
    assert found.by_client == {"a": {"down": 200, "up": 90}, "b": {"down": 7, "up": 3}}
    assert found.turns == {"a": 2, "b": 1}
    assert found.by_round == {"down": {1: 107, 3: 100}, "up": {1: 53, 3: 40}}
    assert found.cumulative() == {1: 160, 3: 300}
    assert (found.a_round("down"), found.a_round("up")) == (69, 31)
    assert found.a_round("up", "rows") == pytest.approx(43 / 3)


def test_a_run_and_its_ledger_agree(fedafd_run: Path) -> None:
    found, records = Traffic.of(open_run(fedafd_run).records), RunRecords.load(fedafd_run)
    assert found.method == "fedafd"
    assert sum(map(found.total, ("down", "up"))) + found.beside == records.total_bytes()
    assert found.beside > 0
    assert {"weights", "representations"} <= set(found.by_kind)
    assert found.by_kind["representations"]["up"] > 0 == found.by_kind["weights"]["up"]
    for direction in ("down", "up"):
        parts = [found.a_round(direction, kind) for kind in found.by_kind]
        assert sum(parts) == pytest.approx(found.a_round(direction))
        assert sum(counts[direction] for counts in found.by_client.values()) == found.total(direction)


def test_runs_side_by_side(fedafd_run: Path, tiny_run: Path) -> None:
    runs = [Traffic.of(open_run(folder).records) for folder in (fedafd_run, tiny_run)]
    both = traffic_of_runs(runs)
    assert both.picture is not None
    left, right = both.picture().axes
    assert [line.get_label() for line in left.lines] == ["run (fedafd)", "run (fedavg)"]
    assert len(right.patches) == 2 * sum(len(run.by_kind) for run in runs)
    totals, kinds = both.tables
    assert [row[0] for row in totals.rows] == ["run (fedafd)", "run (fedavg)"]
    assert len(kinds.rows) == sum(len(run.by_kind) for run in runs)


def test_what_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="nothing has crossed"):
        Traffic.of(Run(tmp_path).records)
    with pytest.raises(RunError, match="nothing has crossed"):
        Traffic.of(RunRecords(tmp_path, transfers=LEDGER[-2:]))
    with pytest.raises(RunError, match="no run folder"):
        Traffic.of(open_run(tmp_path / "nothing").records)
