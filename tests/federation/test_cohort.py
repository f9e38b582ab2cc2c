"""Cohorts: asking, excluding, sampling."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
import torch

from polyfed.errors import ConfigError, ExchangeError, PayloadError
from polyfed.federation.client import ClientInfo
from polyfed.federation.cohort import Answer, Cohort, Reply, SamplingSettings, each
from polyfed.federation.ledger import Ledger, Transport
from polyfed.federation.payload import Payload, Weights
from polyfed.randomness import generator


def info(name: str, group: str = "g") -> ClientInfo:
    return ClientInfo(name, group, ("image",), "classification", 10, "arch")


class FakeEngine:
    """Answers with what it was sent plus one; clients in ``broken`` answer as told."""

    def __init__(self, broken: Mapping[str, Payload | str] | None = None) -> None:
        self.broken = dict(broken or {})
        self.asked: list[tuple[str, int, list[str]]] = []

    def clients(self) -> tuple[ClientInfo, ...]:
        return ()

    def exchange(
        self,
        step: str,
        round_number: int,
        phase: int,
        payloads: Mapping[str, Payload],
        deadline: float | None,
    ) -> Iterator[Answer]:
        self.asked.append((step, phase, list(payloads)))
        for client, payload in payloads.items():
            answer = self.broken.get(client)
            if isinstance(answer, str):
                yield Answer(client, error=answer)
            elif answer is not None:
                yield Answer(client, answer)
            else:
                weights = payload.artefacts["weights"]
                yield Answer(client, Payload({"weights": Weights({k: v + 1 for k, v in weights.items()})}))


def cohort_of(names: str, engine: FakeEngine, **options) -> tuple[Cohort, list[tuple[str, str]]]:
    dropped: list[tuple[str, str]] = []
    cohort = Cohort(
        clients=tuple(info(name) for name in names),
        exchange=engine.exchange,
        round=1,
        transport=Transport(),
        ledger=Ledger(),
        excluded=lambda client, reason: dropped.append((client.id, reason)),
        **options,
    )
    return cohort, dropped


def step() -> Reply:
    raise AssertionError("the fake engine never calls it")


def test_replies_come_in_client_order_with_a_field_for_each() -> None:
    cohort, _ = cohort_of("abc", FakeEngine())
    fields = {"a": 1.0, "b": 2.0, "c": 3.0}
    replies = list(cohort.ask(step, weights=each(lambda client: Weights({"w": torch.tensor(fields[client.id])}))))
    assert [reply.sender.id for reply in replies] == ["a", "b", "c"]
    assert [float(reply.weights["w"]) for reply in replies] == [2.0, 3.0, 4.0]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("ValueError: boom", "boom"),
        (Payload({"weights": Weights({"w": torch.tensor(float("nan"))})}), "NaN"),
        (Payload({"weights": Weights({"w": torch.zeros(3)})}), "shape"),
        (Payload({}), "weights"),
    ],
)
def test_a_client_with_an_unusable_answer_is_out_for_the_round(answer: Payload | str, reason: str) -> None:
    def check(reply: Reply) -> None:
        if reply.weights["w"].shape != ():
            raise PayloadError("wrong shape")

    engine = FakeEngine({"b": answer})
    cohort, dropped = cohort_of("abc", engine)
    sent = Weights({"w": torch.tensor(0.0)})
    assert [reply.sender.id for reply in cohort.ask(step, check=check, weights=sent)] == ["a", "c"]
    assert dropped[0][0] == "b"
    assert reason in dropped[0][1]
    list(cohort.ask(step, check=check, weights=sent))
    assert engine.asked == [("step", 0, ["a", "b", "c"]), ("step", 1, ["a", "c"])]


def test_too_few_answers_stop_the_round_with_the_causes() -> None:
    cohort, _ = cohort_of("ab", FakeEngine({"a": "ValueError: boom"}), min_clients=2)
    with pytest.raises(ExchangeError, match=r"1 of 2 clients .* run.min_clients is 2 \(a: ValueError: boom\)"):
        list(cohort.ask(step, weights=Weights({"w": torch.zeros(1)})))


def test_every_message_is_entered_in_both_directions() -> None:
    cohort, _ = cohort_of("ab", FakeEngine({"b": "lost"}))
    list(cohort.ask(step, weights=Weights({"w": torch.zeros(10)})))
    data = [(line["client"], line["direction"]) for line in cohort.ledger.records if line["artefact"] == "weights"]
    assert data == [("a", "down"), ("b", "down"), ("a", "up")]


CLIENTS = tuple(info(f"{group}{k}", group) for group, count in (("i", 10), ("t", 10), ("p", 15)) for k in range(count))


def test_uniform_sampling_is_without_replacement_in_client_order_and_seeded() -> None:
    sampling = SamplingSettings(cohort=10)
    drawn = sampling.draw(CLIENTS, generator(1))
    assert len({client.id for client in drawn}) == 10
    assert list(drawn) == [client for client in CLIENTS if client in drawn]
    assert drawn == sampling.draw(CLIENTS, generator(1))
    assert drawn != sampling.draw(CLIENTS, generator(2))
    assert SamplingSettings().draw(CLIENTS, generator(1)) == CLIENTS


def test_stratified_sampling_takes_a_share_of_every_group() -> None:
    federation = tuple(info(f"{g}{k}", g) for g, count in (("v", 12), ("l", 12), ("vl", 8)) for k in range(count))
    drawn = SamplingSettings(kind="stratified", cohort=0.25).draw(federation, generator(3))
    assert [sum(client.group == g for client in drawn) for g in ("v", "l", "vl")] == [3, 3, 2]
    few = SamplingSettings(kind="stratified", cohort=0.01).draw(federation, generator(3))
    assert [sum(client.group == g for client in few) for g in ("v", "l", "vl")] == [1, 1, 1]


def test_a_cohort_larger_than_the_federation_is_refused() -> None:
    with pytest.raises(ConfigError, match="cohort is 36, but there are 35"):
        SamplingSettings(cohort=36).draw(CLIENTS, generator(1))
    with pytest.raises(ConfigError, match="set 3 to 35"):
        SamplingSettings(kind="stratified", cohort=2).draw(CLIENTS, generator(1))


@pytest.mark.parametrize(("cohort", "expected"), [(10, [3, 3, 4]), (3, [1, 1, 1]), (35, [10, 10, 15]), (4, [1, 1, 2])])
def test_a_stratified_number_is_met_in_proportion(cohort: int, expected: list[int]) -> None:
    drawn = SamplingSettings(kind="stratified", cohort=cohort).draw(CLIENTS, generator(5))
    assert [sum(client.group == g for client in drawn) for g in ("i", "t", "p")] == expected
