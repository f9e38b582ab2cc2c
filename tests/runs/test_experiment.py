"""Experiments: loading, overriding, and errors that name the key."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyfed.algorithms.creamfl import CreamFL
from polyfed.algorithms.fedavg import FedAvg
from polyfed.core.errors import ConfigError
from polyfed.engines.local import InProcess
from polyfed.federation.cohort import ReplyPolicy
from polyfed.runs.config_files import merged, preset_text, presets, read_config
from polyfed.runs.experiment import Experiment
from polyfed.runs.settings import RunSettings
from polyfed.wire.limits import Limits

Config = dict[str, Any]


@pytest.mark.parametrize("name", sorted(presets()))
def test_every_preset_is_valid_and_described(name: str) -> None:
    experiment = Experiment.load(name)
    assert experiment.name == name
    assert len(experiment.description) > 20
    assert Experiment.parse(yaml.safe_load(experiment.to_yaml())) == experiment


def test_what_presets_extend_holds_data_alone_and_is_not_a_preset() -> None:
    assert read_config("bases/flickr8k").keys() == {"data", "server", "clients"}
    assert not [name for name in presets() if "/" in name]
    with pytest.raises(ConfigError, match="is required and missing"):
        Experiment.load("bases/flickr30k")
    with pytest.raises(ConfigError, match="no preset or file 'bases/flickr30'"):
        Experiment.load("bases/flickr30")


def test_overrides_reach_any_key(tiny: Config) -> None:
    overrides = ["run.rounds=7", "clients.image.partition=iid", "server.training.optimizer.lr=1e-3", "public=null"]
    experiment = Experiment.load(tiny, overrides)
    assert experiment.run.rounds == 7
    assert experiment.server.training.optimizer.lr == 0.001
    assert experiment.public is None


def test_another_component_keeps_what_both_have_and_warns_of_what_it_drops(caplog: pytest.LogCaptureFixture) -> None:
    method = {"name": "creamfl", "local_epochs": 3, "contrast": None, "distiller": {"epochs": 2}}
    source = {**read_config("creamfl-paper"), "algorithm": method}
    constant = ["server.training.schedule.kind=constant", "run.rounds=1"]  # which leaves another setting idle
    local = Experiment.load(source, [*constant, "algorithm.name=local"]).algorithm
    assert (local.component_name(), local.local_epochs) == ("local", 3)
    printed = "algorithm: 'local' does not take, and drops, of the one before: {contrast: null, distiller: {epochs: 2}}"
    assert caplog.messages[-1] == printed
    fedmd = Experiment.load(source, ["algorithm.name=fedmd", "algorithm.distiller.weight=0.5"]).algorithm
    assert (fedmd.distiller.epochs, fedmd.distiller.weight) == (2, 0.5)
    assert caplog.messages[-1].endswith("of the one before: {contrast: null}")
    with pytest.raises(ConfigError, match="algorithm: unknown key 'distiller'"):  # the override sets it itself
        Experiment.load(source, ["algorithm.name=local", "algorithm.distiller.weight=0.5"])


@pytest.mark.parametrize(
    ("override", "printed"),
    [
        ("server.model.encoders.image.name=vit", "'vit' does not take, and drops, of the one before: {depths: ["),
        ("clients.image.partition.name=iid", "'iid' does not take, and drops, of the one before: {alpha: 0.1}"),
        ("algorithm.name=local algorithm=fedavg", "settings of the component before are dropped: {contrast: {"),
        ("algorithm={name: creamfl, contrast: {}, teacher: {}, task: {}}", "are dropped: {local_epochs: 1}; '--s"),
    ],
)
def test_no_component_loses_settings_in_silence(override: str, printed: str, caplog: pytest.LogCaptureFixture) -> None:
    Experiment.load("creamfl-flickr8k", re.split(r" (?=algorithm=)", override))
    (line,) = caplog.messages
    assert line.startswith(override.partition("=")[0].removesuffix(".name") + ": ")
    assert printed in line


def test_a_file_extends_a_preset(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(
        "extends: creamfl-flickr8k\nname: own\nalgorithm: {name: creamfl, contrast: {weight: 0.25}}\nrun: {rounds: 2}\n"
    )
    experiment = Experiment.load(path)
    assert (experiment.name, experiment.run.rounds, experiment.algorithm.contrast.weight) == ("own", 2, 0.25)
    assert experiment.algorithm.contrast.inter == Experiment.load("creamfl-flickr8k").algorithm.contrast.inter


def test_a_mapping_extends_as_a_file_does_and_an_algorithm_may_be_its_class() -> None:
    own = {"extends": "scenes-demo", "algorithm": FedAvg, "run": {"rounds": 2}}
    experiment = Experiment.load(own)
    assert (experiment.algorithm, experiment.run.rounds) == (FedAvg(), 2)
    assert experiment.server == Experiment.load("scenes-demo").server
    assert own["extends"] == "scenes-demo", "what was given is left as it was"
    assert Experiment.load(yaml.safe_load(preset_text("scenes-demo"))) == Experiment.load("scenes-demo")


def test_a_notebook_shows_an_experiment_in_ten_lines_and_a_fault_in_one() -> None:
    lines = repr(Experiment.load("fedaid-scenes")).splitlines()
    assert len(lines) <= 10
    assert lines[0] == "Experiment 'fedaid-scenes': fedaid, 6 rounds, seed 0"
    assert ConfigError("rounds: 0")._render_traceback_() == ["ConfigError: rounds: 0"]


def test_what_an_override_leaves_idle_goes_back_to_its_default_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    constant = "server.training.schedule.kind=constant"
    assert Experiment.load("creamfl-paper", [constant, "run.rounds=1"]).server.training.schedule.t_max is None
    reported = "server.training.schedule.t_max: 30 has no effect with kind: constant; left at its default, null"
    assert reported in caplog.messages
    with pytest.raises(ConfigError, match="t_max has no effect with kind: constant; it is 3"):
        Experiment.load("creamfl-paper", [constant, "server.training.schedule.t_max=3"])


def test_a_section_is_switched_off_and_on_again_as_a_whole() -> None:
    assert Experiment.load("creamfl-flickr8k", ["algorithm.contrast.inter=null"]).algorithm.contrast.inter is None
    again = Experiment.load("creamfl-flickr8k", ["algorithm.contrast=null", "algorithm.contrast.inter.tau=0.3"])
    assert (again.algorithm.contrast.inter.tau, again.algorithm.contrast.batch_size) == (0.3, 128)


def test_a_file_must_give_what_it_sets_itself_an_effect_and_may_switch_off_what_it_extends(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("extends: creamfl-paper\nserver: {training: {schedule: {kind: constant}}}\n")
    assert Experiment.load(path).server.training.schedule.t_max is None
    path.write_text("extends: creamfl-paper\nserver: {training: {schedule: {kind: constant, t_max: 3}}}\n")
    with pytest.raises(ConfigError, match="t_max has no effect with kind: constant"):
        Experiment.load(path)


def test_settings_of_every_group_go_back_to_their_defaults() -> None:
    experiment = Experiment.load("fedcola-paper", ["algorithm.local_steps=20"])
    assert {group.training.schedule.unit for group in experiment.clients.values()} == {"round"}


def test_merging_keeps_settings_of_the_same_component_only() -> None:
    base = {"a": {"name": "x", "k": 1}, "b": {"c": 1, "d": 2}}
    assert merged(base, {"a": {"name": "y"}, "b": {"c": 3}}) == {"a": {"name": "y"}, "b": {"c": 3, "d": 2}}
    assert merged(base, {"a": {"k": 2}})["a"] == {"name": "x", "k": 2}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.ronds=3", "run: unknown key 'ronds'; did you mean 'rounds'"),
        ("run.rounds=0", "run.rounds: Input should be greater than or equal to 1 (got 0)"),
        ("algorithm.contrast.weight=-1", "algorithm.contrast.weight: Input should be greater than 0 (got -1)"),
        ("data.sources.flickr8k.name=parket", "did you mean 'parquet'"),
        ("run.rounds", "--set run.rounds: needs the form KEY=VALUE"),
        ("run.rounds.x=3", "'x' is below a value"),
        ("run.engine={name: local, serialise: true}", "unknown key 'serialise'; did you mean 'serialize'"),
        ("run.exchange.phases.fit.min_client=2", "phases.fit: unknown key 'min_client'; did you mean 'min_clients'"),
    ],
)
def test_what_is_wrong_is_named_with_its_key_value_and_remedy(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Experiment.load("creamfl-flickr8k", [override])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_engine_is_chosen_by_name(tiny: Config) -> None:
    assert Experiment.load(tiny).run.engine == InProcess(serialize=False)
    assert Experiment.load(tiny, ["run.engine=local"]).run.engine == InProcess(serialize=False)
    chosen = Experiment.load(tiny, ["run.engine={name: local, serialize: true}"])
    assert chosen.run.engine == InProcess(serialize=True)
    assert Experiment.parse(yaml.safe_load(chosen.to_yaml())) == chosen


def test_phases_and_limits_survive_the_resolved_configuration(tiny: Config) -> None:
    asked = {"min_clients": 0.5, "phases": {"fit": {"deadline": 60.0}}, "limits": {"row_norm": 5.0}}
    tiny["run"] |= {"exchange": asked}
    experiment = Experiment.parse(tiny)
    again = Experiment.parse(yaml.safe_load(experiment.to_yaml()))
    assert again == experiment
    assert again.run.exchange.reply_policy("fit") == ReplyPolicy(0.5, 60.0)
    assert again.run.exchange.limits == Limits(row_norm=5.0)


def test_what_a_place_needs_is_taken_from_the_experiment(tiny: Config) -> None:
    experiment = Experiment.load(tiny, ["run.threads=3", "run.evaluation_batch=7", "run.state_memory=9"])
    site = experiment.site()
    assert (site.data, site.public, site.clients) == (experiment.data, experiment.public, experiment.clients)
    assert (site.run.device, site.run.threads, site.run.evaluation_batch, site.run.state_memory) == ("cpu", 3, 7, 9)


def test_unknown_presets_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'scenes-demo'"):
        Experiment.load("scene-demo")
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [1, 2")
    with pytest.raises(ConfigError, match="is not YAML"):
        Experiment.load(broken)
    broken.write_text("- 1")
    with pytest.raises(ConfigError, match="must be a mapping"):
        Experiment.load(broken)


@pytest.mark.parametrize(
    "wrong",
    [
        {"algorithm": {"name": "fedavg", "local_epoch": 1}},
        {"rnu": {}},
        {"run": {"engine": {"name": "ray", "workers": 0}}},
        {"server": {"source": "private"}},
    ],
)
def test_in_python_a_fault_reads_as_in_a_file(tiny: Config, tmp_path: Path, wrong: Config) -> None:
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump(tiny | wrong))
    with pytest.raises(ConfigError) as in_file:
        Experiment.load(tmp_path / "wrong.yaml")
    with pytest.raises(ConfigError) as in_python:
        Experiment(**(tiny | wrong))
    assert str(in_python.value) == str(in_file.value)


def test_sections_and_methods_built_in_python_name_their_key() -> None:
    with pytest.raises(ConfigError, match=r"^rounds: .*greater than or equal to 1 \(got 0\)$"):
        RunSettings(rounds=0)
    with pytest.raises(ConfigError, match=r"^config: unknown key 'tau'; "):
        CreamFL(tau=3)  # type: ignore[call-arg]
