"""The data of a federation as this process has opened it, and the public set that is drawn from it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from jaxtyping import Int64
from torch import Tensor

from polyfed.core.activity import preparing
from polyfed.core.errors import ConfigError, nearest
from polyfed.core.randomness import generator
from polyfed.data.arrow import lacking
from polyfed.data.assembly import assemble, mentioning, of_column, of_items, order_of
from polyfed.data.cache import content_digests
from polyfed.data.device_memory import DeviceMemory
from polyfed.data.samples import Samples
from polyfed.data.source import Column, Split
from polyfed.data.view import NO_VIEWS, DataContext, Views
from polyfed.federation.settings import DataSettings, GroupSettings, PublicSettings
from polyfed.models.model import ModelSettings
from polyfed.tasks.task import Task

_PAIRS, _GALLERY, _RESERVE = "pairs", "gallery", "reserve"  # parts of a public set


def sample_views(model: ModelSettings, task: Task) -> Views:
    """Views of the modalities that samples have; what else the model encodes is the task's own, as names of classes."""
    return {name: encoder.view for name, encoder in model.encoders.items() if name not in task.own_modalities}


def require_named_columns(public: PublicSettings, columns: Collection[str]) -> None:
    """Check that the source has the modalities that the settings name.

    Raises:
        ConfigError: it lacks one.
    """
    for key, names in (("without", public.without), ("unpaired", public.unpaired)):
        for name in names:
            if name not in columns:
                raise ConfigError(f"public.{key}: '{public.source}' has no '{name}'; {nearest(name, columns)}")


def require_drawable(public: PublicSettings, there: int, left: str = "") -> None:
    """Check that there are as many items as are to be public.

    Raises:
        ConfigError: there are fewer; ``left`` names what left them.
    """
    wanted = (public.items or 0) + public.further + public.reserve
    if wanted > there:
        further = "public.items, public.unpaired, public.gallery and public.reserve are together"
        what = further if public.further + public.reserve else "public.items is"
        raise ConfigError(f"{what} {wanted}, but '{public.source}' has {there}{left}; lower it")


class OpenedData:
    """Splits and samples, opened when first asked for; participants that use one column through one view share it.

    Args:
        settings: the sources by name, and where their files are.
        seed: seed of the run.
        bundles: folder of what views have learnt from the public set; None: they learn it here.
        columns: gives the columns of the public set, which is all that views may learn from.
    """

    def __init__(
        self, settings: DataSettings, seed: int, bundles: Path | None, columns: Callable[[], Mapping[str, Column]]
    ) -> None:
        self.settings, self._seed, self._bundles, self._columns = settings, seed, bundles, columns
        self.ahead = self.hub = True  # see ``DataContext``; who needs others sets them before anything is opened
        self.memory: DeviceMemory | None = None  # see ``Samples``; likewise
        self._splits: dict[tuple[str, str], Split] = {}
        self._samples: dict[tuple[str, str, str], Samples] = {}

    @cached_property
    def context(self) -> DataContext:
        return DataContext(
            self.settings.cache_folder,
            self.settings.weights_folder,
            bundles=self._bundles,
            pixels=self.settings.max_pixels,
            public=self._columns(),
            seed=self._seed,
            ahead=self.ahead,
            hub=self.hub,
        )

    def split(self, source: str, name: str) -> Split:
        """A split of a named source.

        Raises:
            ConfigError: no such source.
        """
        sources = self.settings.sources
        if source not in sources:
            raise ConfigError(f"source '{source}' is not in data.sources; {nearest(source, sources)}")
        if (source, name) not in self._splits:
            preparing(f"reading {source} {name}")
            opened = sources[source].open(name, name=source, data_dir=self.settings.data_folder)
            self._splits[source, name] = opened
        return self._splits[source, name]

    def samples(self, split: Split, views: Views, *, layout: tuple[str, ...] = (), lazy: Views = NO_VIEWS) -> Samples:
        """All samples of a split, as in ``assemble``."""
        # views are compared by their settings: two models with equal ones share what was opened
        written = [(name, view.model_dump_json()) for name, view in (*views.items(), *lazy.items())]
        key = (split.source, split.name, str((layout, written)))
        if key not in self._samples:
            preparing(f"preparing {split.source} {split.name} ({', '.join(views) or 'who holds what'})")
            opened = assemble(split, views, self.context, layout=layout, lazy=lazy)
            self._samples[key] = replace(opened, memory=self.memory)
        return self._samples[key]


