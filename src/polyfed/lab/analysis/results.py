"""What analyses give: figures, tables, a picture, and the files that hold them."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from polyfed.core.errors import RunError
from polyfed.core.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from polyfed.reporting.tables import TextTable


class AnalysisResult(ABC):
    """What an analysis gives; it writes and shows itself."""

    csv_header: ClassVar[tuple[str, ...]] = ()
    """Columns of ``csv_rows``; none: no CSV file."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """All figures by name, as columns of studies find them."""

    @abstractmethod
    def tables(self) -> list[TextTable]:
        """What the terminal shows."""

    def draw(self) -> Figure | None:
        """A picture, if there is one."""
        return None

    def csv_rows(self) -> Iterable[Sequence[object]]:
        return ()

    def tensors(self) -> Mapping[str, Tensor]:
        return {}

    def to_csv(self) -> str:
        import pandas as pd

        return pd.DataFrame(self.csv_rows(), columns=list(self.csv_header), dtype=object).to_csv(
            index=False, na_rep="nan"
        )

    def save(self, folder: Path, name: str, **more: object) -> list[Path]:
        """Write ``<name>.json`` (with ``more``), and ``.csv``, ``.safetensors`` and ``.png`` where there is such.

        Raises:
            RunError: the folder cannot be written to.
        """
        import safetensors.torch

        from polyfed.reporting.figures import save

        contents = {".json": _json_bytes({**self.to_json(), **more})}
        if self.csv_header:
            contents[".csv"] = self.to_csv().encode()
        if tensors := self.tensors():
            contents[".safetensors"] = safetensors.torch.save(dict(tensors))
        paths = []
        try:
            for suffix, content in contents.items():
                paths.append(folder / f"{name}{suffix}")
                write_atomically(paths[-1], content)
            if (drawing := self.draw()) is not None:
                paths.append(save(drawing, folder / f"{name}.png"))
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
