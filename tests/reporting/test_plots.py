from __future__ import annotations

import json

import matplotlib as mpl
import numpy as np
import pytest
from PIL import Image

from polyfed.reporting.curve_plots import draw_clients, draw_server, latest_values
from polyfed.reporting.partition_plots import draw_partition
from polyfed.reporting.plots import draw_all
from polyfed.reporting.traffic_plots import draw_traffic
from polyfed.reporting.weight_plots import binned
from polyfed.runs.records import RunRecords
from run_folders import write_lines, write_run


def drawn_lines(axes):
    return {tuple(np.asarray(line.get_ydata()).tolist()) for line in axes.lines if len(line.get_xdata())}


def test_all_plots_of_a_run_are_written(run_folder):
    before = dict(mpl.rcParams)
    paths = draw_all(RunRecords.load(run_folder))
    names = ["server.png", "clients.png", "partition.png", "traffic.png", "weights.image.png"]
    assert [path.name for path in paths] == names
    assert dict(mpl.rcParams) == before
    for path in paths:
        with Image.open(path) as image:
            assert image.format == "PNG"
            assert min(image.size) > 300


def test_an_empty_run_has_no_plots(tmp_path):
    assert draw_all(RunRecords.load(tmp_path)) == []
    assert not (tmp_path / "plots").exists()


def test_server_curves_show_the_recorded_values_and_chance(run_folder):
    records = RunRecords.load(run_folder)
    figure = draw_server(records)
    first, second, total = figure.axes
    assert first.get_title(loc="left") == "image to text, gallery 500"
    assert second.get_title(loc="left") == "text to image, gallery 100"
    for kind in ("test", "validation"):
        assert tuple(records.series("server", "image_to_text_r@5", kind).values()) in drawn_lines(first)
        assert tuple(records.series("server", "r1_sum", kind).values()) in drawn_lines(total)
    assert (5.0, 5.0) in {tuple(np.round(values, 9)) for values in drawn_lines(second)}
    assert total.get_xlabel() == "round"


def test_clients_mean_uses_each_clients_latest_value(tmp_path):
    def line(number, participant, value):
        return {"round": number, "participant": participant, "kind": "test", "metrics": {"n": 3.0, "accuracy": value}}

    write_lines(tmp_path / "metrics.jsonl", [line(1, "a", 10.0), line(2, "b", 30.0), line(3, "a", 20.0)])
    (axes,) = draw_clients(RunRecords.load(tmp_path)).axes
    assert (10.0, 20.0, 25.0) in drawn_lines(axes)
    assert latest_values([{1: 10.0, 3: 20.0}, {2: 30.0}], 1) == [10.0]


def test_partition_bubbles_are_the_counts(tmp_path):
    def client(labels, group="image"):
        base = {"group": group, "source": "s", "split": "train", "items": 4, "samples": 4, "index": []}
        return base | {"labels": labels}

    entries = {"x": client({"class 10": 1, "class 9": 3}), "y": client({"class 9": 0, "class 2": 4})}
    (tmp_path / "partition.json").write_text(json.dumps(entries))
    bubbles, bars = draw_partition(RunRecords.load(tmp_path)).subfigs[0].axes
    (points,) = bubbles.collections
    assert [label.get_text() for label in bubbles.get_xticklabels()] == ["class 2", "class 9", "class 10"]
    assert points.get_offsets().tolist() == [[2, 0], [1, 0], [0, 1]]
    sizes = points.get_sizes()
    assert sizes / sizes.max() == pytest.approx(np.array([1, 3, 4]) / 4)
    assert [bar.get_width() for bar in bars.patches] == [4, 4]


def test_many_clients_and_classes_are_drawn(tmp_path):
    labels = {str(c): c + 1 for c in range(100)}
    client = {
        "group": "g",
        "source": "s",
        "split": "t",
        "items": 9,
        "samples": 9,
        "labels": labels,
        "index": [],
    }
    (tmp_path / "partition.json").write_text(json.dumps({f"c{n}": client for n in range(40)}))
    (path,) = draw_all(RunRecords.load(tmp_path))
    assert path.stat().st_size > 10_000


def test_one_round_is_drawn(tmp_path):
    records = RunRecords.load(write_run(tmp_path / "short", rounds=1))
    (server, *_), (rounds, *_) = draw_server(records).axes, draw_traffic(records).axes
    assert server.lines[0].get_marker() == "o"
    assert server.lines[0].get_xdata() == [1]
    assert len(rounds.patches) == 2


def test_traffic_is_stacked_in_mib(run_folder):
    rounds, totals, seconds = draw_traffic(RunRecords.load(run_folder)).axes
    heights = [bar.get_height() for bar in rounds.patches]
    assert heights[:12] == pytest.approx([9 * 3_000_100 / 2**20] * 12)
    assert [bar.get_y() for bar in rounds.patches[12:]] == pytest.approx(heights[:12])
    assert totals.lines[1].get_ydata()[-1] == pytest.approx(12 * 9 * 1_500_100 / 2**20)
    assert len(seconds.patches) == 12


def test_binned_columns_are_means():
    values = np.arange(14.0).reshape(2, 7)
    assert binned(values, 3).tolist() == [[1.0, 4.0, 6.0], [8.0, 11.0, 13.0]]
    assert binned(values, 7).tolist() == values.tolist()
