"""The common model of a run without a server: that of all clients of a type, saved after each round."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import polyfed
from misbehaving import contents, cut_short
from polyfed import Experiment, load_model, open_run
from polyfed.core.errors import RunError
from polyfed.export.model import export_model
from polyfed.runs.config_files import parsed
from small_federations import Config

FILE = """
sites: {north: {data: {where: {hospital: north}}}, south: {data: {where: {hospital: south}}}}
common:
  data: {name: folder, columns: {table: [age]}, targets: {label: state}, fractions: {test: 0.2}}
  task: classification
  model: {dim: 8, encoders: {table: {name: projection, view: {name: table, cells: {age: {mean: 50, std: 12}}}}}}
  training: {batch_size: 8}
algorithm: {name: moon, projection: 4, local_epochs: 1}
run: {rounds: 2, threads: 1, device: cpu, output: {plots: false, keep_rounds: [1]}}
"""


@pytest.fixture
def sites(tmp_path: Path) -> Config:
    """Two hospitals in one table, two rounds."""
    rows = [f"{('north', 'south')[k % 2]},{30 + 7 * k % 40},{('ill', 'well')[k % 3 // 2]}" for k in range(60)]
    (tmp_path / "patients.csv").write_text("\n".join(["hospital,age,state", *rows]))
    config = parsed(FILE)
    config["common"]["data"]["path"] = str(tmp_path / "patients.csv")
    return config


def test_sites_without_a_server_hand_on_the_model_that_they_trained(sites: Config, tmp_path: Path) -> None:
    """Its figures at each site are those of the run; what the method adds to it for training stays behind."""
    run = polyfed.run(Experiment.parse(sites), tmp_path / "run", quiet=True)
    for site in ("north", "south"):
        found = polyfed.evaluate_model(run, site)
        assert (found.model, found.round, found.metrics) == ("last", 2, pytest.approx(run.metrics(site)))
    assert contents(polyfed.resume(cut_short(sites, tmp_path / "cut"), quiet=True)) == contents(run)
    (tmp_path / "patients.csv").unlink()  # from here on the folder is enough
    opened, ages = open_run(run.folder), [{"age": 31}, {"age": 66}]
    assert opened.model.name == "common model of run, round 2"
    assert opened.model.classify(table=ages).names == ("ill", "well")
    assert opened.server_model("1").round == 1
    exported = load_model(export_model(opened, tmp_path / "export"), allow_code=True)
    vectors = [torch.from_numpy(each.encode_modality("table", ages)) for each in (exported, opened.model)]
    torch.testing.assert_close(*vectors, rtol=0, atol=1e-5)


def test_several_types_of_sites_have_a_model_each_which_is_to_be_named(sites: Config, tmp_path: Path) -> None:
    sites["sites"]["south"]["type"] = "own"
    run = polyfed.run(Experiment.parse(sites), tmp_path / "run", quiet=True)
    with pytest.raises(
        RunError, match=r"each type of clients: last-north \(round 2\), last-south .* \(--model last-north\)"
    ):
        _ = run.model
    for site in ("north", "south"):
        metrics = polyfed.evaluate_model(run, site, which=f"last-{site}").metrics
        assert metrics == pytest.approx(run.metrics(site))


def test_a_run_that_knows_no_common_model_says_why(sites: Config, tmp_path: Path) -> None:
    sites["algorithm"] = {"name": "local"}
    run = polyfed.run(Experiment.parse(sites), tmp_path / "run", quiet=True)
    with pytest.raises(RunError, match=r"averages no weights .*model_of\('north'\)"):
        _ = run.model
