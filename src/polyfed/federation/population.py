"""The population of a federation: who there is, which samples they have, and the models that they start with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path

from jaxtyping import Int64
from torch import Tensor, nn

from polyfed.core.activity import preparing
from polyfed.core.randomness import isolated
from polyfed.data.assembly import of_items
from polyfed.data.samples import Samples
from polyfed.data.source import Split
from polyfed.federation.additional import with_additional
from polyfed.federation.client import ClientInfo
from polyfed.federation.heads import head_name
from polyfed.federation.holdings import holding
from polyfed.federation.membership import Member, Membership
from polyfed.federation.opened_data import OpenedData, Views
from polyfed.federation.public_set import PublicSet
from polyfed.federation.settings import DataSettings, GroupSettings, PublicSettings, ServerSettings
from polyfed.federation.soundness import require_disjoint_data, require_equal_width, require_models, require_test_items
from polyfed.federation.types import Blueprint
from polyfed.models.model import Model, ModelSettings
from polyfed.models.slots import places


class Population:
    """Server and clients with their data and models, opened when first asked for.

    A site of a real federation opens only what belongs to its own clients; a simulation opens what it needs.

    Args:
        data: the sources.
        public: which items are public, if any are.
        server: the server's model, task and data, if it has any.
        groups: group name -> its clients.
        seed: of the run.
        bundles: folder of what views have learnt from the public set; None: they learn it here.
        add_modules: adds to clients' models what the method trains besides them.
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
        self.server, self.groups, self.seed = server, groups, seed
        self.data = OpenedData(data, bundles, lambda: {} if self.public is None else self.public.columns())
        self.public = None if public is None else PublicSet(public, groups, self.data, seed)
        self.membership = Membership(groups, self.public, self.data, seed)
        _ = self.membership.also_assignments  # wrong settings are refused here, before any data is read
        self._add_modules = add_modules
        self._tests: dict[tuple[str, str], Samples] = {}

    # ---- who

    @property
    def members(self) -> dict[str, Member]:
        """All clients by id, in client order."""
        return self.membership.members

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

    def holding(self, member: Member) -> dict[str, object]:
        """What a client holds, for the run folder; nothing but columns of classes and lists is read for it."""
        return holding(self, member)

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
        require_disjoint_data(self)
        if self.public is not None:
            require_equal_width(self)

    # ---- samples

    def public_samples(self, views: Views) -> Samples | None:
        """The public set in a participant's own views (of the modalities that it has), or None."""
        return None if self.public is None else self.public.samples(views)

    @property
    def public_order(self) -> str:
        """Digest of the public set, of its content and its order; empty where there is none."""
        return "" if self.public is None else self.public.order

    def train(self, member: Member, model: ModelSettings | None = None) -> Samples:
        """A client's private training samples; with another ``model`` in its views, of modalities that both have."""
        split = self.data.split(member.settings.source, member.settings.split)
        own = of_items(self._viewed(split, member, model), member.items)
        if member.also is None:
            return own
        return with_additional(own, of_items(self._additional(member, model), member.also), member.settings.task)

    def test(self, member: Member, model: ModelSettings | None = None) -> Samples | None:
        """A client's test samples; those of a group that are tested on the same items share them.

        With another ``model`` they are in its views, of the modalities that both have.
        """
        group = member.settings
        if group.test_split is None:
            return None
        split = self.data.split(group.source, group.test_split)
        who = f"all of {member.group}" if group.test == "all" else member.id
        key = (who, f"{member.model.architecture} {model.architecture if model else ''}")
        if key not in self._tests:
            self._tests[key] = of_items(self._viewed(split, member, model), self.test_items(member))
        return self._tests[key]

    def test_items(self, member: Member) -> Int64[Tensor, " k"]:
        """Items of its test split that a client is tested on."""
        return self.membership.test_items(member)

    def server_samples(self, split: str) -> Samples:
        """Validation or test samples of the server, in its model's views."""
        assert self.server is not None
        return self.data.samples(self.data.split(self.server.source, split), _views(self.server.model))

    def _additional(self, member: Member, model: ModelSettings | None) -> Samples:
        """All that a client's group holds in addition, in the views in which it sees its own."""
        if self.public is None or member.settings.also is None or not member.settings.also.public:
            return self._viewed(self.membership.also_assignments[member.group].split, member, model)
        views = _views(model or member.model)
        return self.public.samples({name: view for name, view in views.items() if name in member.model.encoders})

    def _viewed(self, split: Split, member: Member, model: ModelSettings | None) -> Samples:
        """A split in a client's views, or in those of another model: then of the modalities that both have."""
        own = _views(member.model)
        if model is None:
            return self.data.samples(split, own)
        views = {name: view for name, view in _views(model).items() if name in own}
        return self.data.samples(split, views, layout=tuple(own))

    # ---- models

    def client_model(self, member: Member) -> Model:
        """A client's model with its initial weights, which depend on seed and client alone."""
        preparing(f"building the model of {member.id}")
        with isolated(self.seed, "init", member.id):
            head = member.settings.task.head(member.model.dim, self.train(member))
            model = member.model.build(_heads(member.head, head), self.data.context)
            member.settings.task.require_model(model)
            self._add_modules(model)
        return model

    def shared_model(self, model: ModelSettings) -> Model:
        """The encoders of an architecture that a server sends, without its heads, frozen and in evaluation mode."""
        with isolated(self.seed, "init", "shared"):
            return model.build({}, self.data.context).requires_grad_(False).eval()

    def server_model(self) -> Model:
        """The server's model with its initial weights."""
        assert self.server is not None
        preparing("building the model of the server")
        with isolated(self.seed, "init", "server"):
            head = self.server.task.head(self.server.model.dim, self.server_samples(self.server.test_split))
            model = self.server.model.build(_heads(self.server_head, head), self.data.context)
        self.server.task.require_model(model)
        return model

    @property
    def server_head(self) -> str:
        """Name of the server's head."""
        assert self.server is not None
        test_split = self.data.split(self.server.source, self.server.test_split)
        return head_name(self.server.task, test_split, self.server.type)

    def blueprints(self) -> dict[str, Blueprint]:
        """Initial tensors and their places for every architecture among the clients, equal for equal seeds."""
        by_architecture: dict[str, Blueprint] = {}
        for info in self.infos:
            if info.architecture not in by_architecture:
                model = self.client_model(self.members[info.id])
                by_architecture[info.architecture] = Blueprint(dict(model.state_dict()), places(model))
        return by_architecture


def _views(model: ModelSettings) -> Views:
    return {modality: encoder.view for modality, encoder in model.encoders.items()}


def _heads(name: str, head: nn.Module | None) -> dict[str, nn.Module]:
    return {} if head is None else {name: head}
