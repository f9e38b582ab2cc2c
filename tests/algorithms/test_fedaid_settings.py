"""FedAID: settings and federations that are refused, and other methods on aligned models."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from aligned_sessions import CLIENTS, Values, events

from by_hand import copies, play
from grids import mostly_slow
from polyfed.algorithms.fedaid import FedAID
from polyfed.core.errors import ConfigError
from polyfed.runs.session import Session
from sessions import prepared, woken
from small_federations import Config, aligned, transformers

# ---- settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"guidance": None, "task_weight": 0}, "no loss trains"),
        ({"teacher": {"weights": {"divergence": "released", "rho": 0}}}, "use chi_square"),
        ({"teacher": {"beta": 0, "contrast": None}}, "no teacher would be learnt"),
        ({"local_epochs": 2}, "local_epochs has no effect with local_steps"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: Config, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FedAID(**settings)


# ---- other methods on aligned models

OTHERS: dict[str, Config] = {"fedavg": {}, "moon": {}, "fedema": {"byol": {"predictor_width": 8}}, "local": {}}


@pytest.mark.parametrize("name", mostly_slow(OTHERS, "fedema"))
def test_other_methods_train_aligned_models(tmp_path: Path, name: str) -> None:
    config = copy.deepcopy(aligned())
    config["algorithm"] = {"name": name, "local_epochs": 1} | OTHERS[name]
    session = prepared(config, tmp_path)
    before = copies({"model": session.server.model.state_dict()})["model"]
    play(session, 1, 2)
    after = session.server.model.state_dict()
    if name == "local":
        after = woken(session, CLIENTS[0], (99, 0), after=session.cohorts.accepted[CLIENTS[0]]).model.state_dict()
    moved = {
        key.split(".")[2] for key, value in before.items() if "encoders" in key and not torch.equal(value, after[key])
    }
    assert moved == {"trunk", "aligner"}
    assert not events(session)


def test_masked_autoencoding_inside_an_aligned_model(tmp_path: Path) -> None:
    config = transformers(name="fed_mae", decoder_depth=1, decoder_width=32, decoder_heads=4)
    model = copy.deepcopy(config["clients"]["paired"]["model"])
    model |= {"final_norm": False, "aligner": {"hidden": 16}}
    model["encoders"]["image"]["patch"] = 4
    paired = config["clients"]["paired"] | {"model": model}
    config |= {"clients": {"paired": paired}, "server": config["server"] | {"model": model}}
    session = prepared(config, tmp_path)
    before = global_of(session)
    play(session, 1, 1)
    after = global_of(session)
    assert [name for name in before if "aligner" in name and not torch.equal(before[name], after[name])]
    assert any("extras.mae_image" in name for name in before)
    assert not events(session)


def global_of(session: Session) -> Values:
    return copies(session.server.weights)["paired"]
