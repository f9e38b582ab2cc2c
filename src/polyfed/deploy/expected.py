"""Data of a site as they are expected: described where the folders are made, and compared at the site."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np

from polyfed.core.errors import PolyfedError
from polyfed.data.arrow import is_text
from polyfed.data.source import Split
from polyfed.deploy.check_network import Finding, Level
from polyfed.deploy.settings import ExpectedData
from polyfed.federation.data import OpenedData
from polyfed.federation.population import Population
from polyfed.federation.settings import GroupSettings
from polyfed.runs.starter import language_of

_log = logging.getLogger(__name__)

_TEXTS = 1000  # that tell the language


def described(split: Split) -> ExpectedData:
    """Columns, classes, number and language of a split's items."""
    texts: list[str] = []
    for name in split.columns:
        column = split.modality(name)
        column = column.without_gaps()[0] if column.gaps else column
        first = column.take(np.arange(min(_TEXTS, len(column.flat_values()) if column.gaps else len(split))))
        texts += first.to_pylist() if is_text(first.type) else []
    return ExpectedData(
        split=split.name,
        columns={**split.columns, **split.targets},
        classes={name: tuple(classes) for name, classes in split.classes.items()},
        items=len(split),
        language=language_of(texts),
    )


def expected_data(at_hand: Population, group: GroupSettings) -> dict[str, Any]:
    """Source of a group -> its data as they are here; nothing where they are at the site alone."""
    try:
        return {group.source: described(at_hand.data.split(group.source, group.split)).model_dump(mode="json")}
    except PolyfedError as error:
        _log.warning("polyfed deploy check will compare with nothing what cannot be read here: %s", error)
        return {}


def differences(data: OpenedData, source: str, expected: ExpectedData) -> Iterator[Finding]:
    """What of a source is not as expected: wrong where a model would learn something else, else a warning."""
    here = described(data.split(source, expected.split))
    what, remedy = f"expected of '{source}'", "compare the data with those that were agreed upon"
    if here == expected:
        yield Finding("ok", what, "columns, classes, number of items and language")
    for key in ("columns", "classes", "items", "language"):
        found, wanted = getattr(here, key), getattr(expected, key)
        is_near = key == "items" and wanted <= 2 * found <= 4 * wanted
        if found != wanted and not is_near:
            level: Level = "error" if key in ("columns", "classes") else "warning"
            shown = [value or "English, or no texts" if key == "language" else value for value in (found, wanted)]
            yield Finding(level, what, f"{key}: found {shown[0]}, expected {shown[1]}", remedy)
