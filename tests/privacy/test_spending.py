"""The ledger of what is given away: complete lines count, and nothing is taken out, moved, cut or written in part."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from misbehaving import raising
from polyfed.core.errors import DataError
from polyfed.core.files import write_fully
from polyfed.privacy.accounting import PrivacyCost
from polyfed.privacy.guard import LedgerLine, SpendingLedger, ledger_at
from polyfed.privacy.secret import kept_secret

KEY = b"k" * 32
FIRST, SECOND = (LedgerLine(f"request-{k}", cost=PrivacyCost(1.5, 0.5, k)) for k in (1, 2))
ANSWER = LedgerLine("request-1", "reply-1")


@pytest.fixture
def ledger(tmp_path: Path) -> SpendingLedger:
    return SpendingLedger(tmp_path / "a.jsonl", KEY, tmp_path / "secret.ledgers" / "a.note")


@pytest.fixture
def full(ledger: SpendingLedger) -> SpendingLedger:
    """One with three lines."""
    for entry in (FIRST, ANSWER, SECOND):
        ledger.append(entry)
    return ledger


def shortened(ledger: SpendingLedger, lines: int) -> None:
    ledger.path.write_bytes(b"".join(ledger.path.read_bytes().splitlines(keepends=True)[:lines]))


def test_entries_are_read_as_they_were_written(tmp_path: Path) -> None:
    ledger = SpendingLedger(tmp_path / "deep" / "a.jsonl", KEY)
    with ledger.held():
        assert ledger.entries() == []
        for entry in (FIRST, ANSWER, SECOND):
            ledger.append(entry)
    again = SpendingLedger(ledger.path, KEY)
    assert again.entries() == [FIRST, ANSWER, SECOND]
    assert again.costs() == [FIRST.cost, SECOND.cost]


def test_a_line_that_a_kill_cut_off_counts_for_nothing_and_is_replaced(ledger: SpendingLedger) -> None:
    ledger.append(FIRST)
    before, head = ledger.path.read_bytes(), ledger.path.with_suffix(".head").read_bytes()
    ledger.append(SECOND)
    # the kill came before the head was written
    ledger.path.with_suffix(".head").write_bytes(head)
    ledger.path.write_bytes(ledger.path.read_bytes()[:-5])
    assert ledger.entries() == [FIRST]
    ledger.append(SECOND)
    assert ledger.entries() == [FIRST, SECOND]
    assert ledger.path.read_bytes().startswith(before)


def test_a_kill_between_ledger_and_head_loses_nothing(ledger: SpendingLedger) -> None:
    ledger.append(FIRST)
    head = ledger.path.with_suffix(".head").read_bytes()
    ledger.append(SECOND)
    ledger.path.with_suffix(".head").write_bytes(head)
    assert ledger.entries() == [FIRST, SECOND]


def test_no_client_goes_on_without_a_head(ledger: SpendingLedger, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger.append(FIRST)
    with monkeypatch.context() as patched:
        patched.setattr("polyfed.privacy.guard.write_atomically", raising(OSError(28, "")))
        with pytest.raises(OSError, match="28"):
            ledger.append(SECOND)
        with pytest.raises(OSError, match="28"), ledger.held():
            raise AssertionError
    before = ledger.path.with_suffix(".head").read_text()
    with ledger.held():
        assert ledger.entries() == [FIRST, SECOND]
    assert (before[0], ledger.path.with_suffix(".head").read_text()[0]) == ("1", "2")


def test_an_entry_is_on_disk_before_anything_leaves(ledger: SpendingLedger, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr("os.fsync", lambda file: synced.append(str(Path(f"/proc/self/fd/{file}").readlink())))
    ledger.append(FIRST)
    folder = str(ledger.path.parent)
    assert synced[:2] == [str(ledger.path), folder]
    assert synced[-1] == folder  # of the head


Damage = Callable[[list[dict[str, object]]], list[dict[str, object]]]


def changed(place: int, **values: object) -> Damage:
    return lambda lines: [{**line, **values} if number == place else line for number, line in enumerate(lines)]


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (changed(0, cost={"noise": float("nan"), "rate": None, "steps": 1}), 1),
        (changed(0, cost={"noise": float("inf"), "rate": None, "steps": 1}), 1),
        (changed(0, cost={"noise": -1.0, "rate": None, "steps": 1}), 1),
        (changed(0, cost={"noise": 90.0, "rate": None, "steps": 1}), 1),
        (changed(0, cost={"price": 1}), 1),
        (changed(0, cost=None), 1),
        (changed(1, request="request-9"), 2),
        (changed(2, more=1), 3),
        (lambda lines: lines[1:], 1),
        (lambda lines: [lines[0], lines[2]], 2),
        (lambda lines: [lines[1], lines[0], lines[2]], 1),
        (lambda lines: [*lines, lines[2]], 4),
        (lambda lines: [*lines, {}], 4),
    ],
)
def test_no_client_goes_on_with_a_changed_or_moved_line(full: SpendingLedger, damage: Damage, line: int) -> None:
    lines = damage([json.loads(text) for text in full.path.read_text().splitlines()])
    full.path.write_text("".join(json.dumps(content) + "\n" for content in lines))
    with pytest.raises(DataError, match=rf"line {line} of .*a\.jsonl' is damaged .* restore the newest copy"):
        full.entries()
    with pytest.raises(DataError, match="damaged"):
        full.append(SECOND)


def test_a_ledger_of_another_secret_or_client_is_none(ledger: SpendingLedger) -> None:
    ledger.append(FIRST)
    other = ledger.path.with_name("b.jsonl")
    other.write_bytes(ledger.path.read_bytes())
    for stranger in (SpendingLedger(ledger.path, b"o" * 32), SpendingLedger(other, KEY)):
        with pytest.raises(DataError, match=r"line 1 of .* is damaged"):
            stranger.entries()


@pytest.mark.parametrize("lines", [None, 0, 1, 2])
def test_an_old_copy_is_refused_until_the_operator_accepts_it(full: SpendingLedger, lines: int | None) -> None:
    shortened(full, lines or 0)
    if lines is None:
        full.path.unlink()
    with pytest.raises(DataError, match=rf"has {lines or 0} lines and lacks the last that 'a\.head' has.*delete 'a\."):
        full.entries()
    full.path.with_suffix(".head").unlink()
    message = r"a\.head' is gone, which '.*a\.note' records.*delete 'a\.head' and .*a\.note:"
    with pytest.raises(DataError, match=message):
        full.entries()
    assert full.note is not None
    full.note.unlink()  # as in the message
    assert full.entries() == [FIRST, ANSWER, SECOND][: lines or 0]
    full.append(SECOND)
    assert full.entries()[-1] == SECOND


@pytest.mark.parametrize(
    "head",
    [
        *(b"", b"9" * 6000 + b" x\n", b"-1 a b\n", b"\xff\n", b"1", "\u0661 {last} {last}\n".encode()),
        *(b"{count} {last}\n", b"1 {last} " + b"0" * 64 + b"\n"),
        *(b"{count} {first} {mac}\n", b"1 {first} {mac}\n"),
    ],
    ids=range(10),
)
def test_a_head_that_is_none_of_the_sites_is_named(full: SpendingLedger, head: bytes) -> None:
    """Cut to its first line, with that line's own code as head, it was believed."""
    codes = [json.loads(line)["code"] for line in full.path.read_bytes().splitlines()]
    mac = full.path.with_suffix(".head").read_text().split()[-1]
    for name, value in {"count": "3", "first": codes[0], "last": codes[2], "mac": mac}.items():
        head = head.replace(f"{{{name}}}".encode(), value.encode())
    full.path.with_suffix(".head").write_bytes(head)
    for lines in (3, 1):
        shortened(full, lines)
        with pytest.raises(DataError, match=r"a\.head' is damaged, or of another version, so the client's spending"):
            full.entries()


