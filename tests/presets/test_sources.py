"""Presets and rows of studies that claim the values of a paper or of a released code have them, all of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import pytest
import yaml
from stated import MECHANICS, Entry, default_of, hyperparameters, leaves, pattern_of, tables

from paper_studies import STUDIES
from polyfed.data.images import Augment
from polyfed.lab.studies.cells import Places, resolve
from polyfed.lab.studies.study import Study
from polyfed.runs.config_files import preset_names, preset_text, presets, read_config
from polyfed.runs.experiment import Experiment

PRESETS, STUDIED = tables("presets"), tables("rows")
TABLES = PRESETS | STUDIED

CLAIMING = re.compile(r"\b(papers?|released|authors)\b")
"""Words of names and descriptions; a description may also name a row of a paper's table and claim nothing by it."""
NAMED_ROWS = {"fedcola-flickr8k-pretrained": "as the paper's from an ImageNet ViT"}
MAY_BE_LEFT_OUT = {
    False: (".name",),
    True: (".name", ".items", ".weights", ".depth", *(f".augment.{change}" for change in Augment.model_fields)),
}
"""Names, which a bare component states, and settings that are null unless a preset sets them."""
GALLERIES = {
    "creamfl-paper-scale": [1000, 5000],
    "fedafd-paper-scale": [1000],
    "fedcola-paper-scale": [1000, 5000],
    "fedcola-coco-paper-scale": [1000, 5000],
}


@cache
def study_row(name: str) -> tuple[Study, str]:
    file, _, row = name.partition(": ")
    return Study.load(STUDIES[file], "paper"), row


@cache
def loaded(name: str) -> Experiment:
    return resolve(*study_row(name), (), Places()) if name in STUDIED else Experiment.load(name)


@cache
def resolved(name: str) -> dict[str, Any]:
    return hyperparameters(loaded(name).model_dump(mode="json"))


@cache
def written(name: str) -> tuple[str, ...]:
    """Paths of the settings that a preset or row, or its base, writes out."""
    if name not in STUDIED:
        return tuple(paths_of(read_config(name)))
    study, row = study_row(name)
    return (*written(study.base), *study.set, *study.resolved(row).set)


def paths_of(content: Mapping[str, Any]) -> list[str]:
    return [re.sub(r"^(clients\.\w+)\.model\.", r"\1.models.0.", path) for path, _ in leaves(content)]


@cache
def described(name: str) -> str:
    """The description, with that of the preset that it extends."""
    if name in STUDIED:
        return described(study_row(name)[0].base)
    content = yaml.safe_load(preset_text(name))
    words = " ".join(str(content["description"]).split())
    return f"{words} {described(content['extends'])}" if content.get("extends") in PRESETS else words


def is_among(path: str, paths: Iterable[str]) -> bool:
    return any(path == own or path.startswith(f"{own}.") for own in paths)


def entry_of(name: str, path: str) -> Entry | None:
    """Expectation of a setting: that of the preset's table, or that of a setting without a source."""
    if pattern := pattern_of(path, TABLES[name]):
        return TABLES[name][pattern]
    mechanic = pattern_of(path, MECHANICS)
    return Entry("mechanics", MECHANICS[mechanic]) if mechanic else None


def test_every_preset_that_claims_a_sources_values_has_a_table() -> None:
    claims = {name: f"{name} {words.replace(NAMED_ROWS.get(name, name), '')}" for name, words in presets().items()}
    claiming = {name for name, words in claims.items() if CLAIMING.search(words)}
    variants = {name for name in preset_names() if yaml.safe_load(preset_text(name)).get("extends") in PRESETS}
    assert claiming | variants == {*PRESETS}
    assert not [name for name, words in NAMED_ROWS.items() if words not in presets()[name]]


def fault(name: str, path: str, value: Any) -> str:
    """Difference of a setting from its expectation; empty without one."""
    entry = entry_of(name, path)
    if entry is None:
        return f"{value!r}, which its table lacks"
    due = default_of(loaded(name), path) if entry.part == "idle" else entry.value
    if value != ([*due] if isinstance(due, tuple) else due):
        return f"{value!r}, not {due!r}"
    may_be_left_out = entry.part != "sourced" or path.endswith(MAY_BE_LEFT_OUT[value is None])
    return "" if may_be_left_out or is_among(path, written(name)) else f"{value!r}, which is not written out"


@pytest.mark.parametrize("name", sorted(TABLES))
def test_a_preset_has_exactly_the_values_of_its_table(name: str) -> None:
    """Values are equal, sourced ones are written out, idle ones are defaults, and chosen ones are described."""
    table, settings = TABLES[name], resolved(name)
    assert not {path: text for path, value in settings.items() if (text := fault(name, path, value))}
    assert not {*table} - {pattern_of(path, table) for path in settings}, "entries without a setting"
    assert not {pattern: entry.phrase for pattern, entry in table.items() if entry.phrase not in described(name)}


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_only_data_and_described_settings_are_inherited_from_a_preset_without_a_table(name: str) -> None:
    content = yaml.safe_load(preset_text(name))
    if (base := content.get("extends")) not in (None, *PRESETS):
        own, of_base = paths_of(content), paths_of(read_config(base))
        inherited = [path for path in resolved(name) if is_among(path, of_base) and not is_among(path, own)]
        entries = {path: entry_of(name, path) for path in inherited}
        assert not [path for path, entry in entries.items() if entry is None or base not in entry.phrase]


@pytest.mark.parametrize(("name", "galleries"), GALLERIES.items())
def test_recalls_at_the_papers_sizes_have_the_papers_galleries(name: str, galleries: list[int]) -> None:
    server = loaded(name).server
    assert server is not None
    assert server.expected_test_items is not None
    assert [server.expected_test_items / folds for folds in server.task.folds] == galleries
