"""Replies that arrive whole and must not be used, on every engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines_under_test import ready
from faulty import FALSE
from outcomes import events, reasons

import polyfed
from by_hand import play
from polyfed.runs.experiment import Experiment
from sessions import prepared, round_records


@pytest.mark.parametrize("how", FALSE)
def test_a_false_reply_costs_its_client_the_round(keeping: dict[str, Any], tmp_path: Path, how: str) -> None:
    session = prepared(ready(keeping, tmp_path, "local", how=how), tmp_path / "run")
    for number, event in ((2, "client_excluded"), (3, "client_returned")):
        play(session, number, number)
        (record,) = [record for record in round_records(session) if record["kind"] == "event"]
        assert (record["participant"], record["event"]) == ("image", event)
        assert FALSE[how] in record["reason"] or number == 3


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ray", "flower"])
def test_false_replies_are_refused_on_every_engine(
    keeping: dict[str, Any], tmp_path: Path, engine: str, ray_cluster: None
) -> None:
    for how in ("order", "nan", "undeclared", "text"):
        config = ready(keeping, tmp_path / how, engine, how=how, evaluate_clients=False)
        folder = polyfed.run(Experiment.parse(config), tmp_path / how / "run", quiet=True).folder
        assert events(folder) == [(2, "image", "client_excluded"), (3, "image", "client_returned")]
        assert FALSE[how] in reasons(folder)["image"]
