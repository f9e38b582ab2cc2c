"""What is usual in a cohort, and what becomes of clients that do otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from asking import ask_of
from torch import Tensor

from polyfed.core.errors import PayloadError
from polyfed.federation.client import ClientInfo
from polyfed.federation.counting import counted
from polyfed.federation.filters import Alike, Medians, NormClip, Received
from polyfed.privacy.clipping import Clipping
from polyfed.wire.limits import Limits
from polyfed.wire.payload import Payload, Representations, Weights

Tensors = Mapping[str, Tensor]


def info(name: str, samples: int = 10, architecture: str = "a") -> ClientInfo:
    return ClientInfo(name, "g", ("image",), "classification", samples, architecture)


def vector(length: float, entries: int = 4) -> Tensor:
    """A matrix of one column, as vectors have more room."""
    return torch.full((entries, 1), length / entries**0.5)


# ---- how much a client counts


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([100, 120, 90, 10**12], [100, 120, 90, 660]),  # 6 x 110
        ([100, 100, 100, 500], [100, 100, 100, 500]),  # a large hospital
        ([0, 0, 0, 50, 60, 70, 10**12], [0, 0, 0, 50, 60, 70, 390]),  # who has none is no part of the median
        ([10, 10**12], [10, 10**12]),  # of two, nobody can say which is odd
        ([10, 10**12, 0], [10, 10**12, 0]),
    ],
)
def test_nobody_counts_for_more_than_some_medians(samples: list[int], expected: list[int]) -> None:
    clients = [info(str(k), n) for k, n in enumerate(samples)]
    assert list(counted(clients, 6.0).values()) == expected
    assert list(counted(clients, None).values()) == samples


def test_the_median_is_of_an_architecture_or_of_a_modality_if_it_has_too_few_clients() -> None:
    sizes = {"a": [10, 10, 12], "b": [5000, 6000, 7000], "c": [10**12]}
    clients = [info(f"{kind}{k}", n, kind) for kind, own in sizes.items() for k, n in enumerate(own)]
    after = counted(clients, 6.0)
    assert [after[f"b{k}"] for k in range(3)] == sizes["b"]
    assert after["c0"] == 6 * 5000


def test_sizes_of_other_modalities_say_nothing() -> None:
    texts = [replace(info(f"t{k}", 200, "text"), modalities=("text",)) for k in range(3)]
    assert counted([info("pictures", 50_000, "image"), *texts], 6.0)["pictures"] == 50_000


# ---- what crosses


@pytest.mark.parametrize(
    ("new", "reason"),
    [
        ({"w": torch.zeros(4, dtype=torch.float16)}, r"'w' is float16 \[4\], sent was float32 \[4\]"),
        ({"w": torch.zeros(4, dtype=torch.float64)}, r"'w' is float64 \[4\], sent was float32 \[4\]"),
        ({"n": torch.tensor(True)}, r"'n' is bool \[\], sent was int64 \[\]"),
        ({"w": torch.zeros(5)}, r"'w' is float32 \[5\], sent was float32 \[4\]"),
        ({"n": torch.tensor(9)}, "'n' of whole numbers fell by 1"),
        ({"n": torch.tensor(-(2**63))}, "'n' of whole numbers fell"),
    ],
)
def test_types_of_numbers_are_the_servers_and_counters_count_up(new: dict[str, Tensor], reason: str) -> None:
    client = info("c")
    ask = ask_of([client], {"weights": Weights({"w": torch.zeros(4), "n": torch.tensor(10)})})
    with pytest.raises(PayloadError, match=reason):
        Alike().passed(Payload({"weights": Weights(new)}), client, ask)


def test_a_negative_variance_is_refused() -> None:
    payload = Payload({"weights": Weights({"norm.running_var": torch.tensor([1.0, -0.5])})})
    with pytest.raises(PayloadError, match=r"'norm.running_var' has a variance of -0.5"):
        payload.require_sound(Limits())


# ---- norm clipping


def held(
    sent: Tensors,
    replies: Sequence[Tensors | tuple[str, Tensors]],
    usual: Medians | None = None,
    samples: Mapping[str, int] | None = None,
    changes: Sequence[str] = (),
) -> tuple[list[Tensors], dict[str, str]]:
    """What becomes of replies to weights that are the same for all, some with an architecture, and who is told so."""
    named = [one if isinstance(one, tuple) else ("a", one) for one in replies]
    clients = [info(f"c{k}", (samples or {}).get(f"c{k}", 10), kind) for k, (kind, _) in enumerate(named)]
    told: dict[str, str] = {}
    field = changes[0] if changes else "weights"
    ask = ask_of(clients, {"weights": Weights(sent)}, changes, told=told)
    sent_back = (Received(one, Payload({field: Weights(new)})) for one, (_, new) in zip(clients, named, strict=True))
    link = NormClip(Clipping(), {} if usual is None else usual)
    return [reply.payload.bundles[field] for reply in link(sent_back, ask)], told


def moved(after: Tensors, sent: Tensors, name: str = "w") -> float:
    return float((after[name] - sent[name]).norm())


def test_nothing_waits() -> None:
    clients, drawn = [info(f"c{k}") for k in range(3)], list[str]()

    def replies() -> Iterator[Received]:
        for client in clients:
            drawn.append(client.id)
            yield Received(client, Payload({"weights": Weights({"w": vector(50.0)})}))

    passing = NormClip(Clipping(), {})(replies(), ask_of(clients, {"weights": Weights({"w": vector(3.0)})}))
    assert next(passing).client.id == "c0"
    assert drawn == ["c0"]


def test_the_last_ask_bounds_the_next_and_what_is_within_stays_bit_for_bit() -> None:
    sent, usual = {"w": vector(30.0)}, Medians()
    held(sent, [{"w": vector(30.0 + step)} for step in (1.0, 2.0, 1e3)], usual)
    assert usual["fit/weights/a"]["w"] == pytest.approx(2.0, rel=1e-4)
    replies = [{"w": vector(30.0 + step)} for step in (1.0, 7.9, 16.0, 160.0)]
    after, told = held(sent, replies, usual)
    assert all(after[k]["w"] is replies[k]["w"] for k in (0, 1))
    # of a bound of 8, twice and twenty times as much
    assert [moved(after[k], sent) for k in (2, 3)] == pytest.approx([4.0, 0.4], rel=1e-3)
    assert told.keys() == {"c2", "c3"}
    assert "weights: 'w' moved 20 times as far as aggregation.clip lets it" in told["c3"]


def test_asks_of_too_few_replies_count_together_and_a_client_once() -> None:
    """As where the server steps after each reply; rows are bounded by nothing else."""
    link, rows = NormClip(Clipping(), {}), torch.eye(4)
    asked = [(0, 1.0), (0, 50.0), (0, 1.0), (1, 2.0), (2, 3.0), (0, 80.0), (3, 2.0)]
    found = list[float]()
    for place, length in asked:
        client, told = info(f"c{place}"), dict[str, str]()
        payload = Payload({"representations": Representations({"text": length * rows}, order="o")})
        (reply,) = link(iter([Received(client, payload)]), ask_of([client], payload.bundles, told=told))
        found.append(float(reply.payload.bundles["representations"]["text"].max()))
        assert len(told) == (length == 80.0)
    assert found == pytest.approx([1.0, 50.0, 1.0, 2.0, 3.0, 0.8, 2.0])  # a bound of 4 x 2; 80 is ten of it
    assert [sorted(clients) for clients in link.few.values()] == [["c0", "c3"]]


@pytest.mark.parametrize("attackers", [(0, 1), (8, 9), (3, 7)])
def test_outliers_are_told_wherever_they_stand_and_nobody_else(attackers: tuple[int, ...]) -> None:
    sent, usual = {"w": vector(30.0)}, Medians()
    replies = [{"w": vector(30.0 + (1e6 if k in attackers else 1.0 + k / 10))} for k in range(10)]
    for _ in range(2):
        after, told = held(sent, replies, usual)
        assert list(told) == [f"c{k}" for k in attackers]
        assert all(moved(after[k], sent) < 0.01 for k in attackers)


def test_before_anything_is_known_weights_move_as_far_as_they_are_long() -> None:
    sent = {"w": vector(10.0), "far": vector(30.0), "new": vector(0.0)}
    back = {"w": -3 * vector(10.0), "far": vector(59.0), "new": vector(15.0)}
    after, told = held(sent, [back])
    assert moved(after[0], sent) == pytest.approx(18.26**2 / 40, rel=1e-3)  # an entry of the model is 9.13 on average
    assert after[0]["far"] is back["far"]
    assert after[0]["new"] is back["new"]
    assert told.keys() == {"c0"}


def test_who_is_alone_with_an_architecture_is_held_as_well() -> None:
    sent = {"w": vector(3.0)}
    usual: list[Tensors] = [{"w": vector(4.0)}] * 6
    after, told = held(sent, [*usual, *[("odd", {"w": vector(1e5)})] * 3])
    assert told.keys() == {"c6", "c7", "c8"}
    # three of one architecture may say what is usual there, and come no farther than the weights are long
    known: Medians = {"fit/weights/odd": {"w": 1e5}}
    after, told = held(sent, [("odd", {"w": vector(1e5)})] * 3, known)
    assert max(moved(one, sent) for one in after) <= 3.0


def test_most_who_do_not_move_disarm_nothing() -> None:
    usual, sent = Medians(), {"w": vector(3.0)}
    for _ in range(2):
        _, told = held(sent, [sent, sent, sent, {"w": vector(1e5)}], usual)
        assert told.keys() == {"c3"}
    assert usual == {}


def test_a_rise_of_all_is_held_once() -> None:
    sent: Tensors = {"w": vector(30.0)}
    usual: Medians = {"fit/weights/a": {"w": 0.01}}
    replies = [{"w": vector(30.0 + step)} for step in (1.0, 2.0, 1.5)]
    assert held(sent, replies, usual)[1].keys() == {"c0", "c1", "c2"}
    assert held(sent, replies, usual)[1] == {}


def test_who_is_shortened_counts_for_less() -> None:
    client, weights = info("c", samples=60), Weights({"w": vector(80.0)})
    ask = ask_of([client], {"weights": Weights({"w": vector(10.0)})})
    sent = Received(client, Payload({"weights": weights, "num_examples": 60}))
    (reply,) = NormClip(Clipping(), {"fit/weights/a": {"w": 1.75}})(iter([sent]), ask)
    assert reply.payload.scalars["num_examples"] == 6  # ten times too long


def test_who_has_more_samples_may_come_farther() -> None:
    sent: Tensors = {"w": vector(300.0)}
    replies = [{"w": vector(300.0 + step)} for step in (1.0, 1.0, 1.0, 20.0)]
    usual: Medians = {"fit/weights/a": {"w": 1.0}}
    assert held(sent, replies, dict(usual), {"c3": 60})[1] == {}
    assert held(sent, replies, dict(usual), {"c3": 10**12})[1] == {}  # as six times the samples
    assert held(sent, replies, dict(usual))[1].keys() == {"c3"}
    replies[3] = {"w": vector(330.0)}
    assert held(sent, replies, dict(usual), {"c3": 10**12})[1].keys() == {"c3"}


def test_statistics_of_normalisation_have_more_room_and_a_bound() -> None:
    sent = {"w": vector(3.0), "norm.running_var": torch.ones(4)}
    usual: Medians = {"fit/weights/a": {"w": 1.0, "norm.running_var": 0.5}}

    def after(variance: float) -> tuple[float, dict[str, str]]:
        replies = [{"w": vector(4.0), "norm.running_var": torch.full((4,), variance)}]
        found, told = held(sent, replies, dict(usual))
        return moved(found[0], sent, "norm.running_var"), told

    assert after(4.0)[1] == {}
    assert after(1e5)[0] < 0.01
    assert "'norm.running_var'" in after(1e5)[1]["c0"]


def test_counters_count_as_usual_and_at_first_the_samples_at_most() -> None:
    sent = {"w": vector(3.0), "n": torch.tensor(10)}
    replies = [{"w": vector(4.0), "n": torch.tensor(n)} for n in (13, 14, 13, 1 << 62)]
    usual = Medians()
    for _ in range(2):
        after, told = held(sent, replies, usual)
        assert [int(one["n"]) for one in after] == [13, 14, 13, 10]
        assert told.keys() == {"c3"}


def changed(steps: Sequence[float], control: float, usual: Medians) -> list[float]:
    """How long changes of control variates are that come so long, to clients that were sent some."""
    clients = [info(f"c{k}") for k in range(len(steps))]
    sent = {"weights": Weights({"w": vector(20.0)}), "controls": Weights({"w": vector(control)} if control else {})}
    replies = (
        Received(client, Payload({"controls": Weights({"w": vector(step)})}))
        for client, step in zip(clients, steps, strict=True)
    )
    passing = NormClip(Clipping(), usual)(replies, ask_of(clients, sent, ("controls",)))
    return [float(reply.payload.bundles["controls"]["w"].norm()) for reply in passing]


def test_changes_wait_for_each_other_while_nothing_is_known_of_them() -> None:
    usual = Medians()
    assert changed([1e6, 300.0, 400.0, 500.0], 0.0, usual) == pytest.approx([1800**2 / 1e6, 300.0, 400.0, 500.0])
    assert changed([300.0, 36000.0], 0.0, usual) == pytest.approx([300.0, 90.0])
    assert changed([1e6, 300.0], 0.0, {}) == pytest.approx([1e6, 300.0])  # of two, nobody can say which is odd


def test_a_change_may_be_as_long_as_what_it_changes_and_as_changes_ever_were() -> None:
    usual: Medians = {"fit/controls/a": {"w": 1.0}}
    assert changed([100.0], 0.0, usual) == pytest.approx([4.0**2 / 100])
    assert changed([50.0], 50.0, usual) == pytest.approx([50.0])
    changed([0.1] * 3, 0.0, usual)
    assert usual == {"fit/controls/a": {"w": 1.0}}


def test_rows_are_clipped_one_by_one_once_they_are_known() -> None:
    clients, usual = [info(f"c{k}") for k in range(3)], Medians()
    rows = ([[1.0, 0.0], [0.0, 8.0]], [[1.0, 0.0], [0.0, 1.0]], [[0.5, 0.0], [0.0, 1.0]])
    link = NormClip(Clipping(), usual)
    for expected in (8.0, 2.0):
        sent = [Payload({"rows": Representations({"image": torch.tensor(own)}, order="here")}) for own in rows]
        replies = [Received(client, payload) for client, payload in zip(clients, sent, strict=True)]
        first, second, _ = link(iter(replies), ask_of(clients))
        bundle = first.payload.bundles["rows"]
        assert isinstance(bundle, Representations)
        assert bundle.order == "here"
        assert bundle["image"].tolist() == [[1.0, 0.0], [0.0, expected]]
        assert second.payload is sent[1]
