"""Files of an analysis: JSON without NaN, CSV, and folders that can be written to."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyfed.core.errors import RunError
from polyfed.core.files import write_atomically


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


def write_json(path: Path, content: Mapping[str, Any]) -> Path:
    """Write ``content``; NaN and infinity, which JSON does not have, become null. Returns ``path``.

    Raises:
        RunError: it cannot be written.
    """
    finite = json.loads(json.dumps(content, default=dict), parse_constant=lambda name: None)
    try:
        write_atomically(path, f"{json.dumps(finite, indent=1, ensure_ascii=False)}\n".encode())
    except OSError as error:
        raise RunError(f"cannot write '{path}' ({error.strerror or error}); choose another --out") from error
    return path


def csv_text(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    import pandas as pd

    return pd.DataFrame(rows, columns=list(header), dtype=object).to_csv(index=False, na_rep="nan")
