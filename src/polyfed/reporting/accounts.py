"""Tables of what was found of the data, what was read, and what was left out and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyfed.core.untrusted import file_json
from polyfed.reporting.tables import TextTable, count
from polyfed.runs.folder import ACCOUNTS

_NONE = "-"


def account_table(accounts: Mapping[str, Sequence[Mapping[str, Any]]]) -> TextTable:
    """Rows of counts, each with its reasons.

    Args:
        accounts: source -> counts, as ``Count.plain`` gives them.
    """
    rows = [
        (
            f"{source}: {entry['unit']}",
            count(int(entry["found"])),
            count(int(entry["read"])),
            "; ".join(f"{number:,} {reason}" for reason, number in entry["left_out"].items()) or _NONE,
        )
        for source, counts in accounts.items()
        for entry in counts
    ]
    return TextTable("What was read of the data", ("", "found", "read", "left out"), rows)


def recorded_accounts(folder: Path) -> list[TextTable]:
    """The table of a run folder; none of runs that recorded no accounts, or of a damaged record."""
    try:
        return [account_table(file_json((folder / ACCOUNTS).read_bytes()))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