@dataclass(frozen=True)
class PublicSet:
    """The public set P of a federation, in a fixed order that depends on the seed alone.

    Attributes:
        settings: source that it is drawn from, and numbers of items.
        groups: the clients' groups by name; ``without`` may mean the class names of their sources.
        data: opened data with its split.
        seed: seed of the run.
    """

    settings: PublicSettings
    groups: Mapping[str, GroupSettings]
    data: OpenedData
    seed: int

    @property
    def split(self) -> Split:
        return self.data.split(self.settings.source, self.settings.split)

    @cached_property
    def items(self) -> Int64[Tensor, " k"]:
        """Its pairs: items of which all modalities are public, in split order.

        Raises:
            ConfigError: there are fewer than there should be.
        """
        return self._drawn[_PAIRS]

    @cached_property
    def all_items(self) -> Int64[Tensor, " k"]:
        return torch.cat(list(self._drawn.values())).sort().values

    def samples(self, views: Views, lazy: Views = NO_VIEWS) -> Samples:
        """Its pairs in a participant's own views, of the modalities that the split has; ``per_item`` of each item.

        All columns of the split shape them, so that every participant counts the same samples.
        """
        columns = self.split.columns
        own = {name: view for name, view in views.items() if name in columns}
        return self._samples(_PAIRS, own, tuple(columns), lazy)

    def parts(self, views: Views) -> dict[str, Samples]:
        """Samples other than the pairs, each of one modality, by output: ``unpaired/image``, ``gallery/text``."""
        names = {f"unpaired/{modality}": modality for modality in views}
        parts = {name: self._samples(name, {one: views[one]}) for name, one in names.items() if name in self._drawn}
        if _GALLERY in self._drawn:
            columns = self.split.columns
            own = {name: view for name, view in views.items() if name in columns}
            gallery = self._samples(_GALLERY, own, tuple(columns))
            parts |= {f"{_GALLERY}/{name}": gallery.only([name]) for name in own}
        return parts

    @cached_property
    def order(self) -> str:
        contents = list[str]()
        for part, items in self._drawn.items():
            if part == _RESERVE:
                continue
            # a gallery is not learnt from, though its images be the same
            contents += [] if part == _PAIRS else [part]
            contents += content_digests(self.split, items, self.data.context)
        return order_of(self.samples({}), contents)

    def columns(self) -> dict[str, Column]:
        split, nothing = self.split, self.items[:0]
        further = {name: self._drawn.get(f"unpaired/{name}", nothing) for name in split.columns}
        chosen = {name: torch.cat([self.items, items]).sort().values for name, items in further.items()}
        return {name: of_column(split.modality(name), items) for name, items in chosen.items()}

    @cached_property
    def _drawn(self) -> dict[str, Int64[Tensor, " k"]]:
        """Part of the set -> its items, in split order."""
        settings, eligible = self.settings, self._eligible()
        # in one order, however the settings were written
        further = {f"unpaired/{name}": count for name, count in sorted(settings.unpaired.items())}
        further |= {part: count for part in (_GALLERY, _RESERVE) if (count := getattr(settings, part))}
        wanted = settings.further + settings.reserve
        require_drawable(settings, len(eligible), " left by public.without" if settings.without else "")
        pairs = len(eligible) - wanted if settings.items is None else settings.items
        # ``without`` changes which are drawn but not how many; pairs come first, so that they are the same whatever
        # other parts there are
        order = torch.randperm(len(eligible), generator=generator(self.seed, "public"))
        parts = torch.split(order[: pairs + wanted], [pairs, *further.values()])
        return {name: eligible[part].sort().values for name, part in zip((_PAIRS, *further), parts, strict=True)}

    def _eligible(self) -> Int64[Tensor, " n"]:
        """Items that may be public."""
        split, settings = self.split, self.settings
        require_named_columns(settings, split.columns)
        allowed = torch.ones(len(split), dtype=torch.bool)
        for column in map(split.modality, split.columns):
            if column.gaps:  # a public sample lacks nothing
                allowed &= ~torch.from_numpy(lacking(column.values))
        for name, entries in settings.without.items():
            words = [word for entry in entries for word in self._words(entry)]
            allowed &= ~mentioning(split.modality(name), words)
        return allowed.nonzero().squeeze(1)

    def _samples(self, part: str, views: Views, layout: tuple[str, ...] = (), lazy: Views = NO_VIEWS) -> Samples:
        samples = of_items(self.data.samples(self.split, views, layout=layout, lazy=lazy), self._drawn[part])
        if self.settings.per_item is None:
            return samples
        keys = torch.rand(len(samples), generator=generator(self.seed, "public-samples"))
        # sorted by item, and within an item by the random keys: both sorts must be stable
        order = torch.argsort(keys, stable=True)
        order = order[torch.argsort(samples.items[order], stable=True)]
        items = samples.items[order]
        first = torch.searchsorted(items, items)  # position of the first sample of the same item
        chosen = order[torch.arange(len(items)) - first < self.settings.per_item]
        return samples.subset(chosen.sort().values)

    def _words(self, entry: str) -> tuple[str, ...]:
        """An entry of ``without``: a word, or the class names of an ``@source``."""
        if not entry.startswith("@"):
            return (entry,)
        source = entry.removeprefix("@")
        splits = [group.split for group in self.groups.values() if group.source == source]
        classes = self.data.split(source, splits[0] if splits else "train").classes
        names = tuple(name for of_target in classes.values() for name in of_target)
        if not names:
            raise ConfigError(f"public.without: source '{source}' has no names of classes; list the words themselves")
        return names
