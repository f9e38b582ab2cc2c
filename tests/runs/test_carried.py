"""More rounds of a run, and runs that start from the models of another."""

from __future__ import annotations

import json
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

import polyfed
from misbehaving import Stopping, contents
from polyfed.core.errors import ConfigError
from polyfed.runs.carried import lengthened
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder import RunFolder
from polyfed.runs.opened import Run
from run_folders import redigested
from small_federations import Config

COSINE = {"schedule": {"kind": "cosine"}}
DROPS = {"schedule": {"kind": "steps", "milestones": [0.5]}}
NOISE = {"privacy": {"reply": {"representations": 1.0, "noise_multiplier": 1.0}}}


def test_more_rounds_end_in_the_bits_of_a_run_that_had_them_from_the_start(
    config: Config, undisturbed: Path, complete: dict[str, bytes], tmp_path: Path
) -> None:
    config["run"]["rounds"] = 1
    folder = polyfed.run(Experiment.parse(config), tmp_path / "a", quiet=True).folder
    with pytest.raises(KeyboardInterrupt):
        polyfed.resume(folder, [Stopping(2)], rounds=3, quiet=True)
    resumed = polyfed.resume(folder, quiet=True)
    assert resumed.experiment.run.rounds == 3
    assert contents(resumed) == complete
    assert (folder / "config.yaml").read_bytes() == (undisturbed / "config.yaml").read_bytes()


@pytest.mark.parametrize("last", range(3))
def test_a_kill_amid_a_change_leaves_a_valid_file(finished: Path, monkeypatch: pytest.MonkeyPatch, last: int) -> None:
    write, left = RunFolder.write, iter([True] * last)

    def killed(folder: RunFolder, name: str, text: str) -> None:
        if not next(left, False):
            raise KeyboardInterrupt
        write(folder, name, text)

    changed = (finished / "config.yaml").read_text().replace("rounds: 3", "rounds: 4")
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            RunFolder(finished).change_config(changed)
    assert polyfed.open_run(finished).experiment.run.rounds == (3 if last < 2 else 4)
    RunFolder(finished).change_config(changed)
    assert polyfed.open_run(finished).experiment.run.rounds == 4
    assert set(json.loads((finished / "run.json").read_text())) == {"run", "salt", "config"}


@pytest.mark.parametrize(
    ("section", "own", "message"),
    [
        ((), {}, "rounds: 3, but '.*' has 3 complete rounds; give more than 3"),
        (("clients", "image", "training"), COSINE, "clients.image.training.schedule: 'cosine' spreads over 3 "),
        (("server", "training"), DROPS, "but server.training.schedule: 'steps' spreads over 3 "),
        ((), {"aggregation": {"secure": "pairwise_masks"}}, "the keys of masks are made for 3"),
        ((), NOISE, "noise and budget are planned for 3"),
        (("run",), {"engine": {"name": "flower", "superlink": "host:1", "sites": ["a"]}}, "the sites have agreed"),
    ],
)
def test_rounds_a_run_cannot_have(finished: Path, section: tuple[str, ...], own: dict[str, Any], message: str) -> None:
    content = yaml.safe_load((finished / "config.yaml").read_text())
    reduce(lambda place, key: place[key], section, content).update(own)
    (finished / "config.yaml").write_text(yaml.safe_dump(content))
    before = (redigested(finished) / "config.yaml").read_text()
    with pytest.raises(ConfigError, match=message):
        polyfed.resume(finished, rounds=4 if own else 3, quiet=True)
    assert (finished / "config.yaml").read_text() == before


def test_a_last_round_that_was_evaluated_alone_is_reported(finished: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = finished / "config.yaml"
    config.write_text(config.read_text().replace("eval_every: 1", "eval_every: 2"))
    assert lengthened(polyfed.open_run(redigested(finished)), 4)[0].run.rounds == 4
    assert "run.eval_every is 2: round 3 was evaluated as the last one" in caplog.text


# ---- from the models of another run


def started(config: Config, origin: Path, out: Path, **changes: Any) -> Run:
    """One round from the models of another run, with other settings."""
    content = config | {"run": config["run"] | {"rounds": 1}, "initial": {"run": str(origin)}} | changes
    return polyfed.run(Experiment.parse(content), out, quiet=True)


def figure(folder: Path, number: int) -> float:
    """The server's mean of recalls at 10 after a round."""
    records = polyfed.open_run(folder).records
    return sum(records.series("server", f"{way}_r@10")[number] for way in ("image_to_text", "text_to_image"))


def test_a_run_starts_from_server_and_clients_of_another(config: Config, undisturbed: Path, tmp_path: Path) -> None:
    run = started(config, undisturbed, tmp_path / "a", name="other")
    assert figure(run.folder, 0) == figure(undisturbed, 3) != figure(undisturbed, 0)
    assert "initial" not in (undisturbed / "config.yaml").read_text()
    for state in sorted(undisturbed.glob("checkpoints/clients/*")):
        kept = load_file(max(state.glob("*.safetensors")))
        begun = load_file(run.folder / "checkpoints" / "clients" / state.name / "000000-00.safetensors")
        assert begun.keys() == {name for name in kept if name.startswith("model/")}
        assert all(bool((value == kept[name]).all()) for name, value in begun.items())
    assert yaml.safe_load((run.folder / "config.yaml").read_text())["initial"]["round"] == 3
    own = "".join(f", the model of '{client}'" for client in ("paired-0", "paired-1", "image"))
    (event,) = run.records.events
    assert event.reason == f"the server's model{own}, after round 3 of 'run'"
    again = polyfed.run(Experiment.load(run.folder / "config.yaml"), tmp_path / "b", quiet=True)
    assert contents(again) == contents(run)
    for path in (again.folder / "checkpoints").glob("round-*"):  # as if it was killed before the first
        path.unlink()
    assert contents(polyfed.resume(again.folder, quiet=True)) == contents(run)


@pytest.mark.parametrize("method", ["fedavg", "local"])
def test_global_models_start_global_models_or_clients(
    tiny: Config, tiny_run: Path, tmp_path: Path, method: str
) -> None:
    run = started(tiny, tiny_run, tmp_path / "a", algorithm={"name": method, "local_epochs": 1})
    assert method == "local" or figure(run.folder, 0) == figure(tiny_run, polyfed.open_run(tiny_run).records.rounds)
    for name in ("paired", "image"):
        assert f"the global model of '{name}'" in run.records.events[0].reason


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"initial": {"run": "nowhere"}}, "'.*nowhere' is not a run folder"),
        ({"initial": {"run": "RUN", "round": 1}}, "no checkpoint of round 1; it has: round 3, round 2"),
        ({"algorithm": "fedavg"}, "the model of 'image', and this method starts from others"),
        ({"public": {"source": "scenes", "items": 12}}, "its public set has other words"),
        ({"clients.image.count": 2}, "it has no client 'image-0'; did you mean 'image'"),
        ({"clients.image.model.encoders.image.widths": [4, 8]}, r"the model of 'image' differs, first at 'enc.*\[4, 3"),
        (NOISE, "privacy does not go with initial"),
    ],
)
def test_models_that_a_run_cannot_start_from(
    config: Config, undisturbed: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    content = {**config, "initial": {"run": str(undisturbed)}}
    overrides = [f"{key}={json.dumps(value).replace('RUN', str(undisturbed))}" for key, value in changes.items()]
    with pytest.raises(polyfed.PolyfedError, match=message):
        polyfed.run(Experiment.load(content, overrides), tmp_path / "a", quiet=True)
    assert not (tmp_path / "a").exists()
