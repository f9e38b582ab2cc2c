"""What the plots of a run show, read off matplotlib's axes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes

from polyfed.reporting.plots import draw_all, draw_partition, draw_sheet, run_figures
from polyfed.runs.records import RunRecords
from run_folders import write_lines, write_run


@pytest.fixture(scope="module")
def records(made_up_run: Path) -> RunRecords:
    return RunRecords.load(made_up_run)


def axes_of(records: RunRecords, name: str) -> list[Axes]:
    return draw_sheet(run_figures(records)[name]).axes


def drawn_lines(axes: Axes) -> set[tuple[float, ...]]:
    return {tuple(np.asarray(line.get_ydata()).tolist()) for line in axes.lines if len(line.get_xdata())}


def test_an_empty_run_has_no_plots(tmp_path):
    assert draw_all(RunRecords.load(tmp_path)) == []
    assert not (tmp_path / "plots").exists()


def test_server_curves_show_the_recorded_values_and_chance(records):
    first, second, total = axes_of(records, "server")
    assert first.get_title(loc="left") == "image to text, gallery 500"
    assert second.get_title(loc="left") == "text to image, gallery 100"
    for kind in ("test", "validation"):
        assert tuple(records.series("server", "image_to_text_r@5", kind).values()) in drawn_lines(first)
        assert tuple(records.series("server", "r1_sum", kind).values()) in drawn_lines(total)
    assert (5.0, 5.0) in {tuple(np.round(values, 9)) for values in drawn_lines(second)}
    assert total.get_xlabel() == "round"
    legend = first.get_legend()
    lines = zip(legend.get_texts(), legend.get_lines(), strict=True)
    styles = {text.get_text(): line.get_linestyle() for text, line in lines}
    assert styles == {"test": "-", "validation": "--", "chance": ":"} | dict.fromkeys(("R@1", "R@5", "R@10"), "-")


def test_clients_mean_uses_each_clients_latest_value(tmp_path):
    def line(number, participant, value):
        return {"round": number, "participant": participant, "kind": "test", "metrics": {"n": 3.0, "accuracy": value}}

    write_lines(tmp_path / "metrics.jsonl", [line(1, "a", 10.0), line(2, "b", 30.0), line(3, "a", 20.0)])
    (axes,) = axes_of(RunRecords.load(tmp_path), "clients")
    assert (10.0, 20.0, 25.0) in drawn_lines(axes)


def test_partition_bubbles_are_the_counts(tmp_path):
    base = {"group": "image", "source": "s", "split": "train", "items": 4, "samples": 4, "index": []}
    entries = {
        "x": base | {"labels": {"class 10": 1, "class 9": 3}},
        "y": base | {"labels": {"class 9": 0, "class 2": 4}},
    }
    (tmp_path / "partition.json").write_text(json.dumps(entries))
    bubbles, bars = draw_partition(RunRecords.load(tmp_path)).axes
    (points,) = bubbles.collections
    assert [label.get_text() for label in bubbles.get_xticklabels()] == ["class 2", "class 9", "class 10"]
    assert points.get_offsets().tolist() == [[1, 0], [2, 0], [0, 1]]
    sizes = points.get_sizes()
    assert sizes / sizes.max() == pytest.approx(np.array([3, 1, 4]) / 4)
    assert [bar.get_width() for bar in bars.patches] == [4, 4]


def test_many_clients_and_classes_are_drawn(tmp_path):
    labels = {str(c): c + 1 for c in range(100)}
    client = {"group": "g", "source": "s", "split": "t", "items": 9, "samples": 9, "labels": labels, "index": []}
    (tmp_path / "partition.json").write_text(json.dumps({f"c{n}": client for n in range(40)}))
    bubbles, bars = draw_partition(RunRecords.load(tmp_path)).axes
    assert len(bubbles.collections[0].get_offsets()) == 4000
    assert len(bars.patches) == 40


def test_one_round_is_drawn(tmp_path):
    records = RunRecords.load(write_run(tmp_path / "short", rounds=1))
    (server, *_), (rounds, *_) = axes_of(records, "server"), axes_of(records, "traffic")
    assert server.lines[0].get_marker() == "o"
    assert server.lines[0].get_xdata() == [1]
    assert [tick for tick in server.get_xticks() if 0.5 <= tick <= 1.5] == [1]
    assert len(rounds.patches) == 2


def test_traffic_is_stacked_in_mib(records):
    rounds, totals, seconds = axes_of(records, "traffic")
    heights = [bar.get_height() for bar in rounds.patches]
    assert heights[:12] == pytest.approx([9 * 3_000_100 / 2**20] * 12)
    assert [bar.get_y() for bar in rounds.patches[12:]] == pytest.approx(heights[:12])
    assert totals.lines[1].get_ydata()[-1] == pytest.approx(12 * 9 * 1_500_100 / 2**20)
    assert len(seconds.patches) == 12


def test_weights_of_the_last_round_are_a_map(records):
    heat_map, means, *_ = axes_of(records, "weights.image")
    (image,) = heat_map.images
    last = records.arrays()["weights.image"][12]
    shown = np.ma.filled(image.get_array(), np.nan)
    assert shown.shape[1] == 200
    assert np.nanmean(shown) == pytest.approx(last.values.mean())
    assert "Hatched: the client did not take part" in heat_map.get_xlabel()
    assert len(means.get_legend().get_texts()) == 1 + shown.shape[0]
