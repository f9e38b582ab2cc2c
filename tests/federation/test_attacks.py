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
from polyfed.federation.attacks import Conspiracy, FalseUpdate
from polyfed.federation.client import ClientInfo
from polyfed.runs.experiment import Experiment
from polyfed.wire.payload import Payload, Representations, Weights
from sessions import prepared, site_of
from small_federations import Config, topics

INFOS = tuple(
    ClientInfo(f"{kind}-{k}", kind, (kind,), "classification", 10, f"arch-{kind}") for kind in "ab" for k in range(10)
)


def attack(name: str, **settings: Any) -> Any:
    return Attack.named(name).model_validate(settings)


# ---- who


def test_a_share_of_each_type_attacks_and_more_attackers_include_the_fewer() -> None:
    few, more = (attack("sign_flip", clients=share).attackers(INFOS, 3) for share in (0.1, 0.3))
    assert [sum(name.startswith(kind) for name in few) for kind in "ab"] == [1, 1]
    assert [sum(name.startswith(kind) for name in more) for kind in "ab"] == [3, 3]
    assert set(few) < set(more)
    assert list(more) == sorted(more)


def test_who_attacks_is_drawn_from_the_seed() -> None:
    draws = {attack("noise", clients=3).attackers(INFOS, seed) for seed in range(6)}
    assert len(draws) > 3
    assert attack("noise", clients=3).attackers(INFOS, 0) == attack("scaled", clients=3).attackers(INFOS, 0)


def test_attackers_can_be_named_or_drawn_from_groups() -> None:
    assert attack("noise", clients=["b-7", "a-2"]).attackers(INFOS, 0) == ("a-2", "b-7")
    assert {name[0] for name in attack("noise", clients=4, groups=["b"]).attackers(INFOS, 0)} == {"b"}
    assert len(attack("noise", clients=50).attackers(INFOS, 0)) == 20


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clients": ["a-77"]}, "there is no client 'a-77'"),
        ({"clients": ["a-1"], "groups": ["b"]}, "there is no client 'a-1'"),
        ({"groups": ["c"]}, "no clients are called 'c'"),
        ({"clients": 0.04}, "which is nobody"),
    ],
)
def test_attackers_who_are_not_there_are_refused(settings: Config, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        attack("noise", **settings).attackers(INFOS, 0)


@pytest.mark.parametrize("clients", [0, -1, 1.5, 0.0])
def test_numbers_of_attackers_that_cannot_be_are_refused(clients: float) -> None:
    with pytest.raises(ConfigError, match="clients"):
        parse_settings(Attack.named("noise"), {"clients": clients})


def test_nobody_is_in_two_attacks() -> None:
    with pytest.raises(ConfigError, match="'a-1' is an attacker of 'noise' and of 'scaled'"):
        attacks_by_client([attack("noise", clients=["a-1"]), attack("scaled", clients=["a-1"])], INFOS, 0)


# ---- what they send


def weights(value: Tensor) -> Payload:
    tensors = {"w": value, "n": torch.tensor(7), "bn.running_var": torch.tensor([1.0])}
    return Payload({"weights": Weights(tensors), "num_examples": 10})


def falsified(name: str, learnt: Tensor, sent: Tensor, **settings: Any) -> Payload:
    made = attack(name, **settings)
    assert isinstance(made, FalseUpdate)
    return made.falsified(weights(learnt), weights(sent), torch.Generator().manual_seed(0))


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
def test_updates_of_weights_are_falsified_around_what_was_sent(
    name: str, settings: Config, expected: list[float]
) -> None:
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
    [
        ("sign_flip", [[-3.0, -4.0], [-0.0, -1.0]]),
        ("scaled", [[30.0, 40.0], [0.0, 10.0]]),
        ("constant", [[3.0, 4.0], [3.0, 4.0]]),
    ],
)
def test_rows_are_falsified_one_by_one(name: str, expected: list[list[float]]) -> None:
    sent = rows([9.0, 9.0], [9.0, 9.0])  # what the server sends is no start of theirs
    made = attack(name).falsified(rows([3.0, 4.0], [0.0, 1.0]), sent, torch.Generator())
    bundle = made.bundles["representations"]
    assert isinstance(bundle, Representations)
    assert bundle.order == "here"
    assert bundle["image"].tolist() == expected


def test_noisy_rows_keep_their_lengths() -> None:
    made = attack("noise").falsified(rows([3.0, 4.0], [0.0, 1.0]), Payload(), torch.Generator().manual_seed(0))
    assert made.bundles["representations"]["image"].norm(dim=1).tolist() == pytest.approx([5.0, 1.0])