def test_notes_are_next_to_the_secret_and_of_one_ledger_each(tmp_path: Path) -> None:
    own, run = tmp_path / "keys" / "secret", tmp_path / "run" / "a.jsonl"
    own.parent.mkdir()
    ledgers = [ledger_at(run, KEY), ledger_at(run, KEY, own), ledger_at(tmp_path / "other" / "a.jsonl", KEY, own)]
    assert ledgers[0].note == tmp_path / "run" / "secret.ledgers" / "a.note"
    assert len({ledger.note for ledger in ledgers}) == 3
    assert all(str(ledger.note).startswith(str(tmp_path / "keys" / "secret.ledgers" / "a-")) for ledger in ledgers[1:])


# ---- full disks


def test_a_disk_that_takes_a_part_of_a_line_takes_none_of_it(ledger: SpendingLedger) -> None:
    """The limit of the process on the size of a file stands for the end of a disk: what fits is written, no error."""
    ledger.append(FIRST)
    size = ledger.path.stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 40, before[1]))
    try:
        for _ in range(2):
            with pytest.raises(OSError, match="File too large"):
                ledger.append(SECOND)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert ledger.entries() == [FIRST]
    assert ledger.path.stat().st_size == size
    ledger.append(SECOND)
    assert ledger.entries() == [FIRST, SECOND]


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_what_is_written_in_parts_is_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    honest = os.pwrite
    monkeypatch.setattr("os.pwrite", lambda file, data, start: honest(file, data[:step], start))
    ledger = SpendingLedger(tmp_path / "a.jsonl", KEY)
    ledger.append(FIRST)
    assert ledger.entries() == [FIRST]
    assert len(kept_secret(tmp_path / "secret")) == 32


@pytest.mark.parametrize(
    ("pwrite", "message"),
    [(lambda file, data, start: 0, "No space left"), (lambda file, data, start: len(data), "differs from what was")],
)
def test_a_file_that_lies_about_what_it_took_is_cut_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pwrite: Callable[..., int], message: str
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before")
    monkeypatch.setattr("os.pwrite", pwrite)
    with path.open("r+b") as stream, pytest.raises(OSError, match=message):
        write_fully(stream.fileno(), b"line", 6)
    assert path.read_bytes() == b"before"
    with pytest.raises(OSError, match=message):
        kept_secret(tmp_path / "secret")
    assert list(tmp_path.iterdir()) == [path]
