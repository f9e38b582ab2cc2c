"""Files of an analysis: JSON without NaN, complete or not there, and folders that can be written to."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyfed.core.errors import RunError
from polyfed.core.files import write_atomically
from polyfed.reporting.compare import Spread


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
    text = json.dumps(_plain(content), indent=1, ensure_ascii=False, allow_nan=False)
    try:
        write_atomically(path, f"{text}\n".encode())
    except OSError as error:
        raise RunError(f"cannot write '{path}' ({error.strerror or error}); choose another --out") from error
    return path


def spread_json(by_seed: Mapping[int, float]) -> dict[str, Any]:
    """Mean, sample standard deviation (null for one seed) and the value of every seed."""
    spread = Spread.of(list(by_seed.values()))
    return {"mean": spread.mean, "std": spread.std, "by_seed": {str(seed): value for seed, value in by_seed.items()}}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
