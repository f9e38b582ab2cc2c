"""Presets that claim the values of a paper or of a released code have them, all of them, and inherit none."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import creamfl_table
import fedafd_table
import fedcola_table
import pytest
import yaml
from stated import MECHANICS, Table, default_of, entry_for, hyperparameters, leaves

from polyfed.catalogue import preset_names, preset_text, presets
from polyfed.config_files import read_config
from polyfed.data.images import Augment
from polyfed.experiment import Experiment

TABLES: dict[str, Table] = {**creamfl_table.TABLES, **fedafd_table.TABLES, **fedcola_table.TABLES}
# presets of FedAID and FedDRA: their tables go into fedaid_table.py, and then their names leave this set
WITHOUT_A_TABLE = {"fedaid-mimic", "feddra-mimic", "medpix-feddra-released"}

NAMED = re.compile(r"(^|-)(paper|released)(-|$)")
CLAIMING = re.compile(
    r"with the values (and sizes )?of its|as (its|the) released code|at the paper's sizes?|as the paper states"
)
MAY_BE_LEFT_OUT = {
    False: (".name",),
    True: (".name", ".items", ".weights", ".depth", *(f".augment.{change}" for change in Augment.model_fields)),
}
"""Names, which a bare component states, and what is none unless something is asked for."""
MAY_BE_INHERITED = re.compile(r"data\.sources\..+|(server|clients\.\w+)\.source")


@cache
def loaded(name: str) -> Experiment:
    return Experiment.load(name)


@cache
def resolved(name: str) -> dict[str, Any]:
    return hyperparameters(loaded(name).model_dump(mode="json"))


@cache
def written(name: str) -> tuple[str, ...]:
    """Paths of the settings that a preset, or what it extends, writes out."""
    paths = [path for path, _ in leaves(read_config(name))]
    return tuple(re.sub(r"^(clients\.\w+)\.model\.", r"\1.models.0.", path) for path in paths)


@cache
def described(name: str) -> str:
    """The description, with that of the preset which it refers to."""
    content = yaml.safe_load(preset_text(name))
    words = " ".join(str(content["description"]).split())
    return f"{words} {described(content['extends'])}" if content.get("extends") in TABLES else words


def is_written(path: str, name: str) -> bool:
    return any(path == own or path.startswith(f"{own}.") for own in written(name))


def test_every_preset_that_claims_a_sources_values_has_a_table() -> None:
    claiming = {name for name, words in presets().items() if NAMED.search(name) or CLAIMING.search(words)}
    variants = {name for name in preset_names() if yaml.safe_load(preset_text(name)).get("extends") in TABLES}
    assert claiming | variants == {*TABLES} | WITHOUT_A_TABLE


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


@pytest.mark.parametrize("name", sorted(TABLES))
def test_nothing_is_inherited_but_data_or_a_preset_with_a_table(name: str) -> None:
    base = yaml.safe_load(preset_text(name)).get("extends")
    if base not in (None, *TABLES):
        assert not [path for path, _ in leaves(read_config(base)) if not MAY_BE_INHERITED.fullmatch(path)]


@pytest.mark.parametrize(
    ("name", "galleries"),
    [("creamfl-paper-scale", [1000, 5000]), ("fedafd-paper-scale", [1000]), ("fedcola-paper-scale", [1000, 5000])],
)
def test_recalls_at_the_papers_sizes_are_of_the_papers_galleries(name: str, galleries: list[int]) -> None:
    server = loaded(name).server
    assert server is not None
    assert server.expected_test_items is not None
    assert [server.expected_test_items / folds for folds in server.task.folds] == galleries
