"""Charts as they are described, and as a page draws them: lines, bars, bubbles, heat maps, text, colours."""

from __future__ import annotations

import base64
import io
import json
import math
import re
from collections import Counter

import numpy as np
import pytest
import torch
from html_pages import Page, drawn, rendered
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file

from polyfed.reporting.charts import (
    BubbleChart,
    ChartLine,
    FigureSheet,
    HeatMap,
    HeatMapFrame,
    RoundChart,
    stacked_chart,
)
from polyfed.reporting.curves import spread_chart
from polyfed.reporting.html.images import palette_bytes
from polyfed.reporting.html.svg import round_marks, scale_of, whole_marks
from polyfed.reporting.markup import markdown_templates, resource
from polyfed.reporting.traffic import byte_size
from polyfed.reporting.weights import weight_charts
from polyfed.runs.records import RunRecords


def line_chart(*series: dict[int, float]) -> RoundChart:
    return RoundChart("t", "u", [ChartLine("a", values, ("a",)) for values in series])


# ---- charts by round


@settings(max_examples=30)
@given(low=st.floats(-1e6, 1e6), span=st.floats(1e-3, 1e6))
def test_marks_enclose_the_values_with_few_steps(low, span):
    marks = round_marks(low, low + span)
    step = marks[1] - marks[0]
    assert marks[0] <= low + 1e-6 * step
    assert marks[-1] >= low + span - 1e-6 * step
    assert 2 <= len(marks) <= 6
    assert np.diff(marks) == pytest.approx(step)


@settings(max_examples=30)
@given(first=st.integers(0, 3000), rounds=st.integers(1, 5000))
def test_round_marks_are_whole_and_inside(first, rounds):
    marks = whole_marks(first - 0.5, first + rounds - 0.5)
    assert 1 <= len(marks) <= 9 or rounds == 1
    assert all(first <= mark < first + rounds for mark in marks)


@settings(max_examples=30)
@given(st.dictionaries(st.integers(0, 99), st.floats(-1e9, 1e9), min_size=1, max_size=9))
def test_every_value_lies_within_the_axes(values):
    scale = scale_of(line_chart(values))
    for number, value in values.items():
        assert 48 <= scale.across(number) <= 390
        assert 26 <= scale.up(value) <= 207


@pytest.mark.parametrize(
    ("values", "ends"),
    [
        ((1.0, 9.0), (0, 9)),
        ((8.0, 9.0), (8, 9)),
        ((-1.0, 9.0), (-1, 9)),
        ((5.0, 5.0), (0, 5)),
        ((-5.0, -5.0), (-5, -5)),
    ],
)
def test_axes_begin_at_zero_unless_the_values_lie_far_from_it(values, ends):
    assert line_chart(dict(enumerate(values))).value_range == ends


def test_lines_leave_out_what_is_not_finite():
    page = drawn(line_chart({1: 1.0, 2: math.nan, 3: math.inf, 4: 2.0}))
    assert page.charts[0]["lines"][0]["values"] == [1.0, 2.0]
    assert not line_chart({1: math.nan})
    assert not stacked_chart("t", "u", {"a": {1: 0.0}})


def test_stacked_bars_stand_on_each_other():
    page = drawn(stacked_chart("t", "u", {"a": {1: 2.0, 2: 4.0}, "b": {1: 1.0, 3: 3.0}}))
    bars = [each["d"] for each in page.of("path") if "V" in (each["d"] or "")]
    (a, b) = ([(float(y), float(v)) for y, v in re.findall(r"M\S+ (\S+?)h[^V]*V([^h]*)h", path)] for path in bars)
    assert b[0][0] == a[0][1]  # begins where the one below ends
    assert a[0][0] == a[1][0] == b[1][0]  # the others on the ground
    assert (a[0][0] - a[0][1]) == pytest.approx(2 * (b[0][0] - b[0][1]), abs=0.3)


