"""Grids of cases of which ``make test`` runs a few, and ``make test-all`` all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def mostly_slow(cases: Iterable[Any], *fast: Any) -> list[Any]:
    """The cases, of which those that are not among ``fast`` are slow."""
    known = list(cases)
    assert all(case in known for case in fast), f"not all of {fast} are among {known}"
    return [
        case if case in fast else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in known
    ]
