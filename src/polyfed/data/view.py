"""Views: how a modality's raw column becomes the input of an encoder."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Self

from polyfed.core.settings import Settings
from polyfed.data.pictures import PIXELS
from polyfed.data.samples import Inputs
from polyfed.data.source import Column


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
        pixels: most pixels of a picture.
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
