"""Sites by name: three institutions in a few lines, which become groups of one client with sources of their own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import polyfed
from misbehaving import contents, cut_short
from polyfed.core.errors import ConfigError, RunError
from polyfed.core.files import paths_from
from polyfed.export.model import export_model
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
    drawn = {name: (group.count, group.source) for name, group in experiment.clients.items()}
    assert drawn == {name: (1, name) for name in ("north", "south", "west")}
    assert [list(group.models[0].encoders) for group in experiment.clients.values()] == [["table"], ["table"], ["text"]]
    assert [group.training.batch_size for group in experiment.clients.values()] == [8, 8, 2]
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


def test_sites_without_a_server_hand_on_the_model_that_they_trained(file: Path, tmp_path: Path) -> None:
    """Its figures at each site are those of the run; what the method adds to it for training stays behind."""
    file.write_text(re.sub("  west: .*\n|server: .*\n", "", FILE))
    moon = ["algorithm={name: moon, projection: 4, local_epochs: 1}", "run.rounds=2", "run.output.keep_rounds=[1]"]
    experiment = Experiment.load(file, moon)
    run = polyfed.run(experiment, tmp_path / "run", quiet=True)
    for site in ("north", "south"):
        seen = polyfed.evaluate_model(run, site)
        assert (seen.model, seen.round) == ("last", 2)
        assert seen.metrics == pytest.approx(run.metrics(site))
    cut = cut_short(experiment.model_dump(mode="json"), tmp_path / "cut")
    assert contents(polyfed.resume(cut, quiet=True)) == contents(run)
    (tmp_path / "north.csv").unlink()  # from here on the folder is enough
    opened, ages = polyfed.open_run(run.folder), [{"age": 31}, {"age": 66}]
    assert opened.model.name == "common model of run, round 2"
    assert opened.model.classify(table=ages).names == ("no", "yes")
    assert opened.server_model("1").round == 1
    exported = polyfed.load_model(export_model(opened, tmp_path / "export"), allow_code=True)
    vectors = [torch.from_numpy(each.encode_modality("table", ages)) for each in (exported, opened.model)]
    torch.testing.assert_close(*vectors, rtol=0, atol=1e-5)


def test_sites_of_several_types_have_a_common_model_each_if_weights_are_averaged(file: Path, tmp_path: Path) -> None:
    file.write_text(re.sub("server: .*\n", "", FILE))
    run = polyfed.run(Experiment.load(file), tmp_path / "run", quiet=True)
    with pytest.raises(RunError, match=r"type of clients: last-north \(round 1\), last-west .*\(--model last-north\)"):
        _ = run.model
    assert polyfed.evaluate_model(run, "west", which="last-west").metrics == pytest.approx(run.metrics("west"))
    alone = polyfed.run(Experiment.load(file, ["algorithm={name: local}"]), tmp_path / "alone", quiet=True)
    with pytest.raises(RunError, match=r"averages no weights, .*model_of\('north'\)"):
        _ = alone.model


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
        ("common.task=retrieval", "sites.north: its data have table, and common.task 'retrieval' needs image and text"),
        ("clients.west.count=2", "clients.west: 'west' is a site, whose settings stand in sites.west, or in common"),
        ("data.sources.west=scenes", "data.sources.west: 'west' is a site"),
        ("sites=null", "common holds settings of sites, and 'sites' is missing; name them, or leave it out"),
        ("data=3", "data is a section of settings, not 3"),
        ("sites=3", "sites: Input should be a valid dictionary"),
    ],
)
def test_a_mistake_is_reported_with_its_place(file: Path, setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        Experiment.load(file, [setting])


def test_a_site_that_stands_twice_is_not_lost(file: Path) -> None:
    file.write_text(FILE.replace("  south:", "  north:"))
    with pytest.raises(ConfigError, match="key 'north' stands twice in the mapping of line 4; the first would be lost"):
        Experiment.load(file)


def test_drawn_groups_take_part_next_to_sites(file: Path) -> None:
    model = "{dim: 8, encoders: {table: projection}}"
    group = f"clients.others={{count: 2, source: north, task: classification, model: {model}}}"
    assert list(Experiment.load(file, [group]).clients) == ["others", "north", "south", "west"]
