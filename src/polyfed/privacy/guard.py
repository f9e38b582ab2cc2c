"""Differential privacy of a site's replies: protection within each client's budget, and the ledger of its spending."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from polyfed.core.errors import BudgetError, DataError, PayloadError
from polyfed.core.files import sync_folder, write_atomically, write_fully
from polyfed.core.untrusted import file_json
from polyfed.privacy.accounting import Neighbours, PrivacyCost, epsilon_of, fits
from polyfed.privacy.private_training import PrivateTraining
from polyfed.privacy.release import released
from polyfed.privacy.secret import kept_secret, keyed_digest, read_secret
from polyfed.privacy.settings import Budget, PrivacySettings, uncovered
from polyfed.wire.messages import Request
from polyfed.wire.payload import Payload
from polyfed.wire.schema import StepSchema

PRIVATE = ".privacy"
"""Folder of a site's secret and ledgers, next to those of its runs, whose names begin with a letter or number."""


# ---- the ledger


@dataclass(frozen=True)
class LedgerLine:
    """A line of a ledger: a charge before a step begins, or the reply that is about to leave.

    Attributes:
        request: Keyed digest of the request.
        reply: Keyed digest of request, protection and reply before noise, from which the noise is drawn; empty while
            unknown.
        cost: Charge; None: an earlier line paid for the reply.
    """

    request: str
    reply: str = ""
    cost: PrivacyCost | None = None


