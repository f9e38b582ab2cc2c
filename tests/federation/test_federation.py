"""Federations from their settings: who holds what, and what must not overlap."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from polyfed.errors import ConfigError, DataError
from polyfed.experiment import Experiment
from polyfed.federation.federation import Federation

Config = dict[str, Any]


def federation_of(config: Config, seed: int = 0) -> Federation:
    cfg = Experiment.parse(config)
    return Federation(cfg.data, cfg.public, cfg.server, cfg.clients, seed)


def test_public_and_private_items_are_disjoint_and_complete(tiny: Config) -> None:
    federation = federation_of(tiny)
    federation.require_sound()
    held = [member.items for member in federation.members.values() if member.group == "paired"]
    everything = torch.cat([*held, federation.public_items])
    assert sorted(everything.tolist()) == list(range(48))
    assert len(federation.public_items) == 16


def test_a_seed_decides_who_holds_what(tiny: Config) -> None:
    first, again, other = (federation_of(tiny, seed) for seed in (0, 0, 1))
    assert torch.equal(first.public_items, again.public_items)
    assert not torch.equal(first.public_items, other.public_items)
    assert all(torch.equal(member.items, again.members[name].items) for name, member in first.members.items())


def test_the_public_set_has_the_same_rows_for_every_party(tiny: Config) -> None:
    federation = federation_of(tiny)
    both = tiny["server"]["model"]["encoders"]
    views = {name: encoder.view for name, encoder in Experiment.parse(tiny).server.model.encoders.items()}
    assert set(views) == set(both)
    whole = federation.public_samples(views)
    images = federation.public_samples({"image": views["image"]})
    assert len(whole) == len(images) == 16 * 5
    assert torch.equal(whole.items, images.items)
    assert images.modalities == ("image",)


def test_a_few_samples_an_item(tiny: Config) -> None:
    tiny["public"]["per_item"] = 2
    federation = federation_of(tiny)
    samples = federation.public_samples({})
    assert torch.equal(torch.bincount(samples.items)[federation.public_items], torch.full((16,), 2))
    order = federation.public_order
    tiny["public"]["per_item"] = 3
    assert federation_of(tiny).public_order != order


def test_the_server_sees_only_what_a_client_info_says(tiny: Config) -> None:
    infos = federation_of(tiny).infos
    assert [info.id for info in infos] == ["paired-0", "paired-1", "image"]
    assert infos[2].modalities == ("image",)
    assert infos[0].samples == 5 * 16
    assert infos[0].architecture == infos[1].architecture != infos[2].architecture


def test_a_group_of_one_gives_its_client_its_name(tiny: Config) -> None:
    tiny["clients"]["image"]["count"] = 11
    names = [info.id for info in federation_of(tiny).infos if info.group == "image"]
    assert names == [f"image-{k:02d}" for k in range(11)]
    tiny["clients"]["image"]["count"] = 1
    assert [info.id for info in federation_of(tiny).infos if info.group == "image"] == ["image"]


def test_two_clients_of_one_name_are_refused(tiny: Config) -> None:
    tiny["clients"]["paired-1"] = tiny["clients"]["image"]
    with pytest.raises(ConfigError, match=r"two clients are called 'paired-1'; rename one of the groups"):
        federation_of(tiny).require_sound()


def test_models_of_a_group_take_turns(tiny: Config) -> None:
    wider = {
        "dim": 8,
        "encoders": {"image": {"name": "vit", "size": "nano", "view": {"name": "pixels", "size": 16}}},
    }
    image = tiny["clients"]["image"]
    image |= {"count": 3, "models": [image.pop("model"), wider]}
    architectures = [info.architecture for info in federation_of(tiny).infos if info.group == "image"]
    assert architectures[0] == architectures[2] != architectures[1]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda c: c["public"].update(split="test", items=8), DataError, "shares 8 items with 'scenes' test"),
        (lambda c: c["public"].update(items=99), ConfigError, "public.items is 99, but 'scenes' has 48"),
        (lambda c: c["public"].update(source="scnes"), ConfigError, "did you mean 'scenes'"),
        (lambda c: c["clients"]["image"].update(count=25), ConfigError, "there are 24 samples"),
        (lambda c: c["clients"]["image"].update(items=25), ConfigError, "items is 25"),
        (lambda c: c["clients"]["image"]["model"].update(dim=9), ConfigError, "model.dim must be equal"),
    ],
)
def test_what_does_not_fit_is_refused(tiny: Config, change: Any, error: type[Exception], message: str) -> None:
    tiny["clients"]["image"]["model"] = dict(tiny["clients"]["image"]["model"])
    change(tiny)
    with pytest.raises(error, match=message):
        federation_of(tiny).require_sound()


def test_a_matched_test_has_the_classes_of_the_training_data(tiny: Config) -> None:
    tiny["data"]["sources"]["private"] |= {"train": 60, "test": 60}
    tiny["clients"]["image"] |= {
        "count": 2, "test": "matched", "partition": {"name": "shards", "order": "label", "per_client": 1},
    }  # fmt: skip
    federation = federation_of(tiny)
    for member in (member for member in federation.members.values() if member.group == "image"):
        own = set(federation.train(member).targets["label"].tolist())
        found = federation.test(member)
        assert found is not None
        assert set(found.targets["label"].tolist()) <= own


def test_test_items_bounds_the_test(tiny: Config) -> None:
    tiny["clients"]["image"]["test_items"] = 5
    federation = federation_of(tiny)
    assert len(federation.test(federation.members["image"])) == 5


def test_initial_weights_depend_on_seed_and_client_alone(tiny: Config, tmp_path: Path) -> None:
    first, second = federation_of(tiny), federation_of(tiny)
    torch.manual_seed(99)
    a = first.client_model(first.members["paired-1"]).state_dict()
    b = second.client_model(second.members["paired-1"]).state_dict()
    c = second.client_model(second.members["paired-0"]).state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert any(not torch.equal(a[name], c[name]) for name in a)
