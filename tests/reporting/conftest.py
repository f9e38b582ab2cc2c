from __future__ import annotations

import pytest
from rich.text import Text


@pytest.fixture(autouse=True)
def _no_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    """Displays of made-up runs, which have no folder, print its name where they would print what came out."""
    monkeypatch.setattr("polyfed.reporting.progress.summary_of", lambda folder: Text(str(folder)))
