"""No legend of any plot covers data, labels of ticks or axes, titles, or another legend."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import matplotlib as mpl
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox
from papers.creamfl.drift import ModalityDrift, drift_result
from PIL import Image

from polyfed.lab.analysis.analysis import AnalysisResult
from polyfed.reporting.compare import RunComparison
from polyfed.reporting.run_figures import run_figures
from polyfed.runs.records import RunRecords
from run_folders import write_run

SLACK = 1.0  # pixels by which rounding may let boxes touch


def covered(figure: Figure) -> Iterator[str]:
    """Parts under a legend."""
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    legends = [axes.get_legend() for axes in figure.axes if axes.get_legend() is not None] + list(figure.legends)
    boxes = [(legend.get_texts()[0].get_text(), legend.get_window_extent(renderer)) for legend in legends]
    for (name, box), (other, second) in combinations(boxes, 2):
        if overlap(box, second):
            yield f"legend '{name}' on legend '{other}'"
    for name, box in boxes:
        for what, taken in parts(figure):
            if overlap(box, taken):
                yield f"legend '{name}' on {what}"


def parts(figure: Figure) -> Iterator[tuple[str, Bbox]]:
    """Data areas and texts of all axes."""
    renderer = figure.canvas.get_renderer()
    for number, axes in enumerate(figure.axes):
        if not axes.axison:
            continue
        yield f"the data of axes {number}", axes.get_window_extent(renderer)
        labels = [*axes.get_xticklabels(), *axes.get_yticklabels(), axes.xaxis.label, axes.yaxis.label]
        for text in (*labels, axes.title, axes._left_title, *axes.texts):
            if text.get_text() and text.get_visible():
                yield f"'{text.get_text()}'", text.get_window_extent(renderer)


def overlap(one: Bbox, other: Bbox) -> bool:
    width = min(one.x1, other.x1) - max(one.x0, other.x0)
    height = min(one.y1, other.y1) - max(one.y0, other.y0)
    return width > SLACK and height > SLACK


def drawn(result: AnalysisResult) -> Figure:
    return result.draw()


def drift() -> Figure:
    names = (*(f"paired-{k:02d}" for k in range(23)), "server")
    actual = ModalityDrift(
        "image", names, ("paired",) * 23 + (None,), (1,) * 24, torch.rand(24, 24), torch.rand(24, 24),
        tuple(range(24)), torch.rand(24, 5, 2),
    )  # fmt: skip
    return drawn(drift_result("run", 5, "pca", [actual, replace(actual, modality="text")]))


def test_analyses_have_free_legends() -> None:
    assert list(covered(drift())) == []


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [1, 12])
def test_plots_of_a_run_are_written_and_have_free_legends(tmp_path, rounds: int) -> None:
    records = RunRecords.load(write_run(tmp_path / "run", rounds=rounds))
    also = {"public": True, "source": "coco", "split": "train", "items": 40, "samples": 80, "labels": None, "index": []}
    held = {
        client: replace(holding, items=holding.items + 40, samples=holding.samples + 80, also=also)
        if holding.group == "paired"
        else holding
        for client, holding in records.holdings.items()
    }
    records = replace(records, holdings=held)
    settings = dict(mpl.rcParams)
    figures = run_figures(records)
    paths = [sheet.save(tmp_path / f"{name}.png") for name, sheet in figures.items()]
    assert dict(mpl.rcParams) == settings
    by_round = ["server", "clients"] * (rounds > 2)
    assert list(figures) == ["gain", *by_round, "partition", "traffic"]
    for path, sheet in zip(paths, figures.values(), strict=True):
        assert list(covered(sheet.draw())) == []
        with Image.open(path) as image:
            assert image.format == "PNG"
            assert min(image.size) > 300


def test_a_comparison_has_a_free_legend(tmp_path) -> None:
    folders = [write_run(tmp_path / f"{name}-{seed}", seed=seed) for name in ("fedavg", "creamfl") for seed in (0, 1)]
    assert list(covered(RunComparison.of([RunRecords.load(folder) for folder in folders]).figure)) == []


def test_what_draws_nothing_needs_no_more_of_matplotlib_than_it_has_imported() -> None:
    code = "from polyfed.reporting.figures import styled; assert styled(lambda: None)() is None"
    subprocess.run([sys.executable, "-c", code], check=True)
