"""Federations of aligned models, their messages and results, for tests of FedAID."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch import Tensor

from by_hand import copies, play
from polyfed.algorithms.shared.robust_alignment import server_parts
from polyfed.models.binding import Parts
from polyfed.runs.session import Session
from polyfed.wire.messages import Answer, Request
from polyfed.wire.payload import Payload
from sessions import prepared, round_records, watched
from small_federations import Config, aligned, participants, sgd

Values = dict[str, Tensor]
RATE = 0.02
CLIENTS = ("hospital-0", "hospital-1", "hospital-2")


def staged(steps: int, **algorithm: Any) -> Config:
    """Settings of FedAID or FedDRA, with so many batches in each stage."""
    made = {"local_steps": steps} | algorithm
    if algorithm.get("name") == "feddra":
        return {"robust_steps": steps} | made
    teacher = algorithm.get("teacher", {})
    return made | {"teacher": teacher if teacher is None else {"steps": steps} | teacher}


def config_of(*, task: Config | None = None, optimizer: Config | None = None, **algorithm: Any) -> Config:
    """Two batches of plain SGD in each stage; ``task`` changes settings of the task, or is another, with its name."""
    config = copy.deepcopy(aligned(**staged(2, **algorithm)))
    config["clients"]["hospital"]["training"]["optimizer"] = optimizer or sgd(RATE)["optimizer"]
    for participant in participants(config):
        participant["task"] = task if task and "name" in task else participant["task"] | (task or {})
    return config


def session_of(
    folder: Path, *, task: Config | None = None, optimizer: Config | None = None, **algorithm: Any
) -> Session:
    return prepared(config_of(task=task, optimizer=optimizer, **algorithm), folder)


def global_model(session: Session) -> Values:
    return copies(session.server.weights)["hospital"]


def parts_of(session: Session) -> Parts:
    return server_parts(session.server)


def events(session: Session) -> list[tuple[str, str]]:
    return [(record["participant"], record["event"]) for record in round_records(session) if record["kind"] == "event"]


class Message(NamedTuple):
    """A message and its answer."""

    round: int
    step: str
    client: str
    sent: dict[str, Any]
    reply: dict[str, Any]


Spoil = Callable[[Request, Answer], Answer]


def heard(
    session: Session, monkeypatch: pytest.MonkeyPatch, spoil: Spoil = lambda request, answer: answer
) -> list[Message]:
    """Messages of the session from now on; ``spoil`` may change what reaches the server."""
    exchanged: list[Message] = []

    def note(one: Request, answer: Answer) -> Answer:
        answer = spoil(one, answer)
        reply = fields(answer.payload) if answer.payload else {}
        exchanged.append(Message(one.round, one.step, one.client, fields(one.payload), reply))
        return answer

    watched(session, monkeypatch, note)
    return exchanged


def fields(payload: Payload) -> dict[str, Any]:
    """Copies of its tensors, and its scalars."""
    known = {name: {key: value.clone() for key, value in item.items()} for name, item in payload.bundles.items()}
    return known | payload.scalars


def replies(exchanged: list[Message], step: str, number: int = 1) -> dict[str, dict[str, Any]]:
    return {one.client: one.reply for one in exchanged if one.step == step and one.round == number}


def stage_two(
    folder: Path, monkeypatch: pytest.MonkeyPatch, client: str = "hospital-2", **settings: Any
) -> tuple[Session, Values, Values, list[Message]]:
    """A session after its first round, its aggregated model, the teacher before, and the messages."""
    session = session_of(folder, **settings)
    start, exchanged = global_model(session), heard(session, monkeypatch)
    play(session, 1, 1)
    (aggregated,) = (one.sent["weights"] for one in exchanged if one.step == "judge" and one.client == client)
    return session, aggregated, start, exchanged
