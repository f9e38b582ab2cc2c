"""Cohorts of rounds that end with the masked sum of one group, while others are at work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from polyfed.federation.filters import Ask, Received
from polyfed.federation.group_sums import GroupSum, GroupSums
from polyfed.federation.late_replies import LateReplies
from polyfed.federation.paced_cohort import PacedCohort
from polyfed.federation.secure_ask import SecureSums
from polyfed.federation.timeline import Job
from polyfed.federation.timeline_events import DROPPED, LOST, REPLIED
from polyfed.wire.messages import Request
from polyfed.wire.payload import Payload


@dataclass(kw_only=True)
class GroupedCohort(PacedCohort):
    """A paced cohort whose timeline has groups: each starts and is summed as a whole.

    Keys are made when the sum is due, in real time when the group starts. A checkpoint holds none: after a kill the
    group is asked the same with new ones, as a round that waits is. What crosses is entered in the round of the sum.
    """

    def summed(self, sums: SecureSums, ask: Ask, phase: int) -> Iterator[Received]:
        """The means of the group that is done next, for all its clients what they are worth by now."""
        opened = self.timeline.opens(self.round)
        self.start(ask, phase)
        if not (job := tuple(self.due(ask, phase, opened))):
            return
        ask.sent.update({one.request.client: one.request.payload for one in job})
        result = self._sum(sums, job)
        for client, reason, details in result.outcomes:
            if reason is None:
                ask.accept(client)
            else:
                ask.drop(client, reason, details)
        self._note(job, result, {client.id: LOST for client, reason, _ in result.outcomes if reason is not None})
        staleness = self.round - job[0].request.round
        replies = (replace(self.sound_sum(reply, ask), staleness=staleness) for reply in result.received)
        yield from LateReplies(self.pace)(replies, ask)

    def requests(self, step: str, phase: int, sent: Mapping[str, Payload]) -> dict[str, Request]:
        """Client -> what it will be asked once it has the keys of its group."""
        after = self.accepted.get
        return {name: Request(name, step, self.round, phase, after(name), plain) for name, plain in sent.items()}

    def drop_old(self, job: Job) -> None:
        assert self.secure is not None
        result = self._sum(self.secure, job) if self.timeline.is_real else GroupSum()
        self._note(job, result, {one.request.client: DROPPED for one in job})

    def _sum(self, sums: SecureSums, job: Job) -> GroupSum:
        perform = GroupSums(sums, self.channel, self.reply_policy, self.everybody)
        result: GroupSum = self.timeline.result(job, perform)
        self.channel.ledger.add(result.ledger, self.round)
        return result

    def _note(self, job: Job, result: GroupSum, events: Mapping[str, str]) -> None:
        for one in job:
            step, error = result.missing.get(one.request.client, (one.request.step, None))
            event = events.get(one.request.client, REPLIED)
            self.timeline.note(event, replace(one.request, step=step), self.round, one.ends, error)
