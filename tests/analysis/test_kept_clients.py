from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

from polyfed.analysis.kept_clients import KeptClients, one_of_each_item, represented
from polyfed.core.errors import ConfigError, DataError, RunError


def test_models_are_those_that_clients_kept(fedafd_run: Path) -> None:
    opened = KeptClients.of(fedafd_run)
    assert opened.labels == {"paired-0": (1, 0), "paired-1": (1, 0), "image": (1, 0)}
    for client in opened.labels:
        (path,) = (fedafd_run / "checkpoints" / "clients" / client).glob("*.safetensors")
        kept = {
            name.removeprefix("model/"): value
            for name, value in safetensors.torch.load_file(path).items()
            if name.startswith("model/")
        }
        model = opened.model(client)
        assert not model.training
        assert kept.keys() == model.state_dict().keys()
        assert all(torch.equal(kept[name], value) for name, value in model.state_dict().items())


def test_representations_are_in_the_order_that_is_asked_for(fedafd_run: Path) -> None:
    opened = KeptClients.of(fedafd_run)
    member = opened.federation.members["paired-1"]
    public = opened.federation.public_samples({name: each.view for name, each in member.model.encoders.items()})
    assert public is not None
    model, index = opened.model("paired-1"), torch.tensor([7, 3, 12])
    found = represented(model, "text", public, index, 2, "client")
    whole = model.represent("text", public.batch(torch.arange(20)).inputs["text"])
    torch.testing.assert_close(found, whole[index])
    model.encoders["text"].register_forward_hook(lambda *_: torch.full((1, 8), torch.nan))
    with pytest.raises(DataError, match="representations of 'text' by client hold NaN or infinity"):
        represented(model, "text", public, index, 9, "client")


def test_one_sample_of_each_item() -> None:
    assert one_of_each_item(torch.tensor([5, 5, 2, 9, 2, 5, 9])).tolist() == [0, 2, 3]


def test_runs_without_kept_models(tiny_run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"clients of 'fedavg' keep no model in .*such as creamfl, fedafd or local"):
        KeptClients.of(tiny_run)
    with pytest.raises(RunError, match="is no run folder"):
        KeptClients.of(tmp_path)


def test_a_client_or_a_state_that_is_not_there(fedafd_run: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(fedafd_run, tmp_path / "copy"))
    opened = KeptClients.of(folder)
    with pytest.raises(ConfigError, match=r"no client 'imag' took part in .*did you mean 'image'"):
        opened.model("imag")
    shutil.rmtree(folder / "checkpoints" / "clients" / "image")
    with pytest.raises(RunError, match="state of client 'image' after round 1, phase 0 is not here"):
        opened.model("image")
    with pytest.raises(RunError, match="does not fit its model"):
        opened.model("paired-0", {"model": {"weight": torch.zeros(1)}})
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(RunError, match="has taken part in a complete round yet"):
        KeptClients.of(folder)
