"""What is known of a run while it goes on."""

from __future__ import annotations

import math

from run_states import Now, ids, mid_round, play

from polyfed.reporting.progress import RunState
from polyfed.runs.events import ClientDone, ClientStarted, Incident, Measured, RoundStarted, RunStarted, StepStarted


def test_metrics_are_the_last_means_over_clients_and_their_changes():
    state = RunState()
    for number, participant, value in ((1, "a", 1.0), (1, "b", math.nan), (1, "c", 3.0), (1, "a", 5.0), (2, "a", 7.0)):
        state.handle(Measured(number, participant, "test", {"accuracy": value, "n": 3}))
    state.handle(Measured(2, "server", "train", {"loss": math.nan}))
    state.handle(Measured(2, "server", "test", {"r@1": 1.0, "r1_sum": 2.0}))
    assert [names for names, _, _ in state.latest()] == [
        ("server", "test", "r1_sum"),
        ("server", "test", "r@1"),
        ("clients", "test", "accuracy"),
        ("server", "train", "loss"),
    ]
    assert [figures for names, *figures in state.latest() if names[2] == "accuracy"] == [[7.0, 3.0]]


def test_told_twice_is_as_told_once():
    once, twice = RunState(), RunState()
    for state, times in ((once, 1), (twice, 2)):
        for _ in range(times):
            state.handle(RunStarted("run", 30, 6))
            play(state, 3, ids(6))
            state.handle(Incident(2, "text-000", "client_excluded", "late"))
    assert (once.bytes, once.elapsed, once.incidents) == (twice.bytes, twice.elapsed, twice.incidents)
    assert once.metrics == twice.metrics
    assert once.bytes == (3 * 2**20, 3 * 2**21)


def test_a_resumed_run_forgets_what_is_done_again():
    state = mid_round()
    state.handle(Incident(5, "text-000", "client_excluded", "late"))
    state.handle(RunStarted("run", 30, 6, done=2))
    assert (state.round, state.clients, state.running) == (2, {}, False)
    assert list(state.complete) == [1, 2]
    assert state.bytes == (2 * 2**20, 2 * 2**21)
    assert state.incidents == {}
    assert list(state.latest()) == []  # of the two latest rounds, which are done again


def test_a_step_that_nobody_announced_begins_with_its_first_client():
    state = RunState()
    state.handle(RunStarted("run", 2, 3))
    state.handle(RoundStarted(1, ["a", "b", "c"]))
    state.handle(ClientDone("a", "fit", 1.0))
    state.handle(Incident(1, "b", "client_excluded", "late"))
    state.handle(ClientDone("c", "fit", 1.0))
    state.handle(ClientDone("a", "distil", 1.0))
    assert state.clients == {"a": "done", "c": "waiting", "b": "excluded"}


def test_those_asked_may_be_others_than_the_cohort():
    state = RunState()
    state.handle(RoundStarted(2, ["a", "b"]))
    state.handle(Incident(1, "a", "client_excluded", "late"))  # of another round, so not from this one
    state.handle(Incident(2, "b", "client_excluded", "late"))
    state.handle(StepStarted("evaluate", ["a", "z"]))
    assert list(state.clients.items()) == [("a", "waiting"), ("z", "waiting"), ("b", "excluded")]


def test_replayed_times_count_from_when_they_happened():
    clock = Now()
    state = RunState(clock=clock)
    state.happened_at(940.0)
    state.handle(RoundStarted(1, ["a"]))
    state.happened_at(950.0)
    state.handle(ClientStarted("a", "fit"))
    assert (state.elapsed, state.work_in_words) == (60.0, "a: fit, 50 s")
