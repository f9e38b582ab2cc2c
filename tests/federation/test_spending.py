"""The ledger of releases on disk: complete lines count, cut ones do not, damaged ones stop the client."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyfed.core.errors import DataError
from polyfed.federation.accounting import PrivacyCost
from polyfed.federation.spending import Release, SpendingLedger

FIRST, SECOND = (Release(f"request-{k}", f"reply-{k}", PrivacyCost(1.5, 0.5, k)) for k in (1, 2))


def test_releases_are_read_as_they_were_written(tmp_path: Path) -> None:
    ledger = SpendingLedger(tmp_path / "deep" / "a.jsonl")
    with ledger.held():
        assert ledger.releases() == []
        ledger.append(FIRST)
        ledger.append(SECOND)
    assert SpendingLedger(ledger.path).releases() == [FIRST, SECOND]


def test_a_line_that_a_kill_cut_off_counts_for_nothing_and_is_replaced(tmp_path: Path) -> None:
    ledger = SpendingLedger(tmp_path / "a.jsonl")
    ledger.append(FIRST)
    whole = ledger.path.read_bytes()
    ledger.append(SECOND)
    ledger.path.write_bytes(ledger.path.read_bytes()[:-5])
    assert ledger.releases() == [FIRST]
    ledger.append(SECOND)
    assert ledger.releases() == [FIRST, SECOND]
    assert ledger.path.read_bytes().startswith(whole)


def test_a_release_is_on_disk_before_its_reply_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr("os.fsync", synced.append)
    SpendingLedger(tmp_path / "a.jsonl").append(FIRST)
    assert len(synced) == 2  # the file, and the folder that it is new in


@pytest.mark.parametrize("damage", [b"\x00\x00\n", b"{}\n", b'{"request": "r", "reply": "s", "cost": {"price": 1}}\n'])
def test_nobody_goes_on_with_a_damaged_ledger(tmp_path: Path, damage: bytes) -> None:
    ledger = SpendingLedger(tmp_path / "a.jsonl")
    ledger.append(FIRST)
    ledger.path.write_bytes(ledger.path.read_bytes() + damage)
    with pytest.raises(DataError, match=r"line 2 of .* is damaged .* restore the file"):
        ledger.releases()
