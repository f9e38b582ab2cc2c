"""The JSON schema for editors: what polyfed takes is valid, what it refuses is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from polyfed.runs.config_files import COST, FAMILY, preset_names, preset_text
from polyfed.runs.schema import experiment_schema

jsonschema = pytest.importorskip("jsonschema", reason="comes with Ray")
Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def validator() -> Any:
    schema = experiment_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def problems(validator: Any, content: Any) -> list[str]:
    return [f"{'.'.join(map(str, error.path))}: {error.message}" for error in validator.iter_errors(content)]


def preset(name: str) -> dict[str, Any]:
    content = yaml.safe_load(preset_text(name))
    return {key: value for key, value in content.items() if key not in (COST, FAMILY)}


@pytest.mark.parametrize("name", preset_names())
def test_presets_are_valid(validator: Any, name: str) -> None:
    assert problems(validator, preset(name)) == []


@pytest.mark.parametrize(
    "key",
    ["algorithm.kd_epoch", "server.model.encoders.image.deep", "server.task.mask", "clients.paired.modell", "runs"],
)
def test_unknown_keys_are_not(validator: Any, key: str) -> None:
    content = preset("scenes-demo")
    *path, last = key.split(".")
    section = content
    for part in path:
        section = section[part]
    section[last] = 1
    found = jsonschema.exceptions.best_match(validator.iter_errors(content))
    assert ".".join(map(str, found.absolute_path)) == ".".join(path)
    assert last in found.message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("algorithm", "creamfi"),
        ("algorithm", {"name": "fedavgg"}),
        ("run", {"rounds": 0}),
        ("run", {"engine": {"name": "ray", "gpus": "many"}}),
        ("public", {"source": "scenes", "items": -1}),
    ],
)
def test_wrong_values_are_not(validator: Any, key: str, value: Any) -> None:
    assert problems(validator, preset("scenes-demo") | {key: value})


@pytest.mark.parametrize(
    "value", ["creamfl", {"name": "mine.Method", "x": 1}, "mine.Method", {"distiller": {"weight": 2}}]
)
def test_names_import_paths_and_settings_on_top_of_a_file_are_valid(validator: Any, value: Any) -> None:
    assert problems(validator, {"extends": "scenes-demo", "algorithm": value}) == []


def test_the_command_prints_it(cli: Cli) -> None:
    code, out, err = cli("list", "schema")
    assert (code, err) == (0, "")
    assert json.loads(out) == experiment_schema()
