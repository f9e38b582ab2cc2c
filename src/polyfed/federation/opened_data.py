"""The data of a federation as this process has opened it: each split once, each view of it once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path

from polyfed.core.activity import preparing
from polyfed.core.errors import ConfigError, nearest
from polyfed.data.assembly import assemble
from polyfed.data.samples import Samples
from polyfed.data.source import Column, Split
from polyfed.data.view import DataContext, View
from polyfed.federation.settings import DataSettings

Views = Mapping[str, View]
"""Modality -> how an encoder sees its column."""


class OpenedData:
    """Splits and samples, opened when first asked for; participants that use one column through one view share it.

    Args:
        settings: the sources by name, and where their files are.
        bundles: folder of what views have learnt from the public set; None: they learn it here.
        public_columns: gives the columns of the public set, which is all that views may learn from.
    """

    def __init__(
        self, settings: DataSettings, bundles: Path | None, public_columns: Callable[[], Mapping[str, Column]]
    ) -> None:
        self.settings = settings
        self._bundles = bundles
        self._public_columns = public_columns
        self._splits: dict[tuple[str, str], Split] = {}
        self._samples: dict[tuple[str, str, str], Samples] = {}

    @cached_property
    def context(self) -> DataContext:
        """Where views find caches, weights and the public columns."""
        return DataContext(
            self.settings.cache_folder,
            self.settings.weights_folder,
            bundles=self._bundles,
            pixels=self.settings.max_pixels,
            public=self._public_columns(),
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

    def samples(self, split: Split, views: Views, *, layout: tuple[str, ...] = ()) -> Samples:
        """All samples of a split; modalities in ``layout`` shape them without being loaded, as in ``assemble``."""
        # Views are compared by their settings: two models with equal ones share what was opened.
        written = [(name, view.model_dump_json()) for name, view in views.items()]
        key = (split.source, split.name, str((layout, written)))
        if key not in self._samples:
            preparing(f"preparing {split.source} {split.name} ({', '.join(views) or 'who holds what'})")
            self._samples[key] = assemble(split, views, self.context, layout=layout)
        return self._samples[key]
