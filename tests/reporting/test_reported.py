"""Runs in Python and notebooks: what shows them, and how they show themselves while they go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyfed import Experiment, open_run, plot, run
from polyfed.core.errors import ConfigError
from polyfed.reporting.charts import FigureSheet, RoundChart
from small_federations import Config


def test_a_run_shows_itself_as_a_short_table(run_folder: Path) -> None:
    shown = open_run(run_folder)._repr_html_()
    assert shown.count("<table>") == 1
    assert '<th scope="row">rounds</th><td>12</td>' in shown
    assert '<th scope="row">server r1_sum, test</th>' in shown
    assert len(shown) < 5000


def test_what_a_notebook_shows_is_neutralised(run_folder: Path) -> None:
    shown = open_run(run_folder.rename(run_folder.with_name("<script>x")))._repr_html_()
    assert "&lt;script&gt;x" in shown
    assert "<script>" not in shown


def test_figures_by_metric_and_by_name(run_folder: Path, tmp_path: Path) -> None:
    opened = open_run(run_folder)
    sheet = plot(opened, "r1_sum", "accuracy")
    charts = [chart for row in sheet.rows for chart in row]
    of_clients = ["paired: r1_sum, test", "image: accuracy, test", "text: accuracy, test"]
    assert [chart.title for chart in charts] == ["server: r1_sum", *of_clients]
    server = charts[0]
    assert isinstance(server, RoundChart)
    assert server.lines[0].values == opened.records.series("server", "r1_sum")
    assert plot(opened, "traffic").title.endswith("communication")
    assert isinstance(plot(opened), FigureSheet)
    assert sheet.save(tmp_path / "r1.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ConfigError, match="no metric 'r1_sun'; did you mean 'r1_sum'"):
        plot(opened, "r1_sun")


def test_a_notebook_shows_progress_by_itself(
    tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny["run"]["rounds"] = 1
    run(Experiment.load(tiny), tmp_path / "quiet")
    assert "round 1/1" not in capsys.readouterr().out
    printed: list[str] = []
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("rich.jupyter.display", lambda segments, text: printed.append(text))
    run(Experiment.load(tiny), tmp_path / "shown")
    assert "round 1/1" in "".join(printed) + capsys.readouterr().out