@dataclass(frozen=True)
class SpendingLedger:
    """Spending of one client, over all runs that share the file, on disk before a step begins.

    Each line has a code of it and of the line before, by the site's secret, so that no line can be changed, moved or
    taken out. The file ``CLIENT.head`` has their number and the code of the last one, with a code of both, so that the
    ledger alone cannot be cut, nor replaced by an old copy. A note next to the secret records that there is a head. Old
    copies of all three are accepted: only a copy elsewhere could reveal them.

    Attributes:
        path: File of the ledger.
        key: Key of the codes.
        note: File that exists once the ledger has a head; None: no note is kept.
    """

    path: Path
    key: bytes
    note: Path | None = None

    @contextlib.contextmanager
    def held(self) -> Iterator[SpendingLedger]:
        """Lock the ledger against other processes within the block.

        Raises:
            OSError: the head cannot be brought up to the ledger after a kill or a full disk.
            DataError: see ``entries``.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with os.fdopen(os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._note([code for _, code in self._read()])
            yield self

    def entries(self) -> list[LedgerLine]:
        """All complete lines on disk; a last one that was cut off is ignored, as nothing has left for it.

        Raises:
            DataError: a line is damaged or out of place, or lines are missing.
        """
        return [entry for entry, _ in self._read()]

    def costs(self) -> list[PrivacyCost]:
        """Charges in order; errors as for ``entries``."""
        return [entry.cost for entry in self.entries() if entry.cost is not None]

    def append(self, entry: LedgerLine) -> None:
        """Write a line; all of it is on the disk when this returns.

        Raises:
            OSError: the disk is full; the ledger is then as before.
            DataError: see ``entries``.
        """
        known = self._read()
        code, line = self._line(entry, known[-1][1] if known else "")
        start = sum(len(written) + 1 for written in self._lines())
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, start)  # removes a line that a kill has cut off
            write_fully(descriptor, line + b"\n", start)
        finally:
            os.close(descriptor)
        sync_folder(self.path.parent)
        # a kill before this leaves a ledger one line longer than the head records, which is not a rollback
        self._note([*(before for _, before in known), code])

    def _note(self, codes: Sequence[str]) -> None:
        if not codes:
            return
        content = self._head_of(len(codes), codes[-1])
        if not (self._head.exists() and self._head.read_bytes() == content):
            write_atomically(self._head, content)
        if self.note is not None and not self.note.exists():  # after the head, whose existence it records
            write_atomically(self.note, b"")

    def _head_of(self, count: int, last: str) -> bytes:
        content = f"{count} {last}"
        code = keyed_digest(self.key, b"head", self.path.stem.encode(), content.encode()).hex()
        return f"{content} {code}\n".encode()

    @property
    def _head(self) -> Path:
        return self.path.with_suffix(".head")

    def _lines(self) -> list[bytes]:
        content = self.path.read_bytes() if self.path.exists() else b""
        return content[: content.rfind(b"\n") + 1].splitlines()

    def _line(self, entry: LedgerLine, before: str) -> tuple[str, bytes]:
        """The code of an entry after the line with the code ``before``, and its own line."""
        content = asdict(entry)
        code = keyed_digest(self.key, self.path.stem.encode(), before.encode(), json.dumps(content).encode()).hex()
        return code, json.dumps({**content, "code": code}).encode()

    def _read(self) -> list[tuple[LedgerLine, str]]:
        """Entries with the codes of their lines."""
        known: list[tuple[LedgerLine, str]] = []
        for number, line in enumerate(self._lines(), 1):
            try:
                values = file_json(line)
                cost = values["cost"]
                entry = LedgerLine(values["request"], values["reply"], None if cost is None else PrivacyCost(**cost))
                code, expected = self._line(entry, known[-1][1] if known else "")
                if not hmac.compare_digest(line, expected):
                    raise ValueError("its code is not that of this line in this place with the site's secret")
            except (ValueError, KeyError, TypeError) as error:
                raise self._damaged(f"line {number} of '{self.path}' is damaged ({error})") from error
            known.append((entry, code))
        self._require_complete([code for _, code in known])
        return known

    def _require_complete(self, codes: Sequence[str]) -> None:
        if not self._head.exists():
            if self.note is not None and self.note.exists():
                raise self._damaged(f"'{self._head}' is gone, which '{self.note}' records")
            return
        content = self._head.read_bytes()
        parts = re.fullmatch(rb"([1-9][0-9]{0,17}) ([0-9a-f]{64}) [0-9a-f]{64}\n", content)
        if parts is None or not hmac.compare_digest(content, self._head_of(int(parts[1]), parts[2].decode())):
            raise self._damaged(f"'{self._head}' is damaged, or of another version")
        count = int(parts[1])
        if codes[count - 1 : count] != [parts[2].decode()]:
            raise self._damaged(f"'{self.path}' has {len(codes)} lines and lacks the last that '{self._head.name}' has")

    def _damaged(self, what: str) -> DataError:
        both = f"'{self._head.name}'{'' if self.note is None else f' and {self.note}'}"
        return DataError(
            f"{what}, so the client's spending is unknown; restore the newest copy of the ledger: without it the "
            f"client must not go on. To accept a copy that lacks the last lines, delete {both}: the spending of those "
            "lines is then not counted"
        )


def ledger_at(path: Path, secret: bytes, file: Path | None = None) -> SpendingLedger:
    """A client's ledger, with a note next to the secret, whose ``file`` is elsewhere or next to the ledger."""
    file = file or path.with_name("secret")
    # other runs may share a secret elsewhere; without the right to write there the note stays with the ledger
    elsewhere = file.parent.resolve() != path.parent.resolve() and os.access(file.parent, os.W_OK)
    mark = f"-{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:16]}" if elsewhere else ""
    folder = (file.parent if elsewhere else path.parent) / f"{file.name}.ledgers"
    return SpendingLedger(path, keyed_digest(secret, b"ledger"), folder / f"{path.stem}{mark}.note")


# ---- protection


