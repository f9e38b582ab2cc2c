from __future__ import annotations

import time

import pytest
import torch

from polyfed.core.brevity import cut_short, shortened

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def run(clock: list[float], parts: int, seconds: float, what: str = "task") -> int:
    done = 0
    for _ in shortened("client", what, range(parts), parts, CPU):
        clock[0] += seconds
        done += 1
    return done


def test_a_pass_ends_after_its_seconds_and_the_rest_is_reckoned(clock: list[float]) -> None:
    with cut_short(0.5) as brevity:
        assert run(clock, 100, 0.125) == 5, "the first is not counted, as it makes much ready"
        assert brevity.left_out == {"client": 95 * 0.125}
        assert run(clock, 100, 0.125) == 1, "a later pass of that name has a part, so that nothing is empty"
        assert brevity.left_out == {"client": (95 + 99) * 0.125}
        assert run(clock, 3, 0.125, "digest") == 3, "a short one is done"
        assert run(clock, 4, 9.0, "distil") == 4, "three are the fewest for a rate"
    assert brevity.left_out == {"client": (95 + 99) * 0.125}


def test_what_the_first_part_makes_ready_counts_once(clock: list[float]) -> None:
    with cut_short(0.25) as brevity:
        for part in shortened("client", "task", range(10), 10, CPU):
            clock[0] += 0.125 if part else 5.0
        assert brevity.left_out == {"client": 6 * 0.125 - 4.875}
        run(clock, 10, 0.125)
    assert brevity.left_out == {"client": (6 + 9) * 0.125 - 4.875}


def test_what_an_earlier_round_made_ready_is_not_taken_off_this_one(clock: list[float]) -> None:
    with cut_short(0.25) as brevity:
        run(clock, 1, 5.0)
        brevity.next_round()
        run(clock, 10, 0.125)
    assert brevity.left_out == {"client": 7 * 0.125}


def test_passes_within_a_pass_are_its_own(clock: list[float]) -> None:
    with cut_short(0.25) as brevity:
        for _ in shortened("client", "task", range(10), 10, CPU):
            assert run(clock, 4, 0.125, "contrast") == 4
    assert brevity.left_out == {"client": 6 * 0.5}


def test_passes_within_a_whole_pass_are_whole_too(clock: list[float]) -> None:
    with cut_short(0.25) as brevity:
        for _ in shortened("client", "task", range(10), 10, CPU, whole=True):
            assert run(clock, 4, 0.125, "contrast") == 4
    assert brevity.left_out == {}


def test_passes_are_whole_otherwise(clock: list[float]) -> None:
    with cut_short(None) as brevity:
        assert run(clock, 100, 9.0) == 100
    assert run(clock, 100, 9.0) == 100
    assert brevity.left_out == {}
