"""Attacks worked by hand: who attacks, what is sent, what is trained on, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import polyfed
from polyfed.core.errors import ConfigError
from polyfed.core.settings import parse_settings
from polyfed.federation.attack import Attack, attacks_by_client
from polyfed.federation.client import ClientInfo
from polyfed.runs.experiment import Experiment
from polyfed.wire.payload import Payload, Representations, Weights
from sessions import prepared, site_of
from small_federations import Config, topics

INFOS = tuple(ClientInfo(f"{one}-{k}", one, (one,), "t", 10, 5, f"arch-{one}") for one in "ab" for k in range(10))


def attack(name: str, **settings: Any) -> Any:
    return Attack.named(name).model_validate(settings)


# ---- who


def test_a_share_of_each_type_attacks_and_more_attackers_include_the_fewer() -> None:
    few, more = (attack("sign_flip", clients=share).attackers(INFOS, 3) for share in (0.1, 0.3))
    assert [sum(name.startswith(type_name) for name in few) for type_name in "ab"] == [1, 1]
    assert [sum(name.startswith(type_name) for name in more) for type_name in "ab"] == [3, 3]
    assert set(few) < set(more)
    assert list(more) == sorted(more)


def test_who_attacks_is_drawn_from_the_seed() -> None:
    assert len({attack("noise", clients=3).attackers(INFOS, seed) for seed in range(6)}) > 3
    assert attack("noise", clients=3).attackers(INFOS, 0) == attack("scaled", clients=3).attackers(INFOS, 0)


def test_attackers_can_be_named_or_drawn_from_groups() -> None:
    assert attack("noise", clients=["b-7", "a-2"]).attackers(INFOS, 0) == ("a-2", "b-7")
    assert {name[0] for name in attack("noise", clients=4, groups=["b"]).attackers(INFOS, 0)} == {"b"}
    assert len(attack("noise", clients=50).attackers(INFOS, 0)) == 20


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clients": ["a-77"]}, "no client is called 'a-77'"),
        ({"clients": ["a-1"], "groups": ["b"]}, "no client is called 'a-1'"),
        ({"groups": ["c"]}, "no clients are called 'c'"),
        ({"clients": 0.04}, "selects no client"),
    ],
)
def test_attackers_who_are_not_there_are_refused(settings: Config, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        attack("noise", **settings).attackers(INFOS, 0)


@pytest.mark.parametrize("clients", [0, -1, 1.5, 0.0])
def test_numbers_of_attackers_that_cannot_be_are_refused(clients: float) -> None:
    with pytest.raises(ConfigError, match="clients"):
        parse_settings(Attack.named("noise"), {"clients": clients})


def test_no_client_is_in_two_attacks() -> None:
    with pytest.raises(ConfigError, match="'a-1' is an attacker of 'noise' and of 'scaled'"):
        attacks_by_client([attack("noise", clients=["a-1"]), attack("scaled", clients=["a-1"])], INFOS, 0)


# ---- what they send


def weights(value: Tensor) -> Payload:
    tensors = {"w": value, "n": torch.tensor(7), "bn.running_var": torch.tensor([1.0])}
    return Payload({"weights": Weights(tensors), "num_examples": 10})


def falsified(name: str, learnt: Tensor, sent: Tensor, **settings: Any) -> Payload:
    return attack(name, **settings).falsified(weights(learnt), weights(sent), torch.Generator().manual_seed(0))


SENT, LEARNT = torch.tensor([1.0, 1.0]), torch.tensor([4.0, 5.0])


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("sign_flip", {}, [-2.0, -3.0]),
        ("sign_flip", {"factor": 2.0}, [-5.0, -7.0]),
        ("scaled", {}, [31.0, 41.0]),
        ("constant", {}, [1 + 12.5**0.5] * 2),
    ],
)
def test_updates_of_weights_are_falsified_around_those_sent(name: str, settings: Config, expected: list[float]) -> None:
    payload = falsified(name, LEARNT, SENT, **settings)
    bundle = payload.bundles["weights"]
    assert bundle["w"].tolist() == pytest.approx(expected)
    assert bundle["n"] == torch.tensor(7)
    assert bundle["bn.running_var"].tolist() == [1.0]
    assert payload.scalars == {"num_examples": 10}


def test_noise_is_as_long_as_the_update_and_of_the_stream() -> None:
    first, again = (falsified("noise", LEARNT, SENT).bundles["weights"]["w"] - SENT for _ in range(2))
    assert float(first.norm()) == pytest.approx(5.0)
    assert first.equal(again)
    assert not first.allclose(LEARNT - SENT)


def test_variances_stay_positive() -> None:
    learnt = Payload({"weights": Weights({"bn.running_var": torch.tensor([3.0])})})
    sent = Payload({"weights": Weights({"bn.running_var": torch.tensor([1.0])})})
    made = attack("sign_flip", factor=4.0).falsified(learnt, sent, torch.Generator())
    assert made.bundles["weights"]["bn.running_var"].tolist() == [7.0]


def rows(*values: list[float]) -> Payload:
    return Payload({"representations": Representations({"image": torch.tensor(values)}, order="here")})


@pytest.mark.parametrize(
    ("name", "expected"),
    [("sign_flip", [[-3, -4], [0, -1]]), ("scaled", [[30.0, 40.0], [0.0, 10.0]]), ("constant", [[3.0, 4.0]] * 2)],
)
def test_rows_are_falsified_one_by_one(name: str, expected: list[list[float]]) -> None:
    sent = rows([9.0, 9.0], [9.0, 9.0])  # not what they start from
    made = attack(name).falsified(rows([3.0, 4.0], [0.0, 1.0]), sent, torch.Generator())
    bundle = made.bundles["representations"]
    assert isinstance(bundle, Representations)
    assert bundle.order == "here"
    assert bundle["image"].tolist() == expected


def test_noisy_rows_keep_their_lengths() -> None:
    made = attack("noise").falsified(rows([3.0, 4.0], [0.0, 1.0]), Payload(), torch.Generator().manual_seed(0))
    assert made.bundles["representations"]["image"].norm(dim=1).tolist() == pytest.approx([5.0, 1.0])


# ---- what they train on


def test_flipped_labels_count_from_the_other_end_for_attackers_alone(tmp_path: Path) -> None:
    config = topics()
    config["run"]["attackers"] = {"name": "label_flip", "clients": ["text-1"]}
    session = prepared(config, tmp_path)
    site, members = site_of(session), session.federation.members
    false, true = site.data_of(members["text-1"]).train, session.federation.train(members["text-1"])
    assert false.targets["topic"].equal(len(true.classes["topic"]) - 1 - true.targets["topic"])
    assert not false.targets["topic"].equal(true.targets["topic"])
    honest = site.data_of(members["text-0"]).train
    assert honest.targets["topic"].equal(session.federation.train(members["text-0"]).targets["topic"])
    tested = site.data_of(members["text-1"]).test
    assert tested is not None
    assert tested.targets["topic"].equal(session.federation.test(members["text-1"]).targets["topic"])


@pytest.mark.parametrize(
    ("attackers", "message"),
    [
        ({"name": "label_flip", "clients": ["paired-0"]}, "label_flip': paired-0 has no classes to flip"),
        ({"name": "sign_flp"}, "did you mean 'sign_flip'"),
        ({"name": "sign_flip", "clients": ["someone"]}, "no client is called 'someone'"),
    ],
)
def test_attackers_who_cannot_attack_are_refused(tiny: Config, attackers: Config, message: str, tmp_path: Path) -> None:
    tiny["run"]["attackers"] = {"clients": 1} | attackers
    with pytest.raises(ConfigError, match=message):
        polyfed.run(Experiment.parse(tiny), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
