"""State that clients keep: declared keys, exact labels, all that a resume needs, bounded memory."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polyfed.core.errors import RunError
from polyfed.core.files import write_atomically
from polyfed.federation.state import ClientState, Lifetime, StateStore, flatten, unflatten
from polyfed.wire.messages import StateVersion


def entry(value: float, size: int = 4) -> dict[str, torch.Tensor]:
    return {"model/w": torch.full((size,), value)}


def chained(folder: Path, *labels: StateVersion, late: bool = False) -> StateStore:
    """A store with states of ``a``, each after the one before, whose value is their round's."""
    store = StateStore(folder, late=late)
    for label, after in zip(labels, (None, *labels), strict=False):
        store.save("a", label, entry(label[0]), after)
    return store


def of_two_rounds(folder: Path) -> StateStore:
    return chained(folder, (1, 0), (2, 0))


def value_of(store: StateStore, client: str, label: StateVersion | None) -> float | None:
    result = store.load(client, label)
    return float(result["model/w"][0]) if result else None


# ---- exact labels


def test_a_client_goes_on_from_the_requested_label(tmp_path: Path) -> None:
    for opened in (of_two_rounds(tmp_path), StateStore(tmp_path)):  # another process
        assert value_of(opened, "a", (1, 0)) == 1  # round 2 is done again
        assert value_of(opened, "a", (2, 0)) == 2  # its second phase
        assert value_of(opened, "a", None) is None  # before its first step
        assert value_of(opened, "b", None) is None


def test_a_step_that_is_done_again_replaces_what_it_left(tmp_path: Path) -> None:
    store = of_two_rounds(tmp_path)
    store.save("a", (2, 0), entry(3), (1, 0))
    for opened in (store, StateStore(tmp_path)):
        assert value_of(opened, "a", (2, 0)) == 3
        assert value_of(opened, "a", (1, 0)) == 1


def test_a_late_reply_leaves_one_state_more(tmp_path: Path) -> None:
    """Asked in round 1, accepted in round 5: a resume from round 4 still goes on from what was before."""
    for late, kept in ((False, [(2, 0), (6, 0)]), (True, [(1, 0), (2, 0), (6, 0)])):
        assert chained(tmp_path / str(late), (0, 0), (1, 0), (2, 0), (6, 0), late=late).versions("a") == kept


def test_a_lost_state_is_reported_with_those_that_remain(tmp_path: Path) -> None:
    store = chained(tmp_path, (1, 0), (3, 0), (4, 0))
    with pytest.raises(RunError, match=r"client 'a' after round 2, phase 0 is not here; .*others \(rounds 1, 3, 4\)"):
        store.load("a", (2, 0))
    with pytest.raises(RunError, match=r"after round 9, phase 1 is not here; .* restore the folder from a copy"):
        store.load("a", (9, 1))


def test_a_lost_or_foreign_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="there is none of this run: it was lost, or the run is foreign to this folder"):
        StateStore(tmp_path).load("a", (3, 0))


def test_a_stale_server_is_refused(tmp_path: Path) -> None:
    message = r"newer ones \(rounds 6, 7, 8\): the server is stale, restored from an old copy"
    with pytest.raises(RunError, match=message):
        chained(tmp_path, *((number, 0) for number in range(1, 9))).load("a", (2, 0))


def test_what_is_in_memory_is_not_taken_for_another_label(tmp_path: Path) -> None:
    store = of_two_rounds(tmp_path)
    next(tmp_path.rglob("000001-00*")).unlink()
    assert value_of(store, "a", (2, 0)) == 2
    with pytest.raises(RunError, match="after round 1, phase 0 is not here"):
        store.load("a", (1, 0))


# ---- the chain


def test_states_that_a_resume_can_ask_for_are_kept(tmp_path: Path) -> None:
    # while round 9 is under way, a server may go back to the ends of 8 and of 7
    assert chained(tmp_path, *((number, 0) for number in (1, 2, 5, 8, 9))).versions("a") == [(5, 0), (8, 0), (9, 0)]


