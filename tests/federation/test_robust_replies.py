"""Robust rules between a cohort's replies and the method: by type and by tensor, streaming and buffered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from polyfed.aggregation.mean import WeightedMean
from polyfed.aggregation.prototypes import ClassMeans, by_space, prototype_tensors
from polyfed.aggregation.robust_rule import RobustRule
from polyfed.core.errors import ConfigError, ExchangeError
from polyfed.federation.bounds import Bounds
from polyfed.federation.client import ClientInfo
from polyfed.federation.cohort import Cohort, Reply
from polyfed.federation.robust_replies import RobustReplies, require_enough
from polyfed.wire.ledger import Ledger
from polyfed.wire.messages import Answer, Request
from polyfed.wire.payload import Payload, Prototypes, Representations, Weights
from polyfed.wire.schema import client_step
from polyfed.wire.transport import Transport

FREE = Bounds(update=None, refuse=None, size=None, weight=None)


def info(name: str, kind: str = "a", samples: int = 10) -> ClientInfo:
    return ClientInfo(name, kind, ("image",), "classification", samples, f"arch-{kind}")


def rule(name: str, **settings: Any) -> RobustRule:
    made = RobustRule.named(name).model_validate(settings)
    assert isinstance(made, RobustRule)
    return made


def combined(
    name: str, sent: Sequence[tuple[ClientInfo, Payload]], start: Mapping[str, Tensor] | None = None, **settings: Any
) -> list[tuple[str, Payload]]:
    robust = RobustReplies(
        rule(name, **settings), "fit", [client for client, _ in sent], {}, lambda client, field: start or {}
    )
    return [(client.id, payload) for client, payload in robust.combined(sent)]


def weights(*values: float) -> list[tuple[ClientInfo, Payload]]:
    return [
        (info(f"c{k}"), Payload({"weights": Weights({"w": torch.full((2,), value)}), "num_examples": 10}))
        for k, value in enumerate(values)
    ]


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

    robust = RobustReplies(rule("median"), "fit", clients, {}, lambda client, field: {})
    left = robust.combined(replies())
    assert [next(left)[0].id for _ in range(3)] == ["a0", "a1", "a2"]
    assert drawn == ["a0", "b0", "a1", "a2"]
    assert [client.id for client, _ in left] == ["b0", "b1", "b2"]


def test_counters_are_the_median_of_what_was_counted() -> None:
    sent = [
        (info(f"c{k}"), Payload({"weights": Weights({"w": torch.ones(1), "n": torch.tensor(count)})}))
        for k, count in enumerate((7, 8, 1 << 60))
    ]
    for name in ("median", "geometric_median"):
        (_, payload), *_ = combined(name, sent)
        assert payload.bundles["weights"]["n"] == torch.tensor(8)
        assert payload.bundles["weights"]["n"].dtype == torch.int64


def test_half_precision_is_combined_in_full_and_stays_what_it_was() -> None:
    sent = [
        (info(f"c{k}"), Payload({"weights": Weights({"w": torch.tensor([value], dtype=torch.float16)})}))
        for k, value in enumerate((60000.0, 60000.0, 60000.0, 1.0, 60000.0))
    ]
    (_, payload), *_ = combined("trimmed_mean", sent)
    assert payload.bundles["weights"]["w"].tolist() == [60000.0]
    assert payload.bundles["weights"]["w"].dtype == torch.float16


def test_rows_keep_their_kind_and_order() -> None:
    rows = torch.nn.functional.normalize(torch.ones(4, 3), dim=1)
    sent = [
        (info(f"c{k}"), Payload({"representations": Representations({"image": sign * rows}, order="here")}))
        for k, sign in enumerate((1, 1, -1))
    ]
    for name in ("median", "agreement"):
        (_, payload), *_ = combined(name, sent)
        bundle = payload.bundles["representations"]
        assert isinstance(bundle, Representations)
        assert bundle.order == "here"
        torch.testing.assert_close(bundle["image"], rows)


def prototypes(means: Sequence[float], labels: Sequence[int]) -> Payload:
    present = torch.zeros(4, dtype=torch.bool)
    present[list(labels)] = True
    counts = torch.arange(1, len(labels) + 1, dtype=torch.int32)
    own = ClassMeans(torch.tensor([[value, 0.0] for value in means]), counts, present)
    return Payload({"prototypes": Prototypes(prototype_tensors("space", own))})


def test_prototypes_are_combined_class_by_class_and_rare_classes_are_left_out() -> None:
    sent = [
        (info("c0"), prototypes([1.0, 5.0], [0, 2])),
        (info("c1"), prototypes([2.0, 6.0, 3.0], [0, 2, 3])),
        (info("c2"), prototypes([-90.0, 7.0], [0, 2])),
        (info("c3"), prototypes([4.0], [3])),
    ]
    result = dict(combined("median", sent, tolerated=1))
    first = by_space(result["c0"].bundles["prototypes"], ClassMeans)["space"]
    assert first.means[:, 0].tolist() == [1.0, 6.0]
    assert first.counts.tolist() == [1, 2]
    # two clients have class 3, the median against one false client needs three
    second = by_space(result["c1"].bundles["prototypes"], ClassMeans)["space"]
    assert second.present.tolist() == [True, False, True, False]
    assert second.counts.tolist() == [1, 2]
    assert not result["c3"].bundles["prototypes"]


def test_prototypes_without_a_class_that_enough_have_stop_the_round() -> None:
    sent = [(info(f"c{k}"), prototypes([1.0], [k])) for k in range(3)]
    with pytest.raises(ExchangeError, match="'median' needs 3 clients of a type with a class"):
        combined("median", sent, tolerated=1)


def test_clients_of_a_type_that_send_other_tensors_are_named() -> None:
    sent = weights(1.0, 2.0, 3.0)
    sent[1] = (sent[1][0], Payload({"weights": Weights({"other": torch.ones(2)})}))
    with pytest.raises(ExchangeError, match="weights of c1 have other tensors than those of c0"):
        combined("median", sent)


def test_replies_without_tensors_pass() -> None:
    sent = [(info("c0"), Payload({"loss": 1.0}))]
    assert combined("krum", sent) == [("c0", sent[0][1])]


# ---- too few clients


@pytest.mark.parametrize(("name", "needed"), [("median", 3), ("krum", 5), ("clip", 3)])
def test_a_type_with_too_few_replies_is_named_with_its_clients(name: str, needed: int) -> None:
    with pytest.raises(
        ExchangeError, match=rf"'{name}' that tolerates 1 of 2 clients .* needs {needed} .* 2 \(c0, c1\)"
    ):
        combined(name, weights(1.0, 2.0))


def test_what_is_needed_goes_by_those_who_were_asked() -> None:
    sent = weights(*range(10))
    robust = RobustReplies(rule("krum"), "fit", [client for client, _ in sent], {}, lambda client, field: {})
    # two of ten asked may be false, and who has not replied may be honest
    with pytest.raises(ExchangeError, match="tolerates 2 of 10 clients of a type needs 7 replies"):
        list(robust.combined(sent[:6]))
    assert len(list(robust.combined(sent[:7]))) == 7


def test_a_cohort_with_too_few_of_a_type_is_refused_beforehand() -> None:
    clients = [*(info(f"c{k}") for k in range(5)), info("d0", "b"), info("d1", "b")]
    with pytest.raises(ConfigError, match=r"round 4: .*type 'b' has 2 \(d0, d1\); ask more clients"):
        require_enough(rule("median"), clients, "round 4")
    require_enough(rule("median"), clients[:5], "round 4")
    with pytest.raises(ConfigError, match=r"'krum' that tolerates 2 of 5 .* needs 7 replies of it, and type 'a' has 5"):
        require_enough(rule("krum", tolerated=2), clients[:5], "round 4")


# ---- clipping


def lengths(result: Sequence[tuple[str, Payload]], start: float = 0.0) -> list[float]:
    return [float((payload.bundles["weights"]["w"] - start).norm()) for _, payload in result]


def test_updates_are_clipped_to_the_median_and_short_ones_stay_bit_for_bit() -> None:
    start = {"w": torch.full((2,), 5.0)}
    sent = weights(5.1, 5.3, 4.8, 90.0, -90.0)
    result = combined("clip", sent, start)
    usual = 0.3 * 2**0.5
    assert lengths(result, 5.0) == pytest.approx([0.1 * 2**0.5, usual, 0.2 * 2**0.5, usual, usual], rel=1e-4)
    for k in (0, 2):
        assert result[k][1].bundles["weights"]["w"].equal(sent[k][1].bundles["weights"]["w"])
    assert lengths(combined("clip", sent, start, times=2.0), 5.0)[3] == pytest.approx(2 * usual, rel=1e-4)


def test_the_next_round_streams_with_the_median_of_the_last() -> None:
    known: dict[str, dict[str, float]] = {}
    sent = weights(1.0, 2.0, 3.0)
    robust = [
        RobustReplies(rule("clip"), "fit", [client for client, _ in sent], known, lambda client, field: {})
        for _ in range(2)
    ]
    list(robust[0].combined(sent))
    assert known == {"clip fit/weights/arch-a": {"w": pytest.approx(2 * 2**0.5)}}
    drawn = []

    def replies() -> Iterator[tuple[ClientInfo, Payload]]:
        for client, payload in weights(50.0, 60.0, 70.0):
            drawn.append(client.id)
            yield client, payload

    left = robust[1].combined(replies())
    assert lengths([("", next(left)[1])]) == pytest.approx([2 * 2**0.5])
    assert drawn == ["c0"]
    list(left)
    assert known == {"clip fit/weights/arch-a": {"w": pytest.approx(60 * 2**0.5)}}


def test_rows_are_clipped_one_by_one() -> None:
    sent = [
        (info(f"c{k}"), Payload({"representations": Representations({"image": torch.tensor(rows)}, order="")}))
        for k, rows in enumerate(([[1.0, 0.0], [0.0, 9.0]], [[1.0, 0.0], [0.0, 1.0]], [[0.5, 0.0], [0.0, 1.0]]))
    ]
    result = combined("clip", sent)
    assert result[0][1].bundles["representations"]["image"].tolist() == [[1.0, 0.0], [0.0, 1.0]]
    assert result[2][1].bundles["representations"]["image"].tolist() == [[0.5, 0.0], [0.0, 1.0]]


@pytest.mark.parametrize(
    ("samples", "expected"), [("claimed", [4, 8, 300]), ("capped", [4, 8, 8]), ("equal", [104] * 3)]
)
def test_clients_count_as_they_claim_at_most_as_the_median_or_alike(samples: str, expected: list[int]) -> None:
    sent = [
        (info(f"c{k}", samples=n), Payload({"weights": Weights({"w": torch.ones(1)}), "num_examples": n}))
        for k, n in enumerate((4, 8, 300))
    ]
    result = combined("clip", sent, samples=samples)
    assert [payload.scalars["num_examples"] for _, payload in result] == expected


# ---- in a cohort


@client_step(weights=Weights)
def step(self: object, client: object, weights: Weights) -> Reply:
    raise AssertionError("the engine of the test answers")


def asked(answers: Mapping[str, float | None], **options: Any) -> tuple[list[Reply], Cohort]:
    def exchange(requests: Sequence[Request], deadline: float | None) -> Iterator[Answer]:
        for request in requests:
            value = answers[request.client]
            tensors = Payload({"weights": Weights({"w": torch.full((2,), value or 0.0)})})
            yield Answer(request.client, tensors) if value is not None else Answer(request.client, error="gone")

    cohort = Cohort(tuple(map(info, answers)), exchange, 1, Transport(), Ledger(), bounds=FREE, **options)
    return list(cohort.ask(step, weights=Weights({"w": torch.zeros(2)}))), cohort


def test_a_cohort_gives_its_method_robust_replies() -> None:
    replies, cohort = asked({"a": 1.0, "b": 2.0, "c": -900.0, "d": None}, robust=rule("median"))
    assert [reply.weights["w"].tolist() for reply in replies] == [[1.0, 1.0]] * 3
    assert set(cohort.accepted) == {"a", "b", "c"}
    assert [client.id for client in cohort.clients] == ["a", "b", "c"]


def test_a_cohort_without_a_rule_hands_on_the_very_tensors() -> None:
    sent = {"a": 1.0, "b": 2.0}
    replies, cohort = asked(sent)
    assert [reply.weights["w"].tolist() for reply in replies] == [[1.0, 1.0], [2.0, 2.0]]
    assert not any(key.startswith("clip") for key in cohort.medians)


def test_too_few_usable_replies_stop_the_round() -> None:
    with pytest.raises(ExchangeError, match=r"type 'a' has 2 \(a, b\)"):
        asked({"a": 1.0, "b": 2.0, "c": None}, robust=rule("median"))