@pytest.mark.parametrize(("carry", "means"), [(True, [10.0, 20.0, 25.0]), (False, [10.0, 30.0, 20.0])])
def test_spread_over_clients(carry, means):
    chart = spread_chart("t", "u", {"a": {1: 10.0, 3: 20.0}, "b": {2: 30.0}, "c": {1: math.nan}}, 1, carry=carry)
    (mean,) = (line for line in chart.lines if line.label == "mean")
    assert list(mean.values.values()) == means
    assert [line.label for line in chart.lines] == ["a", "b", "mean"]
    (band,) = chart.bands
    assert (band.low[3], band.high[3]) == ((20.0, 30.0) if carry else (20.0, 20.0))


def test_nobody_measured_is_no_chart():
    assert not spread_chart("t", "u", {"a": {}}, 1)


@pytest.mark.parametrize(
    ("clients", "labels"), [(20, [*(f"c{n}" for n in range(20)), "mean"]), (21, ["lowest", "highest", "mean"])]
)
def test_many_clients_have_no_line_of_their_own(clients, labels):
    series = {f"c{n}": {1: float(n), 2: 5.0} for n in range(clients)}
    assert [line.label for line in spread_chart("t", "u", series, 1).lines] == labels


def test_long_runs_have_thinned_tables():
    page = drawn(line_chart({n: float(n) for n in range(1, 1002)}))
    assert "every 6 rounds" in page.text
    assert len(page.of("tr")) < 180
    assert len(page.charts[0]["x"]) == 1001


def test_notebooks_show_figures_in_a_frame_of_their_own():
    hostile = "</iframe><script>"
    sheet = FigureSheet(hostile, [[line_chart({1: 1.0, 2: 2.0})]])
    (frame,) = Page(sheet._repr_html_()).of("iframe")
    page = Page(frame["srcdoc"] or "")
    assert hostile in page.text
    assert (len(page.charts), len(page.of("script"))) == (1, 1)
    assert sheet._repr_png_().startswith(b"\x89PNG")


# ---- heat maps


def levels_of(page: Page, number: int) -> tuple[list[str], np.ndarray]:
    frame = heat_data(page)["frames"][str(number)]
    return frame["rows"], np.frombuffer(base64.b64decode(frame["levels"]), np.uint8)


def heat_data(page: Page) -> dict:
    return next(json.loads(each["data-heat"]) for each in page.of("figure") if "data-heat" in each)


def image_of(page: Page) -> Image.Image:
    source = page.of("img")[0]["src"].removeprefix("data:image/png;base64,")
    return Image.open(io.BytesIO(base64.b64decode(source))).convert("RGBA")


def test_heat_maps_show_levels_of_one_scale():
    frames = {
        1: HeatMapFrame(["a", "b"], np.array([[0.0, 1.0], [math.nan, 0.5]])),
        4: HeatMapFrame(["c"], np.array([[2.0, 1.0]])),
    }
    page = drawn(HeatMap("t", frames, "sample", ["x", "y"]))
    assert levels_of(page, 1)[1].tolist() == [0, 127, 255, 64]
    assert levels_of(page, 4) == (["c"], pytest.approx(np.array([254, 127])))
    assert image_of(page).size == (2, 1)
    assert image_of(page).getpixel((0, 0)) == (*palette_bytes()[3 * 254 : 3 * 254 + 3], 255)


def test_cells_without_a_value_are_transparent():
    page = drawn(HeatMap("t", {1: HeatMapFrame(["a"], np.array([[math.nan, 1.0]]))}, "sample", ["x", "y"]))
    assert [image_of(page).getpixel((x, 0))[3] for x in (0, 1)] == [0, 255]


def write_array(folder, number, values, clients):
    path = folder / "arrays" / "weights"
    path.mkdir(parents=True, exist_ok=True)
    metadata = {"clients": json.dumps(clients)}
    save_file({"values": torch.tensor(values)}, path / f"round-{number:04d}.safetensors", metadata)


