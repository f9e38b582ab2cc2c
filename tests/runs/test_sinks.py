"""Sinks: what a round is made of, how they are chosen, and several at once."""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
from PIL import Image

import polyfed
from misbehaving import creamfl, failing
from polyfed import Experiment
from polyfed.core.errors import ConfigError
from polyfed.runs.events import RunStarted
from polyfed.runs.sink import Record, Sink, SinkRun, SinkWriter, Trackers, round_points, round_records
from sink_rounds import EXPECTED, a_round, complete, sink_run

# ---- what a round is made of


def test_a_round_as_points():
    values = round_points(a_round(1))
    assert math.isnan(values.pop("client/image-1/test/loss"))
    assert math.isnan(values.pop("clients/test/loss"))
    assert values == EXPECTED


def test_a_round_without_clients_by_id():
    points = round_points(a_round(1), per_client=False)
    assert not any("image-" in name for name in points)
    assert points["clients/test/accuracy"] == 30.0
    assert points["events/client_excluded"] == 1.0


def test_a_mean_is_over_the_finite_values():
    line = {"round": 1, "kind": "test"}
    lines = [line | {"participant": f"c-{value}", "metrics": {"x": value}} for value in (1.0, math.inf)]
    assert round_points(lines)["clients/test/x"] == 1.0


def test_round_zero_sends_nothing_and_takes_no_time():
    traffic = {"kind": "traffic", "metrics": {"bytes_up": 0, "bytes_down": 0}}
    assert round_records(0, []) == [{"round": 0, "participant": "server"} | traffic]


# ---- the family


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_refused_with_the_command_that_installs_it(name, monkeypatch):
    sink = Sink.model_validate(name)
    monkeypatch.setitem(sys.modules, sink.packages[0], None)  # as if it were not installed
    with pytest.raises(ConfigError, match=rf"sink '{name}' needs .*pip install \"polyfed\[{name}\]\""):
        sink.require()


# ---- what trackers receive of a machine, and when a package is missing


class Listening(Sink):
    """Keeps every word that it receives, and a link out of the run folder in a folder of its own."""

    heard: ClassVar[list[str]] = []

    def open(self, run: SinkRun) -> SinkWriter:
        self.heard.append(repr(run.config))
        own = run.folder / "listening" / "logs"
        own.mkdir(parents=True)
        (own / "latest.log").symlink_to("/etc/hostname")
        os.mkfifo(own / "pipe")
        return ListeningWriter()


class ListeningWriter(SinkWriter):
    def write(self, records: Sequence[Record]) -> None:
        Listening.heard.append(repr(records))

    def close(self, failed: bool) -> None: ...


