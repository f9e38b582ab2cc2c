"""What clients keep: declared keys, rounds that are done again, bounded memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from polyfed.errors import RunError
from polyfed.federation.files import write_atomically
from polyfed.federation.state import ClientState, Lifetime, StateStore, flatten, unflatten


def entry(value: float, size: int = 4) -> dict[str, torch.Tensor]:
    return {"model/w": torch.full((size,), value)}


def value_of(store: StateStore, client: str, before: tuple[int, int]) -> float | None:
    found = store.load(client, before)
    return None if found is None else float(found[1]["model/w"][0])


def test_a_state_of_a_lost_round_is_not_seen(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    store.save("a", (1, 0), entry(1))
    store.save("a", (2, 0), entry(2))
    assert value_of(store, "a", (2, 0)) == 1  # round 2 is done again
    assert value_of(store, "a", (2, 1)) == 2  # its second phase
    assert value_of(StateStore(tmp_path), "a", (3, 0)) == 2  # another process
    assert value_of(store, "b", (9, 0)) is None


def test_states_that_a_resume_can_ask_for_are_kept(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    for number in (1, 2, 5, 8, 9):
        store.save("a", (number, 0), entry(number))
    # a server at round 9 may go back to 8 or 7
    assert [value_of(store, "a", (number + 1, 0)) for number in (9, 8, 7)] == [9, 8, 5]
    assert len(store.labels("a")) == 3


def test_forget_removes_rounds_that_are_done_again(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    store.save("a", (1, 0), entry(1))
    store.save("a", (2, 0), entry(2))
    store.forget(2)
    assert store.labels("a") == [(1, 0)]
    assert value_of(store, "a", (5, 0)) == 1


def test_saved_tensors_do_not_follow_the_live_model(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    live = torch.zeros(4)
    store.save("a", (1, 0), {"model/w": live})
    live.fill_(9)
    assert value_of(store, "a", (2, 0)) == 0


def test_memory_is_bounded_whatever_the_number_of_clients(tmp_path: Path) -> None:
    store = StateStore(tmp_path, memory=3 * 400)
    for number in range(50):
        store.save(f"c{number}", (1, 0), entry(number, size=100))
    assert store._bytes <= 3 * 400
    assert [value_of(store, f"c{number}", (2, 0)) for number in (0, 25, 49)] == [0, 25, 49]


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    StateStore(tmp_path).save("a", (1, 0), entry(1))
    path = next(tmp_path.rglob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-5])
    store = StateStore(tmp_path)
    assert store.damaged(before_round=2) == "a"
    with pytest.raises(RunError, match="client 'a' is damaged"):
        store.load("a", (2, 0))


def test_only_declared_keys_are_kept() -> None:
    state = ClientState({"previous": Lifetime.RUN}, {})
    state["previous"] = {"image": torch.zeros(1)}
    assert list(state) == ["previous"]
    with pytest.raises(KeyError, match="teacher"):
        state["teacher"] = {}


def test_flatten_and_back() -> None:
    groups = {"model": {"a/b": torch.ones(1), "c": torch.zeros(2)}, "x:y": {"k": torch.ones(3)}}
    back = unflatten(flatten(groups))
    assert {group: set(tensors) for group, tensors in back.items()} == {"model": {"a/b", "c"}, "x:y": {"k"}}


def test_a_failed_write_leaves_the_old_file_and_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "file"
    write_atomically(target, b"old")
    monkeypatch.setattr("os.fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        write_atomically(target, b"new")
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]
