"""The last thing that a reply passes at its client: differential privacy, within the client's budget."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from polyfed.core.errors import BudgetError, PayloadError
from polyfed.privacy.accounting import Neighbours, PrivacyCost, epsilon_of, fits
from polyfed.privacy.private_training import PrivateTraining
from polyfed.privacy.release import released
from polyfed.privacy.secret import kept_secret, keyed_digest, read_secret
from polyfed.privacy.settings import Budget, PrivacySettings, uncovered
from polyfed.privacy.spending import LedgerLine, SpendingLedger
from polyfed.wire.messages import Request
from polyfed.wire.payload import Payload
from polyfed.wire.schema import StepSchema

PRIVATE = ".privacy"
"""Folder of a place's secret and ledgers, beside those of its runs, whose names begin with a letter or number."""


@dataclass(frozen=True)
class PrivacyGuard:
    """Protects the replies of the clients of a site, and keeps account of them.

    A step is charged before it begins, so that one that fails, or is killed, has cost as much. The noise of a reply
    comes from the site's secret, the request with all that the run says and all requests that led to what the client
    keeps, and the reply before noise. So the same request has the same answer for nothing; but where it would make
    another reply (other data, a GPU) the draws are new and cost, as the difference of two replies with one noise would
    show what it hides.

    Attributes:
        settings: resolved.
        folder: where the ledgers are, and the secret if it has no file of its own.
        secret_file: of the secret; None: made in the folder.
        site_budget: what the site allows over all runs; None: nothing beyond the run's budget.
        site_neighbours: between which data sets the site means its budget.
        terms: all that the run says but its name, and whether masks hide what leaves.
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
        """Before a step: that its replies are covered; what it costs is on disk then, unless it was before.

        Args:
            request: to the client.
            received: its payload, decoded.
            schema: of the step.
            cost: of the reply.
            before: digest of the request whose step left what the client keeps; empty: it keeps nothing.

        Returns:
            The request's digest.

        Raises:
            PayloadError: the reply would hold what is not covered.
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
        """Trains the client in a step with that digest, if it is samples that are protected.

        Args:
            digest: of the request.
            cost: of the step.
            blank: the client's samples say nothing.
        """
        samples = self.settings.samples
        if samples is None or cost is None:
            return None
        key = keyed_digest(self._secret, b"samples", digest, self._protection)
        return PrivateTraining(samples, key, cost, blank)

    @property
    def _protection(self) -> bytes:
        return self.settings.model_dump_json(include={"reply", "samples"}).encode()

    def release(
        self,
        request: Request,
        digest: bytes,
        content: Payload,
        received: Payload,
        cost: PrivacyCost | None,
        samples: int,
    ) -> Payload:
        """The reply to a step as it may leave; which one it is is on disk by then.

        Raises:
            PayloadError: it holds what is not covered.
            BudgetError: the request was answered otherwise before, and another answer costs more than is left.
        """
        key = keyed_digest(self._secret, b"reply", digest, self._protection, content.digest)
        reply = self.settings.reply
        made = content if reply is None else released(content, received, reply, key, samples)
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
                    f"client '{client}' has spent its privacy budget: {len(spent)} replies gave away epsilon "
                    f"{so_far:.3g} at delta {budget.delta:g}, one more would make it {more:.3g} of {budget.epsilon:g}"
                )


def ledger_at(path: Path, secret: bytes, file: Path | None = None) -> SpendingLedger:
    """A client's ledger, with a note of it beside the secret, whose ``file`` is elsewhere or beside the ledger."""
    file = file or path.with_name("secret")
    # other runs may share a secret that is elsewhere; who may not write there keeps the note beside the ledger
    elsewhere = file.parent.resolve() != path.parent.resolve() and os.access(file.parent, os.W_OK)
    mark = f"-{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:16]}" if elsewhere else ""
    folder = (file.parent if elsewhere else path.parent) / f"{file.name}.ledgers"
    return SpendingLedger(path, keyed_digest(secret, b"ledger"), folder / f"{path.stem}{mark}.note")


def key_name(key: bytes) -> str:
    """What the ledger calls a key: not the key itself, whoever reads a ledger could draw the noise from that."""
    return hashlib.sha256(b"name" + key).hexdigest()
