"""A federation put together from its settings: the public set, who holds which items, and everybody's samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from jaxtyping import Int64
from torch import Tensor, nn

from polyfed.core.activity import preparing
from polyfed.core.errors import ConfigError, nearest
from polyfed.core.randomness import generator, isolated
from polyfed.data.assembly import (
    assemble,
    of_column,
    of_items,
    order_of,
)
from polyfed.data.digests import content_digests
from polyfed.data.mentions import mentioning
from polyfed.data.samples import Samples
from polyfed.data.source import Split
from polyfed.data.view import DataContext, View
from polyfed.federation.additional import additional_group, mixed, require_alike
from polyfed.federation.assignment import Assignment
from polyfed.federation.client import SERVER, ClientInfo
from polyfed.federation.heads import head_name
from polyfed.federation.holdings import holding
from polyfed.federation.settings import DataSettings, GroupSettings, PublicSettings, ServerSettings
from polyfed.federation.soundness import require_apart, require_equal_width, require_models, require_test_items
from polyfed.federation.types import Blueprint
from polyfed.models.model import Model, ModelSettings
from polyfed.models.slots import places

Modalities = Mapping[str, View]


@dataclass(frozen=True)
class Member:
    """A client of the federation.

    Attributes:
        id: its name.
        group: name of its group.
        settings: of its group.
        model: its own model settings.
        items: its private items.
        head: name of its head: clients with one task and the same classes share it, whatever their sources.
        also: items of the public set, or of a second source, that it holds in addition.
    """

    id: str
    group: str
    settings: GroupSettings
    model: ModelSettings
    items: Int64[Tensor, " k"]
    head: str
    also: Int64[Tensor, " j"] | None = None


class Federation:
    """Everybody's data and models, opened when first asked for.

    A site of a real federation opens only what belongs to its own clients; a simulation opens what it needs, and
    participants that use one column through one view share it. ``add_modules`` adds to clients' models what the
    method trains besides them.
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
    ) -> None:
        self.data, self.public, self.server, self.groups, self.seed = data, public, server, groups, seed
        self._bundles = bundles
        self._add_modules = add_modules
        self._splits: dict[tuple[str, str], Split] = {}
        self._samples: dict[tuple[str, str, str], Samples] = {}
        self._tests: dict[tuple[str, str], Samples] = {}
        self._deals = {name: self._assignment_of(name, group) for name, group in groups.items()}
        self._also = {name: self._also_assignment_of(name, group) for name, group in groups.items() if group.also}

    # ---- who

    @cached_property
    def members(self) -> dict[str, Member]:
        """All clients by id, in client order."""
        dealt = [member for name, group in self.groups.items() for member in self._deal(name, group)]
        found = {member.id: member for member in dealt}
        if len(found) < len(dealt):
            twice = next(member.id for member in dealt if found[member.id] is not member)
            raise ConfigError(f"two clients are called '{twice}'; rename one of the groups under 'clients'")
        if SERVER in found:
            raise ConfigError(f"clients.{SERVER}: a client cannot be called '{SERVER}'; rename the group")
        return found

    @cached_property
    def infos(self) -> tuple[ClientInfo, ...]:
        """What the server sees of all clients, in client order."""
        return tuple(self._info(member) for member in self.members.values())

    def _info(self, member: Member) -> ClientInfo:
        return ClientInfo(
            id=member.id,
            group=member.group,
            modalities=tuple(member.model.encoders),
            task=member.settings.task.component_name(),
            samples=len(self.train(member)),
            architecture=f"{member.model.architecture}/{member.head}",
        )

    def _assignment_of(self, name: str, group: GroupSettings) -> Assignment:
        return Assignment(name, group, self.seed, self.split, lambda: self._private_items(name, group))

    def _also_assignment_of(self, name: str, group: GroupSettings) -> Assignment:
        """How what a group holds in addition is dealt out among its clients."""
        key, dealt = f"{name}.also", additional_group(name, group, self.public)
        is_public = group.also is not None and group.also.public

        def private() -> Int64[Tensor, " n"]:
            require_alike(name, group, self.split(group.source, group.split), self.split(dealt.source, dealt.split))
            return self._chosen(key, dealt, self.public_items) if is_public else self._private_items(key, dealt)

        return Assignment(key, dealt, self.seed, self.split, private)

    def assignment(self, member: Member) -> Assignment:
        """How the items of a client's group are dealt out."""
        return self._deals[member.group]

    def also_assignment(self, member: Member) -> Assignment:
        """How what its group holds in addition is dealt out."""
        return self._also[member.group]

    def _deal(self, name: str, group: GroupSettings) -> list[Member]:
        parts = self._deals[name].parts
        also = self._also[name].parts if name in self._also else [None] * len(parts)
        head = head_name(group.task, self.split(group.source, group.split), group.type)
        return [
            Member(member_id, name, group, group.models[k % len(group.models)], part, head, more)
            for k, (member_id, part, more) in enumerate(zip(_member_ids(name, group.count), parts, also, strict=True))
        ]

    def _private_items(self, name: str, group: GroupSettings) -> Int64[Tensor, " n"]:
        items = torch.arange(len(self.split(group.source, group.split)))
        if self.public is not None and (group.source, group.split) == (self.public.source, self.public.split):
            items = items[~torch.isin(items, self.public_items)]
        return self._chosen(name, group, items)

    def _chosen(self, name: str, group: GroupSettings, items: Int64[Tensor, " n"]) -> Int64[Tensor, " m"]:
        """As many of the items as are to be dealt out."""
        if group.items is not None:
            if group.items > len(items):
                raise ConfigError(
                    f"clients.{name}.items is {group.items}, but '{group.source}' has {len(items)} that can be dealt "
                    "out; lower it"
                )
            order = torch.randperm(len(items), generator=generator(self.seed, "items", name))
            items = items[order[: group.items]].sort().values
        if group.count > len(items):
            what = f"clients.{name.removesuffix('.also')}.count is {group.count}"
            raise ConfigError(f"{what}, but there are {len(items)} samples of '{group.source}'; lower it")
        return items

    # ---- the public set

    @cached_property
    def public_items(self) -> Int64[Tensor, " k"]:
        """Items of the public set, in split order."""
        assert self.public is not None
        eligible = self._eligible(self.split(self.public.source, self.public.split))
        count = len(eligible) if self.public.items is None else self.public.items
        if count > len(eligible):
            left = " left by public.without" if self.public.without else ""
            raise ConfigError(
                f"public.items is {count}, but '{self.public.source}' has {len(eligible)}{left}; lower it"
            )
        order = torch.randperm(len(eligible), generator=generator(self.seed, "public"))
        return eligible[order[:count]].sort().values

    def _eligible(self, split: Split) -> Int64[Tensor, " n"]:
        """Items that may be public: those that mention nothing they must not."""
        assert self.public is not None
        kept = torch.ones(len(split), dtype=torch.bool)
        for name, words in self.public.without.items():
            if name not in split.columns:
                raise ConfigError(f"public.without: '{split.source}' has no '{name}'; {nearest(name, split.columns)}")
            kept &= ~mentioning(split.modality(name), [word for entry in words for word in self._meant(entry)])
        return kept.nonzero().squeeze(1)

    def _meant(self, entry: str) -> tuple[str, ...]:
        """A word, or the class names of a source."""
        if not entry.startswith("@"):
            return (entry,)
        source = entry.removeprefix("@")
        names = [group for group in self.groups.values() if group.source == source]
        split = self.split(source, names[0].split if names else "train")
        found = tuple(name for classes in split.classes.values() for name in classes)
        if not found:
            raise ConfigError(f"public.without: source '{source}' has no names of classes; list the words themselves")
        return found

    def public_samples(self, views: Modalities) -> Samples | None:
        """The public set in a participant's own views (of the modalities that it has), or None."""
        if self.public is None:
            return None
        split = self.split(self.public.source, self.public.split)
        views = {name: view for name, view in views.items() if name in split.columns}
        every = of_items(self._all(split, views, layout=self._public_modalities), self.public_items)
        return self._thin(every)

    @cached_property
    def public_order(self) -> str:
        """Digest of the public set, of its content and its order."""
        if self.public is None:
            return ""
        split = self.split(self.public.source, self.public.split)
        return order_of(self._require_public({}), content_digests(split, self.public_items, self.context))

    def _require_public(self, views: Modalities) -> Samples:
        samples = self.public_samples(views)
        assert samples is not None
        return samples

    @property
    def _public_modalities(self) -> tuple[str, ...]:
        assert self.public is not None
        return tuple(self.split(self.public.source, self.public.split).columns)

    def _thin(self, every: Samples) -> Samples:
        assert self.public is not None
        if self.public.per_item is None:
            return every
        keys = torch.rand(len(every), generator=generator(self.seed, "public-samples"))
        order = torch.argsort(keys, stable=True)
        order = order[torch.argsort(every.items[order], stable=True)]
        items = every.items[order]
        first = torch.searchsorted(items, items)  # position of the first sample of the same item
        chosen = order[torch.arange(len(items)) - first < self.public.per_item]
        return every.subset(chosen.sort().values)

    # ---- samples

    @cached_property
    def context(self) -> DataContext:
        """Where views find caches, weights and the public columns."""
        folders = self.data.cache_folder, self.data.weights_folder
        context = DataContext(*folders, bundles=self._bundles, pixels=self.data.max_pixels)
        if self.public is None:
            return context
        split = self.split(self.public.source, self.public.split)
        columns = {name: of_column(split.modality(name), self.public_items) for name in split.columns}
        return replace(context, public=columns)

    def split(self, source: str, name: str) -> Split:
        """A split of a named source, opened once.

        Raises:
            ConfigError: no such source.
        """
        if source not in self.data.sources:
            raise ConfigError(f"source '{source}' is not in data.sources; {nearest(source, self.data.sources)}")
        if (source, name) not in self._splits:
            preparing(f"reading {source} {name}")
            opened = self.data.sources[source].open(name, name=source, data_dir=self.data.data_folder)
            self._splits[source, name] = opened
        return self._splits[source, name]

    def _all(self, split: Split, views: Modalities, layout: tuple[str, ...] = ()) -> Samples:
        opened = [(name, view.model_dump_json()) for name, view in views.items()]
        key = (split.source, split.name, str((layout, opened)))
        if key not in self._samples:
            preparing(f"preparing {split.source} {split.name} ({', '.join(views) or 'who holds what'})")
            self._samples[key] = assemble(split, views, self.context, layout=layout)
        return self._samples[key]

    def train(self, member: Member, model: ModelSettings | None = None) -> Samples:
        """A client's private training samples; with another ``model`` in its views, of modalities that both have."""
        split = self.split(member.settings.source, member.settings.split)
        own = of_items(self._seen(split, member, model), member.items)
        if member.also is None:
            return own
        return mixed(own, of_items(self._additional(member, model), member.also), member.settings.task)

    def _additional(self, member: Member, model: ModelSettings | None) -> Samples:
        """All that a client's group holds in addition, in the views in which it sees its own."""
        if member.settings.also is None or not member.settings.also.public:
            return self._seen(self.also_assignment(member).split, member, model)
        views = {name: view for name, view in _views(model or member.model).items() if name in member.model.encoders}
        return self._require_public(views)

    def laid_out(self, split: Split, modalities: tuple[str, ...]) -> Samples:
        """The samples of a split as these modalities shape them, with none of them loaded."""
        return self._all(split, {}, layout=modalities)

    def _seen(self, split: Split, member: Member, model: ModelSettings | None) -> Samples:
        """A split in a client's views, or in those of another model: then of the modalities that both have."""
        own = _views(member.model)
        if model is None:
            return self._all(split, own)
        views = {name: view for name, view in _views(model).items() if name in own}
        return self._all(split, views, layout=tuple(own))

    def test(self, member: Member, model: ModelSettings | None = None) -> Samples | None:
        """A client's test samples; those of a group that are tested on the same items share them.

        With another ``model`` they are in its views, of the modalities that both have.
        """
        group = member.settings
        if group.test_split is None:
            return None
        split = self.split(group.source, group.test_split)
        who = f"all of {member.group}" if group.test == "all" else member.id
        key = (who, f"{member.model.architecture} {model.architecture if model else ''}")
        if key not in self._tests:
            self._tests[key] = of_items(self._seen(split, member, model), self.test_items(member))
        return self._tests[key]

    def test_items(self, member: Member) -> Int64[Tensor, " k"]:
        """Items of its test split that a client is tested on."""
        group = _member_ids(member.group, member.settings.count)
        return self._deals[member.group].test_items(group.index(member.id))

    def server_samples(self, split: str) -> Samples:
        """Validation or test samples of the server, in its model's views."""
        assert self.server is not None
        return self._all(self.split(self.server.source, split), _views(self.server.model))

    # ---- models

    def client_model(self, member: Member) -> Model:
        """A client's model with its initial weights, which depend on seed and client alone."""
        preparing(f"building the model of {member.id}")
        with isolated(self.seed, "init", member.id):
            head = member.settings.task.head(member.model.dim, self.train(member))
            model = member.model.build(_heads(member.head, head), self.context)
            member.settings.task.require_model(model)
            self._add_modules(model)
        return model

    def shared_model(self, model: ModelSettings) -> Model:
        """The encoders of an architecture that a server sends, without its heads, frozen and in evaluation mode."""
        with isolated(self.seed, "init", "shared"):
            return model.build({}, self.context).requires_grad_(False).eval()

    def server_model(self) -> Model:
        """The server's model with its initial weights."""
        assert self.server is not None
        preparing("building the model of the server")
        with isolated(self.seed, "init", "server"):
            head = self.server.task.head(self.server.model.dim, self.server_samples(self.server.test_split))
            model = self.server.model.build(_heads(self.server_head, head), self.context)
        self.server.task.require_model(model)
        return model

    @property
    def server_head(self) -> str:
        """Name of the server's head."""
        assert self.server is not None
        judged = self.split(self.server.source, self.server.test_split)
        return head_name(self.server.task, judged, self.server.type)

    def blueprints(self) -> dict[str, Blueprint]:
        """Initial tensors and their places for every architecture among the clients, equal for equal seeds."""
        found: dict[str, Blueprint] = {}
        for info in self.infos:
            if info.architecture not in found:
                model = self.client_model(self.members[info.id])
                found[info.architecture] = Blueprint(dict(model.state_dict()), places(model))
        return found

    def holding(self, member: Member) -> dict[str, object]:
        """What a client holds, for the run folder; nothing but columns of classes and lists is read for it."""
        return holding(self, member)

    # ---- checks

    def require_sound(self) -> None:
        """Check that every group's model can be built and trained for its task, and the public set.

        That set must be disjoint from all private and test items, and widths be equal where there is one; what clients
        hold in addition must be disjoint from all test items. A server that expects a number of test items must find
        it.

        Raises:
            DataError, ConfigError: it is not so.
        """
        require_models(self)
        require_test_items(self)
        require_apart(self)
        if self.public is not None:
            require_equal_width(self)


def _member_ids(group: str, count: int) -> list[str]:
    """A group of one gives its client the group's name."""
    width = len(str(count - 1))
    return [group] if count == 1 else [f"{group}-{k:0{width}d}" for k in range(count)]


def _views(model: ModelSettings) -> dict[str, View]:
    return {modality: encoder.view for modality, encoder in model.encoders.items()}


def _heads(name: str, head: nn.Module | None) -> dict[str, nn.Module]:
    return {} if head is None else {name: head}
