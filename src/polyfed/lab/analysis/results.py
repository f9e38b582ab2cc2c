"""What every analysis gives: figures, tables, a picture, and the files that hold them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyfed.core.errors import RunError
from polyfed.core.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from polyfed.lab.analysis.drawing import Matrix
    from polyfed.reporting.tables import TextTable


@dataclass(frozen=True)
class AnalysisResult:
    """What an analysis gives.

    Attributes:
        figures: all of them by name, as JSON has them and columns of studies find them.
        tables: for the terminal.
        picture: draws it, once the tables are seen; None: there is none.
        tensors: what a picture of a study is drawn from without the models.
    """

    figures: dict[str, Any]
    tables: Sequence[TextTable]
    picture: Callable[[], Figure] | None = None
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of_matrices(cls, title: str, figures: dict[str, Any], matrices: Sequence[Matrix]) -> AnalysisResult:
        """Each matrix as a table, and all side by side in one picture."""
        from polyfed.lab.analysis.drawing import draw_panels

        tables = [matrix.table() for matrix in matrices]
        return cls(figures, tables, partial(draw_panels, title, matrices, len(matrices)))

    def save(self, folder: Path, name: str, **more: object) -> list[Path]:
        """Write ``<name>.json`` (with ``more``), and ``.safetensors`` and ``.png`` where there is such.

        Raises:
            RunError: the folder cannot be written to.
        """
        import safetensors.torch

        from polyfed.reporting.figures import save

        contents = {".json": _json_bytes({**self.figures, **more})}
        if self.tensors:
            contents[".safetensors"] = safetensors.torch.save(dict(self.tensors))
        paths = []
        try:
            for suffix, content in contents.items():
                paths.append(folder / f"{name}{suffix}")
                write_atomically(paths[-1], content)
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
