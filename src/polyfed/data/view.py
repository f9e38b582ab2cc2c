"""Views: how a modality's raw column becomes the input of an encoder, and what they learn from the public set."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from polyfed.core.errors import ConfigError, DataError
from polyfed.core.files import write_atomically
from polyfed.core.settings import Settings
from polyfed.core.untrusted import file_json
from polyfed.data.images import PIXELS
from polyfed.data.samples import Inputs
from polyfed.data.source import Column, Count


@dataclass(frozen=True)
class InputSpec:
    """What an encoder must know of its input.

    Attributes:
        shape: shape of one sample as the encoder receives it, without the batch dimension.
        vocabulary: token strings by id, for token inputs; empty otherwise.
        pad: id of the padding token, for token inputs.
        begins: whether every text begins with a token that marks it, for token inputs.
    """

    shape: tuple[int, ...]
    vocabulary: tuple[str, ...] = ()
    pad: int = 0
    begins: bool = True


@dataclass(frozen=True)
class DataContext:
    """Where views find what they need beyond the column.

    Attributes:
        cache: folder of decoded images and frozen features, shared by all runs of this machine.
        weights: folder that relative paths of pretrained weights and vocabularies start from, or None.
        public: modality -> column of the public set's training texts or images, which every participant may see; what a
            view learns from data (a vocabulary) it learns from here.
        bundles: folder of the run in which learnt vocabularies are kept, or None.
        fitted: in-memory memo of what views learnt, keyed by their settings.
        pixels: most pixels of an image.
        seed: of the run, for random values that all models share.
        hub: whether the hub may be asked for pretrained networks; else its cache alone.
        ahead: whether what takes long is computed for all rows before the first batch; else as batches come.
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


class View(Settings):
    """How one modality is presented to an encoder. Subclasses live in ``polyfed.data.views``, one a module."""

    home: ClassVar[str] = "polyfed.data.views"

    @abstractmethod
    def open(self, column: Column, modality: str, context: DataContext) -> Inputs:
        """Open a column; nested columns are flattened in item order.

        Raises:
            DataError: a value cannot be decoded; the message names the row and the file.
        """

    def cut(self, column: Column, modality: str, context: DataContext) -> Count | None:
        """Count of the parts of values that fit, and of those that are cut off; None: the view cuts nothing off.

        Raises:
            DataError, ConfigError: as for ``open``.
        """
        return None

    def beside(self, views: Mapping[str, View], context: DataContext) -> Self:
        """The view as it is beside those of other modalities, whose settings it may share.

        Raises:
            ConfigError: it goes with one that is not there, or cannot.
        """
        return self

    def resolved(self, modality: str, context: DataContext) -> View:
        """The view that this one comes to with the files that it names, and with what it learns that is a setting.

        Raises:
            ConfigError: they cannot be had, or there is nothing to learn from.
        """
        return self

    @abstractmethod
    def spec(self, modality: str, context: DataContext) -> InputSpec:
        """What an encoder of this view receives.

        Raises:
            ConfigError: the view needs something (a public set, a weights folder) that is not there.
        """


_T = TypeVar("_T")


def learnt(
    context: DataContext, name: str, learn: Callable[[], Mapping[str, Any]], read: Callable[[Mapping[str, Any]], _T]
) -> _T:
    """What ``read`` makes of the run's file ``name``, learnt and written if it is not there; without a run, learnt.

    A resumed run, and a saved model without its data, must have what the first round had.

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
        ConfigError: there is none; the message says ``who`` learns from it, and what to do ``instead``.
    """
    if modality not in context.public:
        raise ConfigError(
            f"{who} learns from the public set, which has no '{modality}' "
            f"(it has: {', '.join(context.public) or 'nothing'}); {instead}, or add a public set with it"
        )
    return context.public[modality]
