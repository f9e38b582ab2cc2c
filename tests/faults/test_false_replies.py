"""Replies that arrive whole and must not be used, on every engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from faulty import FALSE
from struck_runs import events, ready, reasons

import polyfed
from by_hand import play
from polyfed.runs.config_files import merged
from polyfed.runs.experiment import Experiment
from polyfed.runs.session import Session
from sessions import prepared, round_records


@pytest.fixture(scope="module")
def session(keeping_config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Session:
    """One session in which the client ``image`` sends replies with ``faulty.FALSE_REPLY``."""
    config = keeping_config | {"algorithm": keeping_config["algorithm"] | {"name": "faulty.Liar"}}
    config = merged(config, {"clients": {"paired": {"count": 1}}, "run": {"on_error": "exclude"}})
    return play(prepared(config, tmp_path_factory.mktemp("liar") / "run"), 1, 1)


@pytest.mark.parametrize("how", FALSE)
def test_a_false_reply_costs_its_client_the_round(session: Session, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Round after round, and one that replies as declared returns."""
    for reply, event in ((how, "client_excluded"), *([("", "client_returned")] if how == "order" else ())):
        monkeypatch.setattr("faulty.FALSE_REPLY", reply)
        number = session.server.clock.round + 1
        play(session, number, number)
        (record,) = [record for record in round_records(session) if record["kind"] == "event"]
        assert (record["participant"], record["event"]) == ("image", event)
        assert FALSE[how] in record["reason"] or not reply


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ray", "flower"])
def test_engines_refuse_false_replies(keeping: dict[str, Any], tmp_path: Path, engine: str, ray_cluster: None) -> None:
    for how in ("order", "nan", "undeclared", "text"):
        config = ready(keeping, tmp_path / how, engine, how=how, evaluate_clients=False)
        folder = polyfed.run(Experiment.parse(config), tmp_path / how / "run", quiet=True).folder
        assert events(folder) == [(2, "image", "client_excluded"), (3, "image", "client_returned")]
        assert FALSE[how] in reasons(folder)["image"]
