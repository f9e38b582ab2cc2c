"""What is usual in a cohort, and what becomes of clients that do otherwise."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from polyfed.core.errors import ConfigError, PayloadError
from polyfed.core.settings import parse_settings
from polyfed.federation.bounds import Bounds, counted, reaches
from polyfed.federation.client import ClientInfo
from polyfed.federation.gate import Arrival, Medians, ReplyGate, WaitingRoom
from polyfed.federation.norms import ALONG, SENT, SIZE, WHOLE, clipped, excess, median_norms, update_norms
from polyfed.runs.experiment import RunSettings
from polyfed.wire.limits import Limits
from polyfed.wire.payload import Payload, Weights

ZERO = {"w": torch.zeros(4), "n": torch.tensor(10)}


def info(name: str, samples: int = 10, architecture: str = "a") -> ClientInfo:
    return ClientInfo(name, "g", ("image",), "classification", samples, architecture)


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
    clients = [info("pictures", 50_000, "image"), *texts]
    assert counted(clients, 6.0)["pictures"] == 50_000
    assert reaches(clients, 6.0)["pictures"] == 1.0


def test_who_has_more_samples_may_come_farther() -> None:
    clients = [info(str(k), n) for k, n in enumerate([5, 10, 10, 35, 10**12])]
    assert list(reaches(clients, 6.0).values()) == [1.0, 1.0, 1.0, 3.5, 6.0]
    assert reaches(clients[:2], 6.0) == {"0": 1.0, "1": 1.0}


# ---- how long updates are


def test_lengths_are_norms_of_what_moved() -> None:
    new = {"w": torch.tensor([3.0, 4.0, 0.0, 0.0]), "v": torch.tensor([12.0]), "n": torch.tensor(17)}
    assert update_norms(new, ZERO) == {"w": 5.0, "v": 12.0, "n": 7.0, WHOLE: 13.0, SIZE: 13.0, SENT: 0.0, ALONG: 1.0}


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
    with pytest.raises(PayloadError, match=reason):
        update_norms(new, ZERO)


def moved(length: float, counter: float = 3.0) -> dict[str, float]:
    return {"w": length, "n": counter, WHOLE: length}


def test_what_is_usual_is_the_median_of_three_at_least() -> None:
    seen = [moved(1.0), moved(2.0), moved(1e6, 1e18)]
    assert median_norms(seen, {"w": 4}) == {"w": 2.0, "n": 3.0, WHOLE: 2.0}
    assert median_norms(seen[1:], {"w": 4}) == {}
    assert median_norms([moved(0.0), moved(0.0), moved(1.0)], {"w": 4}) == {}  # most do not move at all


def test_a_tensor_that_most_leave_alone_may_move_as_far_as_entries_do_on_average() -> None:
    seen = [{"w": 3.0, "b": 0.0, WHOLE: 3.0}] * 3
    assert median_norms(seen, {"w": 8, "b": 1})["b"] == pytest.approx(1.0)


def test_an_update_is_shortened_as_a_whole_and_in_its_parts() -> None:
    new = {"w": torch.full((4,), 8.0), "n": torch.tensor(110)}  # 16 long, 100 counted
    found = clipped(new, ZERO, update_norms(new, ZERO), {"w": 2.0, "n": 5.0, WHOLE: 2.0}, most=4)
    assert torch.equal(found["w"], torch.full((4,), 4.0))
    assert int(found["n"]) == 10 + 20
    part = clipped(new, ZERO, update_norms(new, ZERO), {"w": 1.0, "n": 50.0, WHOLE: 100.0}, most=4)
    assert torch.equal(part["w"], torch.full((4,), 2.0))
    assert part["n"] is new["n"]  # within its bound


def test_the_farthest_tensor_is_named() -> None:
    assert excess({"a": 5.0, "b": 9.0, WHOLE: 10.0}, {"a": 1.0, "b": 3.0, WHOLE: 10.0}) == (5.0, "a")


def test_bounds_must_be_in_order() -> None:
    with pytest.raises(ConfigError, match=r"refuse is 2, below update \(4\)"):
        parse_settings(RunSettings, {"rounds": 1, "bounds": {"refuse": 2}})


# ---- the gate


def passed(
    steps: list[float], known: Medians | None = None, waiting: int = 1 << 30, **bounds: float | None
) -> list[Arrival]:
    clients = [info(f"c{k}") for k in range(len(steps))]
    settings = Bounds(waiting=waiting, **{"size": None} | bounds)
    gate = ReplyGate(settings, "fit", clients, {} if known is None else known, lambda client, name: ZERO)
    payloads = [
        Payload({"weights": Weights({"w": torch.full((4,), step / 2), "n": torch.tensor(12)}), "loss": 1.0})
        for step in steps
    ]
    pairs = zip(clients, payloads, strict=True)
    return list(gate.passed(gate.arrival(client, payload) for client, payload in pairs))


def first_entries(arrivals: list[Arrival]) -> list[float]:
    return [float(one.payload.bundles["weights"]["w"][0]) for one in arrivals]


@pytest.mark.parametrize("attackers", [(0, 1), (8, 9), (3, 7)])
def test_outliers_are_named_wherever_they_stand_and_nobody_else(attackers: tuple[int, ...]) -> None:
    steps = [1e6 if k in attackers else 1.0 + k / 10 for k in range(10)]
    found = passed(steps)
    assert [one.client.id for one in found] == [f"c{k}" for k in range(10)]
    assert [k for k, one in enumerate(found) if one.refused] == list(attackers)
    assert "run.bounds.refuse is 8" in str(found[attackers[0]].refused)
    honest = [k for k in range(10) if k not in attackers]
    assert [first_entries(found)[k] for k in honest] == [pytest.approx(steps[k] / 2) for k in honest]
    assert not any(one.shortened for one in found)


def test_between_the_two_bounds_an_update_is_shortened_and_said_so() -> None:
    found = passed([1.0, 1.0, 1.0, 6.0])
    assert first_entries(found) == [0.5, 0.5, 0.5, 2.0]
    assert found[3].refused is None
    assert "6 times as long as usual in its cohort, run.bounds.update is 4" in str(found[3].shortened)


def test_weights_far_longer_than_the_others_are_refused_whatever_their_update() -> None:
    sent = {"w": torch.full((4,), 1.0), "running_var": torch.ones(2)}
    clients = [info(f"c{k}") for k in range(5)]
    gate = ReplyGate(Bounds(), "fit", clients, {}, lambda client, name: sent)
    new = [torch.full((4,), value) for value in (2.0, 2.1, 1.9, 2.0, -3.0)]  # updates of 1 and, the last, 4
    payloads = [Payload({"weights": Weights({"w": w, "running_var": torch.ones(2) * 50})}) for w in new]
    pairs = zip(clients, payloads, strict=True)
    found = list(gate.passed([gate.arrival(client, payload) for client, payload in pairs]))
    assert [one.refused for one in found] == [None] * 5
    gate = ReplyGate(Bounds(size=1.4), "fit", clients, {}, lambda client, name: sent)
    found = list(
        gate.passed([gate.arrival(client, payload) for client, payload in zip(clients, payloads, strict=True)])
    )
    assert [bool(one.refused) for one in found] == [False] * 4 + [True]
    assert "they are 1.5 times as long as usual in its cohort, run.bounds.size is 1.4" in str(found[4].refused)


def test_a_minority_that_does_nothing_takes_nobodys_room() -> None:
    found = passed([0.0, 0.0, 0.0, 1.0, 1.2, 0.9, 1.1])
    assert not any(one.refused or one.shortened for one in found)


def test_without_bounds_or_with_too_few_to_compare_all_pass() -> None:
    assert not any(one.refused for one in passed([1.0, 1.0, 1.0, 1e6], update=None, refuse=None, size=None))
    assert not any(one.refused for one in passed([1.0, 1e6]))


def test_what_is_as_usual_passes_at_once_and_what_is_not_waits() -> None:
    known: Medians = {"fit/weights/a": {"w": 1.0, "n": 2.0, WHOLE: 1.0, SIZE: 1.0}}
    clients = [info(f"c{k}") for k in range(4)]
    gate = ReplyGate(Bounds(), "fit", clients, known, lambda client, name: ZERO)
    seen: list[str] = []

    def arriving(steps: list[float]) -> Iterator[Arrival]:
        for client, step in zip(clients, steps, strict=True):
            seen.append(client.id)
            weights = Weights({"w": torch.full((4,), step / 2), "n": torch.tensor(12)})
            yield gate.arrival(client, Payload({"weights": weights}))

    through = gate.passed(arriving([1.0, 50.0, 1.0, 1.0]))
    assert next(through).client.id == "c0"
    assert seen == ["c0"]
    assert [one.client.id for one in through if one.refused is None] == ["c2", "c3"]
    assert known["fit/weights/a"][WHOLE] == 1.0


def test_a_rise_of_all_is_not_held_against_anybody() -> None:
    known: Medians = {"fit/weights/a": {"w": 0.01, "n": 2.0, WHOLE: 0.01, SIZE: 0.01}}  # a warm-up
    assert not any(one.refused or one.shortened for one in passed([1.0, 2.0, 1.5], known))


@pytest.mark.parametrize("folder", [True, False])
def test_replies_that_wait_in_a_file_come_back_bit_for_bit(
    tmp_path: Path, folder: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Mock(wraps=tempfile.TemporaryFile)
    monkeypatch.setattr(tempfile, "TemporaryFile", opened)
    room = WaitingRoom(100, tmp_path if folder else None)
    tensors = {"w": torch.randn(50), "n": torch.tensor(3), "t": torch.randn(4, 4).t(), "e": torch.zeros(0)}
    sent = [Arrival(info(f"c{k}"), Payload({"weights": Weights(tensors), "loss": 0.5}), {}) for k in range(3)]
    for one in sent:
        room.add(one)
    for before, after in zip(sent, room.leaving(), strict=True):
        assert after.client == before.client
        assert after.payload.scalars == before.payload.scalars
        for name, value in tensors.items():
            assert torch.equal(after.payload.bundles["weights"][name], value)
    assert room.is_empty
    assert opened.call_count == 1  # of handles a process has few
    assert list(tmp_path.iterdir()) == []


def test_where_replies_wait_changes_nothing() -> None:
    steps = [1.0, 3.0, 2.0, 11.0, 1e6]
    assert first_entries(passed(steps, waiting=0)) == first_entries(passed(steps))


def test_a_change_is_shortened_and_may_be_as_long_as_what_it_changes() -> None:
    clients = [info(f"c{k}") for k in range(4)]
    for length, allowed in ((0.0, 4.0), (50.0, 100.0)):
        control = {"w": torch.full((4,), length / 2)}
        gate = ReplyGate(Bounds(), "fit", clients, {}, lambda client, name, sent=control: sent, changes=("controls",))
        changes = [Payload({"controls": Weights({"w": torch.full((4,), step / 2)})}) for step in (1.0, 1.0, 1.0, 100.0)]
        pairs = zip(clients, changes, strict=True)
        found = list(gate.passed([gate.arrival(client, payload) for client, payload in pairs]))
        assert not any(one.refused for one in found)
        assert float(found[3].payload.bundles["controls"]["w"].norm()) == pytest.approx(allowed)


def test_a_negative_variance_is_refused() -> None:
    payload = Payload({"weights": Weights({"norm.running_var": torch.tensor([1.0, -0.5])})})
    with pytest.raises(PayloadError, match=r"'norm.running_var' has a variance of -0.5"):
        payload.require_sound(Limits())
