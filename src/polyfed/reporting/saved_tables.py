"""Tables that an analysis left in a run folder, which the run's reports show as well."""

from __future__ import annotations

from typing import Any

from polyfed.core.errors import RunError
from polyfed.core.untrusted import file_json
from polyfed.reporting.tables import TextTable
from polyfed.runs.records import RunRecords

LEAKAGE = "analysis/leakage.json"


def table_json(table: TextTable) -> dict[str, Any]:
    return {key: [*value] if key != "title" else value for key, value in vars(table).items()}


def leakage_parts(records: RunRecords) -> list[TextTable]:
    """What ``polyfed analyse leakage`` found in the run; nothing if nobody asked.

    Raises:
        RunError: its file is damaged.
    """
    path = records.folder / LEAKAGE
    if not path.is_file():
        return []
    try:
        return [TextTable(**table) for table in file_json(path.read_text())["tables"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"'{path}' is damaged ({type(error).__name__}: {error}); remove it, or analyse again") from error
