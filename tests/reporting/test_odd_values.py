"""Charts of values as runs can have them: nearly equal, huge, tiny, infinite, or none."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from polyfed.reporting import charts
from polyfed.reporting.charts import BarPart, BarRows, ChartBand, ChartLine, CountMap, RoundChart, stacked_chart

TINY, NEAR = (0.0, -0.0, 5e-324, -5e-324, 1e-310), (2.883861842751503, 2.8838618427515034, 1e16, 1e16 + 2)
ODD = (*TINY, *NEAR, 1e100, 1.7e308, -1.7e308, math.inf, -math.inf, math.nan)
VALUES = st.one_of(st.sampled_from(ODD), st.floats())
SERIES = st.dictionaries(st.integers(0, 2000), VALUES, max_size=6)
NAMES = st.sampled_from(["r1", "\ud800", "<b>&\"'", "$x_", "", "a" * 300, "\u202e\x00"])


def drawn(chart: Any) -> None:
    """Draw as SVG and as a PNG file; a chart without a value is false and is not drawn."""
    if isinstance(chart, RoundChart) and not chart:
        return
    sheet = charts.sheet_of("figure", [chart])
    ElementTree.fromstring(sheet.svgs[0])
    assert not re.search(r"\b(nan|inf)\b", re.sub("<(title|text)[^>]*>[^<]*<", "<", sheet.svgs[0]))
    assert sheet._repr_png_().startswith(b"\x89PNG")


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(st.lists(SERIES, min_size=1, max_size=3), NAMES)
@example([{1: 2.883861842751503, 2: 2.8838618427515034}], "r1")
@example([{1: 1.7e308, 2: -1.7e308}, {1: math.nan}], "r1")
@example([{1: 5e-324}], "r1")
def test_lines_and_bands_draw(series: list[dict[int, float]], name: str) -> None:
    lines = [ChartLine(name, values, number) for number, values in enumerate(series)]
    drawn(RoundChart(name, "%", lines, bands=[ChartBand(line.finite, line.finite) for line in lines]))


@settings(max_examples=5, deadline=None)
@given(st.lists(SERIES, min_size=1, max_size=3))
@example([{1: 1.7e308}, {1: 1.7e308}])
def test_stacked_bars_draw(series: list[dict[int, float]]) -> None:
    drawn(stacked_chart("bytes", "MiB", {str(k): {n: abs(v) for n, v in own.items()} for k, own in enumerate(series)}))


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@given(st.lists(VALUES, min_size=4, max_size=4), NAMES)
@example([1.7e308, -1.7e308, 0.0, math.nan], "r1")
@example([2.883861842751503, 2.8838618427515034] * 2, "r1")
@example([math.nan] * 4, "r1")
def test_maps_and_bars_draw(values: list[float], name: str) -> None:
    counts = np.nan_to_num(np.abs(np.array(values).reshape(2, 2)), nan=0, posinf=0).clip(0, 2**40).astype(np.int64)
    drawn(CountMap(name, [name, "b"], counts, "column", ["x", name], name))
    drawn(BarRows(name, {name: [BarPart(float(count), name, 1) for count in counts.flat]}, {name: "all"}))


def test_thousands_of_rounds_draw() -> None:
    drawn(RoundChart("long", "%", [ChartLine("a", {n: math.sin(n) for n in range(5000)})]))


@pytest.mark.slow
@pytest.mark.parametrize("values", [[1e308, 1e308], [2.883861842751503, 2.8838618427515034], [-1e308, 1e308]])
def test_a_run_with_odd_metrics_has_a_report(tiny_run: Path, tmp_path: Path, values: list[float], cli: Any) -> None:
    folder = tmp_path / "run"
    shutil.copytree(tiny_run, folder)
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for number, line in enumerate(lines):
        if "metrics" in line:
            line["metrics"] = {name: values[number % len(values)] for name in line["metrics"]}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "report.html").unlink(missing_ok=True)
    code, _, errors = cli("report", folder)
    assert (code, errors) == (0, "")
    assert (folder / "report.html").is_file()
