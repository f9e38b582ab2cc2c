"""A federation as its settings describe it, and the checks that need no data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from polyfed.core.errors import ConfigError, nearest
from polyfed.data.source import Column, Split
from polyfed.federation.client import SERVER, ClientInfo
from polyfed.federation.data import require_drawable, require_named_columns, sample_views
from polyfed.federation.membership import member_ids, require_enough_items
from polyfed.federation.settings import DataSettings, GroupSettings, PublicSettings, ServerSettings
from polyfed.federation.types import head_name
from polyfed.models.model import ModelSettings
from polyfed.tasks.task import Task


@dataclass(frozen=True)
class FederationPlan:
    """A federation as its settings describe it; methods check theirs against it.

    Attributes:
        data: the sources.
        public: the public set, if there is one.
        server: the server's model, task and data, if it has any.
        groups: group name -> its clients, of those whose settings are known here.
        rounds: number of rounds of the run.
        clients: all clients; before a run those of ``groups``, with no samples counted yet.
    """

    data: DataSettings
    public: PublicSettings | None
    server: ServerSettings | None
    groups: Mapping[str, GroupSettings]
    rounds: int = 1
    clients: tuple[ClientInfo, ...] = ()

    @property
    def server_modalities(self) -> list[str]:
        return [] if self.server is None else list(sample_views(self.server.model, self.server.task))

    def models(self) -> Iterator[tuple[str, ModelSettings]]:
        """The settings of clients' models, each with the name of its group."""
        return ((name, model) for name, group in self.groups.items() for model in group.models)

    # ---- checks

    def require(self) -> None:
        """Check that what the settings name exists, that widths are equal, and that items suffice where counted.

        Raises:
            ConfigError: a check fails.
            DataError: a source has no such split.
        """
        sources = self.data.sources
        self._require_names()
        for key, source, split in self._splits():
            if source not in sources:
                raise ConfigError(f"{key}: source '{source}' is not in data.sources; {nearest(source, sources)}")
            sources[source].most_items(split, source)
        for name, group in self.groups.items():
            self._require_public_items(name, group)
        if (server := self.server) is not None:
            self._require_learnable("server", server.task, server.model, server.source)
            most = sources[server.source].most_items(server.test_split, server.source)
            if most is not None and most < (server.expected_test_items or 0):
                raise unexpected_test_items(server, most)
        for name, model in self.models():
            self._require_learnable(f"clients.{name}", self.groups[name].task, model, self.groups[name].source)
        if self.public is not None:
            self._require_public(self.public)
        for name, group in self.groups.items():
            self._require_dealt(name, group, group.items == "public")
            if group.also is not None:
                self._require_dealt(f"{name}.also", group.additional(self.public), group.also.public)

    def _require_names(self) -> None:
        """Check that no two clients have one name: 'a' with two clients and 'a-0' with one make two clients 'a-0'."""
        names = Counter(client for name, group in self.groups.items() for client in member_ids(name, group.count))
        for client in [client for client, times in names.items() if times > 1]:
            raise ConfigError(f"two clients are called '{client}'; rename one of the groups under 'clients'")
        if SERVER in names:
            raise ConfigError(f"clients.{SERVER}: a client cannot be called '{SERVER}'; rename the group")

    def _splits(self) -> Iterator[tuple[str, str, str]]:
        """Key of a setting, and the source and split that it names."""
        if self.public is not None:
            yield "public", self.public.source, self.public.split
        if self.server is not None:
            yield "server", self.server.source, self.server.test_split
            if self.server.validation_split is not None:
                yield "server", self.server.source, self.server.validation_split
        for name, group in self.groups.items():
            yield f"clients.{name}", group.source, group.split
            if group.test_split is not None:
                yield f"clients.{name}", group.source, group.test_split
            if group.also is not None and group.also.source is not None:
                yield f"clients.{name}.also", group.also.source, group.also.split

    def _require_public_items(self, name: str, group: GroupSettings) -> None:
        """Check that there are public items where a group is to hold some."""
        public = self.public
        if group.items == "public" and (public is None or not group.is_of(public)):
            other = f"the public set is not of '{group.source}' {group.split}"
            what = other if public else "the federation has no public set"
            raise ConfigError(f"clients.{name}.items is public, but {what}; give a number, or leave it out")
        if group.also is not None and group.also.public and public is None:
            raise ConfigError(f"clients.{name}.also is public, but there is none; add a 'public' section")

    def _require_learnable(self, where: str, task: Task, model: ModelSettings, source: str) -> None:
        """Check that a task has its modalities and targets, and that the source has what the model encodes."""
        encoded, columns = sample_views(model, task), self.data.sources[source].columns
        for modality in task.compared - encoded.keys():
            raise ConfigError(
                f"{where}.task '{task.component_name()}' needs '{modality}', and the model there encodes "
                f"{list(encoded)}; add an encoder, or give another task"
            )
        for modality in [name for name in encoded if columns and name not in columns]:
            what = f"{where}: data.sources.{source}.columns has no '{modality}', which a model encodes"
            raise ConfigError(f"{what}; it has: {', '.join(columns)}")
        there = self.data.sources[source].target_names
        known = task.class_targets if there is None else (*there, *task.target_views)
        for target in [name for name in task.class_targets if name not in known]:
            raise ConfigError(
                f"{where}.task '{task.component_name()}': target '{target}' is not among those of "
                f"data.sources.{source} {sorted(there or ())}; set target, or name its column under the source's "
                "targets"
            )

    def _require_public(self, public: PublicSettings) -> None:
        """Check that the public set can be drawn and learnt from, and that all who share it have one width."""
        source = self.data.sources[public.source]
        if source.columns:
            require_named_columns(public, source.columns)
        for modality in public.unpaired if self.server is not None else ():
            if modality not in self.server_modalities:
                raise ConfigError(
                    f"public.unpaired.{modality} is {public.unpaired[modality]}, but server.model has no "
                    f"'{modality}' encoder to learn from them with; {nearest(modality, self.server_modalities)}"
                )
        widths = {f"clients.{name}": model.dim for name, model in self.models()}
        if self.server is not None:
            widths["server"] = self.server.model.dim
        if len(set(widths.values())) > 1:
            low, high = min(widths, key=widths.__getitem__), max(widths, key=widths.__getitem__)
            what = f"model.dim must be equal for all who share a public set: '{low}' has {widths[low]}"
            raise ConfigError(f"{what}, '{high}' has {widths[high]}")
        if (most := source.most_items(public.split, public.source)) is not None:
            require_drawable(public, most)

    def _require_dealt(self, name: str, group: GroupSettings, public: bool) -> None:
        """Check that a group's items, where settings give their number, suffice for its clients and partition."""
        most = self.data.sources[group.source].most_items(group.split, group.source)
        if self.public is not None and group.is_of(self.public):
            if public:
                most = self.public.items
            elif most is not None:
                most -= (self.public.items or 0) + self.public.further + self.public.reserve
        if most is not None:
            require_enough_items(name, group, most)
        try:
            group.partition.require(group.count, group.items if isinstance(group.items, int) else most)
        except ConfigError as error:
            raise ConfigError(f"clients.{name}.{error}") from error


def planned_clients(groups: Mapping[str, GroupSettings]) -> tuple[ClientInfo, ...]:
    """The clients that groups will have, in client order; architectures are by source, as only data name classes."""
    clients: list[ClientInfo] = []
    for name, group in groups.items():
        head = head_name(group.task, Split(group.source, group.split, (), {}, {}, {}, _unread), group.type)
        for k, client in enumerate(member_ids(name, group.count)):
            model = group.models[k % len(group.models)]
            modalities, architecture = tuple(sample_views(model, group.task)), f"{model.architecture}/{head}"
            batch = group.training.batch_size
            clients.append(ClientInfo(client, name, modalities, group.task.component_name(), 0, batch, architecture))
    return tuple(clients)


def _unread(column: str) -> Column:
    raise LookupError(f"column '{column}' of data that are only planned")


def unexpected_test_items(server: ServerSettings, count: int) -> ConfigError:
    return ConfigError(
        f"server.expected_test_items is {server.expected_test_items}, but '{server.source}' {server.test_split} has "
        f"{count} items; recalls would be of another gallery than they are named after; provide that split, or set "
        f"server.expected_test_items={count} and adapt server.task.folds"
    )
