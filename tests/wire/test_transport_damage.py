"""What a receiver refuses: damaged and hostile messages of a transport."""

from __future__ import annotations

import math

import pytest
import torch
from crossings import LIMITS, of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polyfed.core.errors import PayloadError
from polyfed.wire.ledger import Ledger
from polyfed.wire.limits import Limits
from polyfed.wire.payload import Coded, Payload
from polyfed.wire.transport import Transport

EIGHT = torch.ones(2, 3, dtype=torch.int8)


def read(tensors: dict[str, Tensor], limits: Limits = LIMITS, **attributes: str) -> Payload:
    """What a server makes of a reply."""
    coded = Coded(tensors, **{"of": "weights"} | attributes)
    return Transport(dtype="float16").decode(Payload({"weights": coded}), limits)


def test_what_is_damaged_below_is_read_when_it_is_not() -> None:
    scales = torch.tensor([1.0, 0.0])
    assert of(read({"w:codes": EIGHT, "w:scales": scales}))["w"].tolist() == [[1.0] * 3, [0.0] * 3]


@pytest.mark.parametrize(
    "tensors",
    [
        {"w:codes": EIGHT, "w:scales": torch.tensor([1.0, math.nan])},
        {"w:codes": EIGHT, "w:scales": torch.tensor([1.0, math.inf])},
        {"w:codes": EIGHT, "w:scales": torch.tensor([1.0, -1.0])},
        {"w:codes": EIGHT, "w:scales": torch.tensor([1.0])},
        {"w:codes": EIGHT, "w:scales": torch.tensor(1.0)},
        {"w:codes": EIGHT, "w:scales": torch.tensor([[1.0], [1.0]])},
        {"w:codes": EIGHT, "w:scales": torch.tensor([1.0, 1.0], dtype=torch.float64)},
        {"w:codes": EIGHT, "w:scales": torch.tensor([1, 1])},
        {"w:codes": EIGHT.float(), "w:scales": torch.ones(2)},
        {"w:codes": torch.tensor(1, dtype=torch.int8), "w:scales": torch.tensor(1.0)},
        {"w:codes": EIGHT},
        {"w:scales": torch.ones(2)},
        {"w": EIGHT},
        {"w:": EIGHT},
        {":whole:more": EIGHT},
    ],
)
def test_what_is_damaged_is_refused(tensors: dict[str, Tensor]) -> None:
    with pytest.raises(PayloadError):
        read(tensors)


@pytest.mark.parametrize(
    "attributes",
    [
        {"of": "gradients"},
        {"of": ""},
        {"of": "coded"},
        {"of": "coded", "about": '{"of": "weights", "about": "{}"}'},
        {"about": ""},
        {"about": "[]"},
        {"about": '{"order": "abc"}'},
        {"about": "[" * 100_000},
        {"of": "representations"},
        {"of": "representations", "about": '{"order": 5}'},
        {"of": "representations", "about": '{"order": "o", "tensors": 1}'},
    ],
)
def test_what_stands_for_nothing_known_is_refused(attributes: dict[str, str]) -> None:
    with pytest.raises(PayloadError):
        read({"w:whole": torch.ones(2, 3)}, **attributes)
    Ledger().enter(1, "c", "up", "fit", Payload({"weights": Coded({}, **attributes)}))


@pytest.mark.parametrize(
    "tensors",
    [
        {"w:codes": torch.zeros(10, 10, dtype=torch.int8), "w:scales": torch.zeros(10)},
        {"w:whole": torch.zeros(105, dtype=torch.float16)},
        {f"w{k}:whole": torch.zeros(20) for k in range(6)},
    ],
)
def test_what_unpacks_beyond_the_limit_is_refused(tensors: dict[str, Tensor]) -> None:
    read(tensors, Limits(message_bytes=480))
    with pytest.raises(PayloadError, match=r"unpacks to \d+ bytes, the limit is 415 \(limits.message_bytes\)"):
        read(tensors, Limits(message_bytes=415))


ROLES = ["whole", "codes", "scales", "", "more"]
TYPES = [torch.int8, torch.float32, torch.int32, torch.float16, torch.int64, torch.bool]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_other_layout_is_refused_or_read_but_never_breaks_the_receiver(data: st.DataObject) -> None:
    """Roles, types, shapes and bytes at will: PayloadError, or tensors that are no larger than they may be."""
    roles = data.draw(
        st.sampled_from([("codes", "scales"), ("whole",)]) | st.lists(st.sampled_from(ROLES), max_size=4, unique=True)
    )
    tensors = {}
    for role in roles:
        natural = torch.int8 if role == "codes" else torch.float32
        dtype = data.draw(st.sampled_from([natural, natural, *TYPES]))
        shape = data.draw(st.sampled_from([[2, 3], [2], [1, 2], [1], [0], [], [0, 3]]))
        stream = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
        most = data.draw(st.sampled_from([2, 7, 256]))
        raw = torch.randint(most, shape, generator=stream)
        floats = torch.tensor([0.5, -1.0, math.nan, math.inf, 3e38, 0.0, 1.0])[raw % 7]
        tensors[f"w:{role}"] = (floats if dtype.is_floating_point else raw).to(dtype)
    wire = Payload({"weights": Coded(tensors, of=data.draw(st.sampled_from(["weights", "rows", "tensors"])))})
    Ledger().enter(1, "c", "up", "fit", wire)
    try:
        found = read(tensors)
        found.require_sound(LIMITS)
    except PayloadError:
        return
    assert sum(value.nbytes for value in of(found).values()) <= 8 * sum(v.numel() for v in tensors.values())
