"""TensorBoard and Weights & Biases as sinks: for real, and the calls that are made."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from polyfed.reporting.sinks import TensorBoard, WandB
from polyfed.runs.events import RunStarted
from polyfed.runs.sink import Sink, Trackers
from sink_rounds import CONFIG, EXPECTED, a_round, complete, sink_run

# ---- TensorBoard, for real


def board_values(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_has_every_point_and_hides_what_is_done_again(tmp_path):
    pytest.importorskip("tensorboard")
    sink = TensorBoard()
    sink.require()
    writer = sink.open(sink_run(tmp_path))
    for number in (0, 1, 2, 3):
        writer.write(a_round(number))
    writer.close(failed=True)
    writer = sink.open(sink_run(tmp_path, resumed_from=1))
    writer.write([{**record, "metrics": {"x": 1.0}} for record in a_round(2) if record["kind"] == "timing"])
    writer.write(a_round(3))
    writer.close(failed=False)
    values = board_values(tmp_path)
    assert values["server/test/image_to_text_r@1"] == [(0, 0.0), (1, 10.0), (3, 30.0)]
    assert values["server/timing/x"] == [(2, 1.0)]
    assert values["client/image-1/test/accuracy"] == [(number, 40.0) for number in (0, 1, 3)]
    assert set(EXPECTED) <= set(values)


# ---- Weights & Biases: its calls, with a stand-in that records them


class Recorder:
    """Answers every call and remembers it."""

    def __init__(self, calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]]) -> None:
        self.calls = calls

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            self.calls.append((name, arguments, named))
            return SimpleNamespace(info=SimpleNamespace(run_id="m1"), experiment_id="7")

        return call


@pytest.fixture
def fake_wandb(monkeypatch) -> SimpleNamespace:
    fake = SimpleNamespace(inits=[], calls=[])
    fake.run = Recorder(fake.calls)
    module = ModuleType("wandb")

    class Settings(dict):
        model_fields: ClassVar = dict.fromkeys(["x_disable_meta", "x_disable_stats"])

        def __init__(self, **values: Any) -> None:
            super().__init__(values)

    def init(**named: Any) -> Recorder:
        fake.inits.append(named)
        return fake.run

    module.Settings, module.init = Settings, init
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_ERROR_REPORTING", raising=False)
    return fake


def test_wandb_is_asked_for_one_private_offline_run_and_gets_every_point(fake_wandb, tmp_path):
    sink = WandB(project="mine", entity="us")
    sink.require()
    writer = sink.open(sink_run(tmp_path))
    (asked,) = fake_wandb.inits
    settings = asked.pop("settings")
    names = {"project": "mine", "entity": "us", "name": "demo", "id": "run-0001", "dir": str(tmp_path)}
    assert asked == names | {"resume": "allow", "config": CONFIG, "reinit": "create_new"}
    assert settings["mode"] == "offline"
    assert all(settings[switch] for switch in ("disable_git", "disable_code", "x_disable_meta"))
    assert "x_save_requirements" not in settings  # this version has no such switch
    writer.write(a_round(1))
    writer.close(failed=True)
    axes, every, (name, (points,), step), end = fake_wandb.calls
    assert step == {"step": 1, "commit": True}  # the tracker's own step, which would begin at 0 after a resume
    assert [axes[:2], every[:2]] == [("define_metric", ("round",)), ("define_metric", ("*",))]
    assert name == "log"
    assert {**EXPECTED, "round": 1}.items() <= points.items()
    assert end == ("finish", (), {"exit_code": 1})


# ---- the same for real, where they are installed


def wandb_rounds(folder: Path) -> list[int]:
    """How often each stored run names the server's metric in a row of its history (its summary names it again)."""
    files = (folder / "wandb").glob("offline-run-*/run-run-0001.wandb")
    return sorted(file.read_bytes().count(b"image_to_text_r@1") // 2 for file in files)


def begun_and_resumed(sink_class: type[Sink], folder: Path) -> None:
    """A round of a run, and one after it was resumed."""
    for done in (0, 1):
        with Trackers([sink_class()], sink_run(folder)) as trackers:
            trackers.handle(RunStarted("demo", 2, 3, done))
            complete(trackers, done + 1)


def test_wandb_for_real(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    pytest.importorskip("wandb")
    begun_and_resumed(WandB, tmp_path)
    deadline = time.monotonic() + 30  # a second run with one id in one process is on disk a moment after its end
    while (stored := wandb_rounds(tmp_path)) != [1, 1] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert stored == [1, 1]
    assert not list((tmp_path / "wandb").glob("*/files/*"))  # no code, requirements or console output
