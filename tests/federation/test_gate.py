"""What the gate compares a reply with where its own architecture and ask say little."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

from polyfed.federation.bounds import Bounds
from polyfed.federation.client import ClientInfo
from polyfed.federation.gate import Arrival, Medians, ReplyGate
from polyfed.federation.norms import SENT, SIZE, WHOLE
from polyfed.wire.payload import Payload, Weights

Tensors = Mapping[str, Tensor]


def info(name: str, architecture: str = "a") -> ClientInfo:
    return ClientInfo(name, "g", ("image",), "classification", 10, architecture)


def vector(length: float, entries: int = 4) -> Tensor:
    return torch.full((entries,), length / entries**0.5)


def judged(
    sent: Tensors, replies: Sequence[Tensors | tuple[str, Tensors]], known: Medians | None = None, **reach: float
) -> list[Arrival]:
    """Replies to weights that are the same for all; some with an architecture."""
    named = [one if isinstance(one, tuple) else ("a", one) for one in replies]
    clients = [info(f"c{k}", architecture) for k, (architecture, _) in enumerate(named)]
    gate = ReplyGate(Bounds(), "fit", clients, {} if known is None else known, lambda client, name: sent, reaches=reach)
    pairs = zip(clients, named, strict=True)
    return list(gate.passed([gate.arrival(one, Payload({"weights": Weights(new)})) for one, (_, new) in pairs]))


def touched(arrivals: Sequence[Arrival]) -> list[str]:
    """Who was refused or shortened."""
    return [one.client.id for one in arrivals if one.refused or one.shortened]


def test_who_is_alone_with_an_architecture_is_compared_with_all_that_have_the_tensor() -> None:
    sent = {"encoder": vector(3.0), "head": vector(1.0), "other": vector(1.0, 9)}
    usual = [{"encoder": vector(4.0), "head": vector(1.5)} for _ in range(4)]
    honest = ("odd", {"encoder": vector(5.0), "other": vector(4.0, 9)})
    assert touched(judged(sent, [*usual, honest])) == []
    assert judged(sent, [*usual, ("odd", {"encoder": vector(103.0), "other": vector(1.0, 9)})])[4].refused
    part = judged(sent, [*usual, ("odd", {"encoder": vector(9.0), "other": vector(1.0, 9)})])[4]
    assert "'encoder'" in str(part.shortened)
    assert float(part.payload.bundles["weights"]["encoder"].norm()) == pytest.approx(7.0)
    own = judged(sent, [*usual, ("odd", {"encoder": vector(4.0), "other": vector(1e4, 9)})])[4]
    assert own.refused  # a tensor that nobody else has


def test_three_who_share_an_architecture_are_held_to_all_in_what_all_have() -> None:
    sent = {"encoder": vector(3.0)}
    usual: list[Tensors] = [{"encoder": vector(4.0)}] * 6
    liars = [("odd", {"encoder": vector(1e5)})] * 3
    after = judged(sent, [*usual, *liars])
    assert touched(after) == ["c6", "c7", "c8"]
    assert float(after[6].payload.bundles["weights"]["encoder"].norm()) == pytest.approx(3.0 + 16.0)


def test_what_was_usual_last_holds_where_few_replies_arrive() -> None:
    known: Medians = {}
    sent = {"w": vector(3.0)}
    assert touched(judged(sent, [{"w": vector(4.0)}] * 3, known)) == []
    assert touched(judged(sent, [{"w": vector(4.0)}, {"w": vector(1e5)}], known)) == ["c1"]
    assert touched(judged(sent, [{"w": vector(1e5)}], known)) == ["c0"]


@pytest.mark.parametrize("is_known", [True, False])
def test_most_who_do_not_move_disarm_nothing(is_known: bool) -> None:
    known: Medians = {"fit/weights/a": {"w": 1.0, WHOLE: 1.0, SIZE: 4.0}} if is_known else {}
    sent = {"w": vector(3.0)}
    assert touched(judged(sent, [sent, sent, sent, {"w": vector(4.0)}], known)) == []
    assert touched(judged(sent, [sent, sent, sent, {"w": vector(1e5)}], known)) == ["c3"]


def test_weights_that_start_near_zero_are_as_long_as_their_updates() -> None:
    sent = {"w": vector(0.01)}
    assert touched(judged(sent, [{"w": vector(1.0)}] * 3 + [{"w": vector(2.5)}])) == []
    far = {"w": vector(10.0)}
    assert touched(judged(far, [{"w": vector(13.0)}] * 3 + [{"w": -3 * vector(10.0)}])) == ["c3"]


def test_statistics_of_normalisation_have_more_room_and_a_bound() -> None:
    sent = {"w": vector(3.0), "norm.running_var": vector(1.0)}

    def after(variance: float) -> Arrival:
        usual = [{"w": vector(4.0), "norm.running_var": vector(2.0)}] * 3
        return judged(sent, [*usual, {"w": vector(4.0), "norm.running_var": vector(variance)}])[3]

    assert touched([after(11.0)]) == []
    bounded = after(1e5)
    assert "running_var" in str(bounded.shortened)
    assert float(bounded.payload.bundles["weights"]["norm.running_var"].norm()) == pytest.approx(1.0 + 16.0)


def test_a_large_client_is_refused_only_beyond_what_its_samples_allow() -> None:
    sent = {"w": vector(10.0)}
    usual: list[Tensors] = [{"w": vector(11.0)}] * 4
    assert touched(judged(sent, [*usual, {"w": vector(19.0)}], c4=6.0)) == []
    assert touched(judged(sent, [*usual, {"w": vector(19.0)}])) == ["c4"]
    refused = judged(sent, [*usual, {"w": vector(60.0)}], c4=6.0)[4].refused
    assert "for one of 6 times the usual samples" in str(refused)


def test_weights_that_point_away_from_what_was_sent_have_no_more_room_for_their_samples() -> None:
    sent = {"w": vector(10.0)}
    usual: list[Tensors] = [{"w": torch.tensor([9.0, 5.0, 1.0, 5.0])}] * 4
    assert judged(sent, [*usual, {"w": -3 * vector(10.0)}], c4=6.0)[4].refused


def test_what_was_sent_is_measured_and_never_bounded() -> None:
    known: Medians = {}
    judged({"w": vector(3.0)}, [{"w": vector(4.0)}] * 3, known)
    assert SENT not in known["fit/weights/a"]
