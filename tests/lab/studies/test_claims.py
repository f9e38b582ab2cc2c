"""How claims are written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from polyfed.core.errors import ConfigError
from polyfed.lab.studies.claims import Claim, Operand
from polyfed.lab.studies.study import Study

AXES = {"alpha": {"setting": "run.seed", "values": [0.1, 5]}}


@pytest.mark.parametrize(
    ("text", "left", "right"),
    [
        ("fedcola > fedavg on r1_sum", [("fedcola", "r1_sum")], [("fedavg", "r1_sum")]),
        ("a b > c on x at 0.1", [("a b", "x", "0.1")], [("c", "x", "0.1")]),
        ("a at 1.0 < a at 0.1 on x y", [("a", "x y", "1.0")], [("a", "x y", "0.1")]),
        ("a at 3, 5 < b on x", [("a", "x", "3, 5")], [("b", "x")]),
        ("a > b on x at all", [("a", "x", "all")], [("b", "x", "all")]),
        ("a on same kind < a on other kind", [("a", "same kind")], [("a", "other kind")]),
        ("a on x at 1 < b on y at 2", [("a", "x", "1")], [("b", "y", "2")]),
        (
            "a at n 3 - a at n 2 > a at d 5 - a at d 6 on x",
            [("a", "x", "n 3"), ("a", "x", "n 2")],
            [("a", "x", "d 5"), ("a", "x", "d 6")],
        ),
        ("a on x - b on y < c on z", [("a", "x"), ("b", "y")], [("c", "z")]),
    ],
)
def test_forms(text: str, left: list[tuple[str, ...]], right: list[tuple[str, ...]]) -> None:
    claim = Claim.parse(text)
    assert [[*claim.left], [*claim.right]] == [[Operand(*parts) for parts in side] for side in (left, right)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "has not the form") for text in ("a > b", "a = b on c", "a >= b on c", "> b on c", "", "a on x > b")),
        ("a - b - c > d on x", "has not the form"),
        ("a at 1 > b on x at all", "'at all' is for every row of a claim or for none"),
    ],
)
def test_other_forms_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Claim.parse(text)


@pytest.mark.parametrize(
    ("claims", "more", "message"),
    [
        ({"secondary": ["tiny > prox on r1"]}, {}, "claims: method, part, setting: all are empty"),
        ({"method": ["tiny > prox on r1"] * 2, "part": ["tiny > prox on r1"] * 2}, {}, "4 are judged"),
        ({"method": ["tiny beats prox"]}, {}, "'tiny beats prox' has not the form"),
        ({"method": ["tiny > proxy on r1"]}, {}, "'tiny > proxy on r1': unknown 'proxy'; did you mean 'prox'"),
        ({"method": ["tiny on r1 > prox on r2"]}, {}, "unknown 'r2'"),
        ({"method": ["tiny > prox on r1 at 3"]}, {"axes": AXES}, "unknown '3'"),
        ({"method": ["tiny > prox on r1"]}, {"axes": AXES}, "names no point; add 'at LABEL', or 'at all'"),
        (
            {"method": ["a > b on r1 at all"]},
            {"axes": AXES, "rows": {"a": {"only": {"alpha": [5]}}, "b": {"only": {"alpha": [0.1]}}}},
            "its rows have no point in common",
        ),
    ],
)  # fmt: skip
def test_refusals(loaded: Callable[..., Study], claims: Any, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loaded(claims=claims, **more)


def test_judged_claims_are_of_a_kind(loaded: Callable[..., Study]) -> None:
    study = loaded(claims={name: ["tiny > prox on r1"] for name in ("setting", "method", "secondary")})
    assert [claim.kind for claim in study.claims.to_judge] == ["method", "setting"]
    assert [claim.kind for claim in study.claims.to_show] == [None]