def test_phases_of_a_round_are_kept_along_the_chain(tmp_path: Path) -> None:
    store = chained(tmp_path, (1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2))
    # asked for may be: the ends of rounds 2 and 1; what is between them is what leads there
    assert {(1, 0), (2, 1), (3, 2)} <= set(store.versions("a"))


def test_what_was_refused_is_dropped_with_the_next_step(tmp_path: Path) -> None:
    store = of_two_rounds(tmp_path)  # the reply of the second is refused
    store.save("a", (3, 0), entry(3), (1, 0))
    assert store.versions("a") == [(1, 0), (3, 0)]


def test_a_lost_future_is_dropped_when_the_past_is_done_again(tmp_path: Path) -> None:
    store = chained(tmp_path, (1, 0), (2, 0), (3, 0))
    store.save("a", (2, 0), entry(20), (1, 0))  # the server fell back to round 1
    assert store.versions("a") == [(1, 0), (2, 0)]


def test_a_chain_that_breaks_ends_there(tmp_path: Path) -> None:
    store = chained(tmp_path, (1, 0), (2, 0), (3, 0))
    (tmp_path / "a" / "000003-00.safetensors").write_bytes(b"rubbish")
    StateStore(tmp_path).save("a", (4, 0), entry(4), (3, 0))
    assert (4, 0) in store.versions("a")
    assert StateStore(tmp_path).damaged({"a": (3, 0)}) == "a"


@dataclass
class Model:
    """A run as it should be: nothing is ever dropped, and the server remembers what it accepted."""

    round: int = 0
    kept: dict[tuple[str, StateVersion], float] = field(default_factory=dict)
    accepted: dict[str, StateVersion] = field(default_factory=dict)
    checkpoints: dict[int, dict[str, StateVersion]] = field(default_factory=lambda: {0: {}})
    steps: int = 0


STEP = st.tuples(
    st.sampled_from("abc"),  # who is asked
    st.sampled_from(["accepted", "accepted", "accepted", "refused", "lost"]),
)
PHASES = st.lists(st.lists(STEP, max_size=3, unique_by=lambda step: step[0]), max_size=3)
EVENT = st.tuples(st.sampled_from(["round", "crash"]), PHASES) | st.tuples(st.just("rewind"), st.just([]))
EVENTS = st.lists(EVENT, min_size=1, max_size=14)


@pytest.mark.slow
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(EVENTS, st.sampled_from([0, 1 << 20]))
def test_what_a_server_can_ask_for_is_there(events: list[tuple[str, list[list[tuple[str, str]]]]], memory: int) -> None:
    """Random cohorts, phases, refused and lost replies, crashes in a round and falls back to the round before.

    A server resumes from one of its last two complete rounds. Whatever it then asks for, and whatever it asks for
    while it goes on, is what a store that never drops anything would give.
    """
    with TemporaryDirectory() as place:
        model, store = Model(), StateStore(Path(place), memory)
        for type_name, phases in events:
            if type_name == "rewind":  # the newest checkpoint is damaged
                if len(model.checkpoints) > 1:
                    del model.checkpoints[max(model.checkpoints)]
                store = resumed(model, Path(place), memory)
                continue
            play(model, store, phases)
            if type_name == "round":
                model.round += 1
                model.checkpoints[model.round] = dict(model.accepted)
                for old in sorted(model.checkpoints)[:-2]:
                    del model.checkpoints[old]
            else:
                store = resumed(model, Path(place), memory)
            require_all(model, Path(place))


def play(model: Model, store: StateStore, phases: list[list[tuple[str, str]]]) -> None:
    """The asks of the next round; a client whose reply was not accepted is out of it."""
    number, out = model.round + 1, set[str]()
    for phase, steps in enumerate(phases):
        for client, fate in sorted(steps):
            if client in out:
                continue
            after = model.accepted.get(client)
            assert value_of(store, client, after) == (model.kept[client, after] if after else None)
            model.steps += 1
            store.save(client, (number, phase), entry(model.steps), after)
            model.kept[client, (number, phase)] = model.steps
            if fate == "accepted":
                model.accepted[client] = (number, phase)
            else:
                out.add(client)


