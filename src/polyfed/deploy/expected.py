"""Data of a site as they are expected: described where the folders are made, and compared at the site."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from polyfed.core.errors import PolyfedError
from polyfed.data.arrow import is_text
from polyfed.data.source import Split
from polyfed.deploy.check_network import Finding
from polyfed.deploy.settings import ExpectedData
from polyfed.federation.data import OpenedData
from polyfed.federation.population import Population
from polyfed.federation.settings import GroupSettings
from polyfed.runs.starter import language_of

_TEXTS = 1000  # that tell the language


def described(split: Split) -> ExpectedData:
    """Columns, classes, number and language of a split's items."""
    return ExpectedData(
        split=split.name,
        columns={**split.columns, **split.targets},
        classes={name: tuple(classes) for name, classes in split.classes.items()},
        items=len(split),
        language=language_of(_texts(split)),
    )


def _texts(split: Split) -> list[str]:
    texts: list[str] = []
    for name in split.columns:
        column = split.modality(name)
        column = column.without_gaps()[0] if column.gaps else column
        first = column.take(np.arange(min(_TEXTS, len(split), len(column.flat_values()) if column.gaps else _TEXTS)))
        texts += first.to_pylist() if is_text(first.type) else []
    return texts


def expected_data(population: Population, group: GroupSettings) -> dict[str, ExpectedData]:
    """Source of a group -> its data as they are here; nothing where they cannot be read."""
    try:
        return {group.source: described(population.data.split(group.source, group.split))}
    except PolyfedError:  # the data may be at the site alone
        return {}


def differences(data: OpenedData, source: str, expected: ExpectedData) -> Iterator[Finding]:
    """What of a source is not as expected: wrong where a model would learn something else, else a warning."""
    here = described(data.split(source, expected.split))
    if here == expected:
        yield Finding("ok", f"expected of '{source}'", "columns, classes, number of items and language")
    what, remedy = f"expected of '{source}'", "compare the data with those that were agreed upon"
    for key, found, wanted in (
        ("columns", here.columns, expected.columns),
        ("classes", here.classes, expected.classes),
    ):
        for name in sorted(found.keys() | wanted.keys()):
            if found.get(name) != wanted.get(name):
                detail = f"{key} of '{name}': found {found.get(name)}, expected {wanted.get(name)}"
                yield Finding("error", what, detail, remedy)
    if not expected.items <= 2 * here.items <= 4 * expected.items:
        yield Finding(
            "warning", what, f"found {here.items:,} items of {here.split}, expected {expected.items:,}", remedy
        )
    if here.language != expected.language:
        named = [language or "English, or too little to tell" for language in (here.language, expected.language)]
        yield Finding("warning", what, f"texts seem to be {named[0]}; expected: {named[1]}", remedy)
