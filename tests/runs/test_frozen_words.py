"""Frozen word embeddings in runs: they neither cross nor are kept, are made again, and saved models have them."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

import polyfed
from misbehaving import Stops, interrupted
from polyfed.core.errors import ConfigError, RunError
from polyfed.export.model import export_model
from polyfed.federation.server import Server
from polyfed.federation.types import GlobalModels
from polyfed.models.frozen import frozen_tensors
from polyfed.runs.experiment import Experiment
from polyfed.runs.opened import open_run
from polyfed.runs.saved import read_model
from polyfed.wire.payload import Payload, Weights
from sessions import prepared, request
from small_federations import Config, bag, participants, three_kinds, tiny_experiment, words

TABLE = "encoders.text.embedding.weight"


def with_frozen_words(config: Config) -> Config:
    config = copy.deepcopy(config)
    for participant in participants(config):
        if "text" in participant["model"]["encoders"]:
            participant["model"]["encoders"]["text"] = bag(words(16, 300)) | {"freeze_embedding": True}
    return config


@pytest.fixture(scope="module")
def averaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rounds of FedAvg."""
    folder = tmp_path_factory.mktemp("frozen") / "averaged"
    polyfed.run(Experiment.parse(with_frozen_words(tiny_experiment())), folder, quiet=True)
    return folder


def stored(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for path in folder.rglob("*.safetensors"):
        where = path.relative_to(folder)
        yield from ((f"{where} {name}", value) for name, value in safetensors.torch.load_file(path).items())


def test_what_crosses_is_what_is_trained_to_the_byte(averaged: Path) -> None:
    run = open_run(averaged)
    model = run.federation.client_model(run.federation.members["paired-0"])
    table, trained = model.encoders["text"].embedding.weight, model.state_dict()
    assert table.shape == (300, 8)
    assert not [name for name, _ in stored(averaged / "checkpoints") if "embedding" in name]
    records = [json.loads(line) for line in (averaged / "ledger.jsonl").read_text().splitlines()]
    lines = [line for line in records if (line["client"], line["kind"]) == ("paired-0", "weights")]
    assert {(line["direction"], line["step"]) for line in lines} >= {("down", "fit"), ("up", "fit")}
    assert {line["bytes"] for line in lines} == {sum(value.nbytes for value in trained.values())}
    # one table for everybody, in a federation that was opened anew as in the run
    other = run.federation.client_model(run.federation.members["paired-1"])
    assert other.encoders["text"].embedding.weight.data_ptr() == table.data_ptr()
    assert run.federation.server_model().encoders["text"].embedding.weight.data_ptr() == table.data_ptr()
    assert torch.equal(run.server_model("last").model.encoders["text"].embedding.weight, table)


def test_a_saved_model_has_its_own_frozen_words(averaged: Path, tmp_path: Path) -> None:
    alone = shutil.copytree(averaged / "models" / "last", tmp_path / "alone")
    assert TABLE not in safetensors.torch.load_file(alone / "model.safetensors")
    other = torch.arange(2400.0).reshape(300, 8)  # not what the settings and this seed give
    safetensors.torch.save_file({TABLE: other}, alone / "frozen.safetensors")
    run = open_run(averaged)
    read = partial(read_model, alone, run.conditions.data, run.place, allow_code=False)
    assert torch.equal(frozen_tensors(read().model)[TABLE], other)
    safetensors.torch.save_file({TABLE: other[1:].clone()}, alone / "frozen.safetensors")
    with pytest.raises(RunError, match=r"do not fit each other \(frozen 'weight' is \[300, 8\].*\[299, 8\]"):
        read()
    (alone / "frozen.safetensors").unlink()
    with pytest.raises(RunError, match=r"do not fit each other \(frozen 'weight'"):
        read()


@pytest.mark.slow
def test_an_export_is_whole(averaged: Path, tmp_path: Path) -> None:
    out = export_model(averaged, tmp_path / "out")
    weights = safetensors.torch.load_file(out / "model.safetensors")
    model = open_run(averaged).server_model().model
    assert weights.keys() == {*model.state_dict(), TABLE}
    program, texts = torch.export.load(out / "text.pt2").module(), torch.randint(300, (5, 16))
    assert torch.allclose(program(texts), model.represent("text", texts), atol=1e-5)


def test_weights_with_a_frozen_table_are_refused(tmp_path: Path) -> None:
    session = prepared(with_frozen_words(tiny_experiment()), tmp_path)
    foreign = dict(session.server.weights_for(session.server.clients[0])) | {TABLE: torch.zeros(300, 8)}
    (answer,) = session.engine.exchange([request("paired-0", Payload({"weights": Weights(foreign)}))], None)
    assert re.search(rf'Unexpected key.*"{TABLE}"', str(answer.failure), re.DOTALL)


def test_other_words_are_not_averaged_and_not_the_server_s(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = prepared(with_frozen_words(tiny_experiment()), tmp_path).server

    def elsewhere(*ids: str) -> Server:
        """The server as it is where these clients have other words."""
        types = {client.id: re.sub("300x[0-9a-f]{8}", "300x00000000", client.architecture) for client in server.clients}
        clients = [replace(one, architecture=types[one.id]) if one.id in ids else one for one in server.clients]
        known = {
            new.architecture: server.global_models.blueprints[old.architecture]
            for new, old in zip(clients, server.clients, strict=True)
        }
        return replace(server, global_models=GlobalModels(tuple(clients), lambda: known))

    assert elsewhere().own_type == "paired"
    one_differs = elsewhere("paired-1")
    one_differs.share_weights()
    assert one_differs.own_type == "paired-0"  # the first of two types of the group
    members = [[client.id for client in which.clients] for which in one_differs.types.values()]
    assert members == [["paired-0"], ["paired-1"], ["image"]]
    assert "clients of types 'paired-0' and 'paired-1'" in caplog.text
    absent = "'encoders.text.embedding' of the server is not in clients of type 'paired'"
    with pytest.raises(ConfigError, match=re.escape(absent)):
        _ = elsewhere("paired-0", "paired-1").own_type


def test_a_stopped_run_goes_on_with_the_same_words_and_keeps_none(tmp_path: Path) -> None:
    config = with_frozen_words(three_kinds(name="creamfl", local_epochs=1))
    marker = tmp_path / "marker"
    interrupted(copy.deepcopy(config), tmp_path / "stopped", marker)
    polyfed.resume(tmp_path / "stopped", quiet=True)
    config["algorithm"] |= {"name": f"{Stops.__module__}.Stops", "marker": str(marker)}
    polyfed.run(Experiment.parse(config), tmp_path / "whole", quiet=True)
    stopped, complete = dict(stored(tmp_path / "stopped")), dict(stored(tmp_path / "whole"))
    assert stopped.keys() == complete.keys()
    assert all(torch.equal(stopped[name], value) for name, value in complete.items())
    kept = dict(stored(tmp_path / "whole" / "checkpoints"))
    assert any("encoders.text.project" in name for name in kept)
    assert not [name for name in kept if "embedding" in name]
