"""What a client's reply passes before it leaves its site: one small class for each thing that is done."""

from __future__ import annotations

import logging
import secrets
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from polyfed.core.errors import BudgetError, PayloadError, RefusedError, author_line
from polyfed.engines.run_spec import RunSpec
from polyfed.federation.client import ClientInfo
from polyfed.federation.membership import Member
from polyfed.federation.state import Lifetime, StateStore
from polyfed.models.model import Model
from polyfed.privacy.accounting import Neighbours, PrivacyCost
from polyfed.privacy.guard import PrivacyGuard
from polyfed.privacy.private_training import PrivateTraining
from polyfed.privacy.release import require_updates
from polyfed.privacy.settings import EXAMPLES, UPDATE, Budget
from polyfed.wire.limits import Limits
from polyfed.wire.messages import Cause, Failure, Request
from polyfed.wire.payload import Payload, Scalar, TensorBundle
from polyfed.wire.schema import StepSchema

if TYPE_CHECKING:  # takes cryptography, which is no part of the base installation
    from polyfed.privacy.masking.party import SiteIdentity

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SiteTerms:
    """What a place allows over all its runs; a simulation allows everything.

    Attributes:
        private: an institution's folder of the secret, the ledgers of privacy and the accounts of what clients have
            answered, which bound what a server may ask; None: a simulation.
        budget: of privacy.
        neighbours: between which data sets it means that.
        measures: whether test metrics may leave.
        identity: signs keys of masked sums, where sites have keys.
        stops: whether a step that fails ends the run, so that no failure is hidden from its author.
    """

    private: Path | None = None
    budget: Budget | None = None
    neighbours: Neighbours = "replace"
    measures: bool = True
    identity: SiteIdentity | None = None
    stops: bool = False


@dataclass
class Performing:
    """A step that a client is asked for.

    Attributes:
        request: to the client.
        received: its payload, decoded.
        schema: of the step.
        member: the client.
        digest: of the request, where it is charged; kept with what a protected client keeps.
        cost: of its reply in privacy, if anything.
    """

    request: Request
    received: Payload
    schema: StepSchema
    member: Member
    digest: bytes = b""
    cost: PrivacyCost | None = None


class LeavingFilter(Protocol):
    """Passes on what a step returned, as it is or changed."""

    def __call__(self, content: Payload, step: Performing) -> Payload: ...


@dataclass(frozen=True)
class Noised:
    """Clips a protected client's reply and adds noise to it, in a step that is charged.

    Attributes:
        guard: keeps account.
        samples: client -> its training samples, a number that is public.
    """

    guard: PrivacyGuard
    samples: dict[str, int]

    def __call__(self, content: Payload, step: Performing) -> Payload:
        samples = self.samples[step.member.id]
        return self.guard.release(step.request, step.digest, content, step.received, step.cost, samples)


def failure_of(error: Exception, *, in_full: bool, refused: bool = False) -> Failure:
    """What a server is told of an error at a site.

    The line is the error's text, or its class and a number under which the log here has the text. A refusal says
    nothing but what was asked and what the site demands, so its text is told; so is that a budget is spent.

    Args:
        error: that was raised.
        in_full: whether its text and traceback are told, whatever it is.
        refused: whether it was raised over what is asked, before any data were looked at.
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


def detach_reply(payload: Payload, model: Model | None) -> Payload:
    """The payload with no tensor that shares memory with the model, which serves the next client next."""
    owners: dict[int, list[Tensor]] = {}
    for tensor in model.exchanged(live=True).values() if model is not None else ():
        owners.setdefault(_memory(tensor), []).append(tensor)

    def own(value: Tensor) -> Tensor:
        sharing = owners.get(_memory(value))
        if sharing is None:
            return value
        if len(sharing) == 1 and sharing[0].shape == value.shape:
            # hand the memory over instead of copying it: weights are loaded into the model before its next use
            sharing[0].data = torch.empty_like(sharing[0])
            del owners[_memory(value)]
            return value
        return value.clone()

    fields = dict(payload.fields)
    for name, bundle in payload.bundles.items():
        tensors = {key: own(value) for key, value in bundle.items()}
        fields[name] = type(bundle)(tensors=tensors, **bundle.attributes())
    return Payload(fields)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


_LEFT_BY = ".left/by"
"""Key of the digest of the request whose step left a client's state; what methods keep has other keys."""


def left_by(digest: bytes) -> dict[str, Tensor]:
    """Entry of a state that says which request left it; nothing of clients that are not protected."""
    return {_LEFT_BY: torch.tensor(list(digest), dtype=torch.uint8)} if digest else {}