def agreed(name: str, *values: float, attackers: tuple[str, ...] = ("c3", "c4"), **settings: Any) -> dict[str, float]:
    made = attack(name, **settings)
    assert isinstance(made, Conspiracy)
    honest = {f"c{k}": weights(torch.tensor([value])) for k, value in enumerate(values)}
    return {client: float(sent.bundles["weights"]["w"]) for client, sent in made.agreed(honest, attackers).items()}


def test_copies_are_of_the_first_attacker() -> None:
    assert agreed("copied", 1.0, 2.0, 3.0, 8.0, 9.0) == {"c3": 8.0, "c4": 8.0}


def test_a_little_is_enough_lies_z_deviations_beside_the_mean() -> None:
    # mean 3, variance (4 + 1 + 0 + 1 + 4) / 5 = 2
    expected = 3 - 1.5 * 2**0.5
    assert agreed("little_is_enough", 1.0, 2.0, 3.0, 4.0, 5.0) == pytest.approx({"c3": expected, "c4": expected})


# ---- what they train on


def federation(tmp_path: Path, **attackers: Any) -> Any:
    config = topics()
    config["run"]["attackers"] = attackers
    return prepared(config, tmp_path)


def test_flipped_labels_count_from_the_other_end_for_attackers_alone(tmp_path: Path) -> None:
    session = federation(tmp_path, name="label_flip", clients=["text-1"])
    site, members = site_of(session), session.federation.members
    false, true = site.data_of(members["text-1"]).train, session.federation.train(members["text-1"])
    classes = len(true.classes["topic"])
    assert false.targets["topic"].equal(classes - 1 - true.targets["topic"])
    assert not false.targets["topic"].equal(true.targets["topic"])
    honest = site.data_of(members["text-0"]).train
    assert honest.targets["topic"].equal(session.federation.train(members["text-0"]).targets["topic"])
    tested = site.data_of(members["text-1"]).test
    assert tested is not None
    assert tested.targets["topic"].equal(session.federation.test(members["text-1"]).targets["topic"])


def test_targeted_pairs_get_the_texts_of_another_thing(tiny: Config, tmp_path: Path) -> None:
    words = {"source": "circle", "target": "square"}
    tiny["run"]["attackers"] = {"name": "targeted_pairs", "clients": ["paired-0"], **words}
    session = prepared(tiny, tmp_path)
    member = session.federation.members["paired-0"]
    false, true = site_of(session).data_of(member).train, session.federation.train(member)
    texts = session.federation.data.split("scenes", "train").modality("text").values.to_pylist()
    item_of = [item for item, captions in enumerate(texts) for _ in captions]  # of each row of captions
    moved = 0
    for sample, item in enumerate(true.items.tolist()):
        row, new = int(true.rows["text"][sample]), int(false.rows["text"][sample])
        assert item_of[row] == item
        if any("circle" in caption for caption in texts[item]):
            assert any("square" in caption for caption in texts[item_of[new]])
            moved += new != row
        else:
            assert new == row
    assert moved
    assert false.rows["image"].equal(true.rows["image"])


@pytest.mark.parametrize(
    ("attackers", "message"),
    [
        ({"name": "label_flip", "clients": ["paired-0"]}, "label_flip': paired-0 has no classes to flip"),
        (
            {"name": "targeted_pairs", "clients": ["image-0"], "source": "circle", "target": "square"},
            "targeted_pairs': image-0 has no pairs with 'text'",
        ),
        (
            {"name": "targeted_pairs", "clients": ["paired-0"], "source": "circle", "target": "walrus"},
            "run.attackers.target: no text of paired-0 has the word 'walrus'",
        ),
        ({"name": "copied", "clients": ["paired-0"]}, "needs two attackers of a type, and paired-0"),
        ({"name": "little_is_enough", "clients": ["image-0"]}, "image-0 is alone in its type"),
        ({"name": "sign_flp"}, "did you mean 'sign_flip'"),
        ({"name": "sign_flip", "clients": ["nobody"]}, "there is no client 'nobody'"),
    ],
)
def test_attackers_who_cannot_attack_like_this_are_refused(
    tiny: Config, attackers: Config, message: str, tmp_path: Path
) -> None:

    tiny["clients"]["image"]["count"] = 1
    names = attackers.get("clients", [])
    attackers["clients"] = [name.replace("image-0", "image") for name in names] or 1
    message = message.replace("image-0", "image")
    tiny["run"]["attackers"] = attackers
    with pytest.raises(ConfigError, match=message):
        polyfed.run(Experiment.parse(tiny), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