def resumed(model: Model, folder: Path, memory: int) -> StateStore:
    """Another process, from the newest checkpoint."""
    model.round = max(model.checkpoints)
    model.accepted = copy.copy(model.checkpoints[model.round])
    require_all(model, folder)
    return StateStore(folder, memory)


def require_all(model: Model, folder: Path) -> None:
    """Both checkpoints can be resumed from."""
    store = StateStore(folder, memory=0)
    for accepted in model.checkpoints.values():
        assert store.damaged(accepted) is None
        for client, label in accepted.items():
            assert value_of(store, client, label) == model.kept[client, label]


@pytest.mark.parametrize("phases", [1, 3])
def test_the_number_of_files_does_not_grow_with_the_rounds(tmp_path: Path, phases: int) -> None:
    labels = [(number, phase) for number in range(1, 30) for phase in range(phases)]
    assert len(chained(tmp_path, *labels).versions("a")) <= 2 * phases + 1


# ---- damage


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    chained(tmp_path, (1, 0))
    path = next(tmp_path.rglob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-5])
    store = StateStore(tmp_path)
    assert store.damaged({"a": (1, 0)}) == "a"
    with pytest.raises(RunError, match=r"client 'a' after round 1, phase 0 is damaged: 000001-00\.safetensors"):
        store.load("a", (1, 0))


def test_a_missing_file_counts_as_damaged_and_others_do_not_matter(tmp_path: Path) -> None:
    store = chained(tmp_path, (1, 0))
    store.save("b", (1, 0), entry(1), None)
    (tmp_path / "b" / "000001-00.safetensors").write_bytes(b"")
    assert store.damaged({}) is None
    assert store.damaged({"a": (1, 0)}) is None
    assert store.damaged({"a": (1, 0), "b": (1, 0)}) == "b"
    assert store.damaged({"a": (2, 0)}) == "a"
    assert store.damaged({"c": (1, 0)}) == "c"


def test_a_failed_write_leaves_the_old_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = chained(tmp_path, (1, 0))
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="No space"):
            store.save("a", (2, 0), entry(2), (1, 0))
    assert store.versions("a") == [(1, 0)]
    assert value_of(store, "a", (1, 0)) == 1


def full(descriptor: int) -> None:
    raise OSError(28, "No space left on device")


# ---- memory


def test_saved_tensors_do_not_follow_the_live_model(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    live = torch.zeros(4)
    store.save("a", (1, 0), {"model/w": live}, None)
    live.fill_(9)
    assert value_of(store, "a", (1, 0)) == 0


def test_memory_is_bounded_whatever_the_number_of_clients(tmp_path: Path) -> None:
    store = StateStore(tmp_path, memory=3 * 400)
    for number in range(50):
        store.save(f"c{number}", (1, 0), entry(float(number), size=100), None)
        assert store.held_bytes <= 3 * 400
    assert [value_of(store, f"c{number}", (1, 0)) for number in (0, 25, 49)] == [0, 25, 49]
    assert 0 < store.held_bytes <= 3 * 400


# ---- keys


def test_only_declared_keys_are_kept() -> None:
    state = ClientState({"previous": Lifetime.RUN}, {})
    state["previous"] = {"image": torch.zeros(1)}
    assert list(state) == ["previous"]
    with pytest.raises(KeyError, match="teacher"):
        state["teacher"] = {}


def test_flatten_and_back() -> None:
    back = unflatten(flatten({"model": {"a/b": torch.ones(1), "c": torch.zeros(2)}, "x:y": {"k": torch.ones(3)}}))
    assert {group: set(tensors) for group, tensors in back.items()} == {"model": {"a/b", "c"}, "x:y": {"k"}}


def test_a_failed_write_leaves_the_old_file_and_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "file"
    write_atomically(target, b"old")
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(target, b"new")
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]


def test_files_with_other_names_are_not_states(tmp_path: Path) -> None:
    store = chained(tmp_path, (1, 0))
    for name in ("-00001-00", "000001--1", "notes", "000002-00 copy"):
        (tmp_path / "a" / f"{name}.safetensors").touch()
    assert store.versions("a") == [(1, 0)]
    store.save("a", (2, 0), entry(2), (1, 0))
    assert store.versions("a") == [(1, 0), (2, 0)]
