"""Flipped labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from polyfed.core.errors import ConfigError
from polyfed.data.samples import Samples
from polyfed.data.source import Split
from polyfed.federation.attack import Attack
from polyfed.federation.client import ClientInfo
from polyfed.federation.membership import Member
from polyfed.tasks.classification import Classification


class LabelFlip(Attack):
    """Attackers train on class C - 1 - c in place of class c (Fang et al., USENIX Security 2020)."""

    @property
    def falsifies(self) -> bool:
        return False

    def require(self, members: Sequence[Member], infos: Sequence[ClientInfo]) -> None:
        """Check that the attackers classify.

        Raises:
            ConfigError: one does not.
        """
        for member in members:
            if not isinstance(member.settings.task, Classification):
                raise ConfigError(
                    f"run.attackers 'label_flip': {member.id} has no classes to flip (its task is "
                    f"'{member.settings.task.component_name()}'); restrict it with run.attackers.groups, or choose "
                    "targeted_pairs for clients that match modalities"
                )

    def poisoned(self, samples: Samples, member: Member, split: Split, seed: int) -> Samples:
        """With flipped labels; classes without names count up to the highest label of the client."""
        task = member.settings.task
        assert isinstance(task, Classification)
        labels = samples.targets[task.target]
        known = task.classes or len(samples.classes.get(task.target, ()))
        highest = known - 1 if known else int(labels.max()) if len(labels) else 0
        return replace(samples, targets={**samples.targets, task.target: highest - labels})
