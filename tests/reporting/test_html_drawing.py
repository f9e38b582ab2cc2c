"""How the HTML report draws: charts, heat maps, markup, sizes, colours."""

from __future__ import annotations

import base64
import io
import json
import math
import re
from collections import Counter
from importlib import resources

import numpy as np
import pytest
import torch
from html_pages import Page
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file

from polyfed.reporting.html.axes import axes_of, round_marks, whole_marks
from polyfed.reporting.html.cells import size
from polyfed.reporting.html.charts import Key, Line, line_chart, stacked_chart
from polyfed.reporting.html.curves import spread_chart
from polyfed.reporting.html.heat_map import Frame, HeatMap, palette_bytes
from polyfed.reporting.html.markup import Markup, escaped, tag
from polyfed.reporting.html.weights import weights
from polyfed.runs.records import RunRecords

# ---- charts


@given(low=st.floats(-1e6, 1e6), span=st.floats(1e-3, 1e6))
def test_marks_enclose_the_values_with_few_steps(low, span):
    marks = round_marks(low, low + span)
    step = marks[1] - marks[0]
    assert marks[0] <= low + 1e-6 * step
    assert marks[-1] >= low + span - 1e-6 * step
    assert 2 <= len(marks) <= 6
    assert np.diff(marks) == pytest.approx(step)


@given(first=st.integers(0, 3000), rounds=st.integers(1, 5000))
def test_round_marks_are_whole_and_inside(first, rounds):
    marks = whole_marks(first - 0.5, first + rounds - 0.5)
    assert 1 <= len(marks) <= 9 or rounds == 1
    assert all(first <= mark < first + rounds for mark in marks)


@given(st.dictionaries(st.integers(0, 99), st.floats(-1e9, 1e9), min_size=1, max_size=9))
def test_every_value_lies_within_the_axes(values):
    axes = axes_of(values, values.values())
    for number, value in values.items():
        assert 48 <= axes.across(number) <= 390
        assert 26 <= axes.up(value) <= 207


def test_lines_leave_out_what_is_not_finite():
    line = Line("a", {1: 1.0, 2: math.nan, 3: math.inf, 4: 2.0}, ("a",))
    page = Page(line_chart("t", "u", [line], [Key("a")]))
    assert page.charts[0]["lines"][0]["values"] == [1.0, 2.0]
    assert line_chart("t", "u", [Line("a", {1: math.nan}, ())], []) == ""
    assert stacked_chart("t", "u", [Line("a", {1: 0.0}, ())]) == ""


def test_stacked_bars_stand_on_each_other():
    parts = [Line("a", {1: 2.0, 2: 4.0}, ()), Line("b", {1: 1.0, 3: 3.0}, ())]
    drawn = [each["d"] for each in Page(stacked_chart("t", "u", parts)).of("path") if "V" in (each["d"] or "")]
    (a, b) = ([(float(y), float(v)) for y, v in re.findall(r"M\S+ (\S+?)h[^V]*V([^h]*)h", path)] for path in drawn)
    assert b[0][0] == a[0][1]  # begins where the one below ends
    assert a[0][0] == a[1][0] == b[1][0]  # the others on the ground
    assert (a[0][0] - a[0][1]) == pytest.approx(2 * (b[0][0] - b[0][1]), abs=0.3)


@pytest.mark.parametrize(("carry", "means"), [(True, [10.0, 20.0, 25.0]), (False, [10.0, 30.0, 20.0])])
def test_spread_over_clients(carry, means):
    series = {"a": {1: 10.0, 3: 20.0}, "b": {2: 30.0}}
    chart = Page(spread_chart("t", "u", series, 1, carry=carry)).charts[0]
    assert next(line["values"] for line in chart["lines"] if line["label"] == "mean") == means


def test_many_clients_have_no_line_of_their_own():
    def labels(number):
        series = {f"c{n}": {1: float(n), 2: 5.0} for n in range(number)}
        return [line["label"] for line in Page(spread_chart("t", "u", series, 1)).charts[0]["lines"]]

    assert labels(20) == [*(f"c{n}" for n in range(20)), "mean"]
    assert labels(21) == ["lowest", "highest", "mean"]


def test_long_runs_have_thinned_tables():
    page = Page(line_chart("t", "u", [Line("a", {n: float(n) for n in range(1, 1002)}, ("a",))], []))
    assert "every 6 rounds" in page.text
    assert len(page.of("tr")) < 180
    assert len(page.charts[0]["x"]) == 1001


# ---- heat maps


def levels_of(attributes, number):
    frame = json.loads(attributes["data-heat"])["frames"][str(number)]
    return frame["rows"], np.frombuffer(base64.b64decode(frame["levels"]), np.uint8)


