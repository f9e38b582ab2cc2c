"""Charts: their values as tables and on hovering, what is left out, and text and colours of pages."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from html_pages import rendered, titles_of
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes

from polyfed.reporting.charts import BarPart, BarRows, ChartLine, CountMap, FigureSheet, RoundChart, stacked_chart
from polyfed.reporting.figures import COLOURS, GREY, INK, VARIABLES
from polyfed.reporting.markup import markdown_templates, resource
from polyfed.reporting.run_figures import run_figures, spread_chart
from polyfed.reporting.tables import byte_size
from polyfed.runs.records import RunRecords


def line_chart(*series: dict[int, float]) -> RoundChart:
    return RoundChart("t", "u", [ChartLine("a", values) for values in series])


def hovering(chart) -> list[str]:
    """Texts under the pointer, in the order of drawing."""
    return titles_of(FigureSheet("figure", [[chart]]).svgs[0])


# ---- charts by round


@pytest.mark.parametrize(
    ("values", "at_zero"),
    [((1.0, 9.0), True), ((8.0, 9.0), False), ((-1.0, 9.0), False), ((5.0, 5.0), True), ((-5.0, -5.0), False)],
)
def test_axes_begin_at_zero_unless_the_values_lie_far_from_it(values, at_zero):
    (axes,) = FigureSheet("figure", [[line_chart(dict(enumerate(values)))]]).draw().axes
    assert (axes.get_ylim()[0] == 0) == at_zero


def test_lines_leave_out_what_is_not_finite():
    chart = line_chart({1: 1.0, 2: math.nan, 3: math.inf, 4: 2.0})
    assert chart.values_table().rows == [("1", "1.00"), ("4", "2.00")]
    assert hovering(chart) == ["round 1\na: 1.00", "round 4\na: 2.00"]
    assert not line_chart({1: math.nan})
    assert not stacked_chart("t", "u", {"a": {1: 0.0}})


def test_stacked_bars_stand_on_each_other():
    chart = stacked_chart("t", "u", {"a": {1: 2.0, 2: 4.0}, "b": {1: 1.0, 3: 3.0}})
    (axes,) = FigureSheet("figure", [[chart]]).draw().axes
    positions = [(bar.get_y(), bar.get_height()) for bar in axes.patches if bar.get_alpha() != 0]
    assert positions == [(0, 2), (0, 4), (2, 1), (0, 3)]
    assert hovering(chart) == ["round 1\na: 2.00\nb: 1.00", "round 2\na: 4.00", "round 3\nb: 3.00"]


@pytest.mark.parametrize(("carry", "means"), [(True, [10.0, 20.0, 25.0]), (False, [10.0, 30.0, 20.0])])
def test_spread_over_clients(carry, means):
    chart = spread_chart("t", "u", {"a": {1: 10.0, 3: 20.0}, "b": {2: 30.0}, "c": {1: math.nan}}, 1, carry=carry)
    (mean,) = (line for line in chart.lines if line.label == "mean")
    assert list(mean.values.values()) == means
    assert [line.label for line in chart.lines] == ["a", "b", "mean"]
    (band,) = chart.bands
    assert (band.low[3], band.high[3]) == ((20.0, 30.0) if carry else (20.0, 20.0))


def test_many_clients_have_no_line_of_their_own():
    for clients, labels in ((20, [*(f"c{n}" for n in range(20)), "mean"]), (21, ["lowest", "highest", "mean"])):
        series = {f"c{n}": {1: float(n), 2: 5.0} for n in range(clients)}
        assert [line.label for line in spread_chart("t", "u", series, 1).lines] == labels


def test_long_runs_have_thinned_tables():
    table = line_chart({n: float(n) for n in range(1, 1002)}).values_table()
    assert "every 6 rounds" in table.title
    assert len(table.rows) < 180
    assert table.rows[-1] == ("1001", "1,001.00")


def test_notebooks_show_figures_as_svg_and_as_png():
    hostile = "</svg><script>"
    sheet = FigureSheet(hostile, [[RoundChart(hostile, hostile, [ChartLine(hostile, {1: 1.0, 2: 2.0})])]])
    shown = sheet._repr_html_()
    assert shown == "".join(sheet.svgs)
    assert "<script" not in shown
    assert titles_of(shown)[0] == f"round 1\n{hostile}: 1.00"
    assert sheet._repr_png_().startswith(b"\x89PNG")


def test_equal_figures_have_equal_bytes_and_others_have_other_ids():
    sheets = [FigureSheet(title, [[line_chart({1: 1.0, 2: 2.0})]]) for title in ("one", "one", "two")]
    first, second, other = (sheet.svgs[0] for sheet in sheets)
    assert first == second
    ids = [set(re.findall(r' id="([^"]*)"', text)) for text in (first, other)]
    assert not ids[0] & ids[1]


# ---- maps and bars


def test_maps_show_their_counts_on_hovering():
    chart = CountMap("t", ["a", "b"], np.array([[0, 1], [1200, 5]]), "class", ["x", "y"], "items")
    assert hovering(chart) == ["a, x: 0", "a, y: 1", "b, x: 1,200", "b, y: 5"]
    many = CountMap("t", ["a", "b"], np.arange(1000).reshape(2, 500), "class", [str(n) for n in range(500)], "items")
    assert hovering(many) == []


def test_bars_show_their_parts_on_hovering():
    chart = BarRows("t", {"fit": [BarPart(2.0, "up: 2", 1), BarPart(1.0, "down: 1", 2)]}, {"fit": "3"})
    assert hovering(chart) == ["fit: up: 2", "fit: down: 1"]


# ---- text, sizes, colours


@pytest.mark.slow
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
    """Contrast of two colours, after WCAG 2."""
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
    for colour in (*COLOURS[:4], GREY, INK):
        assert contrast(colours.get(VARIABLES.get(colour.lower()), colour), colours["surface"]) >= 3.0
    chart = RoundChart("a", "b", [ChartLine("c", {1: 1.0, 2: 2.0})])
    drawn = re.findall(r"(?:fill|stroke): ([^;\"]*)", FigureSheet("t", [[chart]]).svgs[0])
    assert set(VARIABLES) & {*drawn} == set()
    assert {f"var(--{VARIABLES[INK]}, {INK})", "var(--surface, #ffffff)"} <= {*drawn}


# ---- figures of a run


@pytest.fixture(scope="module")
def records(made_up_run: Path) -> RunRecords:
    return RunRecords.load(made_up_run)


def axes_of(records: RunRecords, name: str) -> list[Axes]:
    return run_figures(records)[name].draw().axes


def drawn_lines(axes: Axes) -> set[tuple[float, ...]]:
    return {tuple(np.asarray(line.get_ydata()).tolist()) for line in axes.lines if len(line.get_xdata())}


def test_server_curves_show_the_recorded_values_and_chance(records):
    first, second, total = axes_of(records, "server")
    assert first.get_title(loc="left") == "image to text, gallery 500"
    assert second.get_title(loc="left") == "text to image, gallery 100"
    for split in ("test", "validation"):
        assert tuple(records.series("server", "image_to_text_r@5", split).values()) in drawn_lines(first)
        assert tuple(records.series("server", "r1_sum", split).values()) in drawn_lines(total)
    assert (5.0,) * 12 in {tuple(np.round(values, 9)) for values in drawn_lines(second)}
    assert total.get_xlabel() == "round"
    legend = first.get_legend()
    lines = zip(legend.get_texts(), legend.get_lines(), strict=True)
    styles = {text.get_text(): line.get_linestyle() for text, line in lines}
    assert styles == {"test": "-", "validation": "--", "chance": ":"} | dict.fromkeys(("R@1", "R@5", "R@10"), "-")
