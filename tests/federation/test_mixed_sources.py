"""Types across sources: a server that is judged on another source, groups that hold a second one or public items."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from by_hand import assert_mean, copies, plain_training
from polyfed.core.errors import ConfigError, DataError
from polyfed.federation import types
from sessions import first_cohort, population, prepared
from small_federations import Config, plain_sgd, scenes, three_kinds, transformers

OTHER = scenes(20, 8, 12, seed=7)


def elsewhere(config: Config) -> Config:
    """The same federation with a server that is judged on pairs that no client has."""
    columns = config["data"]["sources"]["scenes"].get("columns", {"image": "image", "text": "captions"})
    config["data"]["sources"]["other"] = OTHER | {"columns": columns, "targets": {}}
    config["server"] = config["server"] | {"source": "other"}
    return config


def with_public(config: Config) -> Config:
    """The same federation whose paired clients hold public pairs in addition."""
    return config | {"clients": config["clients"] | {"paired": config["clients"]["paired"] | {"also": "public"}}}


def with_second(config: Config) -> Config:
    """The same federation whose paired clients hold pairs of a second source in addition."""
    elsewhere(config)["clients"]["paired"]["also"] = {"source": "other", "items": 10, "partition": "iid"}
    return config


# ---- a server judged on another source


@pytest.mark.parametrize(
    "config",
    [
        *(three_kinds(name=name) for name in ("fedavg", "fedprox", "scaffold")),
        *(transformers(name=name) for name in ("fediot", "fedcola")),
    ],
    ids=lambda config: config["algorithm"]["name"],
)
def test_the_server_shows_the_type_that_it_is_judged_for_on_another_source(config: Config, tmp_path: Path) -> None:
    session = prepared(elsewhere(copy.deepcopy(config)), tmp_path)
    server = session.server
    assert server.own_type == "paired"
    session.experiment.algorithm.round(server, first_cohort(session))
    shown = server.model.state_dict()
    assert all(torch.equal(value, server.weights["paired"][name]) for name, value in shown.items())
    assert server.test is not None
    assert server.test.ids == session.federation.data.split("other", "test").ids
    assert server.evaluate(server.test)["r1_sum"] >= 0


def test_clients_of_two_sources_are_one_type_unless_they_are_kept_apart(tmp_path: Path) -> None:
    config = elsewhere(three_kinds(name="fedavg"))
    config["clients"]["more"] = config["clients"]["paired"] | {"source": "other", "count": 1}
    assert list(prepared(config, tmp_path / "one").server.types) == ["image", "text", "paired+more"]
    apart = copy.deepcopy(config)
    apart["clients"]["more"]["type"] = "coco"
    server = prepared(apart, tmp_path / "two").server
    assert list(server.types) == ["image", "text", "paired", "more"]
    assert server.own_type == "paired"
    apart["server"]["type"] = "coco"
    server = prepared(apart, tmp_path / "three").server
    assert server.own_type == "more"
    apart["server"]["type"] = "vg"
    with pytest.raises(ConfigError, match="the source may differ"):
        prepared(apart, tmp_path / "four")


def test_a_number_of_judged_clients_is_one_of_each_group_of_a_type(tmp_path: Path) -> None:
    config = elsewhere(three_kinds(name="fedavg"))
    config["clients"]["more"] = config["clients"]["paired"] | {"source": "other"}
    config["run"]["evaluate_clients"] = 1
    evaluations = prepared(config, tmp_path).loop()
    evaluations.changed()
    assert [client.id for client in evaluations.due()] == ["image", "text", "paired-0", "more-0"]


def test_types_that_differ_in_names_of_classes_alone_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = three_kinds(name="fedavg")
    config["data"]["sources"]["renamed"] = config["data"]["sources"]["pictures"] | {"seed": 9}
    config["clients"]["more"] = config["clients"]["image"] | {"source": "renamed"}
    classes = types.type_classes

    def renamed(target: str, split: Any, salt: str) -> str:
        return "18x00000000" if split.source == "renamed" else classes(target, split, salt)

    monkeypatch.setattr(types, "type_classes", renamed)
    assert list(prepared(config, tmp_path).server.types) == ["image", "text", "paired", "more"]
    assert "clients of types 'image' and 'more' have one model, one task and equally many classes" in caplog.text


# ---- a group that holds more than its own source


@pytest.mark.parametrize("change", [with_public, with_second])
def test_a_group_holds_a_second_share(change: Any) -> None:
    config = change(three_kinds(name="fedavg"))
    federation = population(config)
    federation.require_sound()
    clients = [member for member in federation.members.values() if member.group == "paired"]
    also = [holding.items for member in clients for holding in member.holdings[1:]]
    pool = federation.public.items if change is with_public else torch.arange(20)
    dealt = torch.cat(also)
    assert len(dealt.unique()) == len(dealt) == (8 if change is with_public else 10)
    assert torch.isin(dealt, pool).all()
    tests = {name for source in ("scenes", "other") if source in config["data"]["sources"]
             for name in federation.data.split(source, "test").ids}  # fmt: skip
    for member in clients:
        samples = federation.train(member)
        _, also = member.holdings
        names = {samples.ids[item] for item in samples.items.tolist()}
        own = {federation.data.split("scenes", "train").ids[item] for item in member.items.tolist()}
        more = set(also.ids)
        assert names == own | more
        assert not own & more
        assert not names & tests
        assert len(samples.items.unique()) == len(member.items) + len(also.items)


def test_public_items_come_with_the_captions_that_are_public() -> None:
    federation = population(with_public(three_kinds(name="fedavg")))
    member = federation.members["paired-0"]
    public = federation.public_samples({name: encoder.view for name, encoder in member.model.encoders.items()})
    _, also = member.holdings
    wanted = public.subset(torch.isin(public.items, also.items).nonzero().squeeze(1))
    result = federation.train(member)
    last = torch.arange(len(result) - len(wanted), len(result))
    ours, theirs = result.batch(last), wanted.batch(torch.arange(len(wanted)))
    assert len(wanted) == 2 * len(also.items)
    assert all(torch.equal(ours.inputs[name], theirs.inputs[name]) for name in theirs.inputs)
    infos = {info.id: info for info in federation.infos}
    assert infos["paired-0"].samples == len(result) == 5 * len(member.items) + len(wanted)


@pytest.mark.parametrize("change", [with_public, with_second])
def test_two_clients_that_mix_sources_are_averaged_by_all_that_they_hold(change: Any, tmp_path: Path) -> None:
    config = plain_sgd(change(three_kinds(name="fedavg")), batch_size=6)
    config["clients"]["paired"]["partition"] = {"name": "quantity", "alpha": 0.5, "min_size": 2}
    session = prepared(config, tmp_path)
    server = session.server
    start = copies(server.weights)["paired"]
    infos = {info.id: info for info in server.clients if info.group == "paired"}
    trained = {name: plain_training(session, name, start) for name in infos}
    session.experiment.algorithm.round(server, first_cohort(session))
    samples = {name: float(info.samples) for name, info in infos.items()}
    assert len(set(samples.values())) == 2
    assert_mean(server.weights["paired"], trained, samples)


def test_what_is_held_in_addition_is_recorded(tmp_path: Path) -> None:
    session = prepared(with_second(three_kinds(name="fedavg")), tmp_path)
    entry = session.partition()["paired-0"]
    also = entry["also"]
    member = session.federation.members["paired-0"]
    _, held = member.holdings
    assert {key: also[key] for key in ("public", "source", "split", "items", "samples", "index")} == {
        "public": False, "source": "other", "split": "train", "items": 5, "samples": 25,
        "index": held.items.tolist(),
    }  # fmt: skip
    assert entry["source"] == "scenes"
    assert entry["items"] == len(member.items) + 5
    assert entry["samples"] == len(session.federation.train(member))
    assert len(entry["index"]) == len(member.items)


def test_classifiers_may_mix_sources_of_the_same_classes() -> None:
    config = three_kinds(name="fedavg")
    config["data"]["sources"]["more"] = config["data"]["sources"]["pictures"] | {"seed": 9}
    config["clients"]["image"]["also"] = {"source": "more", "items": 6}
    federation = population(config)
    federation.require_sound()
    assert len(federation.train(federation.members["image"]).targets["label"]) == 24 + 6
    assert federation.holding(federation.members["image"])["also"]["labels"]


def swapped(config: Config) -> None:
    other = {"columns": {"image": "image"}, "targets": {"label": "topic"}}
    config["data"]["sources"]["more"] = config["data"]["sources"]["texts"] | other
    config["clients"]["image"]["also"] = {"source": "more"}


def paired(**more: Any) -> Any:
    return lambda config: config["clients"]["paired"].update(more)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (paired(also="coco"), r"'coco' is not 'public'.*source: coco"),
        (paired(also={}), "give either 'public'"),
        (paired(also={"public": True, "source": "scenes"}), "not both"),
        (paired(also={"public": True, "split": "test"}), "split has no"),
        (paired(also={"source": "scenes"}), "is dealt out among these"),
        (paired(also={"source": "scnes"}), "did you mean 'scenes'"),
        (paired(also={"source": "texts"}), "has no 'image', which these"),
        (paired(also={"source": "scenes", "split": "test"}), "'paired-0' are in 'scenes' test, which .* judged"),
        (
            lambda c: c.update(public=None) or paired(also="public")(c),
            "clients.paired.also is public, but there is none",
        ),
        (paired(also={"public": True, "items": 9}), "clients.paired.also.items is 9, but 'scenes' has 8 to deal out"),
        (paired(also="public", count=9), "clients.paired.count is 9, but there are 8 samples"),
        (swapped, "classes of 'label' in 'more' are not those of 'pictures'"),
    ],
)
def test_what_cannot_be_held_in_addition_is_refused(change: Any, message: str) -> None:
    config = three_kinds(name="fedavg")
    change(config)
    with pytest.raises(DataError if "judged" in message else ConfigError, match=message):
        population(config).require_sound()


def test_an_item_is_not_held_twice() -> None:
    config = three_kinds(name="fedavg")
    config["data"]["sources"]["again"] = config["data"]["sources"]["scenes"]
    config["clients"]["paired"] |= {"count": 1, "also": {"source": "again"}}
    with pytest.raises(DataError, match=r"shares|are in its own"):
        population(config).require_sound()


def test_models_of_one_type_have_equal_tensors() -> None:
    config = three_kinds(name="fedavg")
    for name, source in (("image", "pictures"), ("more", "numbers")):
        config["data"]["sources"][source] = config["data"]["sources"]["pictures"] | {"targets": {"label": "label"}}
        config["clients"][name] = copy.deepcopy(config["clients"]["image"]) | {"source": source}
    config["clients"]["more"]["task"] = {"name": "classification", "classes": 20}
    population(config).require_sound()  # another number of classes is another type
    assert len({info.architecture for info in population(config).infos}) == 4
