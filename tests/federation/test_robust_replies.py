"""Robust rules between a cohort's replies and the method: by type and by tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from asking import ask_of
from torch import Tensor

from polyfed.aggregation.mean import WeightedMean
from polyfed.core.errors import ConfigError, ExchangeError
from polyfed.federation.client import ClientInfo
from polyfed.federation.cohort import Cohort
from polyfed.federation.filters import Checks, Reply, RobustReplies, require_enough
from polyfed.privacy.rules import RobustRule
from polyfed.wire.ledger import Channel, Ledger
from polyfed.wire.messages import Answer, Cause, Request
from polyfed.wire.payload import Payload, Representations, Weights
from polyfed.wire.schema import client_step
from polyfed.wire.transport import Transport


def info(name: str, type_name: str = "a", samples: int = 10) -> ClientInfo:
    return ClientInfo(name, type_name, ("image",), "classification", samples, 5, f"arch-{type_name}")


def rule(name: str, **settings: Any) -> RobustRule:
    return RobustRule.named(name).model_validate(settings)


def combined(name: str, sent: Sequence[tuple[ClientInfo, Payload]], **settings: Any) -> list[tuple[str, Payload]]:
    replies = RobustReplies(rule(name, **settings))(received(sent), ask_of([client for client, _ in sent]))
    return [(reply.client.id, reply.payload) for reply in replies]


def received(sent: Iterable[tuple[ClientInfo, Payload]]) -> Iterator[Reply]:
    return (Reply.received(payload, client) for client, payload in sent)


def weights(*values: float) -> list[tuple[ClientInfo, Payload]]:
    bundles = [Weights({"w": torch.full((2,), value)}) for value in values]
    return [(info(f"c{k}"), Payload({"weights": own, "num_examples": 10})) for k, own in enumerate(bundles)]


def test_every_reply_leaves_with_what_stands_for_its_type() -> None:
    sent = weights(1.0, 2.0, 90.0)
    others = [
        (info(f"d{k}", "b"), Payload({"weights": Weights({"v": torch.full((3,), value)}), "num_examples": 5}))
        for k, value in enumerate((-7.0, 4.0, 6.0))
    ]
    result = combined("median", [*sent, *others])
    assert [name for name, _ in result] == ["c0", "c1", "c2", "d0", "d1", "d2"]
    assert [payload.bundles["weights"]["w"].tolist() for _, payload in result[:3]] == [[2.0, 2.0]] * 3
    assert [payload.bundles["weights"]["v"].tolist() for _, payload in result[3:]] == [[4.0] * 3] * 3
    assert [payload.scalars["num_examples"] for _, payload in result] == [10, 10, 10, 5, 5, 5]


def test_any_mean_of_the_replies_is_the_rules_result() -> None:
    mean = WeightedMean()
    for k, (_, payload) in enumerate(combined("median", weights(0.1, 0.7, 1e6, 0.3, 0.2))):
        mean.add(payload.bundles["weights"], weight=3 * k + 1)
    assert mean.result()["w"].tolist() == pytest.approx([0.3, 0.3])


def test_types_leave_as_soon_as_their_last_client_has_replied() -> None:
    clients = [info("a0"), info("b0", "b"), info("a1"), info("a2"), info("b1", "b"), info("b2", "b")]
    drawn = []

    def replies() -> Iterator[tuple[ClientInfo, Payload]]:
        for client in clients:
            drawn.append(client.id)
            yield client, Payload({"weights": Weights({"w": torch.ones(1)})})

    left = RobustReplies(rule("median"))(received(replies()), ask_of(clients))
    assert [next(left).client.id for _ in range(3)] == ["a0", "a1", "a2"]
    assert drawn == ["a0", "b0", "a1", "a2"]
    assert [reply.client.id for reply in left] == ["b0", "b1", "b2"]


def test_counters_are_the_median_of_what_was_counted() -> None:
    bundles = [Weights({"w": torch.ones(1), "n": torch.tensor(count)}) for count in (7, 8, 1 << 60)]
    sent = [(info(f"c{k}"), Payload({"weights": own})) for k, own in enumerate(bundles)]
    for name in ("median", "geometric_median"):
        (_, payload), *_ = combined(name, sent)
        assert payload.bundles["weights"]["n"] == torch.tensor(8)
        assert payload.bundles["weights"]["n"].dtype == torch.int64


def test_half_precision_is_combined_in_full_and_stays_what_it_was() -> None:
    values = (60000.0, 60000.0, 60000.0, 1.0, 60000.0)
    bundles = [Weights({"w": torch.tensor([value], dtype=torch.float16)}) for value in values]
    sent = [(info(f"c{k}"), Payload({"weights": own})) for k, own in enumerate(bundles)]
    (_, payload), *_ = combined("trimmed_mean", sent)
    assert payload.bundles["weights"]["w"].tolist() == [60000.0]
    assert payload.bundles["weights"]["w"].dtype == torch.float16


def test_rows_keep_their_kind_and_order() -> None:
    rows = torch.nn.functional.normalize(torch.ones(4, 3), dim=1)
    bundles = [Representations({"image": sign * rows}, order="here") for sign in (1, 1, -1)]
    sent = [(info(f"c{k}"), Payload({"representations": own})) for k, own in enumerate(bundles)]
    (_, payload), *_ = combined("median", sent)
    bundle = payload.bundles["representations"]
    assert isinstance(bundle, Representations)
    assert bundle.order == "here"
    torch.testing.assert_close(bundle["image"], rows)


def test_clients_of_a_type_that_send_other_tensors_are_named() -> None:
    sent = weights(1.0, 2.0, 3.0)
    sent[1] = (sent[1][0], Payload({"weights": Weights({"other": torch.ones(2)})}))
    with pytest.raises(ExchangeError, match="weights of c1 have other tensors than those of c0"):
        combined("median", sent)


def test_replies_without_tensors_pass() -> None:
    sent = [(info("c0"), Payload({"loss": 1.0}))]
    assert combined("krum", sent) == [("c0", sent[0][1])]


# ---- too few clients


@pytest.mark.parametrize(("name", "needed"), [("median", 3), ("krum", 5)])
def test_a_type_with_too_few_replies_is_named_with_its_clients(name: str, needed: int) -> None:
    with pytest.raises(ExchangeError, match=rf"'{name}' that tolerates 1 of 2 .* needs {needed} .* 2 \(c0, c1\)"):
        combined(name, weights(1.0, 2.0))


def test_what_is_needed_goes_by_those_who_were_asked() -> None:
    sent = weights(*range(10))
    robust, ask = RobustReplies(rule("krum")), ask_of([client for client, _ in sent])
    # two of ten asked may be false, and who has not replied may be honest
    with pytest.raises(ExchangeError, match="tolerates 2 of 10 clients of a type needs 7 replies"):
        list(robust(received(sent[:6]), ask))
    assert len(list(robust(received(sent[:7]), ask))) == 7


def test_a_cohort_with_too_few_of_a_type_is_refused_beforehand() -> None:
    clients = [*(info(f"c{k}") for k in range(5)), info("d0", "b"), info("d1", "b")]
    with pytest.raises(ConfigError, match=r"round 4: .*type 'b' has 2 \(d0, d1\); ask more clients"):
        require_enough(rule("median"), clients, "round 4")
    require_enough(rule("median"), clients[:5], "round 4")
    with pytest.raises(ConfigError, match=r"'krum' that tolerates 2 of 5 .* needs 7 replies of it, and type 'a' has 5"):
        require_enough(rule("krum", tolerated=2), clients[:5], "round 4")


# ---- in a cohort


@client_step(weights=Weights)
def step(self: object, client: object, weights: Weights) -> Reply:
    raise AssertionError("the engine of the test answers")


def asked(answers: Mapping[str, float | None], **options: Any) -> tuple[list[Tensor], Cohort]:
    def exchange(requests: Sequence[Request], deadline: float | None) -> Iterator[Answer]:
        for request in requests:
            value = answers[request.client]
            tensors = Payload({"weights": Weights({"w": torch.full((2,), value or 0.0)})})
            lost = Answer.failed(request.client, Cause.LOST, "gone")
            yield lost if value is None else Answer(request.client, tensors)

    cohort = Cohort(tuple(map(info, answers)), 1, Channel(exchange, Transport(), Ledger()), **options)
    return [reply.weights["w"] for reply in cohort.ask(step, weights=Weights({"w": torch.zeros(2)}))], cohort


def test_a_cohort_gives_its_method_robust_replies() -> None:
    filters = (Checks(), RobustReplies(rule("median")))
    replies, cohort = asked({"a": 1.0, "b": 2.0, "c": -900.0, "d": None}, filters=filters)
    assert [w.tolist() for w in replies] == [[1.0, 1.0]] * 3
    assert set(cohort.accepted) == {"a", "b", "c"}
    assert [client.id for client in cohort.clients] == ["a", "b", "c"]
