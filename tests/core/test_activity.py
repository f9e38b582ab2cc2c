"""Reports of work."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pytest

from polyfed import Experiment, run
from polyfed.core import activity
from polyfed.runs.events import Callbacks, ClientDone, ClientStarted, Event, Preparing, StepStarted, Working


class Heard(Callbacks):
    """Remembers events of work."""

    def __init__(self) -> None:
        super().__init__()
        self.reported: list[tuple[str, ...]] = []

    def handle(self, event: Event) -> None:
        match event:
            case Preparing(what, done, total):
                self.reported.append(("preparing", what, f"{done}/{total}"))
            case StepStarted(step):
                self.reported.append(("asked", step))
            case ClientStarted(client, step):
                self.reported.append(("started", client, step))
            case Working(participant, what, done, total):
                self.reported.append((participant, what, f"{done}/{total}"))
            case ClientDone(client, step):
                self.reported.append(("done", client, step))


def test_unheard_nothing_happens() -> None:
    activity.preparing("x")
    assert list(activity.passed("a", "task", "abc", 3)) == ["a", "b", "c"]
    assert list(activity.prepared("x", "abc", 3)) == ["a", "b", "c"]


def test_a_pass_is_reported_as_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity.time, "monotonic", count().__next__)
    heard = Heard()
    with activity.heard_by(heard):
        assert list(activity.passed("a", "task", "xy", 6, before=2)) == ["x", "y"]
        list(activity.prepared("reading", range(0, 5, 2), 5, size=2))
    of_passes = [("a", "task", "2/6"), ("a", "task", "3/6")]
    assert heard.reported == of_passes + [("preparing", "reading", f"{done}/5") for done in (0, 2, 4)]


def test_a_pass_is_reported_seldom_however_short_its_parts() -> None:
    heard = Heard()
    with activity.heard_by(heard):
        list(activity.passed("a", "task", range(1000), 1000))
    assert 1 <= len(heard.reported) < 100


def test_a_pass_within_a_pass_is_a_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity.time, "monotonic", count().__next__)
    heard = Heard()
    with activity.heard_by(heard):
        for _ in activity.passed("a", "task", "x", 1):
            list(activity.passed("a", "contrast", "uvw", 3))
        abandoned = activity.passed("a", "left", "xy", 2)
        next(iter(abandoned))
        del abandoned
        list(activity.passed("a", "next", "x", 1))
    assert [what for _, what, _ in heard.reported] == ["task", "left", "next"]


@pytest.mark.slow
def test_a_run_reports_its_preparation_each_client_and_the_server(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLYFED_CACHE", str(tmp_path / "cache"))  # a new one: what is there already is not prepared
    heard = Heard()
    run(Experiment.load(tiny | {"algorithm": {"name": "creamfl", "local_epochs": 1}}), tmp_path / "run", [heard])
    first = next(k for k, reported in enumerate(heard.reported) if reported[0] == "asked")
    assert any(
        reported[0] == "preparing" and reported[1].startswith("reading scenes") for reported in heard.reported[:first]
    )
    assert any(reported[0] == "preparing" and reported[1].startswith("decoding images") for reported in heard.reported)
    started = [reported[1:] for reported in heard.reported if reported[0] == "started"]
    assert started == [reported[1:] for reported in heard.reported if reported[0] == "done"]
    for one in ("paired-0", "image"):
        begun = next(k for k, reported in enumerate(heard.reported) if reported[:2] == ("started", one))
        work = next(k for k, reported in enumerate(heard.reported) if reported[0] == one)
        assert begun < work < next(k for k, reported in enumerate(heard.reported) if reported[:2] == ("done", one))
    assert ("server", "measuring (test)", "0/0") in heard.reported
    assert any(reported[:2] == ("server", "distil") for reported in heard.reported)
