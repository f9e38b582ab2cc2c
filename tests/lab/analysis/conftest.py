from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs draw nothing, which takes longer than all the rest; analyses do."""
    monkeypatch.setattr("polyfed.reporting.api.run_figures", lambda records: {})


@pytest.fixture
def analyse(cli: Cli) -> Cli:
    """Runs ``polyfed analyse ...`` in an empty folder; gives exit code, output and errors."""
    return partial(cli, "analyse")
