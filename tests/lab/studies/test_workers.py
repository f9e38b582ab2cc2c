"""Display of a study and of its cells while they run."""

from __future__ import annotations

import io
import multiprocessing
import multiprocessing.connection
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from polyfed.core.errors import RunError
from polyfed.lab.studies.cells import Places, StudyPlan
from polyfed.lab.studies.runner import Progress, study_display
from polyfed.lab.studies.study import Study
from polyfed.lab.studies.workers import ActivitySender, Order, execute
from polyfed.runs.events import ClientStarted, Preparing


def test_preparation_is_sent_with_its_count_and_with_its_end() -> None:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    activity = ActivitySender(sender)
    for event in (
        Preparing("encoding cifar100", 3200, 24000),
        Preparing("encoding cifar100", 3300, 24000),  # too soon after the other to be read
        ClientStarted("image-0", "fit"),
        ClientStarted("image-1", "fit"),
    ):
        activity.handle(event)
    sender.close()
    assert [receiver.recv()[1], receiver.recv()[1]] == ["encoding cifar100: 3,200 of 24,000", ""]
    assert not receiver.poll() or _is_closed(receiver)


def _is_closed(receiver: multiprocessing.connection.Connection) -> bool:
    try:
        receiver.recv()
    except EOFError:
        return True
    return False


def test_a_method_that_is_edited_while_the_study_runs_is_not_run_as_what_it_was(
    loaded: Callable[..., Study], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mymethod.py").write_text("from polyfed.algorithms.fedavg import FedAvg\nclass Ours(FedAvg): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    study = loaded(seeds=1, rows={"ours": {"set": {"algorithm": {"name": "mymethod.Ours", "local_epochs": 1}}}})
    cell = StudyPlan(study, Places(), tmp_path).cell("ours", (), 0)
    order = Order(cell.experiment, cell.folder(tmp_path), [], Places(), "records", cell.sources)
    with (tmp_path / "mymethod.py").open("a") as file:
        file.write("# edited\n")
    with pytest.raises(RunError, match="edited since the study began"):
        execute(order)
    assert not order.folder.exists()


def shown(*seen: tuple[float, Progress]) -> list[str]:
    """Lines without a terminal, of progress at some seconds."""
    stream, times = io.StringIO(), [0.0]
    with study_display(Console(file=stream, width=200), now=lambda: times[0]) as display:
        for when, progress in seen:
            times[0] = when
            display(progress)
    return stream.getvalue().splitlines()


def progress(done: int = 0, activity: str = "") -> Progress:
    return Progress(done, 0, 4 - done, {"creamfl, seed 0": activity}, None)


def test_a_line_whenever_a_cell_is_done() -> None:
    assert shown((0, progress()), (1, progress()), (2, progress(1)), (50, progress(1))) == [
        "0/4 | creamfl, seed 0 | 0.00 s so far",
        "1/4 | creamfl, seed 0 | 2.00 s so far",
        "1/4 | creamfl, seed 0 | 50 s so far",
    ]


def test_current_work_is_shown_every_ten_seconds() -> None:
    texts = [f"encoding cifar100: {number},000 of 24,000" for number in range(1, 6)]
    seen = [(4.0 * number, progress(0, text)) for number, text in enumerate(texts)]
    assert shown(*seen, (26, progress(0, texts[-1]))) == [
        f"0/4 | creamfl, seed 0 ({texts[at]}) | {seconds} so far"
        for at, seconds in ((0, "0.00 s"), (3, "12 s"), (4, "26 s"))
    ]
