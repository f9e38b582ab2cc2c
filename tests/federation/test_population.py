"""Federations from their settings: who holds what, and what must not overlap."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from polyfed.core.errors import ConfigError, DataError
from polyfed.runs.experiment import Experiment
from sessions import population, prepared, woken
from small_federations import CAPTIONS, named, plain_sgd, scenes

Config = dict[str, Any]


def test_a_server_refuses_a_test_split_of_another_size_than_its_recalls_are_named_after(tiny: Config) -> None:
    tiny["server"]["expected_test_items"] = 12
    population(tiny).require_sound()
    tiny["server"]["expected_test_items"] = 60
    with pytest.raises(ConfigError) as caught:
        population(tiny).require_sound()
    assert "server.expected_test_items is 60, but 'scenes' test has 12 items" in str(caught.value)
    del tiny["public"]
    tiny["server"]["model"]["encoders"]["text"]["view"] |= {"tokenizer": {"name": "hashing", "size": 64}}
    with pytest.raises(ConfigError, match="expected_test_items"):
        population(tiny).require_sound()


def test_a_seed_decides_who_holds_what(tiny: Config) -> None:
    first, again, other = (population(tiny, seed) for seed in (0, 0, 1))
    assert torch.equal(first.public.items, again.public.items)
    assert not torch.equal(first.public.items, other.public.items)
    assert all(torch.equal(member.items, again.members[name].items) for name, member in first.members.items())


@pytest.mark.parametrize("own", ["image", "text"])
def test_an_encoder_of_class_names_adds_no_modality(own: str, tmp_path: Path) -> None:
    config = named(name="local")
    config["data"]["sources"]["shown"] = scenes(12, 6, 6, seed=3) | CAPTIONS
    config["public"] = {"source": "shown", "items": 4, "per_item": 1}
    group = config["clients"]["few"]
    if own == "text":  # names may be read by an encoder of any name
        reader = group["model"]["encoders"]["text"]
        config["data"]["sources"]["drawings"]["columns"] = {"text": "text"}
        group["model"] = group["model"] | {"encoders": {"text": reader, "names": reader}}
        group["task"] = group["task"] | {"names": group["task"]["names"] | {"modality": "names"}}
    session = prepared(plain_sgd(config, batch_size=8), tmp_path)
    server, info = session.server, session.federation.infos[-1]
    assert (info.id, info.modalities) == ("few", (own,))
    assert server.types[server.type_of(info)].modalities == (own,)
    assert server.modalities == server.public_set.modalities == ("image",)
    client = woken(session, "few")
    assert client.modalities == client.public_set.modalities == (own,)
    assert set(client.represent(client.public_set, list(client.model.modalities))) == {own}


def test_the_public_set_has_the_same_rows_for_every_party(tiny: Config) -> None:
    federation = population(tiny)
    both = tiny["server"]["model"]["encoders"]
    views = {name: encoder.view for name, encoder in Experiment.parse(tiny).server.model.encoders.items()}
    assert set(views) == set(both)
    full = federation.public_samples(views)
    images = federation.public_samples({"image": views["image"]})
    assert len(full) == len(images) == 16 * 5
    assert torch.equal(full.items, images.items)
    assert images.modalities == ("image",)


def test_a_few_samples_per_item(tiny: Config) -> None:
    tiny["public"]["per_item"] = 2
    federation = population(tiny)
    samples = federation.public_samples({})
    assert torch.equal(torch.bincount(samples.items)[federation.public.items], torch.full((16,), 2))
    order = federation.public_order
    tiny["public"]["per_item"] = 3
    assert population(tiny).public_order != order


def test_the_public_order_is_that_of_the_content(tiny: Config, tmp_path: Path) -> None:
    def order(folder: str, **changed: list[Any]) -> str:
        (tmp_path / folder).mkdir(exist_ok=True)
        columns = {"id": ["a", "b", "c"], "image": [b"1", b"2", b"3"], "text": [["x"], ["y"], ["z"]]} | changed
        pq.write_table(pa.table(columns), tmp_path / folder / "train.parquet")
        source = {"name": "parquet", "path": folder, "id": "id", "columns": {"image": "image", "text": "text"}}
        data = tiny["data"] | {"dir": str(tmp_path), "sources": tiny["data"]["sources"] | {"shared": source}}
        return population(tiny | {"data": data, "public": {"source": "shared"}}).public_order

    agreed = order("server")
    assert order("site") == agreed
    assert order("poisoned", image=[b"1", b"2", b"!"]) != agreed
    assert order("reworded", text=[["x"], ["y"], ["!"]]) != agreed


def test_the_server_sees_only_the_client_info(tiny: Config) -> None:
    infos = population(tiny).infos
    assert [info.id for info in infos] == ["paired-0", "paired-1", "image"]
    assert infos[2].modalities == ("image",)
    assert infos[0].samples == 5 * 16
    assert infos[0].architecture == infos[1].architecture != infos[2].architecture


def test_a_group_of_one_gives_its_client_its_name(tiny: Config) -> None:
    tiny["clients"]["image"]["count"] = 11
    names = [info.id for info in population(tiny).infos if info.group == "image"]
    assert names == [f"image-{k:02d}" for k in range(11)]
    tiny["clients"]["image"]["count"] = 1
    assert [info.id for info in population(tiny).infos if info.group == "image"] == ["image"]


def test_models_of_a_group_take_turns(tiny: Config) -> None:
    wider = {"dim": 8, "encoders": {"image": {"name": "vit", "size": "nano", "view": {"name": "pixels", "size": 16}}}}
    image = tiny["clients"]["image"]
    image |= {"count": 3, "models": [image.pop("model"), wider]}
    architectures = [info.architecture for info in population(tiny).infos if info.group == "image"]
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
        (lambda c: c["clients"].update({"paired-1": c["clients"]["image"]}), ConfigError, "two clients are called"),
    ],
)
def test_what_does_not_fit_is_refused(tiny: Config, change: Any, error: type[Exception], message: str) -> None:
    tiny["clients"]["image"]["model"] = dict(tiny["clients"]["image"]["model"])
    change(tiny)
    with pytest.raises(error, match=message):
        population(tiny).require_sound()


def test_test_items_bounds_the_test(tiny: Config) -> None:
    tiny["clients"]["image"]["test_items"] = 5
    federation = population(tiny)
    assert len(federation.test(federation.members["image"])) == 5


def test_initial_weights_depend_on_seed_and_client_alone(tiny: Config) -> None:
    first, second = population(tiny), population(tiny)
    torch.manual_seed(99)
    a = first.client_model(first.members["paired-1"]).state_dict()
    b = second.client_model(second.members["paired-1"]).state_dict()
    c = second.client_model(second.members["paired-0"]).state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert any(not torch.equal(a[name], c[name]) for name in a)


# ---- classes made of columns, patients, dealt tests


def diseased(tiny: Config, folder: Path, **group: Any) -> Config:
    """``tiny`` with a group of reports whose class is made of two diseases, several of a patient."""
    columns = {
        "text": [f"report {k}" for k in range(90)],
        "edema": pa.array([int(k % 3 == 0) for k in range(90)], pa.int8()),
        "effusion": [k % 2 == 0 for k in range(90)],
        "patient": [None if k < 6 else f"p{k // 3}" for k in range(90)],
        "country": [("Italy", "Spain", "Malta")[k % 10 // 4] for k in range(90)],
    }
    (folder / "reports").mkdir()
    pq.write_table(pa.table(columns), folder / "reports" / "train.parquet")
    pq.write_table(pa.table(columns).slice(0, 45), folder / "reports" / "test.parquet")
    tiny["data"] |= {"dir": str(folder)}
    columns = {"columns": {"text": "text"}, "targets": {"label": "edema"}}
    tiny["data"]["sources"]["reports"] = {"name": "parquet", "path": "reports", **columns}
    text = tiny["server"]["model"]["encoders"]["text"]
    ill = {"name": "dirichlet", "alpha": 1.0, "min_size": 5, "of": ["edema", "effusion"], "together": "patient"}
    model = {"dim": 8, "encoders": {"text": text}}
    base = {"count": 4, "source": "reports", "model": model, "task": "classification", "test": "dealt"}
    tiny["clients"] = {"reports": base | {"partition": ill} | group}
    return tiny


def test_diseases_make_the_class_and_patients_stay_whole(tiny: Config, tmp_path: Path) -> None:
    federation = population(diseased(tiny, tmp_path))
    held = [member.items for member in federation.members.values()]
    assert sorted(torch.cat(held).tolist()) == list(range(90))
    assert min(len(items) for items in held) >= 5
    patients = [{int(item) // 3 for item in items if item >= 6} for items in held]
    assert sum(len(own) for own in patients) == len(set().union(*patients)) == 28
    entry = federation.holding(federation.members["reports-1"])
    own = held[1].tolist()
    assert entry["columns"]["edema"]["1"] == sum(k % 3 == 0 for k in own)
    assert entry["labels"].get("edema+effusion", 0) == sum(k % 6 == 0 for k in own)
    assert sum(entry["labels"].values()) == entry["items"] == entry["samples"] == len(own)
    assert set(entry["labels"]) <= {"none", "edema", "effusion", "edema+effusion"}


def test_a_dealt_test_is_disjoint_complete_and_like_the_training_data(tiny: Config, tmp_path: Path) -> None:
    partition = {"name": "dirichlet", "alpha": 0.3, "min_size": 2, "of": ["edema", "effusion"]}
    federation = population(diseased(tiny, tmp_path, partition=partition))
    tests = {name: federation.test(member) for name, member in federation.members.items()}
    assert sorted(torch.cat([test.items for test in tests.values()]).tolist()) == list(range(45))
    for name, member in federation.members.items():
        own = {(k % 3 == 0, k % 2 == 0) for k in member.items.tolist()}
        assert {(k % 3 == 0, k % 2 == 0) for k in tests[name].items.tolist()} <= own
        notes = federation.holding(member)["test"]
        assert notes["index"] == sorted(tests[name].items.tolist())
        assert sum(notes["labels"].values()) == notes["items"] == len(tests[name])
        assert notes["columns"]["effusion"]["1"] == sum(k % 2 == 0 for k in notes["index"])


def test_a_dealt_test_depends_on_the_seed_keeps_patients_and_obeys_test_items(tiny: Config, tmp_path: Path) -> None:
    config = diseased(tiny, tmp_path)

    def dealt(seed: int) -> list[list[int]]:
        federation = population(config, seed)
        return [federation.test(member).items.tolist() for member in federation.members.values()]

    assert dealt(0) == dealt(0) != dealt(1)
    patients = [{k // 3 for k in items if k >= 6} for items in dealt(0)]
    assert sum(len(own) for own in patients) == len(set().union(*patients)) == 13
    full = dealt(0)
    assert min(len(items) for items in full) >= 2
    config["clients"]["reports"]["test_items"] = 3
    assert all(set(few) <= set(many) and len(few) <= 3 for few, many in zip(dealt(0), full, strict=True))


def test_natural_clients_are_tested_on_their_own_country(tiny: Config, tmp_path: Path) -> None:
    federation = population(diseased(tiny, tmp_path, count=3, partition={"name": "natural", "of": ["country"]}))
    for member, country in zip(federation.members.values(), ("Italy", "Spain", "Malta"), strict=True):
        assert set(federation.holding(member)["labels"]) == {country}
        assert set(federation.holding(member)["test"]["labels"]) == {country}


def test_without_labels_a_test_is_dealt_by_size(tiny: Config, tmp_path: Path) -> None:
    config = diseased(tiny, tmp_path, count=3, partition="iid")
    del config["data"]["sources"]["reports"]["targets"]
    federation = population(config)
    assert [len(federation.test(member)) for member in federation.members.values()] == [15, 15, 15]
    assert federation.holding(federation.members["reports-0"])["test"]["labels"] is None


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"test": "dealt", "test_split": None}, "test: dealt needs a test_split"),
        ({"partition": {"name": "dirichlet", "of": ["edma"]}}, r"clients.reports.partition.of: 'edma' .*'edema'"),
        ({"partition": {"name": "iid", "together": "ptient"}}, r"reports.partition.together: 'ptient' .*'patient'"),
        ({"partition": {"name": "natural", "of": ["text"]}, "count": 46}, r"test is dealt, .* has 45 items for 46"),
    ],
)
def test_what_cannot_be_dealt_is_refused(tiny: Config, tmp_path: Path, group: Config, message: str) -> None:
    config = diseased(tiny, tmp_path, **group)

    def first_test() -> Any:
        federation = population(config)
        return federation.test(next(iter(federation.members.values())))

    with pytest.raises(ConfigError, match=message):
        first_test()


def test_what_a_client_holds_is_counted_without_decoding(tiny: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = population(tiny)
    wanted = len(population(tiny).train(federation.members["paired-0"]))
    monkeypatch.setattr("polyfed.data.views.pixels.Pixels.open", lambda *_: pytest.fail("an image was decoded"))
    entry = federation.holding(federation.members["paired-0"])
    assert (entry["items"], entry["samples"]) == (16, wanted)
    assert "columns" not in entry
    assert "test" not in entry