class Performer(Protocol):
    """A site, as far as its protected steps need it."""

    spec: RunSpec
    store: StateStore
    limits: Limits

    @property
    def info(self) -> Mapping[str, ClientInfo]: ...

    @property
    def keeps_states(self) -> bool: ...

    def perform(self, step: Performing, training: PrivateTraining | None = None, *, blank: bool = False) -> Payload: ...


@dataclass(frozen=True)
class ProtectedSteps:
    """Performs the steps of a site's protected clients.

    Whether a step fails may depend on the data as much as what it returns. So it is charged before it begins, and one
    that fails returns what a client returns that learns nothing, with noise.

    Attributes:
        site: where the clients live.
        guard: clips, adds noise, and keeps account.
        stops: whether a step that fails ends the run, as it tells its own author alone.
    """

    site: Performer
    guard: PrivacyGuard
    stops: bool = False

    def perform(self, step: Performing) -> Payload:
        """What a step returns, charged; it may leave once it has noise.

        Raises:
            PolyfedError: the request is not covered or beyond the budget, or the step fails whatever the data are.
        """
        site, guard, request, schema = self.site, self.guard, step.request, step.schema
        samples, batch = site.info[step.member.id].samples, step.member.settings.training.batch_size
        step.cost = site.spec.policy.cost(schema, samples, batch)
        step.digest = guard.begin(request, step.received, schema, step.cost, self._before(request))
        try:
            content = site.perform(step, guard.training(step.digest, step.cost))
            schema.require_reply(content)
            content.require_sound(site.limits)
            if schema.kind == "step":
                require_updates(content, step.received)
        except Exception:
            if self.stops:
                raise
            _log.exception("client %s failed in step %s", request.client, request.step)
            if schema.kind != "step":
                raise _untold(request) from None
            return self._unlearnt(step)
        return content

    def _before(self, request: Request) -> bytes:
        """Digest of the request whose step left what the client goes on from; empty if it goes on from nothing."""
        if not self.site.spec.algorithm.keeps or request.after is None:
            return b""
        kept = self.site.store.load(request.client, request.after).get(_LEFT_BY)
        return b"" if kept is None else bytes(kept.tolist())

    def _unlearnt(self, step: Performing) -> Payload:
        """A reply of the step's layout that says nothing; the client keeps what it kept.

        Raises:
            PayloadError: the step fails with blank samples as well, which tells nothing of the client's.
        """
        received, returns = step.received, step.schema.returns
        if self.site.keeps_states:
            self._keep_as_it_was(step.request, step.digest)
        training = self.guard.training(step.digest, step.cost, blank=True)
        fields = dict[str, TensorBundle | Scalar]()
        if UPDATE in received.fields:
            fields[UPDATE] = received.fields[UPDATE]
        if training is not None:  # of DP-SGD without gradients all is noise
            fields = dict(self._blank(step, training).fields)
        elif returns.keys() - {UPDATE, EXAMPLES}:
            fields = dict(_zeroed(self._blank(replace(step, received=_zeroed(received)))).fields) | fields
        fields[EXAMPLES] = self.site.info[step.member.id].samples
        return Payload({name: fields[name] for name in returns})

    def _keep_as_it_was(self, request: Request, digest: bytes) -> None:
        store, keeps, after = self.site.store, self.site.spec.algorithm.keeps, request.after
        kept = store.load(request.client, after) if after in store.versions(request.client) else {}
        over = {key for key, life in keeps.items() if life is Lifetime.ROUND and after and after[0] < request.round}
        lasting = {name: value for name, value in kept.items() if name.partition("/")[0] not in over}
        store.save(request.client, (request.round, request.phase), lasting | left_by(digest), after)

    def _blank(self, step: Performing, training: PrivateTraining | None = None) -> Payload:
        """What the step returns of blank samples."""
        request = step.request
        try:
            made = self.site.perform(step, training, blank=True)
            step.schema.require_reply(made)
        except Exception:
            _log.exception("client %s failed in step %s with blank samples too", request.client, request.step)
            raise _untold(request) from None
        return made


def _untold(request: Request) -> PayloadError:
    return PayloadError(f"step '{request.step}' failed; a protected client does not say how")


def _zeroed(payload: Payload) -> Payload:
    """The same layout with 0 in place of every floating number of its tensors."""
    fields = dict(payload.fields)
    for name, bundle in payload.bundles.items():
        floating = {key: torch.zeros_like(value) for key, value in bundle.items() if value.is_floating_point()}
        fields[name] = replace(bundle, tensors={**bundle, **floating})
    return Payload(fields)
