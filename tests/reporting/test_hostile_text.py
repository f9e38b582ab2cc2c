"""Text of clients, sites and data sets has no effect wherever it is shown."""

from __future__ import annotations

import io
import logging
import re
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from rich.text import Text

import polyfed
from polyfed.cli.console import warnings_and_signals
from polyfed.reporting.figures import figure_grid, legend_below, save, styled
from polyfed.reporting.page import write_html_report, write_report
from polyfed.reporting.progress import LiveProgress, PlainProgress
from polyfed.reporting.run_tables import tables
from polyfed.reporting.tables import TextTable
from polyfed.reporting.terminal import FittedTable, Terminal
from polyfed.runs.events import Incident, Measured, RoundComplete, RoundStarted, RunComplete, RunStarted
from polyfed.runs.folder import RunFolder
from polyfed.runs.records import RunRecords
from run_folders import write_lines

HOSTILE = "\x1b[2J\x1b]0;owned\x07<script>alert(1)</script> | ![x](http://tracker)\r\n# forged\u202e"
EFFECTS = ("\x1b", "\x07", "\r", "\u202e", "\x9b")


def require_harmless(text: str) -> None:
    assert not [mark for mark in EFFECTS if mark in text]
    assert "\n# forged" not in text


@pytest.fixture
def records(tmp_path: Path) -> RunRecords:
    """A run with hostile words in every place that takes words."""
    event = {"round": 1, "participant": f"a{HOSTILE}", "kind": "event", "event": "client_excluded", "reason": HOSTILE}
    metrics = {f"m{HOSTILE}": 0.5, "accuracy": 1.0}
    measured = {"round": 1, "participant": f"b{HOSTILE}", "kind": "test", "metrics": metrics}
    write_lines(tmp_path / "metrics.jsonl", [event, measured, measured | {"participant": "server"}])
    return RunRecords.load(tmp_path)


def test_reports(records: RunRecords) -> None:
    text = write_report(records).read_text()
    require_harmless(text)
    assert "<script" not in text
    assert "![" not in text
    assert text.count("forged") == 6  # it is all there to be read
    page = write_html_report(records).read_text()
    assert not [mark for mark in (*EFFECTS, "<script>alert") if mark in page]  # a line break is a space there


def test_a_terminal(records: RunRecords) -> None:
    stream = io.StringIO()
    terminal = Terminal(file=stream, width=200)
    for table in tables(records):
        terminal.print(FittedTable(table))
    terminal.print(FittedTable(TextTable(HOSTILE, (HOSTILE, "x"), [(HOSTILE, "1")], (HOSTILE,))))
    terminal.print(Text(HOSTILE))
    terminal.print(HOSTILE, markup=False)
    shown = stream.getvalue()
    assert not [mark for mark in EFFECTS if mark in shown]
    assert shown.count("\u241b") >= 10


def test_colours_of_a_terminal_stay() -> None:
    stream = io.StringIO()
    Terminal(file=stream, force_terminal=True, color_system="standard").print(Text("a\x1b[2J", style="red"))
    assert stream.getvalue() == "\x1b[31ma\u241b[2J\x1b[0m\n"


@pytest.mark.parametrize("kind", [PlainProgress, LiveProgress])
def test_displays(kind: type) -> None:
    stream = io.StringIO()
    progress = kind(Terminal(file=stream, width=200))
    progress.handle(RunStarted(f"run{HOSTILE}", 2, 1))
    progress.handle(RoundStarted(1, ["a"]))
    progress.handle(Incident(1, f"a{HOSTILE}", "client_excluded", HOSTILE))
    progress.handle(Measured(1, "server", "test", {f"m{HOSTILE}": 0.5}))
    progress.handle(RoundComplete(1, 1.0))
    progress.handle(RunComplete(Path("done")))
    progress.close()
    require_harmless(stream.getvalue())


def test_tracebacks_have_no_entries_but_their_own(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.add_traceback(1, f"a{HOSTILE}", f"Traceback:\n{HOSTILE}\n--- round 9, client b\nforged")
    folder.add_traceback(2, "b", "Traceback")
    text = folder.tracebacks.read_text()
    require_harmless(text)
    assert [line for line in text.splitlines() if line.startswith("---")] == [
        line for line in text.splitlines() if line.startswith(("--- round 1, client a", "--- round 2, client b"))
    ]
    assert text.count("\n--- ") == 1


def test_warnings_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings_and_signals():
        logging.getLogger("polyfed.somewhere").warning("client %s", HOSTILE)
    shown = capsys.readouterr().err
    require_harmless(shown)
    assert shown.count("\n") == 1


def test_names_in_plots_are_not_formulas(tmp_path: Path) -> None:
    name = r"$\frac{"  # would be an error as a formula

    @styled
    def drawn() -> Figure:
        figure, [axes] = figure_grid(1, 1, title=name)
        axes.plot([0, 1], [0, 1], label=name)
        axes.set_xticks([0, 1], [name, "b"])
        legend_below(axes, 1)
        return figure

    assert save(drawn(), tmp_path / "plot.png").stat().st_size > 1000


def test_every_way_to_a_terminal_or_a_log_is_escaped() -> None:
    sources = Path(polyfed.__file__).parent
    texts = {path.relative_to(sources).as_posix(): path.read_text("utf-8") for path in sources.rglob("*.py")}
    assert [name for name, text in texts.items() if re.search(r"\bConsole\(\)|\bConsole\(file", text)] == []
    assert [name for name, text in texts.items() if "basicConfig(" in text] == ["core/untrusted.py"]
