"""The local engine: one client after the other, in order, and what crosses when it is asked to lay messages out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from odd_steps import Odd

from polyfed.core.errors import ExchangeError
from polyfed.engines.local import LocalEngine
from polyfed.engines.site import Site
from polyfed.runs.session import Session
from polyfed.wire.ledger import Ledger
from polyfed.wire.limits import Limits
from polyfed.wire.messages import Answer, Cause, Failure, Request
from polyfed.wire.payload import Payload, Weights
from sessions import prepared, request, site_of


class Recorder:
    """A site that answers at once and remembers whom it was asked for."""

    def __init__(self) -> None:
        self.asked: list[Request] = []
        self.limits = Limits()
        self.payload = Payload({"weights": Weights({"w": torch.arange(3.0)}), "n": 3})

    def answer(self, request: Request) -> Answer:
        self.asked.append(request)
        return Answer(request.client, self.payload)


def requests(names: str) -> list[Request]:
    return [request(name, Payload({"weights": Weights({"w": torch.ones(2)})})) for name in names]


def engine_of(site: Any, *, serialize: bool = False) -> LocalEngine:
    return LocalEngine(site, serialize=serialize)


def test_each_answer_can_be_used_before_the_next_client_starts() -> None:
    site = Recorder()
    answers = engine_of(site).exchange(requests("abc"), None)
    assert site.asked == []
    for count, name in enumerate("abc", start=1):
        assert next(answers).client == name
        assert [asked.client for asked in site.asked] == list("abc")[:count]


def test_messages_are_handed_over_by_reference() -> None:
    site = Recorder()
    sent = requests("a")
    (answer,) = engine_of(site).exchange(sent, None)
    assert site.asked[0] is sent[0]
    assert answer.payload is site.payload


def test_messages_that_are_laid_out_share_nothing() -> None:
    site = Recorder()
    sent = requests("a")
    (answer,) = engine_of(site, serialize=True).exchange(sent, None)
    assert answer.payload is not None
    for received, original in [(site.asked[0].payload, sent[0].payload), (answer.payload, site.payload)]:
        ours, theirs = received.bundles["weights"]["w"], original.bundles["weights"]["w"]
        assert torch.equal(ours, theirs)
        assert ours.data_ptr() != theirs.data_ptr()
    assert answer.payload.scalars == {"n": 3}


def test_an_answer_after_the_deadline_is_none() -> None:
    (late,) = engine_of(Recorder()).exchange(requests("a"), 1e-9)
    assert (late.payload, late.failure) == (None, Failure(Cause.LATE, "no answer within 1e-09 s"))
    (early,) = engine_of(Recorder()).exchange(requests("a"), 60.0)
    assert early.payload is not None


@pytest.fixture
def odd(tiny: dict[str, Any], tmp_path: Path) -> Session:
    tiny["algorithm"], tiny["run"]["on_error"] = f"{Odd.__module__}.Odd", "exclude"
    return prepared(tiny, tmp_path / "run")


@pytest.mark.parametrize("serialize", [False, True])
def test_a_client_that_raises_is_an_answer_among_others(odd: Session, serialize: bool) -> None:
    site: Site = site_of(odd)
    made = [Request(name, step, 1, 0, None, Payload({})) for name, step in (("image", "fail"), ("paired-1", "count"))]
    first, second = engine_of(site, serialize=serialize).exchange(made, None)
    assert first.failure is not None
    assert (first.failure.cause, first.failure.text) == (Cause.FAILED, "ZeroDivisionError: halfway")
    assert second.payload is not None
    assert second.payload.scalars == {"count": 1, "round": 1}


@pytest.mark.parametrize("serialize", [False, True])
def test_a_reply_that_cannot_cross_costs_only_its_client_the_round(odd: Session, serialize: bool) -> None:
    odd.engine = engine_of(site_of(odd), serialize=serialize)
    cohort = odd.cohort(1, Ledger())
    algorithm = odd.experiment.algorithm
    assert isinstance(algorithm, Odd)
    with pytest.raises(ExchangeError, match=r"0 of 3 clients gave a usable reply to 'exotic'.*complex64"):
        list(cohort.ask(algorithm.exotic))
