"""What every analysis gives: figures, tables, a picture, and the files that hold them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyfed.core.errors import RunError
from polyfed.core.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from polyfed.reporting.tables import TextTable


@dataclass(frozen=True)
class AnalysisResult:
    """What an analysis gives.

    Attributes:
        figures: all of them by name, as JSON has them and columns of studies find them.
        tables: for the terminal.
        picture: draws it, once the tables are seen; None: there is none.
        csv: content of a CSV file; empty: there is none.
        tensors: what a picture of a study is drawn from without the models.
    """

    figures: dict[str, Any]
    tables: Sequence[TextTable]
    picture: Callable[[], Figure] | None = None
    csv: str = ""
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def save(self, folder: Path, name: str, **more: object) -> list[Path]:
        """Write ``<name>.json`` (with ``more``), and ``.csv``, ``.safetensors`` and ``.png`` where there is such.

        Raises:
            RunError: the folder cannot be written to.
        """
        import safetensors.torch

        from polyfed.reporting.figures import save

        contents = {".json": _json_bytes({**self.figures, **more}), ".csv": self.csv.encode()}
        if self.tensors:
            contents[".safetensors"] = safetensors.torch.save(dict(self.tensors))
        paths = []
        try:
            for suffix, content in contents.items():
                if content:
                    paths.append(folder / f"{name}{suffix}")
                    write_atomically(paths[-1], content)
            if self.picture is not None:
                paths.append(save(self.picture(), folder / f"{name}.png"))
        except OSError as error:
            raise RunError(f"cannot write to '{folder}' ({error.strerror or error}); choose another --out") from error
        return paths


def csv_text(rows: Sequence[Sequence[object]], columns: Sequence[str]) -> str:
    import pandas as pd

    return pd.DataFrame(rows, columns=list(columns), dtype=object).to_csv(index=False, na_rep="nan")


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
