"""Steps of clients with differential privacy: nothing of them leaves but what has noise, not even that they fail."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polyfed.core.errors import PayloadError
from polyfed.federation.membership import Member
from polyfed.federation.privacy_guard import PrivacyGuard
from polyfed.federation.private_training import PrivateTraining
from polyfed.federation.release import require_updates
from polyfed.federation.state import Lifetime
from polyfed.privacy.accounting import PrivacyCost
from polyfed.privacy.settings import EXAMPLES, UPDATE
from polyfed.wire.messages import Request
from polyfed.wire.payload import Payload, Scalar, TensorBundle
from polyfed.wire.schema import StepSchema

if TYPE_CHECKING:  # a site performs its steps through this
    from polyfed.engines.site import Site

_log = logging.getLogger(__name__)
_LEFT_BY = ".left/by"
"""Key of the digest of the request whose step left a client's state; what methods keep has other keys."""


def left_by(digest: bytes) -> dict[str, Tensor]:
    """Entry of a state that says which request left it; nothing of clients that are not protected."""
    return {_LEFT_BY: torch.tensor(list(digest), dtype=torch.uint8)} if digest else {}


@dataclass(frozen=True)
class ProtectedSteps:
    """Performs the steps of a site's protected clients.

    Whether a step fails may depend on the data as much as what it returns. So it is charged before it begins, and one
    that fails returns what a client returns that learns nothing, with noise.

    Attributes:
        site: where the clients live.
        guard: clips, adds noise, and keeps account.
    """

    site: Site
    guard: PrivacyGuard

    def perform(self, request: Request, received: Payload, schema: StepSchema, member: Member) -> Payload:
        """What a step returns, as it may leave.

        Raises:
            PolyfedError: the request is not covered or beyond the budget, or the step fails whatever the data are.
        """
        site, guard = self.site, self.guard
        info, batch = site.info[member.id], member.settings.training.batch_size
        cost = site.spec.cost(schema, info.samples, batch)
        digest = guard.begin(request, received, schema, cost, self._before(request))
        try:
            content = site.perform(request, received, schema, member, guard.training(digest, cost), digest)
            schema.require_reply(content)
            content.require_sound(site.limits)
            if schema.kind == "step":
                require_updates(content, received)
        except Exception:
            _log.exception("client %s failed in step %s", request.client, request.step)
            if schema.kind != "step":
                raise _untold(request) from None
            content = self._unlearnt(request, received, schema, member, digest, cost)
        if schema.kind != "step":
            return content
        return guard.release(request, digest, content, received, cost, info.samples)

    def _before(self, request: Request) -> bytes:
        """Digest of the request whose step left what the client goes on from; empty if it goes on from nothing."""
        if not self.site.spec.algorithm.keeps or request.after is None:
            return b""
        kept = self.site.store.load(request.client, request.after).get(_LEFT_BY)
        return b"" if kept is None else bytes(kept.tolist())

    def _unlearnt(
        self,
        request: Request,
        received: Payload,
        schema: StepSchema,
        member: Member,
        digest: bytes,
        cost: PrivacyCost | None,
    ) -> Payload:
        """A reply of the step's layout that says nothing; the client keeps what it kept.

        Raises:
            PayloadError: the step fails with blank samples as well, which tells nothing of the client's.
        """
        site = self.site
        if site.keeps_states:
            self._keep_as_it_was(request, digest)
        training = self.guard.training(digest, cost, blank=True)
        fields = dict[str, TensorBundle | Scalar]()
        if UPDATE in received.fields:
            fields[UPDATE] = received.fields[UPDATE]
        if training is not None:  # of DP-SGD without gradients all is noise
            fields = dict(self._blank(request, received, schema, member, training).fields)
        elif schema.returns.keys() - {UPDATE, EXAMPLES}:
            fields = dict(_zeroed(self._blank(request, _zeroed(received), schema, member)).fields) | fields
        fields[EXAMPLES] = site.info[member.id].samples
        return Payload({name: fields[name] for name in schema.returns})

    def _keep_as_it_was(self, request: Request, digest: bytes) -> None:
        store, keeps, after = self.site.store, self.site.spec.algorithm.keeps, request.after
        kept = store.load(request.client, after) if after in store.versions(request.client) else {}
        over = {key for key, life in keeps.items() if life is Lifetime.ROUND and after and after[0] < request.round}
        lasting = {name: value for name, value in kept.items() if name.partition("/")[0] not in over}
        store.save(request.client, (request.round, request.phase), lasting | left_by(digest), after)

    def _blank(
        self,
        request: Request,
        received: Payload,
        schema: StepSchema,
        member: Member,
        training: PrivateTraining | None = None,
    ) -> Payload:
        """What the step returns of blank samples."""
        try:
            made = self.site.perform(request, received, schema, member, training, blank=True)
            schema.require_reply(made)
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
