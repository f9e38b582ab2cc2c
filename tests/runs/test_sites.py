"""Sites by name: three institutions in a few lines, which become groups of one client with sources of their own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import polyfed
from polyfed.core.errors import ConfigError
from polyfed.core.files import paths_from
from polyfed.runs.config_files import parsed
from polyfed.runs.experiment import Experiment

FILE = """
name: consortium
sites:
  north: {data: {path: north.csv}}
  south: {data: {path: south.csv}}
  west: {data: {path: west.csv, columns: {text: letter}, targets: {label: ward}}, training: {batch_size: 2}}
common:
  data: {name: folder, columns: {table: [age]}, targets: {label: ill}, fractions: {validation: 0.2, test: 0.2}}
  task: classification
  model:
    dim: 8
    encoders:
      table: {name: projection, standardise: none, view: {name: table, cells: {age: {mean: 40, std: 9}}}}
      text: {name: bag, width: 8, view: {name: tokens, tokenizer: hashing, length: 8}}
  training: {batch_size: 4, optimizer: {kind: sgd, lr: 0.1}}
server: {source: north}
algorithm: {name: fedavg, local_epochs: 1}
run: {rounds: 1, threads: 1, output: {plots: false}}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    for name in ("north", "south"):
        rows = [f"{20 + 7 * k % 60},{('no', 'yes')[k % 2]}" for k in range(20)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["age,ill", *rows]))
    letters = [f"words {k} of {k % 5},{('icu', 'er')[k % 2]}" for k in range(20)]
    (tmp_path / "west.csv").write_text("\n".join(["letter,ward", *letters]))
    (tmp_path / "consortium.yaml").write_text(FILE)
    return tmp_path / "consortium.yaml"


def test_a_site_is_a_group_of_one_with_a_source_of_its_own_and_what_is_common(file: Path) -> None:
    experiment = Experiment.load(file, ["common.training.batch_size=8", "sites.south.task={separation: 1.0}"])
    assert {name: (group.count, group.source) for name, group in experiment.clients.items()} == {
        "north": (1, "north"),
        "south": (1, "south"),
        "west": (1, "west"),
    }
    assert [list(group.models[0].encoders) for group in experiment.clients.values()] == [["table"], ["table"], ["text"]]
    assert [group.training.batch_size for group in experiment.clients.values()] == [8, 8, 2]
    assert experiment.server is not None
    assert (experiment.server.training.batch_size, list(experiment.server.model.encoders)) == (8, ["table"])
    sources: dict[str, Any] = dict(experiment.data.sources)
    assert sources["west"].path == str(file.parent / "west.csv")
    assert (sources["west"].columns, sources["west"].shares) == ({"text": "letter"}, {"validation": 0.2, "test": 0.2})
    with paths_from(None, file.parent):
        assert Experiment(**parsed(FILE)) == Experiment.load(file)


def test_the_resolved_configuration_has_groups_alone_and_gives_the_same_run(file: Path, tmp_path: Path) -> None:
    first = polyfed.run(Experiment.load(file), tmp_path / "first", quiet=True).folder
    assert yaml.safe_load((first / "config.yaml").read_text()).keys().isdisjoint({"sites", "common"})
    again = polyfed.run(Experiment.load(first / "config.yaml"), tmp_path / "again", quiet=True).folder
    models = [(folder / "models/last/model.safetensors").read_bytes() for folder in (first, again)]
    assert models[0] == models[1]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("sites.west.dat={}", "sites.west: unknown key 'dat'; did you mean 'data'"),
        ("sites.west.data.colums={}", "sites.west.data: unknown key 'colums'; did you mean 'columns'"),
        ("sites.west.data.columns.text=[1.5]", "sites.west.data.columns.text"),
        ("sites.west.training.batch_size=1", "sites.west.training.batch_size: Input should be greater than or equal"),
        ("common.training.batch_size=1", "common.training.batch_size: Input should be greater than or equal to 2"),
        ("common.data.name=fodler", "common.data: unknown source 'fodler'; did you mean 'folder'"),
        ("common.training.optimizer={kind: adam, momentum: 0.5}", "common.training.optimizer: momentum has no effect"),
        (
            "common.task=retrieval",
            "sites.north: its data have table, and common.task 'retrieval' needs image and text; ",
        ),
        ("clients.west.count=2", "clients.west: 'west' is a site, whose settings stand in sites.west, or in common"),
        ("data.sources.west=scenes", "data.sources.west: 'west' is a site"),
        ("sites=null", "common is what the sites have, and there are no 'sites'; name them, or leave it out"),
        ("data=3", "data is a section of settings, not 3"),
        ("sites=3", "sites: Input should be a valid dictionary"),
    ],
)
def test_a_mistake_is_told_where_it_stands(file: Path, setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        Experiment.load(file, [setting])


def test_a_site_that_stands_twice_is_not_lost(file: Path) -> None:
    file.write_text(FILE.replace("  south:", "  north:"))
    with pytest.raises(ConfigError, match="key 'north' stands twice in the mapping of line 4; the first would be lost"):
        Experiment.load(file)


def test_groups_that_are_drawn_take_part_beside_sites(file: Path) -> None:
    group = (
        "clients.others={count: 2, source: north, task: classification, model: {dim: 8, encoders: {table: projection}}}"
    )
    assert list(Experiment.load(file, [group]).clients) == ["others", "north", "south", "west"]
