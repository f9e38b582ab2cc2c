"""What holds for every method that exchanges weights: bytes of the ledger, repetition, resumption, absent types."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from by_hand import transformers
from misbehaving import contents, cut_short
from polyfed.reporting.reported import resume, run
from polyfed.runs.experiment import Experiment
from polyfed.runs.records import RunRecords
from sessions import prepared

Config = dict[str, Any]

METHODS: dict[str, Config] = {
    "fedavg": {},
    "fedprox": {},
    "fediot": {},
    "moon": {},
    "scaffold": {},
    "fedema": {"predictor_width": 16},
    "fed_mae": {"decoder_depth": 1, "decoder_width": 32, "decoder_heads": 4},
    "fedcola": {},
    "creamfl_averaged": {"gamma": 0.5, "public_batch_size": 8},
}
SERVERS = ("momentum", "adam", "yogi", "adagrad")


@pytest.fixture(params=METHODS)
def config(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setenv("POLYFED_CACHE", str(tmp_path / "cache"))
    return federation(request.param)


def federation(name: str) -> Config:
    config = transformers(name=name, **METHODS[name])
    if name == "creamfl_averaged":
        config["public"] = {"source": "scenes", "items": 8, "per_item": 1}
    config["run"] |= {"evaluate_clients": False}
    return config


def test_the_ledger_has_the_bytes_of_the_payloads(config: Config, tmp_path: Path) -> None:
    """Table 8 of the specification: the model both ways, and what a method adds to it."""
    found = sent(run(Experiment.parse(config), tmp_path / "run").records)
    session = prepared(config, tmp_path / "sizes")
    server, method = session.server, config["algorithm"]["name"]
    blocks = {"image": "text", "text": "image"}
    for client in server.clients:
        kind = server.type_of(client)
        model = sum(value.nbytes for value in server.weights[kind].values())
        trained = sum(value.nbytes for value in session.federation.client_model(_member(session, client)).parameters())
        more = {"down": [0, 0], "up": [0, 0]}  # in rounds 1 and 2
        if method == "scaffold":
            more = {"down": [0, trained], "up": [trained, trained]}
        if method == "fedcola" and kind in blocks:
            matrices = [v.nbytes for n, v in server.weights[blocks[kind]].items() if ".blocks." in n and v.ndim == 2]
            more["down"] = [sum(matrices)] * 2
        for direction, extra in more.items():
            weights = [found[client.id, number, direction, "weights"] for number in (1, 2)]
            assert weights == [model + part for part in extra], (client.id, direction)
        row = 8 * 96 * 4  # representations of one modality, [|P|, d] in fp32
        single = method == "creamfl_averaged" and len(client.modalities) == 1
        assert found[client.id, 1, "down", "representations"] == (2 * row if single else 0)
        assert found[client.id, 1, "up", "representations"] == (row if single else 0)


def _member(session: Any, client: Any) -> Any:
    return session.federation.members[client.id]


def sent(records: RunRecords) -> dict[tuple[str, int, str, str], int]:
    """(client, round, direction, kind) -> bytes of tensors; 0 if there is no such line."""
    totals: dict[tuple[str, int, str, str], int] = defaultdict(int)
    for line in records.transfers:
        totals[line.client, line.round, line.direction, line.kind] += line.bytes
    return totals


def test_twice_and_resumed_gives_the_same_bits(config: Config, tmp_path: Path) -> None:
    experiment = Experiment.parse(config)
    whole = contents(run(experiment, tmp_path / "a"))
    assert contents(run(experiment, tmp_path / "b")) == whole
    assert contents(resume(cut_short(config, tmp_path / "c"))) == whole


def test_rounds_without_a_type_of_clients(config: Config, tmp_path: Path) -> None:
    """One client of five a round, drawn from all: most types are absent from most rounds."""
    config["run"] |= {"rounds": 3, "sampling": {"kind": "uniform", "cohort": 1}}
    result = run(Experiment.parse(config), tmp_path / "run")
    assert len(result.records.seconds) == 3
    assert not result.records.events


@pytest.mark.parametrize(
    "optimizer", [name if name == "adam" else pytest.param(name, marks=pytest.mark.slow) for name in SERVERS]
)
def test_server_optimisers_go_with_any_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str) -> None:
    monkeypatch.setenv("POLYFED_CACHE", str(tmp_path / "cache"))
    config = federation("fedcola")
    config["algorithm"] |= {"averaging": {"name": "fedcola", "server_optimizer": optimizer}}
    whole = contents(run(Experiment.parse(config), tmp_path / "a"))
    assert contents(resume(cut_short(config, tmp_path / "b"))) == whole  # momenta outlast the interruption
    plain = run(Experiment.parse(federation("fedcola")), tmp_path / "c")
    assert contents(plain)["models/last/model.safetensors"] != whole["models/last/model.safetensors"]
