"""Views: a modality's raw column as the input of an encoder, and what views learn from the public set."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Self, TypeVar, cast

from polyfed.core.errors import ConfigError, DataError
from polyfed.core.files import write_atomically
from polyfed.core.settings import Settings
from polyfed.core.untrusted import file_json
from polyfed.data.images import PIXELS
from polyfed.data.samples import Inputs
from polyfed.data.source import Column, Count

_T = TypeVar("_T")


@dataclass(frozen=True)
class InputSpec:
    """Description of an encoder's input.

    Attributes:
        shape: shape of one sample as the encoder receives it, without the batch dimension.
        vocabulary: token strings by id, for token inputs; empty otherwise.
        pad: id of the padding token, for token inputs.
        begins: True if every text begins with a token that marks it, for token inputs.
    """

    shape: tuple[int, ...]
    vocabulary: tuple[str, ...] = ()
    pad: int = 0
    begins: bool = True


@dataclass(frozen=True)
class DataContext:
    """Folders, limits and memos that views need in addition to a column.

    Attributes:
        cache: folder of decoded images and frozen features, shared by all runs of this machine.
        weights: folder that relative paths of pretrained weights and vocabularies start from, or None.
        public: modality -> column of the public set's training texts or images, which every participant may see; what a
            view learns from data (a vocabulary) it learns from here.
        bundles: folder of the run in which learnt vocabularies are kept, or None.
        fitted: Memo of what views learnt, keyed by their settings.
        pixels: Limit of an image's pixels.
        seed: Seed of the run, for random values that all models share.
        hub: True if pretrained networks may be downloaded from the hub; else its cache alone is used.
        ahead: True to compute expensive inputs of all rows before the first batch; else with each batch.
    """

    cache: Path
    weights: Path | None = None
    public: Mapping[str, Column] = field(default_factory=dict)
    bundles: Path | None = None
    fitted: dict[str, object] = field(default_factory=dict)
    pixels: int = PIXELS
    seed: int = 0
    ahead: bool = True
    hub: bool = True

    def memo(self, key: str, make: Callable[[], _T]) -> _T:
        """Result of ``make``, which is called once per key."""
        if key not in self.fitted:
            self.fitted[key] = make()
        return cast("_T", self.fitted[key])


class View(Settings):
    """Presentation of one modality to an encoder. Subclasses live in ``polyfed.data.views``."""

    home: ClassVar[str] = "polyfed.data.views"

    @abstractmethod
    def open(self, column: Column, modality: str, context: DataContext) -> Inputs:
        """Open a column; nested columns are flattened in item order.

        Raises:
            DataError: a value cannot be decoded; names the row and the file.
        """

    def cut(self, column: Column, modality: str, context: DataContext) -> Count | None:
        """Count of the parts of values that fit and that are cut off, with the errors of ``open``; None: no cuts."""
        return None

    def beside(self, views: Mapping[str, View], context: DataContext) -> Self:
        """The view next to those of other modalities, whose settings it may share.

        Raises:
            ConfigError: the view that it depends on is missing or does not fit.
        """
        return self

    def resolved(self, modality: str, context: DataContext) -> View:
        """The view with settings read from the files that it names, and with learnt settings filled in.

        Raises:
            ConfigError: the files are missing, or it has no data to learn from.
        """
        return self

    @abstractmethod
    def spec(self, modality: str, context: DataContext) -> InputSpec:
        """Description of the input that encoders of this view receive.

        Raises:
            ConfigError: a public set or weights folder that the view needs is missing.
        """


def learnt(
    context: DataContext, name: str, learn: Callable[[], Mapping[str, Any]], read: Callable[[Mapping[str, Any]], _T]
) -> _T:
    """Result of ``read`` on the run's file ``name``, which is learnt and written if missing; without a run, learnt.

    A resumed run, and a saved model without its data, must have the same as the first round.

    Raises:
        DataError: the file cannot be read.
    """
    if context.bundles is None:
        return read(learn())
    path = context.bundles / f"{name}.json"
    if not path.exists():
        write_atomically(path, json.dumps(learn(), ensure_ascii=False).encode())
    try:
        return read(file_json(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: not readable ({error}); remove the file to learn it again") from error


def public_column(context: DataContext, modality: str, who: str, instead: str) -> Column:
    """The public set's column of a modality.

    Raises:
        ConfigError: it has no such column; names ``who`` learns from it, and what to do ``instead``.
    """
    if modality not in context.public:
        has = f"which has no '{modality}' (it has: {', '.join(context.public) or 'nothing'})"
        raise ConfigError(f"{who} learns from the public set, {has}; {instead}, or add a public set with it")
    return context.public[modality]


Views = Mapping[str, View]
"""Maps a modality to the view of its column."""

NO_VIEWS: Views = MappingProxyType({})
