"""Messages between a server and an engine for one client, and their layout for other processes: JSON, and raw bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from torch import Tensor

from polyfed.core.errors import PayloadError
from polyfed.core.untrusted import plain
from polyfed.wire.framing import pack, parsed_object, require_within, unpack, whole_number
from polyfed.wire.limits import Frame, Limits, ReplySize
from polyfed.wire.payload import Payload

_ERROR, _DETAILS = 1_000, 20_000  # characters that are kept of what went wrong, and of the end of a traceback


StateVersion = tuple[int, int]
"""Round and phase (number of the ask in it) of the step that left a client's state as it is."""


@dataclass(frozen=True)
class Request:
    """Request to one client.

    Attributes:
        client: id of the client.
        step: name of the client step.
        round, phase: number of the round, from 1, and of the ask in it; together the version of what the client keeps.
        after: version that its last step whose reply the server accepted left, from which it goes on; None: none.
        payload: the step's fields, as they cross the wire.
        reply_size: bound of its reply, which the server keeps to itself; None: nothing but the limits.
    """

    client: str
    step: str
    round: int
    phase: int
    after: StateVersion | None
    payload: Payload
    reply_size: ReplySize | None = field(default=None, compare=False)


class Cause(StrEnum):
    """Why a client gave no usable reply."""

    LOST = "lost"
    """Its process, node or connection is gone."""
    LATE = "late"
    """No answer arrived in time."""
    REFUSED = "refused"
    """Its site does not do what it is asked for."""
    INVALID = "invalid"
    """The answer is damaged, or must not be used."""
    FAILED = "failed"
    """Its step raised an error."""


@dataclass(frozen=True)
class Failure:
    """Why a client gave no usable reply.

    Attributes:
        cause: class of the failure.
        text: one line.
        details: traceback.
        place: ``file:line`` of the author's code, where an error was raised in it.
        error: exception, only in the process that raised it.
    """

    cause: Cause
    text: str
    details: str = ""
    place: str = ""
    error: Exception | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return self.text


NO_ANSWER = Failure(Cause.LOST, "no answer")


@dataclass(frozen=True)
class Answer:
    """An engine's answer for one client: a payload, or why there is none.

    Attributes:
        client: id of the client.
        payload: payload of its reply.
        failure: reason of a missing reply.
        step_losses: losses of the optimiser steps behind it, in order; they cross no wire.
        refused_bytes: bytes of a reply that cannot be read.
    """

    client: str
    payload: Payload | None = None
    failure: Failure | None = None
    step_losses: Sequence[Tensor | float] = field(default=(), compare=False)
    refused_bytes: int = field(default=0, compare=False)

    @classmethod
    def failed(cls, client: str, cause: Cause, text: str, details: str = "", place: str = "") -> Answer:
        return cls(client, failure=Failure(cause, text, details, place))

    @classmethod
    def late(cls, client: str, deadline: float | None) -> Answer:
        return cls.failed(client, Cause.LATE, f"no answer within {deadline:g} s")


@dataclass(frozen=True)
class Envelope:
    """A request or an answer on its way: JSON, and which frames its message refers to.

    Attributes:
        text: JSON of everything but the tensors.
        places: positions of its frames among those it was packed with.
    """

    text: str
    places: tuple[int, ...] = ()


def envelope_requests(requests: Sequence[Request], *, checksums: bool = False) -> tuple[list[Envelope], list[Frame]]:
    """Requests ready to be carried; what they share is one frame."""
    messages, frames = pack({request.client: request.payload for request in requests}, checksums=checksums)
    names = ("client", "step", "round", "phase", "after")
    fields = [{name: getattr(request, name) for name in names} for request in requests]
    return [_envelope(own, messages[str(own["client"])]) for own in fields], frames


def request_of(text: str, frames: Sequence[Frame], limits: Limits) -> Request:
    """The request in an envelope, from its text and its own frames, in the order of ``places``.

    Raises:
        PayloadError: it is damaged or beyond the limits.
    """
    content = parsed_object(text, limits.text_bytes)
    after = content.get("after")
    try:
        return Request(
            client=str(content["client"]),
            step=str(content["step"]),
            round=whole_number(content["round"]),
            phase=whole_number(content["phase"]),
            after=None if after is None else (whole_number(after[0]), whole_number(after[1])),
            payload=_payload(content, frames, limits),
        )
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise PayloadError(f"damaged request: {type(error).__name__}: {error}") from error


def envelope_answer(answer: Answer, *, checksums: bool = False) -> tuple[str, list[Frame]]:
    """An answer ready to be carried."""
    if answer.payload is None:
        failure = answer.failure or NO_ANSWER
        fields = {name: getattr(failure, name) for name in ("cause", "text", "details", "place")}
        return json.dumps({"client": answer.client, "failure": fields}), []
    messages, frames = pack({"": answer.payload}, checksums=checksums)
    return _envelope({"client": answer.client}, messages[""]).text, frames


def answer_of(request: Request, text: str, frames: Sequence[Frame], limits: Limits) -> Answer:
    """A client's answer to a request; anything else becomes a failure that names its fault."""
    client, sizes = request.client, [raw.nbytes for frame in frames for raw in frame.buffers]
    try:
        require_within(text, frames, limits)
        if request.reply_size is not None:
            request.reply_size.require(sizes)
        content = parsed_object(text, limits.text_bytes)
        if content.get("client") != client:
            raise PayloadError(f"got the answer of '{content.get('client')}', expected that of '{client}'")
        failure = content.get("failure")
        if failure is None:
            return Answer(client, _payload(content, frames, limits))
        if frames:
            raise PayloadError(f"damaged message: a failure with {len(frames)} frames")
        cause, text, details = Cause(failure["cause"]), str(failure["text"]), str(failure["details"])
        place = plain(str(failure.get("place", ""))[:_ERROR])
        return Answer.failed(client, cause, plain(text[:_ERROR]), details[-_DETAILS:], place)
    except PayloadError as error:
        failed = Answer.failed(client, Cause.INVALID, str(error))
    except (KeyError, TypeError, ValueError) as error:
        failed = Answer.failed(client, Cause.INVALID, f"damaged message: {type(error).__name__}: {error}")
    return replace(failed, refused_bytes=len(text) + sum(len(frame.header) for frame in frames) + sum(sizes))


def _envelope(fields: dict[str, Any], message: str) -> Envelope:
    """Seal a message; it then refers to frames by their place among its own, not among those of all messages."""
    content = json.loads(message)
    own = sorted(set(content["parts"].values()))  # two fields may be one bundle
    content["parts"] = {name: own.index(place) for name, place in content["parts"].items()}
    return Envelope(json.dumps(fields | {"message": json.dumps(content, separators=(",", ":"))}), tuple(own))


def _payload(content: dict[str, Any], frames: Sequence[Frame], limits: Limits) -> Payload:
    if not isinstance(content.get("message"), str):
        raise PayloadError("damaged message: the envelope is empty")
    return unpack(content["message"], frames, limits)
