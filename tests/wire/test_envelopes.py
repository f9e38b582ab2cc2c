"""Envelopes: bounds of a client's name, a step and an error."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polyfed.core.errors import PayloadError
from polyfed.federation.client import ClientInfo
from polyfed.models.slots import Slot, TensorSlot, decode_slots, encode_slots
from polyfed.wire.limits import Limits
from polyfed.wire.messages import Answer, Cause, Request, answer_of, envelope_answer, envelope_requests, request_of
from polyfed.wire.payload import Payload

INFO = {"id": "a", "group": "g", "modalities": ["m"], "task": "t", "samples": 3, "batch_size": 2, "architecture": "x/h"}


@pytest.mark.parametrize(
    "change", [{"round": -1}, {"phase": -1}, {"round": 1.5}, {"round": "1"}, {"after": [-1, 0]}, {"after": [1, True]}]
)
def test_a_request_has_labels_that_a_file_can_be_called_after(change: dict[str, Any]) -> None:
    [envelope], _ = envelope_requests([Request("a", "fit", 1, 0, (0, 2), Payload({"n": 1}))])
    assert request_of(envelope.text, [], Limits()).after == (0, 2)
    with pytest.raises(PayloadError, match="damaged request: TypeError"):
        request_of(json.dumps(json.loads(envelope.text) | change), [], Limits())


def test_an_error_is_reported_in_a_bounded_line() -> None:
    text = "x\x1b[2J\nround 3: client b" + "y" * 5000
    text, _ = envelope_answer(Answer.failed("a", Cause.LATE, text, "first\n" + "z" * 50_000 + "\nlast"))
    answer = answer_of(Request("a", "fit", 1, 0, None, Payload()), text, [], Limits())
    assert answer.failure is not None
    assert answer.failure.cause is Cause.LATE
    assert answer.failure.text.startswith("x\u241b[2J\u240around 3")
    assert len(answer.failure.text) == 1000
    assert len(answer.failure.details) == 20_000
    assert answer.failure.details.endswith("\nlast")


@pytest.mark.parametrize(
    "change",
    [
        {"samples": 10**400},
        {"samples": 1 << 63},
        {"samples": 0},
        {"batch_size": 0},
        {"samples": 10**9},  # passes of more batches than epsilon is computed of
        {"group": "g\x1b[2J"},
        {"task": "t\nforged"},
        {"architecture": "\u202ex"},
        {"architecture": "x" * 5000},
        {"modalities": ["image\x07"]},
        {"id": "a\x1b"},
    ],
)
def test_a_client_is_described_in_words_and_numbers_of_64_bits(change: dict[str, Any]) -> None:
    assert ClientInfo.from_json(INFO).samples == 3
    with pytest.raises(PayloadError) as caught:
        ClientInfo.from_json(INFO | change)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 6000


def test_deep_slots_are_refused() -> None:
    with pytest.raises(PayloadError, match="nested deeper than 32 levels"):
        decode_slots("[" * 100_000 + "]" * 100_000)


def test_slots_of_tensors_name_the_frozen_parts_around_them() -> None:
    slots = {
        "encoders.image.w": TensorSlot(Slot("image", "trunk"), "w", (("image", "3xaa"),)),
        "heads.h.w": TensorSlot(Slot("h", "head"), "w", (("image", "3xaa"), ("text", "4xbb"))),
        "heads.h.b": TensorSlot(Slot("h", "head"), "b"),
    }
    assert decode_slots(encode_slots(slots)) == slots
    for row in (
        '"a", "b", "c", "d", ["image"]',
        '"a", "b", "c", "d", ["image", 3]',
        '"a", "b", "c"',
        '"a", "b", "c", 1',
    ):
        with pytest.raises(PayloadError, match="not a description of a model's parameters"):
            decode_slots(f"[[{row}]]")
