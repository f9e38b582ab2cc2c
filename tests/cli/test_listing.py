"""Output of ``polyfed list``."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import yaml

from polyfed.cli.catalogue import entries
from polyfed.core.settings import Settings, is_component
from polyfed.runs.config_files import presets
from polyfed.runs.settings import RunSettings

Cli = Callable[..., tuple[int, str, str]]


def test_the_list_is_a_screen_of_families_and_kinds_with_what_they_need_and_cost(cli: Cli, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = cli("list")[1].splitlines()
    assert len(lines) <= 59
    demo = next(line for line in lines if line.split()[:1] == ["scenes-demo"])
    assert "needs nothing; 81 s on two quiet cores" in demo
    real = next(line for line in lines if line.split()[:1] == ["creamfl-flickr8k"])
    assert "needs data: ag_news, cifar100, flickr8k; two cores" in real
    examples = {"presets": "scenes-demo", "methods": "fedavg", "models": "gru", "data": "parquet", "tasks": "retrieval"}
    for family, name in examples.items():
        assert any(line.startswith(f"{family}: ") for line in lines)
        assert len(next(line for line in cli("list", family)[1].splitlines() if line.split()[0] == name).split()) > 3


@pytest.mark.parametrize(
    ("family", "name", "setting", "values"),
    [
        ("models", "resnet", "size", "tiny | small | 18 | 34 | 50 | 101"),
        ("methods", "fedavg", "local_epochs", "whole number >= 1"),
        ("partitions", "dirichlet", "alpha", "number > 0 and <= 1e+06"),
        ("settings", "run", "engine", "flower | local | ray | import path of a class"),
        ("settings", "run.output", "plots", "true | false | page"),
        ("settings", "server", "training", "section of optimizer, schedule, batch_size"),
    ],
)
def test_settings_are_listed_with_their_values(cli: Cli, family: str, name: str, setting: str, values: str) -> None:
    row = next(line for line in cli("list", family, name)[1].splitlines() if line.startswith(f"{setting}:"))
    assert row.endswith(values)
    settings = {entry["name"]: entry for entry in json.loads(cli("list", family, name, "--json")[1])}
    assert settings[setting]["allowed"] == values


def test_every_section_of_run_is_listed() -> None:
    kinds = {f"run.{name}": field.default_factory for name, field in RunSettings.model_fields.items()}
    own = {name: made for name, made in kinds.items() if isinstance(made, type) and issubclass(made, Settings)}
    sections = {name for name, section in own.items() if not is_component(section)}
    assert {"run.exchange", "run.output", "run.sampling"} <= sections
    assert sections <= set(entries("settings"))


def test_presets_are_listed_by_family_with_what_differs(cli: Cli) -> None:
    everything = cli("list", "presets")[1]
    assert "variants" in next(line for line in everything.splitlines() if line.startswith("creamfl-flickr8k: "))
    assert "[data: ag_news, cifar100, flickr8k; weights]" in everything
    facts = {facts["name"]: facts for facts in json.loads(cli("list", "presets", "--json")[1])}
    assert all(entry["cost"] for entry in facts.values())
    paper = json.loads(cli("list", "presets", "fedcola-paper", "--json")[1])
    assert paper == facts["fedcola-paper"]
    assert (paper["weights"], paper["cost"], paper["root"]) == (True, "hours on two cores", "fedcola-flickr8k")


def test_a_preset_is_shown_as_a_file_to_start_from(cli: Cli) -> None:
    name = next(iter(presets()))
    assert yaml.safe_load(cli("list", "presets", name)[1])["description"] == presets()[name]


def test_settings_of_sections_stand_below_them(cli: Cli) -> None:
    code, out, _ = cli("list", "methods", "creamfl")
    lines = [line.partition("#")[0].rstrip() for line in out.splitlines()]
    place = lines.index("contrast:")
    assert code == 0
    assert lines[place + 1 : place + 5] == ["  weight: 0.5", "  inter:", "    tau: 1.0", "    mask_siblings: false"]
