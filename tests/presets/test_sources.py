"""Presets and rows of studies that claim the values of a paper or of a released code have them, all of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import creamfl_table
import fedafd_table
import fedaid_table
import fedcola_table
import pytest
import yaml
from stated import MECHANICS, Table, default_of, entry_for, hyperparameters, leaves

from paper_studies import STUDIES
from polyfed.data.images import Augment
from polyfed.lab.studies.cells import Places, resolve
from polyfed.lab.studies.study import Study
from polyfed.runs.config_files import preset_names, preset_text, presets, read_config
from polyfed.runs.experiment import Experiment

MODULES = (creamfl_table, fedafd_table, fedaid_table, fedcola_table)
PRESETS: dict[str, Table] = {name: table for module in MODULES for name, table in module.TABLES.items()}
STUDIED: dict[str, Table] = {name: table for module in MODULES for name, table in module.ROWS.items()}
"""``study: row`` at scale paper -> its table."""
TABLES = PRESETS | STUDIED

CLAIMING = re.compile(r"\b(papers?|released|authors)\b")
"""Words of names and descriptions; a description may also name a row of a paper's table and claim nothing by it."""
ROWS = {"fedcola-flickr8k-pretrained": "as the paper's from an ImageNet ViT"}
MAY_BE_LEFT_OUT = {
    False: (".name",),
    True: (".name", ".items", ".weights", ".depth", *(f".augment.{change}" for change in Augment.model_fields)),
}
"""Names, which a bare component states, and what is none unless something is asked for."""


@cache
def study_row(name: str) -> tuple[Study, str]:
    place, _, row = name.partition(": ")
    return Study.load(STUDIES[place], "paper"), row


@cache
def loaded(name: str) -> Experiment:
    return resolve(*study_row(name), (), Places()) if name in STUDIED else Experiment.load(name)


@cache
def resolved(name: str) -> dict[str, Any]:
    return hyperparameters(loaded(name).model_dump(mode="json"))


@cache
def written(name: str) -> tuple[str, ...]:
    """Paths of the settings that a preset or row, or what it starts from, writes out."""
    if name not in STUDIED:
        return tuple(paths_of(read_config(name)))
    study, row = study_row(name)
    return (*written(study.base), *study.set, *study.resolved(row).set)


def paths_of(content: Mapping[str, Any]) -> list[str]:
    return [re.sub(r"^(clients\.\w+)\.model\.", r"\1.models.0.", path) for path, _ in leaves(content)]


@cache
def described(name: str) -> str:
    """The description, with that of the preset which it refers to."""
    if name in STUDIED:
        return described(study_row(name)[0].base)
    content = yaml.safe_load(preset_text(name))
    words = " ".join(str(content["description"]).split())
    return f"{words} {described(content['extends'])}" if content.get("extends") in PRESETS else words


def is_written(path: str, name: str) -> bool:
    return is_among(path, written(name))


def is_among(path: str, paths: Iterable[str]) -> bool:
    return any(path == own or path.startswith(f"{own}.") for own in paths)


def test_every_preset_that_claims_a_sources_values_has_a_table() -> None:
    claims = {name: f"{name} {words.replace(ROWS.get(name, name), '')}" for name, words in presets().items()}
    claiming = {name for name, words in claims.items() if CLAIMING.search(words)}
    variants = {name for name in preset_names() if yaml.safe_load(preset_text(name)).get("extends") in PRESETS}
    assert claiming | variants == {*PRESETS}


@pytest.mark.parametrize(("name", "words"), ROWS.items())
def test_a_row_that_is_named_is_in_the_description(name: str, words: str) -> None:
    assert words in presets()[name]


@pytest.mark.parametrize("name", sorted(TABLES))
def test_every_value_is_the_sources_or_declared(name: str) -> None:
    table = TABLES[name]
    wrong, unknown = {}, {}
    for path, value in resolved(name).items():
        own = entry_for(path, table.patterns)
        if own in table.idle:
            continue
        pattern = own or entry_for(path, MECHANICS)
        if pattern is None:
            unknown[path] = value
        elif value != (due := (table.values if own else MECHANICS)[pattern]):
            wrong[path] = f"{value!r}, not {due!r}"
    assert not wrong, f"{name} differs from its source"
    assert not unknown, f"{name} has settings that its table lacks"


@pytest.mark.parametrize("name", sorted(TABLES))
def test_every_sourced_value_is_written_out(name: str) -> None:
    sourced, patterns = TABLES[name].sourced, TABLES[name].patterns
    due = [path for path, value in resolved(name).items() if not path.endswith(MAY_BE_LEFT_OUT[value is None])]
    assert not [path for path in due if entry_for(path, patterns) in sourced and not is_written(path, name)]


@pytest.mark.parametrize("name", sorted(TABLES))
def test_settings_without_effect_are_at_their_defaults(name: str) -> None:
    idle, patterns = TABLES[name].idle, TABLES[name].patterns
    paths = {path: value for path, value in resolved(name).items() if entry_for(path, patterns) in idle}
    defaults = {path: json_of(default_of(loaded(name), path)) for path in paths}
    assert paths == defaults


def json_of(value: Any) -> Any:
    return [*value] if isinstance(value, tuple) else value


@pytest.mark.parametrize("name", sorted(TABLES))
def test_a_table_has_no_entry_without_a_setting(name: str) -> None:
    used = {entry_for(path, TABLES[name].patterns) for path in resolved(name)}
    assert not TABLES[name].patterns - used


@pytest.mark.parametrize("name", sorted(TABLES))
def test_what_is_not_the_sources_stands_in_the_description(name: str) -> None:
    chosen = TABLES[name].chosen.items()
    assert not {pattern: phrase for pattern, (_, phrase) in chosen if phrase not in described(name)}


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_nothing_is_inherited_but_data_or_from_a_preset_with_a_table(name: str) -> None:
    """Nor but what the description says that another preset decides, which then is no value of a source."""
    content = yaml.safe_load(preset_text(name))
    if content.get("extends") not in (None, *PRESETS):
        base, own, table = content["extends"], paths_of(content), PRESETS[name]
        of_base = paths_of(read_config(base))
        inherited = [path for path in resolved(name) if is_among(path, of_base) and not is_among(path, own)]
        phrases = [table.chosen.get(str(entry_for(path, table.patterns)), (None, ""))[1] for path in inherited]
        assert not [path for path, phrase in zip(inherited, phrases, strict=True) if base not in phrase]


@pytest.mark.parametrize(
    ("name", "galleries"),
    [
        ("creamfl-paper-scale", [1000, 5000]),
        ("fedafd-paper-scale", [1000]),
        ("fedcola-paper-scale", [1000, 5000]),
        ("fedcola-coco-paper-scale", [1000, 5000]),
    ],
)
def test_recalls_at_the_papers_sizes_are_of_the_papers_galleries(name: str, galleries: list[int]) -> None:
    server = loaded(name).server
    assert server is not None
    assert server.expected_test_items is not None
    assert [server.expected_test_items / folds for folds in server.task.folds] == galleries