@dataclass(frozen=True)
class PrivacyGuard:
    """Protects the replies of a site's clients and charges their budgets.

    A step is charged before it begins, so that one that fails, or is killed, has cost as much. The noise of a reply
    is drawn from the site's secret, the request with the run's terms and all requests that led to the client's state,
    and the reply before noise. So the same request has the same answer at no further cost; but where it would make
    another reply (other data, a GPU) the draws are new and cost, as the difference of two replies with one noise would
    reveal the data.

    Attributes:
        settings: Resolved settings.
        folder: Folder of the ledgers, and of the secret if it has no file of its own.
        secret_file: File of the secret; None: made in the folder.
        site_budget: Budget of the site over all runs; None: the run's budget only.
        site_neighbours: Data sets between which the site's budget is meant.
        terms: The run's terms without its name and masks.
    """

    settings: PrivacySettings
    folder: Path
    secret_file: Path | None = None
    site_budget: Budget | None = None
    site_neighbours: Neighbours = "replace"
    terms: bytes = b""

    @cached_property
    def _secret(self) -> bytes:
        return kept_secret(self.folder / "secret") if self.secret_file is None else read_secret(self.secret_file)

    def prepare(self) -> None:
        """Read or make the secret, before processes that need it begin.

        Raises:
            ConfigError: it cannot be read.
        """
        _ = self._secret

    @property
    def _budgets(self) -> Sequence[tuple[Budget, Neighbours]]:
        own = [(self.site_budget, self.site_neighbours)] if self.site_budget is not None else []
        return [(self.settings.budget, self.settings.neighbours), *own]

    def ledger(self, client: str) -> SpendingLedger:
        return ledger_at(self.folder / f"{client}.jsonl", self._secret, self.secret_file)

    def begin(
        self, request: Request, received: Payload, schema: StepSchema, cost: PrivacyCost | None, before: bytes = b""
    ) -> bytes:
        """Check that a step's reply is covered, and charge it unless it was charged before; returns the digest.

        Args:
            request: Request to the client.
            received: Payload of the request, decoded.
            schema: Schema of the step.
            cost: Cost of the reply.
            before: Digest of the request whose step left the client's state; empty: the client keeps no state.

        Raises:
            PayloadError: the reply would hold fields that are not covered.
            BudgetError: the client has spent its budget.
        """
        if missing := next(uncovered(self.settings, request.step, schema), None):
            raise PayloadError(f"differential privacy does not cover {missing}")
        about = [request.client, request.step, request.round, request.phase, request.after]
        parts = json.dumps(about).encode(), received.digest, self.terms, before
        digest = keyed_digest(self._secret, b"request", *parts)
        if cost is not None:
            with self.ledger(request.client).held() as ledger:
                if all(entry.request != digest.hex() for entry in ledger.entries()):
                    self._require_affordable(request.client, ledger.costs(), cost)
                    ledger.append(LedgerLine(digest.hex(), cost=cost))
        return digest

    def training(self, digest: bytes, cost: PrivacyCost | None, *, blank: bool = False) -> PrivateTraining | None:
        """Training with noise for a step, if single samples are protected.

        Args:
            digest: Digest of the request.
            cost: Cost of the step.
            blank: True if the client's samples are replaced by blank ones.
        """
        samples = self.settings.samples
        if samples is None or cost is None:
            return None
        return PrivateTraining(samples, keyed_digest(self._secret, b"samples", digest, self._protection), cost, blank)

    @property
    def _protection(self) -> bytes:
        return self.settings.model_dump_json(include={"reply", "samples"}).encode()

    def release(
        self, request: Request, digest: bytes, content: Payload, sent: Payload, cost: PrivacyCost | None, samples: int
    ) -> Payload:
        """The reply to a step with its protection; its digest is on disk by then.

        Raises:
            PayloadError: the reply holds fields that are not covered.
            BudgetError: the request had another answer before, and this one costs more than is left.
        """
        key = keyed_digest(self._secret, b"reply", digest, self._protection, content.digest)
        reply = self.settings.reply
        made = content if reply is None else released(content, sent, reply, key, samples)
        if cost is None:
            return made
        with self.ledger(request.client).held() as ledger:
            answers = [entry.reply for entry in ledger.entries() if entry.request == digest.hex() and entry.reply]
            if key_name(key) not in answers:
                if answers:
                    self._require_affordable(request.client, ledger.costs(), cost)
                ledger.append(LedgerLine(digest.hex(), key_name(key), cost if answers else None))
        return made

    def _require_affordable(self, client: str, spent: Sequence[PrivacyCost], cost: PrivacyCost) -> None:
        for budget, neighbours in self._budgets:
            if budget.epsilon is not None and not fits([*spent, cost], budget.epsilon, budget.delta, neighbours):
                so_far, more = (epsilon_of(costs, budget.delta, neighbours) for costs in (spent, [*spent, cost]))
                raise BudgetError(
                    f"client '{client}' has spent its privacy budget: {len(spent)} replies spent epsilon {so_far:.3g} "
                    f"at delta {budget.delta:g}, one more would make it {more:.3g} of {budget.epsilon:g}"
                )


def key_name(key: bytes) -> str:
    """Name of a key in the ledger: its digest, as the noise could be drawn from the key itself."""
    return hashlib.sha256(b"name" + key).hexdigest()
