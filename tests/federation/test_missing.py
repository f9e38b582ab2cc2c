"""Modalities that are taken from some of the items of clients."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyfed.core.errors import ConfigError
from polyfed.core.randomness import generator
from polyfed.data.samples import Samples
from polyfed.federation.settings import MissingSettings
from polyfed.runs.experiment import Experiment
from sessions import population
from small_federations import Config, tiny_experiment

# ---- who lacks what


@given(st.integers(1, 60), st.lists(st.floats(0.01, 1), min_size=1, max_size=4), st.integers(0, 9))
def test_shares_are_met_and_no_item_loses_all(items: int, shares: list[float], seed: int) -> None:
    rates = {f"m{k}": share for k, share in enumerate(shares)}
    lacking = MissingSettings(rates=rates).lacking(torch.arange(items), generator(seed, "x"))
    for name, rate in rates.items():
        assert abs(len(lacking[name]) - rate * items) <= 1
    lost = torch.cat(list(lacking.values())).bincount(minlength=items)
    # as few lack two as can be: all lack as many as any other, or one more
    assert int(lost.max()) - int(lost.min()) <= 1
    if sum(shares) <= len(shares) - 1:
        assert int(lost.max()) < len(shares)


# ---- in a federation


def lacking(**missing: Any) -> Config:
    config = tiny_experiment()
    config["clients"]["paired"] |= {"count": 4, "missing": {"rates": {"image": 0.25, "text": 0.5}} | missing}
    return config


def masks(samples: Samples) -> dict[str, list[bool]]:
    return {name: (samples.rows[name] < 0).tolist() for name in samples.inputs}


def test_items_of_each_client_lack_modalities_and_nobody_s_all() -> None:
    federation = population(lacking())
    for member in federation.members.values():
        train = federation.train(member)
        if member.group != "paired":
            assert not any(any(mask) for mask in masks(train).values())
            continue
        assert len(member.items) == 8
        counts = {name: int(train.items[train.rows[name] < 0].unique().numel()) for name in train.inputs}
        assert counts == {"image": 2, "text": 4}
        assert not any(all(lost) for lost in zip(*masks(train).values(), strict=True))
        assert federation.holding(member)["missing"] == counts
        assert not any(any(mask) for mask in masks(federation.test(member)).values())
        batch = train.batch(torch.arange(len(train)))
        for name, mask in masks(train).items():
            assert (~batch.present[name]).tolist() == mask
            assert not batch.inputs[name][~batch.present[name]].any()


def test_the_same_seed_takes_the_same_whatever_else_there_is() -> None:
    config = lacking()
    first, again = population(config), population(config | {"clients": {"paired": config["clients"]["paired"]}})
    other = population(config | {"run": config["run"] | {"seed": 1}})
    for name, member in again.members.items():
        assert masks(first.train(first.members[name])) == masks(again.train(member))
        assert masks(first.train(first.members[name])) != masks(other.train(other.members[name]))
    a, b = (masks(first.train(first.members[f"paired-{k}"])) for k in (0, 1))
    assert a != b


@pytest.mark.parametrize("order", [1, -1])
def test_a_shared_test_lacks_the_same_for_all_clients(order: int) -> None:
    federation = population(lacking(test=True))
    members = list(federation.members.values())[::order]  # in any order
    first, *others = [federation.test(one) for one in members if one.group == "paired"]
    assert all(other is first for other in others)
    captions = len(first) // 12
    assert [sum(mask) for mask in masks(first).values()] == [3 * captions, 6 * captions]


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ({"rates": {"sound": 0.5}}, "missing.rates names 'sound', which not all models of the group encode"),
        ({"rates": {"image": 0.6, "text": 0.6}}, "are together more than 1, so that items would lack all of the 2"),
    ],
)
def test_rates_of_what_is_not_encoded_or_of_all_are_refused(missing: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Experiment.parse(lacking(**missing))


def test_what_leaves_a_client_nothing_to_learn_or_be_tested_on_is_refused_before_a_run() -> None:
    config = lacking(rates={"image": 0.5, "text": 0.5})
    with pytest.raises(ConfigError, match=r"clients.paired: no training sample of 'paired-\d' has what task"):
        population(config).require_sound()
    config = lacking()
    config["clients"]["paired"]["task"] = {"name": "classification", "target": "label", "imputation": "nearest"}
    config["data"]["sources"]["scenes"]["targets"] = {"label": "label"}
    config["clients"]["paired"]["model"]["encoders"]["text"]["view"]["tokenizer"] = {"name": "hashing", "size": 200}
    del config["public"], config["server"]
    with pytest.raises(ConfigError, match="nearest takes a public set of several modalities"):
        population(config).require_sound()


def test_tests_that_there_are_none_of_are_refused() -> None:
    config = lacking(test=True)
    config["clients"]["paired"]["test_split"] = None
    with pytest.raises(ConfigError, match="the group has no test_split"):
        Experiment.parse(config)


def test_a_sample_never_loses_its_last_modality() -> None:
    federation = population(tiny_experiment())
    train = federation.train(federation.members["paired-0"])
    items = train.items.unique()
    twice = train.lacking({"image": items[:4]}).lacking({"text": items[2:6]})
    lost = {item: (masks(twice)["image"][k], masks(twice)["text"][k]) for k, item in enumerate(train.items.tolist())}
    assert [lost[item] for item in items.tolist()[:6]] == [(True, False)] * 4 + [(False, True)] * 2
    there = {name: twice.rows[name] >= 0 for name in train.inputs}
    assert all((there[one] | there[other]).all() for one, other in combinations(train.inputs, 2))
    for name, own in twice.batch(torch.arange(len(twice))).by_modality():
        assert len(own) == sum(not gone for gone in masks(twice)[name])
