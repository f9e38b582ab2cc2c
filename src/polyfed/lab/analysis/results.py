"""What every analysis gives: figures, tables, a picture, and the files that hold them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyfed.core.errors import RunError
from polyfed.core.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from polyfed.lab.analysis.drawing import Matrix
    from polyfed.reporting.tables import TextTable


@dataclass(frozen=True)
class AnalysisResult:
    """What an analysis gives.

    Attributes:
        figures: all of them by name, as JSON has them and columns of studies find them.
        tables: for the terminal.
        picture: draws it, once the tables are seen; None: there is none.
    """

    figures: dict[str, Any]
    tables: Sequence[TextTable]
    picture: Callable[[], Figure] | None = None

    @classmethod
    def of_matrices(cls, title: str, figures: dict[str, Any], matrices: Sequence[Matrix]) -> AnalysisResult:
        """Each matrix as a table, and all side by side in one picture."""
        from polyfed.lab.analysis.drawing import draw_panels

        tables = [matrix.table() for matrix in matrices]
        return cls(figures, tables, partial(draw_panels, title, matrices, len(matrices)))

    def save(self, folder: Path, name: str, **more: object) -> list[Path]:
        """Write ``<name>.json`` (with ``more``), and ``<name>.png`` where there is a picture.

        Raises:
            RunError: the folder cannot be written to.
        """
        from polyfed.reporting.figures import save

        paths = [folder / f"{name}.json"]
        try:
            write_atomically(paths[0], _json_bytes({**self.figures, **more}))
            if self.picture is not None:
                paths.append(save(self.picture(), folder / f"{name}.png"))
        except OSError as error:
            raise RunError(f"cannot write to '{folder}' ({error.strerror or error}); choose another --out") from error
        return paths


def ready_folder(path: Path) -> Path:
    """The folder, made if it is not there: called before the work whose result goes there.

    Raises:
        RunError: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot create folder '{path}' ({error.strerror or error}); choose another --out") from error
    return path


def _json_bytes(content: Mapping[str, Any]) -> bytes:
    """NaN and infinity, which JSON does not have, become null."""
    finite = json.loads(json.dumps(content, default=dict), parse_constant=lambda name: None)
    return f"{json.dumps(finite, indent=1, ensure_ascii=False)}\n".encode()
