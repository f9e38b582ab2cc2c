"""Replies and errors on their way out of a site: terms of the site, a step and its filters, failures, own memory."""

from __future__ import annotations

import logging
import secrets
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polyfed.core.errors import BudgetError, PayloadError, RefusedError, author_line
from polyfed.federation.filters import Reply
from polyfed.federation.membership import Member
from polyfed.models.model import Model
from polyfed.privacy.accounting import Neighbours, PrivacyCost
from polyfed.privacy.guard import PrivacyGuard
from polyfed.privacy.settings import Budget
from polyfed.wire.messages import Cause, Failure, Request
from polyfed.wire.payload import Payload, is_laid_out
from polyfed.wire.schema import StepSchema

if TYPE_CHECKING:  # imports cryptography, which the base installation lacks
    from polyfed.privacy.masking.party import SiteIdentity

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SiteTerms:
    """Terms of a site over all its runs; a simulation allows everything.

    Attributes:
        private: An institution's folder of the secret, the privacy ledgers and the accounts of answered asks, which
            bound what a server may ask; None: a simulation.
        budget: Privacy budget over all runs.
        neighbours: Data sets between which the budget is meant.
        measures: True if test metrics may leave.
        identity: Signing key for masked sums, where sites have keys.
        stops: True if a step that fails ends the run, so that no failure is hidden from its author.
    """

    private: Path | None = None
    budget: Budget | None = None
    neighbours: Neighbours = "replace"
    measures: bool = True
    identity: SiteIdentity | None = None
    stops: bool = False


@dataclass
class Performing:
    """A client step in progress.

    Attributes:
        request: Request to the client.
        received: Its payload, decoded.
        schema: Schema of the step.
        member: The client.
        digest: Digest of the request if it is charged; kept with a protected client's state.
        cost: Privacy cost of its reply, if any.
    """

    request: Request
    received: Payload
    schema: StepSchema
    member: Member
    digest: bytes = b""
    cost: PrivacyCost | None = None


@dataclass(frozen=True)
class Noised:
    """Filter that clips a protected client's reply and adds noise to it, in a step that is charged.

    Attributes:
        guard: Charges the client's budget.
        samples: Number of training samples of each client, which is public.
    """

    guard: PrivacyGuard
    samples: Mapping[str, int]

    def __call__(self, replies: Iterator[Reply], ask: Performing) -> Iterator[Reply]:
        for reply in replies:
            samples = self.samples[ask.member.id]
            reply.payload = self.guard.release(ask.request, ask.digest, reply.payload, ask.received, ask.cost, samples)
            yield reply


@dataclass(frozen=True)
class Encoded:
    """Last filter of a site: lays the payload out for the wire, masked or in the clear."""

    encode: Callable[[Payload], Payload]

    def __call__(self, replies: Iterator[Reply], ask: Performing) -> Iterator[Reply]:
        for reply in replies:
            reply.payload = self.encode(reply.payload)
            yield reply


def failure_of(error: Exception, *, in_full: bool, refused: bool = False) -> Failure:
    """Failure that a server receives for an error at a site.

    Its line is the error's text, or its class and a number under which the log here has the text. The text of a
    refusal depends only on the request and the site's demands, so it is sent; so is the fact that a budget is spent.

    Args:
        error: The error.
        in_full: True to send text and traceback in any case.
        refused: True if the error was raised over the request, before any data were read.
    """
    refused = isinstance(error, RefusedError) or (refused and isinstance(error, PayloadError))
    text = str(error)
    if not in_full and not refused:
        number = secrets.token_hex(4)
        _log.error("error %s", number, exc_info=error)
        spent = "its privacy budget is spent; " if isinstance(error, BudgetError) else ""
        text = f"{spent}error {number} in the site's log"
    details = "".join(traceback.format_exception(error)) if in_full else ""
    cause = Cause.INVALID if isinstance(error, PayloadError) else Cause.FAILED
    cause = Cause.REFUSED if refused or isinstance(error, BudgetError) else cause
    own = (author_line(error), error) if in_full else ()
    return Failure(cause, f"{type(error).__name__}: {text}", details, *own)


@torch.no_grad()
def detach_reply(payload: Payload, model: Model | None) -> Payload:
    """The payload without memory that the model goes on to use.

    Values that are laid out as they cross keep their memory, in place of which the model gets new one; all others that
    share memory with the model are copied in one operation.
    """
    if model is None:
        return payload
    owners: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in model.exchanged(live=True).items():
        owners.setdefault(_memory(tensor), []).append((name, tensor))
    taken, fields = dict[str, Tensor](), dict(payload.fields)
    for field, bundle in payload.bundles.items():
        shared = []
        for name, value in bundle.items():
            sharing = owners.get(_memory(value), [])
            own = sharing[0][1] if len(sharing) == 1 else value
            if own is not value and own.shape == value.shape and is_laid_out(value):
                taken |= sharing
            elif sharing:
                shared.append(name)
        if shared:
            copies = torch._foreach_clone([bundle[name] for name in shared], memory_format=torch.contiguous_format)
            tensors = {**bundle, **dict(zip(shared, copies, strict=True))}
            fields[field] = type(bundle)(tensors=tensors, **bundle.attributes())
    # at once: where the reply is freed first, an allocator gives its memory back, and steps wait for new pages
    for name, own in zip(taken, torch._foreach_clone([*taken.values()]) if taken else (), strict=True):
        taken[name].data = own
    return Payload(fields)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
