"""Cohorts: asking, excluding, accepting, reply policies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

from polyfed.core.errors import ExchangeError, PayloadError
from polyfed.federation.client import ClientInfo
from polyfed.federation.cohort import Cohort, CohortListener, ReplyPolicy
from polyfed.federation.filters import Reply, each
from polyfed.runs.settings import ExchangeSettings
from polyfed.wire.ledger import Channel, Ledger
from polyfed.wire.limits import Limits
from polyfed.wire.messages import Answer, Cause, Failure, Request
from polyfed.wire.payload import Payload, Representations, Weights
from polyfed.wire.schema import client_query, client_step
from polyfed.wire.transport import Transport


def info(name: str, group: str = "g") -> ClientInfo:
    return ClientInfo(name, group, ("image",), "classification", 10, 5, "arch")


class FakeEngine:
    """Answers with what it was sent plus one; clients in ``broken`` answer as given."""

    def __init__(self, broken: Mapping[str, Payload | str] | None = None) -> None:
        self.broken = dict(broken or {})
        self.asked: list[tuple[str, int, list[str]]] = []
        self.requests: list[Request] = []
        self.deadlines: list[float | None] = []

    def exchange(self, requests: Sequence[Request], deadline: float | None) -> Iterator[Answer]:
        self.asked += [(requests[0].step, requests[0].phase, [request.client for request in requests])]
        self.requests += requests
        self.deadlines.append(deadline)
        for request in requests:
            answer = self.broken.get(request.client)
            if isinstance(answer, str):
                yield Answer.failed(request.client, Cause.FAILED, answer, f"Traceback of {request.client}")
            elif answer is not None:
                yield Answer(request.client, answer)
            else:
                weights = request.payload.bundles["weights"]
                yield Answer(request.client, Payload({"weights": Weights({k: v + 1 for k, v in weights.items()})}))


Dropped = list[tuple[str, str]]


class Noting(CohortListener):
    """Keeps all incidents."""

    def __init__(self, dropped: Dropped) -> None:
        self.dropped = dropped
        self.details: list[str] = []
        self.answers: list[tuple[str, str]] = []

    def excluded(self, client: ClientInfo, failure: Failure) -> None:
        self.dropped.append((client.id, failure.text))
        self.details.append(failure.details)

    def answered(self, client: ClientInfo, step: str) -> None:
        self.answers.append((client.id, step))


def cohort_of(names: str, engine: FakeEngine, **options: Any) -> tuple[Cohort, Dropped]:
    dropped: Dropped = []
    channel = Channel(engine.exchange, options.pop("transport", Transport()), Ledger(), options.pop("limits", Limits()))
    settings = {"clients": tuple(map(info, names)), "round": 1, "channel": channel, "listener": Noting(dropped)}
    return Cohort(**settings | options), dropped


@client_step(weights=Weights)
def step(self: object, client: object, weights: Weights) -> Reply:
    raise AssertionError("the fake engine never calls it")


@client_query(weights=Weights)
def query(self: object, client: object, weights: Weights) -> Reply:
    raise AssertionError("the fake engine never calls it")


def weights(value: float = 0.0) -> Weights:
    return Weights({"w": torch.tensor(value)})


# ---- asking


def test_replies_come_in_client_order_with_a_field_for_each() -> None:
    cohort, _ = cohort_of("abc", FakeEngine())
    fields = {"a": 1.0, "b": 2.0, "c": 3.0}
    replies = cohort.ask(step, weights=each(lambda client: weights(fields[client.id])))
    values = {reply.sender.id: float(reply.weights["w"]) for reply in replies}
    assert list(values.items()) == [("a", 2.0), ("b", 3.0), ("c", 4.0)]


def test_only_a_step_is_sent() -> None:
    engine = FakeEngine()
    cohort, _ = cohort_of("a", engine)
    with pytest.raises(TypeError, match=r"is not a client step; mark it with @client_step\(\)"):
        list(cohort.ask(lambda client: Reply(), weights=weights()))
    assert engine.requests == []


def bad(**fields: Any) -> Payload:
    return Payload(fields)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("ValueError: boom", "boom"),
        (bad(weights=weights(float("nan"))), "tensor 'w' has NaN"),
        (bad(weights=weights(float("-inf"))), "tensor 'w' has NaN or infinite"),
        (bad(weights=weights(2e6)), "tensor 'w' has norm 2e+06, the limit is 1e+06"),
        (bad(weights=Weights({"w": torch.zeros(3)})), "asked for, first at 'w': float32 [3], expected float32 []"),
        (bad(weights=weights(13.0)), "an unlucky number"),
        (bad(), "reply lacks 'weights'"),
        (bad(weights=weights(), secret=weights()), "undeclared field 'secret'"),
        (bad(weights=Representations({"w": torch.zeros(1, 1)})), "is representations, declared is weights"),
        (bad(weights=3), "is int, declared is weights"),
    ],
)
def test_a_client_with_an_unusable_answer_is_out_for_the_round(answer: Payload | str, reason: str) -> None:
    def check(reply: Reply) -> None:
        if reply.weights["w"] == 13:
            raise PayloadError("an unlucky number")

    engine = FakeEngine({"b": answer})
    cohort, dropped = cohort_of("abc", engine)
    assert [reply.sender.id for reply in cohort.ask(step, check=check, weights=weights())] == ["a", "c"]
    assert dropped[0][0] == "b"
    assert reason in dropped[0][1]
    list(cohort.ask(step, check=check, weights=weights()))
    assert engine.asked == [("step", 0, ["a", "b", "c"]), ("step", 1, ["a", "c"])]


def test_the_listener_gets_each_answer_with_its_step() -> None:
    listener = Noting([])
    cohort, _ = cohort_of("abc", FakeEngine({"b": "lost"}), listener=listener)
    list(cohort.ask(step, weights=weights()))
    list(cohort.ask(query, weights=weights()))
    assert (listener.dropped, listener.details) == ([("b", "lost")], ["Traceback of b"])
    assert listener.answers == [("a", "step"), ("c", "step"), ("a", "query"), ("c", "query")]


def test_norms_are_bounded_by_the_limits_of_the_run() -> None:
    limits = Limits(tensor_norm=2.5)
    answers = {"a": bad(weights=weights(2.5)), "b": bad(weights=weights(-2.6))}
    cohort, dropped = cohort_of("ab", FakeEngine(answers), limits=limits)
    assert [reply.sender.id for reply in cohort.ask(step, weights=weights())] == ["a"]
    assert dropped == [("b", "weights: tensor 'w' has norm 2.6, the limit is 2.5")]


def test_a_reply_that_arrives_narrow_is_judged_as_it_is_used() -> None:
    answer = bad(weights=Weights({"w": torch.tensor(float("inf"), dtype=torch.float16)}))
    cohort, dropped = cohort_of("ab", FakeEngine({"b": answer}), transport=Transport(dtype="float16"))
    (dtype,) = [reply.weights["w"].dtype for reply in cohort.ask(step, weights=weights(0.5))]
    assert dtype == torch.float32
    assert dropped[0][1].endswith("tensor 'w' has NaN or infinite values")


def test_every_message_is_entered_in_both_directions() -> None:
    answers = {"b": "lost", "c": bad(weights=weights(float("nan")))}  # what is refused has crossed
    cohort, _ = cohort_of("abc", FakeEngine(answers))
    list(cohort.ask(step, weights=Weights({"w": torch.zeros(10)})))
    data = [(one["client"], one["direction"]) for one in cohort.channel.ledger.records if one["bundle"] == "weights"]
    assert data == [("a", "down"), ("b", "down"), ("c", "down"), ("a", "up"), ("c", "up")]


# ---- accepted labels


def test_a_client_goes_on_from_its_last_accepted_step() -> None:
    engine = FakeEngine()
    accepted = {"a": (3, 1), "c": (1, 0)}
    cohort, _ = cohort_of("abc", engine, round=4, accepted=accepted)
    list(cohort.ask(step, weights=weights()))
    list(cohort.ask(step, weights=weights()))
    assert [(request.client, request.after) for request in engine.requests] == [
        *(("a", (3, 1)), ("b", None), ("c", (1, 0))),
        *(("a", (4, 0)), ("b", (4, 0)), ("c", (4, 0))),
    ]
    assert accepted == {"a": (4, 1), "b": (4, 1), "c": (4, 1)}


@pytest.mark.parametrize(
    "answer",
    ["no answer within 3 s", *(bad(weights=weights(x)) for x in (float("nan"), 7.0)), bad(weights=weights(), more=1)],
)
def test_a_step_whose_reply_is_refused_never_happened(answer: Payload | str) -> None:
    def check(reply: Reply) -> None:
        if float(reply.weights["w"]) == 7.0:
            raise PayloadError("not this one")

    accepted = {"a": (1, 0), "b": (1, 0)}
    cohort, _ = cohort_of("ab", FakeEngine({"b": answer}), round=2, accepted=accepted)
    list(cohort.ask(step, check=check, weights=weights()))
    assert accepted == {"a": (2, 0), "b": (1, 0)}
    engine = FakeEngine()
    later, _ = cohort_of("ab", engine, round=3, accepted=accepted)
    list(later.ask(step, weights=weights()))
    assert [request.after for request in engine.requests] == [(2, 0), (1, 0)]


def test_a_query_is_not_what_a_client_goes_on_from() -> None:
    engine = FakeEngine()
    accepted = {"a": (1, 0)}
    cohort, _ = cohort_of("a", engine, round=2, accepted=accepted, phase=90)
    list(cohort.ask(query, weights=weights()))
    list(cohort.ask(step, weights=weights()))
    assert [(request.phase, request.after) for request in engine.requests] == [(90, (1, 0)), (91, (1, 0))]
    assert accepted == {"a": (2, 91)}


def test_a_reply_that_was_not_taken_is_not_accepted() -> None:
    """A server that stops reading in the middle has not used the rest."""
    accepted: dict[str, tuple[int, int]] = {}
    cohort, _ = cohort_of("abc", FakeEngine(), accepted=accepted)
    for reply in cohort.ask(step, weights=weights()):
        if reply.sender.id == "b":
            break
    assert set(accepted) == {"a", "b"}


# ---- reply policies


def failing(count: int) -> FakeEngine:
    return FakeEngine(dict.fromkeys("abcdefghij"[:count], "ValueError: boom"))


def test_too_few_answers_stop_the_round_with_the_causes() -> None:
    cohort, _ = cohort_of("ab", failing(1), reply_policy=lambda name: ReplyPolicy(min_clients=2))
    reason = r"1 of 2 clients .* to 'step', the quorum \(run.exchange.min_clients\) is 2 \(a: ValueError: boom\)"
    with pytest.raises(ExchangeError, match=reason):
        list(cohort.ask(step, weights=weights()))


def test_a_federation_without_clients_asks_no_client() -> None:
    engine = FakeEngine()
    engine.exchange = lambda requests, deadline: iter(())
    cohort, _ = cohort_of("", engine)
    with pytest.raises(ExchangeError, match=r"0 of 0 clients .* is 1 \(no client was asked\)"):
        list(cohort.ask(step, weights=weights()))
    cohort, _ = cohort_of("ab", FakeEngine(), reply_policy=lambda name: ReplyPolicy(min_clients=3))
    with pytest.raises(ExchangeError, match=r"2 of 2 clients .* is 3 \(no more were waited for\)"):
        list(cohort.ask(step, weights=weights()))


@pytest.mark.parametrize(
    ("quorum", "asked", "needed"),
    [
        *((0.5, 10, 5), (0.5, 3, 2), (0.75, 4, 3), (0.3, 10, 3), (0.7, 10, 7), (1.0, 7, 7), (0.0, 7, 0)),
        *((0.01, 5, 1), (0.5, 0, 0), (3, 10, 3), (0, 10, 0), (3, 2, 3), (1, 0, 1)),
    ],
)
def test_a_fraction_is_a_share_of_those_asked(quorum: float, asked: int, needed: int) -> None:
    assert ReplyPolicy(min_clients=quorum).quorum(asked) == needed


def test_the_share_is_of_those_still_in_the_round() -> None:
    engine = failing(5)
    cohort, _ = cohort_of("abcdefghij", engine, reply_policy=lambda name: ReplyPolicy(min_clients=0.5))
    list(cohort.ask(step, weights=weights()))
    engine.broken = {"f": "lost", "g": "lost"}
    assert len(list(cohort.ask(step, weights=weights()))) == 3  # of five; of ten it would be too few


def test_each_step_has_its_own_reply_policy() -> None:
    phases = {"step": {"min_clients": 2, "deadline": 5.0}, "query": {"min_clients": 0}}
    settings = ExchangeSettings.model_validate({"min_clients": 0.5, "deadline": 60, "phases": phases})
    assert settings.reply_policy("step") == ReplyPolicy(2, 5.0)
    assert settings.reply_policy("query") == ReplyPolicy(0, 60.0)
    assert settings.reply_policy("other") == ReplyPolicy(0.5, 60.0)
    assert [ExchangeSettings(min_clients=least).reply_policy("x").quorum(4) for least in (1, 1.0)] == [1, 4]
    engine = failing(2)
    cohort, _ = cohort_of("abc", engine, reply_policy=settings.reply_policy)
    assert len(list(cohort.ask(query, weights=weights()))) == 1
    with pytest.raises(ExchangeError, match=r"1 of 1 clients gave a usable reply to 'step', the quorum .* is 2"):
        list(cohort.ask(step, weights=weights()))
    assert engine.deadlines == [60.0, 5.0]


@pytest.mark.parametrize("setting", [{"min_clients": 1.5}, {"phases": {"fit": {"min_clients": 2.5}}}])
def test_a_share_beyond_everybody_is_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="min_clients"):
        ExchangeSettings.model_validate(setting)
