"""What is known of a run while it goes on."""

from __future__ import annotations

import math

from run_states import Now, ids, mid_round, play, screen

from polyfed.reporting.run_state import MetricCurve, RunState
from polyfed.runs.events import ClientDone, ClientStarted, Incident, RoundStarted, RunStarted, StepStarted
from polyfed.runs.records import RunRecords


def test_a_curve_is_the_mean_of_the_finite_values_of_a_round():
    curve = MetricCurve()
    for participant, value in (("a", 1.0), ("b", math.nan), ("c", 3.0), ("a", 5.0)):
        curve.add(1, participant, value)
    curve.add(2, "a", math.nan)
    curve.add(3, "a", 7.0)
    values = curve.by_round()
    assert (values[1], values[3]) == (4.0, 7.0)
    assert math.isnan(values[2])
    curve.cut(1)
    assert curve.by_round() == {1: 4.0}


def test_told_twice_is_as_told_once():
    once, twice = RunState(), RunState()
    for state, times in ((once, 1), (twice, 2)):
        for _ in range(times):
            state.handle(RunStarted("run", 30, 6))
            play(state, 3, ids(6))
            state.handle(Incident(2, "text-000", "client_excluded", "late"))
    assert (once.bytes, once.elapsed, once.events) == (twice.bytes, twice.elapsed, twice.events)
    assert {key: curve.by_round() for key, curve in once.curves.items()} == {
        key: curve.by_round() for key, curve in twice.curves.items()
    }
    assert once.bytes == (3 * 2**20, 3 * 2**21)


def test_a_resumed_run_forgets_what_is_done_again():
    state = mid_round()
    state.handle(Incident(5, "text-000", "client_excluded", "late"))
    state.handle(RunStarted("run", 30, 6, done=2))
    assert (state.round, state.clients, state.running) == (2, {}, False)
    assert list(state.seconds) == [1, 2]
    assert state.bytes == (2 * 2**20, 2 * 2**21)
    assert state.events == {}
    assert list(state.curves["server", "test", "r1_sum"].by_round()) == [1, 2]


def test_a_step_that_nobody_announced_begins_with_its_first_client():
    state = RunState()
    state.handle(RunStarted("run", 2, 3))
    state.handle(RoundStarted(1, ["a", "b", "c"]))
    state.handle(ClientDone("a", "fit", 1.0))
    state.handle(Incident(1, "b", "client_excluded", "late"))
    state.handle(ClientDone("c", "fit", 1.0))
    state.handle(ClientDone("a", "distil", 1.0))
    assert {client: progress.status for client, progress in state.clients.items()} == {
        "a": "done",
        "c": "waiting",
        "b": "excluded",
    }


def test_those_asked_may_be_others_than_the_cohort():
    state = RunState()
    state.handle(RoundStarted(2, ["a", "b"]))
    state.handle(Incident(1, "a", "client_excluded", "late"))  # of another round, so not from this one
    state.handle(Incident(2, "b", "client_excluded", "late"))
    state.handle(StepStarted("evaluate", ["a", "z"]))
    assert [(client, progress.status) for client, progress in state.clients.items()] == [
        ("a", "waiting"),
        ("z", "waiting"),
        ("b", "excluded"),
    ]


def test_replayed_times_count_from_when_they_happened():
    clock = Now()
    state = RunState(clock=clock)
    state.happened_at(940.0)
    state.handle(RoundStarted(1, ["a"]))
    state.happened_at(950.0)
    state.handle(ClientStarted("a", "fit"))
    assert (state.elapsed, state.working_for(state.clients["a"])) == (60.0, 50.0)


def test_nothing_tells_how_long_the_first_round_takes():
    state = RunState()
    state.handle(RunStarted("run", 5, 1))
    assert state.left is None


def test_records_of_a_run_are_the_state_it_is_in(run_folder):
    records = RunRecords.load(run_folder)
    state = RunState.of(records)
    assert (state.name, state.round, state.rounds, state.total_clients) == ("run", 12, 12, 9)
    assert sum(state.bytes) == records.total_bytes()
    assert state.curves["server", "test", "r1_sum"].by_round() == records.series("server", "r1_sum")
    assert [event[0] for event in state.events] == [3, 5]
    assert "client excluded: text-1: no answer in 60 s" in "\n".join(screen(state, 80, 24))
