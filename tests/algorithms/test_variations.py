"""Options of methods together, as papers and released code have them: two rounds end in the same bits on a wire."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from by_hand import copies, outcome, play
from fedafd_sessions import RELEASED
from polyfed.engines.local import LocalEngine
from polyfed.wire.ledger import Ledger
from sessions import prepared, round_records, site_of
from small_federations import Config, federation_for

pytestmark = pytest.mark.slow

BFLOAT16 = {"precision": "bfloat16"}
HALF = BFLOAT16 | {"exchange": {"transport": {"dtype": "float16"}}}
ACROSS_TYPES = {"name": "by_slot", "layers": "blocks", "range": "modality", "server_optimizer": "momentum"}


def averaged(name: str, **settings: Any) -> Config:
    return {"averaging": {"name": name, **settings}}


VARIATIONS: dict[str, tuple[Config, Config]] = {
    "creamfl released": (
        {"task": {"order": "first"}, "distiller": {"optimizer": "shared", "loss": "mse", "weight": 0.6}},
        {},
    ),
    "creamfl separate": (
        {
            "contrast": {"schedule": "separate_pass", "intra": {"previous": "on_the_fly"}},
            "public": {"extraction": "train", "augment": True},
        },
        {},
    ),
    "creamfl inter": ({"contrast": {"intra": None}, "teacher": {"weights": {"name": "gca", "include_self": True}}}, {}),
    "creamfl_averaged in bf16": ({"contrast": {"weight": 1.0}}, BFLOAT16),
    "fed_mae in bf16": (averaged("by_slot", layers="blocks", range="modality") | {"mask_ratio": 0.6}, BFLOAT16),
    "fedafd released": (RELEASED, {}),
    "fedafd maps": (
        {"fusion": {"level": "maps", "broadcast_every": 2}, "public": {"samples": 10}, "local_epochs": 2},
        {},
    ),
    "fedafd without alignment": (
        {
            "adversarial": None,
            "fusion": {"inputs": "embeddings"},
            "task": {"order": "joint"},
            "public": {"samples": 10},
        },
        {},
    ),
    "fedafd without fusion": (
        {"fusion": None, "public": {"augment": True, "extraction": "train"}, "task": {"order": "last"}},
        {},
    ),
    "fedcola frozen": ({"complement": {"train_out": False}}, BFLOAT16),
    "fedcola modules": ({"complement": {"send": "modules", "layers": "mlp"}}, {}),
    "fedcola all": (
        averaged("fedcola", layers="blocks", range="all", server_optimizer={"name": "momentum", "momentum": 0.5}),
        {},
    ),
    "fedema in bf16": (averaged("by_slot", layers="attention", range="all", server_optimizer="adam"), BFLOAT16),
    "fediot all": (averaged("fediot", range="all", server_optimizer="adagrad"), BFLOAT16),
    "fedmd sed": (
        {
            "scores": True,
            "public": {"form": "scores", "extraction": "train", "largest_score": 0.5},
            "teacher": {"weights": "sed"},
        },
        {},
    ),
    "margin_weighted scores": (
        {"scores": True, "public": {"form": "scores", "samples": 10}, "task": {"order": "joint"}},
        {},
    ),
    "moon projected": ({"projection": 4, "averaging": ACROSS_TYPES}, BFLOAT16),
}
"""Method and a word -> its settings, those of the run."""


@pytest.mark.parametrize("name", VARIATIONS)
def test_two_rounds_are_the_same_bits_with_messages_that_are_encoded(tmp_path: Path, name: str) -> None:
    settings, run = VARIATIONS[name]
    config = federation_for(name.split()[0], **settings)
    config["algorithm"] = {key: value for key, value in config["algorithm"].items() if value is not None}
    config["run"] |= run
    ended = []
    for serialize in (False, True):
        session = prepared(config, tmp_path / str(serialize))
        session.engine = LocalEngine(site_of(session), serialize=serialize)
        play(session, 1, 2)
        records = round_records(session)
        assert not [record for record in records if record["kind"] == "event"]
        assert set(session.cohorts.accepted) == {client.id for client in session.server.clients}
        values = [value for record in records for value in record["metrics"].values()]
        assert torch.isfinite(torch.tensor(values)).all()
        judged = session.experiment.algorithm.evaluate_clients(session.server, session.cohort(3, Ledger()))
        ended.append((outcome(session), judged))
    (plain, metrics), (encoded, again) = ended
    assert metrics == again
    for participant, tensors in plain.items():
        assert all(torch.equal(value, encoded[participant][key]) for key, value in tensors.items()), participant


OFF: dict[str, Config] = {
    "fedema": {"byol": None, "blending": None},
    "fedprox": {"mu": 0.0},
    "moon": {"mu": 0.0},
}


@pytest.mark.parametrize("method", OFF)
def test_without_what_it_adds_a_method_is_fedavg(tmp_path: Path, method: str) -> None:
    weights = {}
    for name, settings in ((method, OFF[method]), ("fedavg", {})):
        config = federation_for("fedavg") | {"algorithm": {"name": name, "local_epochs": 1} | settings}
        session = prepared(config, tmp_path / name)
        start = copies(session.server.weights)
        play(session, 1, 2)
        weights[name] = session.server.weights
        for kind, model in start.items():
            own = [key for key in model if key.startswith("extras.")]
            assert not own, kind
    for kind, model in weights["fedavg"].items():
        assert all(torch.equal(value, weights[method][kind][key]) for key, value in model.items()), kind
