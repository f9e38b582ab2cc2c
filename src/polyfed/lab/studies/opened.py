"""``open_study``: results of a study as frames, as text, and as runs."""

from __future__ import annotations

import glob
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from polyfed.core.errors import ConfigError, RunError, nearest
from polyfed.core.extras import brought_by
from polyfed.lab.studies.exports import FRAMES, markdown_text
from polyfed.lab.studies.results import RESULTS, Results
from polyfed.lab.studies.runner import CELLS
from polyfed.lab.studies.study_files import study_name
from polyfed.lab.studies.tables import study_tables
from polyfed.reporting.page import page_templates
from polyfed.runs.opened import Run, open_run

if TYPE_CHECKING:
    import pandas as pd

STUDIES = Path("runs") / "studies"
"""Default folder of studies, next to the cells that they share."""


def open_study(study: Path | str, *, allow_code: bool = False) -> OpenStudy:
    """Open a study, also while it runs: with the results so far.

    Args:
        study: Folder of the study, its name in ``runs/studies``, with or without the scale, or the study's file.
        allow_code: Import columns and analyses that the study names by import path, see ``polyfed.open_run``.

    Raises:
        RunError: The study does not exist, its name fits several, or its files are damaged.
        ConfigError: The study names code, which is not allowed.
    """
    folder = _study_folder(Path(study))
    return OpenStudy(folder, Results.load(folder, allow_code), allow_code)


@dataclass(frozen=True)
class OpenStudy:
    """A study on disk, see ``open_study``.

    Attributes:
        folder: Folder of the study.
        results: Its results when it was opened.
        allow_code: True to import classes that its runs name by import path.
    """

    folder: Path
    results: Results
    allow_code: bool = False

    def to_pandas(self, table: Literal["summary", "cells", "tuning", "claims"] = "summary") -> pd.DataFrame:
        """Results as a pandas frame; a point is a column for each axis.

        Estimate, interval, p and verdict are those of the printed tables, all of one test. Every axis is a column.

        Args:
            table: ``summary``, a row for each row, point and column of the study, with the number of seeds, mean, std
                and 95 % interval of the mean (low, high), the difference to the reference with its interval and p, and
                the verdict where a claim is judged on just that; ``cells``, a row for each complete run, with its seed,
                all columns, and its key in ``runs``; ``tuning``, a row for each choice, with factors, changed settings,
                validation, number of candidates, and kinds whose search ended at an end; or ``claims``, with judged and
                secondary ones.

        Raises:
            ConfigError: The table does not exist, or pandas is missing.
        """
        if table not in FRAMES:
            raise ConfigError(f"to_pandas: no table '{table}'; {nearest(table, FRAMES)}")
        with brought_by("frames"):
            import pandas as pd

        heads, rows = FRAMES[table](self.results)
        return pd.DataFrame(rows, columns=list(heads))

    def table(self) -> str:
        """All tables as Markdown."""
        return markdown_text(self.results)

    def _repr_html_(self) -> str:
        """All tables, for notebooks."""
        parts: Any = page_templates().get_template("parts.html.j2").module
        return str(parts.tables(study_tables(self.results)))

    @cached_property
    def runs(self) -> Mapping[str, Run]:
        """Cell, such as ``ours, 250, seed 0`` -> its run, of cells whose folder is there; models only if kept."""
        folders = {label: self.folder.parent / CELLS / name for label, name in self.results.cells.items()}
        there = {label: folder for label, folder in folders.items() if (folder / "config.yaml").is_file()}
        return {label: open_run(folder, allow_code=self.allow_code) for label, folder in there.items()}


def _study_folder(given: Path) -> Path:
    """Folder of a study's results, by its name or file: of the one scale that was run.

    Raises:
        RunError: There is none, or there are several.
    """
    named = [given, STUDIES / given]
    if given.is_file():
        named = [STUDIES / study_name(given), given.parent / STUDIES / given.stem]
    if exact := [folder for folder in named if (folder / RESULTS).is_file()]:
        return exact[0]
    scaled = {
        file.parent
        for folder in named
        for file in folder.parent.glob(f"{glob.escape(folder.name)}-*/{RESULTS}")
        if "-" not in file.parent.name.removeprefix(f"{folder.name}-")  # else of a study with a longer name
    }
    if len(scaled) == 1:
        return scaled.pop()
    if scaled:
        raise RunError(f"several studies '{given}': {', '.join(map(str, sorted(scaled)))}; give one of them")
    there = sorted(file.parent.name for file in STUDIES.glob(f"*/{RESULTS}"))
    listed = f"in {STUDIES}: {', '.join(there)}" if there else "give the folder that polyfed study run printed"
    raise RunError(f"no study in '{given}' (no {RESULTS} in it); {listed}")
