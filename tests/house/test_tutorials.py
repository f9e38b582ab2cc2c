"""Tutorials: each page runs from top to bottom as the notebook that the site offers, on less data."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

import notebooks

SMALL = "--set run.output.plots=false --set run.threads=1"
FEW = "--set data.sources.scenes.train=90 --set data.sources.scenes.validation=12 --set data.sources.scenes.test=12"
OTHERS = "--set data.sources.pictures.train=40 --set data.sources.texts.train=40 --set public.items=24"
FILES = {
    "ten-minutes": tuple(
        f"runs/{name}/report.html" for name in ("first/federation", "demo-server-only-seed1", "fedmd")
    ),
    "own-data": ("data/photos/report.json", "runs/shop-seed0/report.html", "shop-model/README.md"),
    "own-method": ("consensus.py", "bounded/runs/bounded-seed0/report.html"),
    "reading-a-report": ("runs/read/report.html",),
}


def on_less(source: str) -> str:
    """The source of a cell whose commands take seconds; any that fails ends it."""
    source = re.sub(r"--rounds \d+", "--rounds 2", source.replace("train=1500", "train=40"))
    source = source.replace("--seeds 1,2,3,4", "--seeds 1").replace("study.yaml", "study.yaml --scale smoke")
    for preset, few in {"experiment.yaml": FEW, "scenes-demo": f"{FEW} {OTHERS}"}.items():
        source = source.replace(f"polyfed run {preset}", f"polyfed run {preset} {SMALL} {few}")
    own = f"polyfed run shop.yaml {SMALL} --set algorithm.warmup_rounds=0"
    return source.replace("polyfed run shop.yaml", own).replace("%%bash\n", "%%bash\nset -e\n")


def test_a_page_becomes_cells() -> None:
    page = "# T\n\nSee [there](x.md).\n\n```bash\nls\n```\n\n"
    page += "<!-- file: a.py -->\n```python\nx = 1\n```\n\n```yaml\na: 1\n```\n"
    assert [*notebooks.cells(page)] == [
        ("markdown", "# T\n\nSee there."),
        ("code", "%%bash\nls"),
        ("markdown", ""),
        ("code", "%%writefile a.py\nx = 1"),
        ("markdown", "```yaml\na: 1\n```"),
    ]


def test_own_data_takes_at_most_fifteen_commands() -> None:
    page = (notebooks.TUTORIALS / "own-data.md").read_text(encoding="utf-8")
    commands = [source for cell, source in notebooks.cells(page) if cell == "code" and source.startswith("%%bash")]
    assert sum(len(source.splitlines()) - 1 for source in commands) <= 15


@pytest.mark.slow
@pytest.mark.parametrize("name", notebooks.NAMES)
def test_a_tutorial_runs_as_a_notebook(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient", reason="the extra docs is not installed")
    nbformat = pytest.importorskip("nbformat", reason="the extra docs is not installed")
    pytest.importorskip("ipykernel", reason="the extra docs is not installed")
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    made = nbformat.reads(notebooks.notebook(name), as_version=4)
    for cell in made.cells:
        if cell.cell_type == "code":
            cell.source = on_less(cell.source)
    nbclient.NotebookClient(made, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert [file for file in FILES[name] if not (tmp_path / file).is_file()] == []
    if name == "own-data":
        items = json.loads((tmp_path / "data/photos/report.json").read_text())["items"]
        assert items == {"test": 4, "validation": 4, "train": 32}
