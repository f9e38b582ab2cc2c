"""Replies that arrive whole and must not be used, on every engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines_under_test import ENGINES, ready
from faulty import FALSE
from outcomes import events, reasons

from polyfed import Experiment, run


@pytest.mark.parametrize("how", FALSE)
def test_a_false_reply_costs_its_client_the_round(keeping: dict[str, Any], tmp_path: Path, how: str) -> None:
    assert_refused(keeping, tmp_path, how, "local")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ray", "flower"])
def test_false_replies_are_refused_on_every_engine(
    keeping: dict[str, Any], tmp_path: Path, engine: str, ray_cluster: None
) -> None:
    for how in ("order", "nan", "undeclared", "text"):
        assert_refused(keeping, tmp_path / how, how, engine)


def assert_refused(config: dict[str, Any], tmp_path: Path, how: str, engine: str) -> None:
    config = ready(config, tmp_path, engine, how=how, evaluate_clients=False)
    folder = run(Experiment.parse(config), tmp_path / "run").folder
    assert events(folder) == [(2, "image", "client_excluded"), (3, "image", "client_returned")]
    assert FALSE[how] in reasons(folder)["image"]
    assert ENGINES[engine]["name"] == engine
