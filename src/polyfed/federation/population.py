"""The population of a federation: its participants, their samples, and the models that they start with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from polyfed.core.activity import preparing
from polyfed.core.errors import ConfigError, DataError
from polyfed.core.randomness import generator, isolated
from polyfed.data.assembly import of_items, require_disjoint
from polyfed.data.samples import Samples
from polyfed.data.source import Split
from polyfed.data.view import Views
from polyfed.federation import membership
from polyfed.federation.client import ClientInfo
from polyfed.federation.data import OpenedData, PublicSet, sample_views
from polyfed.federation.membership import Assignment, ItemShare, Member
from polyfed.federation.plan import FederationPlan, unexpected_test_items
from polyfed.federation.settings import DataSettings, GroupSettings, PublicSettings, ServerSettings
from polyfed.federation.types import Blueprint, Outline, head_name, outline_of
from polyfed.models.model import Model, ModelSettings
from polyfed.models.slots import model_slots


class Population:
    """Server and clients with their data and models, opened when first asked for.

    A site of a real federation opens only what belongs to its own clients; a simulation opens what it needs.

    Args:
        data: the sources.
        public: settings of the public set, if there is one.
        server: the server's model, task and data, if it has any.
        groups: group name -> its clients.
        seed: seed of the run.
        bundles: folder of state that views have learnt from the public set; None: they learn it here.
        add_modules: adds the method's own modules to clients' models.
        salt: key of the digests of classes in names of heads; see ``head_name``.
    """

    def __init__(
        self,
        data: DataSettings,
        public: PublicSettings | None,
        server: ServerSettings | None,
        groups: Mapping[str, GroupSettings],
        seed: int,
        bundles: Path | None = None,
        add_modules: Callable[[Model], None] = lambda model: None,
        salt: str = "",
    ) -> None:
        FederationPlan(data, public, server, groups).require()
        self.server, self.groups, self.seed = server, groups, seed
        self.data = OpenedData(data, seed, bundles, lambda: {} if self.public is None else self.public.columns())
        self.public = None if public is None else PublicSet(public, groups, self.data, seed)
        self._add_modules, self._salt = add_modules, salt
        # of all clients once ``infos`` asks: made among the tensors of a round, each small one would keep the allocator
        # from using a freed large one again
        self._trains: dict[str, Samples] = {}
        self._tests: dict[tuple[str, str], Samples] = {}

    # ---- participants

    @cached_property
    def members(self) -> dict[str, Member]:
        """All clients by id, in client order."""
        members: dict[str, Member] = {}
        for name, group in self.groups.items():
            split = self.data.split(group.source, group.split)
            head = head_name(group.task, split, group.type, self._salt)
            assignments = [self._assignment(name, group, group.items == "public")]
            if group.also is not None:
                second = group.additional(None if self.public is None else self.public.settings)
                membership.require_alike(name, group, split, self.data.split(second.source, second.split))
                assignments.append(self._assignment(f"{name}.also", second, group.also.public))
            for k, member_id in enumerate(membership.member_ids(name, group.count)):
                holdings = tuple(ItemShare(one, one.parts[k], one.lacking(k)) for one in assignments)
                model = group.models[k % len(group.models)]
                members[member_id] = Member(member_id, name, k, group, model, head, holdings)
        return members

    def _assignment(self, name: str, group: GroupSettings, public: bool) -> Assignment:
        if public and self.public is not None:
            items = self.public.items
        else:
            items = torch.arange(len(self.data.split(group.source, group.split)))
            if self.public is not None and group.is_of(self.public.settings):
                items = items[~torch.isin(items, self.public.all_items)]  # public items are not private
        membership.require_enough_items(name, group, len(items))
        if isinstance(group.items, int):
            order = torch.randperm(len(items), generator=generator(self.seed, "items", name))
            items = items[order[: group.items]].sort().values
        return Assignment(name, group, self.seed, self.data.split, items, public)

    @cached_property
    def infos(self) -> tuple[ClientInfo, ...]:
        """Public profiles of all clients, in client order."""
        return tuple(
            ClientInfo(
                id=member.id,
                group=member.group,
                modalities=tuple(member.views),
                task=member.settings.task.component_name(),
                samples=len(self.train(member)),
                batch_size=member.settings.training.batch_size,
                architecture=f"{member.model.architecture_in(self.data.context)}/{member.head}",
            )
            for member in self.members.values()
        )

    def holding(self, member: Member) -> dict[str, object]:
        """Holdings of a client, for the run folder; only columns of classes and lists are read for them.

        ``items`` and ``samples`` are all that it holds and encodes a modality of; ``also`` counts those of the public
        set or of a second source. ``index`` and the counts by class are of its own source. ``missing`` are
        items that lack a modality, really or by simulation, ``unreadable`` those of which it encodes nothing.
        """
        own, *more = [self._held(holding, member) for holding in member.holdings]
        entry: dict[str, object] = {"group": member.group, **own}
        assignment = member.holdings[0].assignment
        if member.settings.test == "dealt":
            entry["test"] = assignment.test_counts(member.test_items)
        for also, holding in zip(more, member.holdings[1:], strict=True):
            entry["also"] = {"public": holding.assignment.public, **also}
            entry |= {key: own[key] + also[key] for key in ("items", "samples")}
        left_out = dict(getattr(assignment.split, "left_out", {}))
        return entry | ({"left_out": left_out} if left_out else {})

    def _held(self, holding: ItemShare, member: Member) -> dict[str, Any]:
        assignment, items = holding.assignment, holding.items
        # the public set may have fewer samples per item than its source
        public = self.public_samples({}) if assignment.public else None
        layout = public or self.data.samples(assignment.split, {}, layout=tuple(member.views))
        own = of_items(layout, items, holding.lacking)
        modalities = [name for name in member.views if name in own.rows]
        readable = own.having_any(*modalities)
        read = items if readable is own else items[torch.isin(items, readable.items)]
        gaps = {name: len(torch.unique(readable.items[readable.rows[name] < 0])) for name in modalities}
        return {
            "source": assignment.split.source,
            "split": assignment.split.name,
            "items": len(read),
            "samples": len(readable),
            **assignment.counts(read),
            "index": read.tolist(),
            **({"missing": gaps} if any(gaps.values()) else {}),
            **({"unreadable": len(items) - len(read)} if len(read) < len(items) else {}),
        }

    # ---- samples

    def public_samples(self, views: Views, lazy: Views = MappingProxyType({})) -> Samples | None:
        return None if self.public is None else self.public.samples(views, lazy)

    def public_parts(self, views: Views) -> dict[str, Samples]:
        """Public samples other than the pairs, by output; see ``PublicSet.parts``."""
        return {} if self.public is None else self.public.parts(views)

    @property
    def public_order(self) -> str:
        """Digest of the public set, of its content and its order; empty where there is none."""
        return "" if self.public is None else self.public.order

    def train(self, member: Member, model: ModelSettings | None = None) -> Samples:
        """A client's private training samples; with another ``model`` in its views, of modalities that both have."""
        if model is not None:
            return self._held_by(member, model)
        if member.id not in self._trains:
            self._trains[member.id] = self._held_by(member, None)
        return self._trains[member.id]

    def _held_by(self, member: Member, model: ModelSettings | None) -> Samples:
        held = [
            of_items(self._held_in(one.assignment, member, model), one.items, one.lacking) for one in member.holdings
        ]
        return membership.joined(held, member.settings.task)

    def test(self, member: Member, model: ModelSettings | None = None) -> Samples | None:
        """A client's test samples; those of a group that are tested on the same items share them.

        With another ``model`` they are in its views, of the modalities that both have.
        """
        group = member.settings
        if group.test_split is None:
            return None
        # one copy of the test samples for the group, not one for each of its clients
        whose = f"all of {member.group}" if group.test == "all" else member.id
        key = (whose, f"{member.model.architecture} {model.architecture if model else ''}")
        if key not in self._tests:
            split = self.data.split(group.source, group.test_split)
            lacking = member.holdings[0].assignment.lacking(member.place, test=True)
            self._tests[key] = of_items(self._viewed(split, member, model), member.test_items, lacking)
        return self._tests[key]

    def server_samples(self, split: str) -> Samples:
        server = self.server
        assert server is not None
        views, opened = sample_views(server.model, server.task), self.data.split(server.source, split)
        samples = self.data.samples(opened, views, lazy=server.task.target_views)
        return samples.having_any(*samples.modalities).prepared()

    def _held_in(self, assignment: Assignment, member: Member, model: ModelSettings | None) -> Samples:
        """Samples of a split, or of the public set, which may have fewer samples per item."""
        if self.public is None or not assignment.public:
            return self._viewed(assignment.split, member, model)
        views = sample_views(model or member.model, member.settings.task)
        own = {name: view for name, view in views.items() if name in member.views}
        return self.public.samples(own, {} if model else member.settings.task.target_views)

    def _viewed(self, split: Split, member: Member, model: ModelSettings | None) -> Samples:
        own = member.views
        if model is None:
            return self.data.samples(split, own, lazy=member.settings.task.target_views)
        views = {name: view for name, view in sample_views(model, member.settings.task).items() if name in own}
        # its own modalities lay out the samples, so that positions are the same in both views
        return self.data.samples(split, views, layout=tuple(own))

    # ---- models

    def client_model(self, member: Member) -> Model:
        """A client's model with its initial weights, which depend on seed and client alone."""
        preparing(f"building the model of {member.id}")
        # whichever process builds it, and whatever was built before, the weights are the same
        with isolated(self.seed, "init", member.id):
            samples = self.train(member)
            head = member.settings.task.head(member.model.dim, samples)
            model = member.model.build(_heads(member.head, head), self.data.context)
            member.settings.task.require_model(model, samples)
            self._add_modules(model)
        return model

    def shared_model(self, model: ModelSettings) -> Model:
        with isolated(self.seed, "init", "shared"):
            return model.build({}, self.data.context).requires_grad_(False).eval()

    def server_model(self) -> Model:
        assert self.server is not None
        preparing("building the model of the server")
        with isolated(self.seed, "init", "server"):
            samples = self.server_samples(self.server.test_split)
            head = self.server.task.head(self.server.model.dim, samples)
            model = self.server.model.build(_heads(self.server_head, head), self.data.context)
        self.server.task.require_model(model, samples)
        return model

    @property
    def server_head(self) -> str:
        assert self.server is not None
        test_split = self.data.split(self.server.source, self.server.test_split)
        return head_name(self.server.task, test_split, self.server.type, self._salt)

    def blueprints(self) -> dict[str, Blueprint]:
        by_architecture: dict[str, Blueprint] = {}
        for info in self.infos:
            if info.architecture not in by_architecture:
                model = self.client_model(self.members[info.id])
                by_architecture[info.architecture] = Blueprint(model.exchanged(), model_slots(model))
        return by_architecture

    # ---- checks before a run

    def require_sound(self) -> None:
        """Check that every group's model can be built and trained for its task, and the public set.

        That set must be disjoint from all private and test items; what clients hold in addition must be disjoint from
        all test items. A server that expects a number of test items must find it.

        Raises:
            DataError, ConfigError: a check fails.
        """
        settings = self.server
        if settings is not None and settings.expected_test_items is not None:
            count = len(self.data.split(settings.source, settings.test_split))
            if count != settings.expected_test_items:
                raise unexpected_test_items(settings, count)
        self._require_use()
        self._require_disjoint_data()
        self._require_models()

    def _require_models(self) -> None:
        outlines: dict[str, tuple[str, Outline]] = {}
        infos = {info.id: info for info in self.infos}
        # one client of each will do: models differ by group and architecture, and building them takes long
        one_of_each = {(info.group, info.architecture): self.members[info.id] for info in infos.values()}
        for member in one_of_each.values():
            outline = outline_of(self.client_model(member).exchanged())
            other, expected = outlines.setdefault(infos[member.id].architecture, (member.group, outline))
            if outline != expected:
                both = f"clients '{other}' and '{member.group}' have one model and one task"
                remedy = f"keep them apart with clients.{member.group}.type"
                raise ConfigError(f"{both}, but tensors of other shapes; {remedy}")

    def _require_use(self) -> None:
        """Check that every client has samples that its task can use, and public ones where it takes them."""
        public = () if self.public is None else tuple(self.public.split.columns)
        for member in self.members.values():
            task = member.settings.task
            task.require_public([name for name in public if name in member.views])
            if member.settings.test != "all":
                _ = member.test_items  # refuses what cannot be dealt out
            if member.settings.missing is not None or any(_has_gaps(one.assignment.split) for one in member.holdings):
                _require_usable(member, "training", self.train(member))
                _require_usable(member, "test", self.test(member))
            if (samples := len(task.usable(self.train(member)))) < 2:
                raise ConfigError(
                    f"clients.{member.group}: '{member.id}' has {samples} training sample that task "
                    f"'{task.component_name()}' takes, and a batch of one is left out; raise items (it is "
                    f"{member.settings.items}), lower count ({member.settings.count}), or choose another partition"
                )

    def _require_disjoint_data(self) -> None:
        """Check that additional items are not tested on or held twice, and that public items are only public."""
        if self.public is None and all(group.also is None for group in self.groups.values()):
            return
        pairs = {(group.source, group.test_split) for group in self.groups.values()}
        if self.server is not None:
            pairs |= {(self.server.source, self.server.test_split), (self.server.source, self.server.validation_split)}
        splits = [self.data.split(source, name) for source, name in sorted((s, n) for s, n in pairs if n is not None)]
        judged = [
            (f"'{one.source}' {one.name}, which participants are judged on", one.known_as(one.ids)) for one in splits
        ]
        for member in self.members.values():
            own, *more = member.holdings
            also = {name for holding in more for name in holding.ids}
            for where, ids in (*judged, ("its own", own.ids)) if more else ():
                if shared := also & set(ids):
                    raise DataError(
                        f"clients.{member.group}.also: {len(shared)} items of client '{member.id}' are in {where}, for "
                        f"example '{min(shared)}'; name data that is not tested on and that it does not hold already"
                    )
        if self.public is not None:
            shares = [(member.id, one) for member in self.members.values() for one in member.holdings]
            private = [(f"client '{name}'", one.ids) for name, one in shares if not one.assignment.public]
            public = self.public.split
            names = public.known_as([public.ids[item] for item in self.public.all_items.tolist()])
            for where, ids in (*private, *judged):
                require_disjoint(names, ids, where)


def _has_gaps(split: Split) -> bool:
    return any(split.modality(name).gaps for name in split.columns)


def _require_usable(member: Member, what: str, samples: Samples | None) -> None:
    task = member.settings.task
    if samples is not None and not len(task.usable(samples)):
        raise ConfigError(
            f"clients.{member.group}: no {what} sample of '{member.id}' has what task '{task.component_name()}' takes; "
            "lower missing.rates, or give it more items"
        )


def _heads(name: str, head: nn.Module | None) -> dict[str, nn.Module]:
    return {} if head is None else {name: head}
