"""Arrays by client and sample that a run keeps: ``arrays/<name>/round-0007.safetensors``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from polyfed.core.errors import RunError
from polyfed.core.untrusted import file_json


@dataclass(frozen=True)
class ClientArray:
    """One value a client and sample.

    Attributes:
        clients: client ids, one a row.
        values: [clients, samples].
    """

    clients: tuple[str, ...]
    values: NDArray[np.float64]


def read_arrays(folder: Path) -> dict[str, dict[int, ClientArray]]:
    """Name -> round -> array, both ascending.

    Raises:
        RunError: a file is damaged.
    """
    arrays: dict[str, dict[int, ClientArray]] = {}
    for path in sorted(folder.glob("*/round-*.safetensors")):
        arrays.setdefault(path.parent.name, {})[int(path.stem.removeprefix("round-"))] = _read(path)
    return arrays


def _read(path: Path) -> ClientArray:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as opened:
            values = opened.get_tensor("values")
            clients = file_json(opened.metadata()["clients"])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise RunError(f"array {path.parent.name}/{path.name} is damaged: {error}; delete {path}") from error
    if values.ndim != 2 or len(values) != len(clients):
        raise RunError(f"array {path} has shape {values.shape} for {len(clients)} clients; delete it")
    return ClientArray(tuple(clients), values.astype(np.float64))