def test_heat_maps_show_levels_of_one_scale():
    frames = {1: Frame(["a", "b"], np.array([[0.0, 1.0], [math.nan, 0.5]])), 4: Frame(["c"], np.array([[2.0, 1.0]]))}
    page = Page(HeatMap("t", frames, "sample", ["x", "y"]).drawn())
    (figure,) = page.of("figure")
    assert levels_of(figure, 1)[1].tolist() == [0, 127, 255, 64]
    assert levels_of(figure, 4) == (["c"], pytest.approx(np.array([254, 127])))
    source = page.of("img")[0]["src"]
    with Image.open(io.BytesIO(base64.b64decode(source.removeprefix("data:image/png;base64,")))) as image:
        assert image.size == (2, 1)
        assert image.convert("RGBA").getpixel((0, 0)) == (*palette_bytes()[3 * 254 : 3 * 254 + 3], 255)


def test_cells_without_a_value_are_transparent():
    page = Page(HeatMap("t", {1: Frame(["a"], np.array([[math.nan, 1.0]]))}, "sample", ["x", "y"]).drawn())
    with Image.open(io.BytesIO(base64.b64decode(page.of("img")[0]["src"].split(",")[1]))) as image:
        assert [image.convert("RGBA").getpixel((x, 0))[3] for x in (0, 1)] == [0, 255]


def write_array(folder, number, values, clients):
    path = folder / "arrays" / "weights"
    path.mkdir(parents=True, exist_ok=True)
    save_file(
        {"values": torch.tensor(values)}, path / f"round-{number:04d}.safetensors", {"clients": json.dumps(clients)}
    )


def test_weights_are_averaged_over_columns_and_absent_clients_are_empty(tmp_path):
    values = np.arange(2 * 450, dtype=np.float64).reshape(2, 450)
    write_array(tmp_path, 1, values, ["b", "a"])
    write_array(tmp_path, 2, values[:1], ["b"])
    (figure, _) = Page(weights(RunRecords.load(tmp_path))).of("figure")
    data = json.loads(figure["data-heat"])
    rows, levels = levels_of(figure, 1)
    assert rows == ["a", "b"]
    assert data["columns"][:2] == ["0 to 2", "3 to 5"]
    means = values[[1, 0]].reshape(2, 150, 3).mean(2)
    assert (data["low"], data["high"]) == (means.min(), means.max())
    restored = data["low"] + (data["high"] - data["low"]) * levels.reshape(2, 150) / 254
    assert np.abs(restored - means).max() <= (means.max() - means.min()) / 508 + 1e-9
    assert levels_of(figure, 2)[1].reshape(2, 150)[0].tolist() == [255] * 150


def test_maps_of_many_clients_show_each_rounds_cohort(tmp_path):
    names = [f"c{n:02d}" for n in range(60)]
    for number in (1, 2):
        cohort = names[number::6]
        write_array(tmp_path, number, np.random.default_rng(0).random((len(cohort), 4)), cohort)
        write_array(tmp_path, 3, np.ones((60, 4)), names)
    (figure, _) = Page(weights(RunRecords.load(tmp_path))).of("figure")
    assert levels_of(figure, 1)[0] == names[1::6]
    assert levels_of(figure, 3)[0] == names


# ---- markup, sizes, colours


def test_markup_escapes_all_but_markup():
    assert tag("p", "<b>", Markup("<b></b>"), 3, None, ["&"], class_='"x"', data_a=True, id=None) == (
        '<p class="&quot;x&quot;" data-a>&lt;b&gt;<b></b>3&amp;</p>'
    )
    assert tag("img", alt="") == '<img alt="">'
    assert escaped("a\x00\x1b\u202eb\ud800") == "a\ufffd\ufffd\ufffdb?"


@given(st.text())
def test_what_is_escaped_is_read_back(text):
    page = Page(tag("p", text, title=text))
    shown = "".join(page.texts)
    assert Counter(page.of("p")[0]["title"]) == Counter(shown)
    assert len(page.elements) == 1
    if text.isprintable():
        assert shown == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (1023, "1,023 B"), (1024, "1.0 KiB"), (5 * 2**20, "5.0 MiB"), (3 * 2**50, "3,072.0 TiB")],
)
def test_sizes(number, text):
    assert size(number) == text


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, two: str) -> float:
    low, high = sorted((luminance(one), luminance(two)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_have_the_contrast_that_readers_need(scheme):
    style = resources.files("polyfed.reporting.html").joinpath("style.css").read_text("utf-8")
    light, dark = (
        dict(re.findall(r"--([\w-]+): (#\w{6})", block)) for block in re.findall(r":root \{(.*?)\}", style, re.S)[:2]
    )
    colours = light if scheme == "light" else light | dark
    for ground in ("page", "surface", "raised"):
        for text in ("ink", "muted", "accent"):
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    for mood in ("good", "bad", "odd"):
        assert contrast(colours[f"{mood}-ink"], colours[mood]) >= 4.5
    for number in range(8):
        assert contrast(colours[f"c{number}"], colours["surface"]) >= 3.0, number
