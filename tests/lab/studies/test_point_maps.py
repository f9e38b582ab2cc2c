"""Maps of samples side by side, from what analyses have saved in cells without models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from polyfed.core.errors import ConfigError, RunError
from polyfed.lab.analysis.drift import ModalityDrift, Represented, drift_result, modality_drift
from polyfed.lab.analysis.drift_maps import saved_maps
from polyfed.lab.studies.columns.analysis import Analysis
from polyfed.lab.studies.figures import draw_study
from polyfed.lab.studies.records import StudyRecord, pictures_of_cells, record_text
from polyfed.lab.studies.results import Results
from polyfed.lab.studies.study import Study

Load = Callable[..., Study]
COLUMN = {"name": "analysis", "analysis": "drift", "figure": "modalities.image.means.all.distance"}
COLUMNS = {"r1": "r1_sum", "far": COLUMN}


def save_drift(folder: Path, seed: int = 0) -> ModalityDrift:
    """Two clients and the server in one modality, as a column of a study leaves them."""
    generator = torch.Generator().manual_seed(seed)

    def participant(name: str, group: str | None) -> Represented:
        values = torch.nn.functional.normalize(torch.randn(8, 4, generator=generator), dim=1)
        return Represented(name, group, 1, {"image": values})

    who = [participant("image-0", "image"), participant("image-1", "image"), participant("server", None)]
    drift = modality_drift("image", who)
    folder.mkdir(parents=True)
    drift_result("run", 8, "pca", [drift]).save(folder, "drift", options="{}")
    return drift


def test_what_is_saved_is_read_again(tmp_path: Path) -> None:
    drift = save_drift(tmp_path / "analysis")
    (read,) = saved_maps(tmp_path / "analysis", "drift")
    own = drift.map
    assert (read.modality, list(read.names), list(read.groups)) == (own.modality, own.names, own.groups)
    assert torch.equal(read.points, own.points.float())
    assert saved_maps(tmp_path, "drift") == []
    (tmp_path / "analysis" / "drift.json").write_text("{}")
    with pytest.raises(RunError, match="drift' is damaged"):
        saved_maps(tmp_path / "analysis", "drift")


def test_a_panel_a_row_of_the_first_seed(loaded: Load, tmp_path: Path) -> None:
    study = loaded(columns=COLUMNS, figures=[{"points": "far"}])
    cells = {f"{row}, seed {seed}": f"{row}{seed}" for row in study.rows for seed in study.seeds}
    for number, row in enumerate(study.rows):
        save_drift(tmp_path / f"{row}0" / "analysis", number)
    first, second = draw_study(Results(study, {}, cells=cells), study.figures[0], tmp_path).axes
    assert [axes.get_title(loc="left") for axes in (first, second)] == ["tiny: image", "prox: image"]
    assert [text.get_text() for text in first.get_legend().get_texts()] == ["image-0", "image-1", "server"]  # type: ignore[union-attr]
    assert len(first.collections) == 3
    (empty,) = draw_study(Results(study, {}), study.figures[0], tmp_path).axes
    assert empty.get_title(loc="left") == "no cell with a map yet"


def test_a_record_takes_the_maps_along(loaded: Load, tmp_path: Path) -> None:
    study = loaded(columns=COLUMNS, figures=[{"points": "far"}])
    save_drift(tmp_path / "tiny0" / "analysis")
    record = StudyRecord("demo", "small", study, Results(study, {}, cells={"tiny, seed 0": "tiny0"}))
    ((name, content),) = pictures_of_cells(record, tmp_path).items()
    assert (name, content[:4]) == ("demo-small-points-1.png", b"\x89PNG")
    (tmp_path / name).write_bytes(content)
    again = StudyRecord.of("demo", "small", tmp_path)
    assert again.pictures == [name]
    assert f"]({name})" in record_text(replace(record, pictures=[name]))


def test_only_a_column_that_saved_a_map_has_one(loaded: Load) -> None:
    with pytest.raises(ConfigError, match=r"figures.0.points: there is no 'r1'; .*valid: far"):
        loaded(columns=COLUMNS, figures=[{"points": "r1"}])


def test_another_figure_of_a_saved_analysis_needs_no_models(tmp_path: Path) -> None:
    column, other = (Analysis(analysis="drift", figure="x", options=options) for options in ({}, {"samples": 99}))
    assert column.needs_models
    assert not column.is_at_hand(tmp_path)
    save_drift(tmp_path / "analysis")
    assert column.is_at_hand(tmp_path)
    assert not other.is_at_hand(tmp_path)