def test_no_tracker_receives_paths_of_data_or_texts_of_errors(cli, tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    monkeypatch.setattr(Listening, "heard", [])
    config = failing(creamfl(), "raise")
    data = tmp_path / "Klinik_Secret"
    for number in range(30):
        (data / "one" / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (8 * number, 0, 0)).save(data / "one" / "ab"[number % 2] / f"{number}.png")
    folder = {"name": "folder", "path": "../Klinik_Secret/one", "fractions": {"validation": 0.2, "test": 0.2}}
    config["data"]["sources"]["held"] = folder | {"columns": {"image": "image"}, "targets": {"label": "label"}}
    config["data"]["sources"]["asked"] = {"name": "parquet", "path": str(data), "columns": {"text": "text"}}
    config["data"] |= {"dir": str(data), "weights_dir": str(data), "cache_dir": str(data / "cache")}
    config["run"] |= {"rounds": 2, "output": {"sinks": ["tensorboard", f"{__name__}.Listening"]}}
    run = polyfed.run(Experiment.parse(config), tmp_path / "run")
    board = b"".join(path.read_bytes() for path in (run.folder / "tensorboard").iterdir())
    for words in (*Listening.heard, board.decode(errors="replace")):
        assert not [mark for mark in ("Klinik_Secret", "no GPU left", str(tmp_path)) if mark in words]
    assert "client_excluded" in Listening.heard[-1]
    assert b"events/client_excluded" in board
    assert "'columns': {'image': 'image'}" in Listening.heard[0]
    for words in (("report", run.folder), ("export", run.folder, "--allow-code"), ("watch", run.folder)):
        assert cli(*words)[0] == 0  # although a third party keeps links in its folder
    for name in ("models", "arrays", ".privacy", "plots"):
        (run.folder / name).mkdir(exist_ok=True)
        link = run.folder / name / "link"
        link.symlink_to("/etc/hostname")
        assert f"'{link}' is a link out of the folder" in cli("report", run.folder)[2]
        link.unlink()


@pytest.mark.parametrize("begin", ["load", "run"])
def test_a_missing_package_is_refused_before_anything_is_built(tiny, begin, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr("polyfed.runs.session.build_federation", None)
    tiny["run"]["output"] = {"sinks": ["wandb"]}
    with pytest.raises(ConfigError, match="sink 'wandb' needs the package 'wandb'"):
        Experiment.load(tiny) if begin == "load" else polyfed.run(Experiment.parse(tiny), tmp_path / "run")
    assert not (tmp_path / "run").exists()


# ---- several sinks


class Memory(Sink):
    """Keeps its calls; fails on demand."""

    label: str = ""
    fails: str = ""

    reported: ClassVar[list[tuple[Any, ...]]] = []

    def open(self, run: SinkRun) -> SinkWriter:
        if self.fails == "open":
            raise OSError("no route")
        return MemoryWriter(self)


class MemoryWriter(SinkWriter):
    def __init__(self, sink: Memory) -> None:
        self.sink = sink

    def _hear(self, call: str, *content: Any) -> None:
        self.sink.reported.append((self.sink.label, call, *content))
        if self.sink.fails == call:
            raise OSError("disk full")

    def write(self, records: Sequence[Record]) -> None:
        self._hear("write", records[0]["round"])

    def close(self, failed: bool) -> None:
        self._hear("close", failed)


@pytest.fixture
def reported(monkeypatch) -> list[tuple[Any, ...]]:
    monkeypatch.setattr(Memory, "reported", [])
    return Memory.reported


def started(folder: Path, *sinks: Memory, done: int = 0) -> Trackers:
    trackers = Trackers(sinks, sink_run(folder))
    trackers.handle(RunStarted("demo", 3, 3, done))
    return trackers


def test_all_sinks_receive_all_rounds_and_an_exception(reported, tmp_path):
    trackers = started(tmp_path, Memory(label="a"), Memory(label="b"))
    complete(trackers, 1)
    with pytest.raises(ZeroDivisionError), trackers:
        1 / 0  # noqa: B018
    assert reported == [("a", "write", 1), ("b", "write", 1), ("a", "close", True), ("b", "close", True)]


def test_a_sink_that_fails_is_switched_off_with_one_warning(reported, tmp_path, caplog):
    with caplog.at_level(logging.WARNING), started(tmp_path, Memory(label="a", fails="write"), Memory(label="b")) as on:
        for number in (1, 2, 3):
            complete(on, number)
    first, second = ([entry[1:] for entry in reported if entry[0] == label] for label in "ab")
    assert first == [("write", 1), ("close", True)]
    assert second == [("write", 1), ("write", 2), ("write", 3), ("close", False)]
    assert len(caplog.records) == 1
    assert caplog.records[0].getMessage().endswith("Memory' failed and is switched off: OSError: disk full")


def test_a_sink_that_cannot_be_closed_keeps_no_other_from_it(reported, tmp_path, caplog):
    with started(tmp_path, Memory(label="a", fails="close"), Memory(label="b")):
        pass
    assert reported == [("a", "close", False), ("b", "close", False)]
    assert len(caplog.records) == 1


def test_an_interruption_is_not_swallowed(reported, tmp_path, monkeypatch):
    monkeypatch.setattr(MemoryWriter, "write", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        complete(started(tmp_path, Memory()), 1)


def test_a_sink_that_cannot_be_opened_is_an_error_before_work_starts(reported, tmp_path):
    with pytest.raises(ConfigError, match=r"Memory' cannot be opened \(OSError: no route\); mend its settings"):
        started(tmp_path, Memory(label="a"), Memory(label="b", fails="open"))
    assert reported == [("a", "close", True)]


def test_a_resumed_run_goes_on_without_a_sink_that_cannot_be_opened(reported, tmp_path, caplog):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "round-0001.json").touch()
    complete(started(tmp_path, Memory(label="a", fails="open"), Memory(label="b"), done=1), 2)
    assert reported == [("b", "write", 2)]
    assert "the run goes on without it" in caplog.text