def test_weights_are_averaged_over_columns_and_absent_clients_are_empty(tmp_path):
    values = np.arange(2 * 450, dtype=np.float64).reshape(2, 450)
    write_array(tmp_path, 1, values, ["b", "a"])
    write_array(tmp_path, 2, values[:1], ["b"])
    page = drawn(weight_charts(RunRecords.load(tmp_path))["weights"][0])
    data, (rows, levels) = heat_data(page), levels_of(page, 1)
    assert rows == ["a", "b"]
    assert data["columns"][:2] == ["0 to 2", "3 to 5"]
    means = values[[1, 0]].reshape(2, 150, 3).mean(2)
    assert (data["low"], data["high"]) == (means.min(), means.max())
    restored = data["low"] + (data["high"] - data["low"]) * levels.reshape(2, 150) / 254
    assert np.abs(restored - means).max() <= (means.max() - means.min()) / 508 + 1e-9
    assert levels_of(page, 2)[1].reshape(2, 150)[0].tolist() == [255] * 150


def test_the_last_column_of_a_map_may_be_narrower(tmp_path):
    write_array(tmp_path, 1, np.arange(401.0)[None], ["a"])
    heat_map, _ = weight_charts(RunRecords.load(tmp_path))["weights"]
    assert heat_map.last.values[0, [0, -1]].tolist() == [1.0, 399.5]


def test_maps_of_many_clients_show_each_rounds_cohort(tmp_path):
    names = [f"c{n:02d}" for n in range(60)]
    for number in (1, 2):
        cohort = names[number::6]
        write_array(tmp_path, number, np.random.default_rng(0).random((len(cohort), 4)), cohort)
    write_array(tmp_path, 3, np.ones((60, 4)), names)
    heat_map, _ = weight_charts(RunRecords.load(tmp_path))["weights"]
    assert heat_map.frames[1].rows == names[1::6]
    assert heat_map.frames[3].rows == names


def test_a_page_shows_bubbles_as_a_map():
    page = drawn(BubbleChart("t", ["a", "b"], "largest: 4", ["x", "y"], np.array([[4, 0], [0, 1]]), 1, []))
    assert levels_of(page, 0) == (["a", "b"], pytest.approx(np.array([254, 0, 0, 64])))


# ---- text, sizes, colours


@settings(max_examples=50)
@given(st.text())
def test_what_is_escaped_is_read_back(text):
    page = rendered('<p title="{{ text }}">{{ text }}</p>', text=text)
    shown = "".join(page.texts)
    assert Counter(page.of("p")[0]["title"]) == Counter(shown)
    assert len(page.elements) == 1
    if text.isprintable():
        assert shown == text


def test_control_characters_are_replaced_and_unknown_names_refused():
    assert rendered("{{ text }}", text="a\x00\x1b\u202eb\ud800").texts == ["a\ufffd\ufffd\ufffdb?"]
    assert markdown_templates().from_string("# {{ text }}").render(text="*a*\n# b") == r"# \*a\*␊# b"
    with pytest.raises(Exception, match="'text' is undefined"):
        rendered("{{ text }}")


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (1023, "1,023 B"), (1024, "1.0 KiB"), (5 * 2**20, "5.0 MiB"), (3 * 2**50, "3,072.0 TiB")],
)
def test_sizes(number, text):
    assert byte_size(number) == text


def contrast(*colours: str) -> float:
    """Of two colours, after WCAG 2."""
    luminances = []
    for colour in colours:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        luminances.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(luminances) + 0.05) / (min(luminances) + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_have_the_contrast_that_readers_need(scheme):
    blocks = re.findall(r":root \{(.*?)\}", resource("style.css"), re.S)[:2]
    light, dark = (dict(re.findall(r"--([\w-]+): (#\w{6})", block)) for block in blocks)
    colours = light if scheme == "light" else light | dark
    for ground in ("page", "surface", "raised"):
        for text in ("ink", "muted", "accent"):
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    for mood in ("good", "bad", "odd"):
        assert contrast(colours[f"{mood}-ink"], colours[mood]) >= 4.5
    for number in range(8):
        assert contrast(colours[f"c{number}"], colours["surface"]) >= 3.0, number
