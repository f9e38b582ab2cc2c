"""Encoder settings: one modality's network, from its view to an embedding, and what it may expect of that view."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from pydantic import SerializeAsAny
from torch import nn

from polyfed.core.errors import ConfigError
from polyfed.core.settings import Settings
from polyfed.data.view import DataContext, InputSpec, View


class Encoder(Settings):
    """Architecture of one modality. Subclasses live in ``polyfed.models.encoders``.

    Subclasses give ``view`` a default that suits them.
    """

    home: ClassVar[str] = "polyfed.models.encoders"
    projecting: ClassVar[tuple[str, ...]] = ("pie",)
    """Settings of the projection to d alone, without effect where an align module takes its place."""

    view: SerializeAsAny[View]

    def settings_of_projection(self) -> tuple[str, ...]:
        """Settings among ``projecting`` that differ from their defaults."""
        fields = type(self).model_fields
        return tuple(key for key in self.projecting if key in fields and getattr(self, key) != fields[key].default)

    @abstractmethod
    def build(self, dim: int, spec: InputSpec, context: DataContext) -> nn.Module:
        """A module that maps the view's input [b, ...] to an embedding [b, dim], not normalised.

        Weights are drawn from torch's global generator, or loaded if the settings name a file.
        """

    def frozen(self, modality: str, context: DataContext) -> str:
        """Number and digest (``123x0123abcd``) of frozen values in its modules (``models.frozen``); empty: none.

        It belongs to the architecture's name, as models with other frozen values cannot be averaged.
        """
        return ""


def image_shape(spec: InputSpec, encoder: str) -> tuple[int, int, int]:
    """(channels, height, width) of an image view.

    Raises:
        ConfigError: the view gives something else.
    """
    if len(spec.shape) != 3:
        raise mismatch(encoder, "images [channels, height, width]", spec, "pixels")
    channels, height, width = spec.shape
    return channels, height, width


def token_length(spec: InputSpec, encoder: str) -> int:
    """Longest token sequence of a token view.

    Raises:
        ConfigError: the view gives something else, or tokens without a vocabulary.
    """
    # a shape of one number is also that of pooled features
    if len(spec.shape) != 1 or not spec.vocabulary:
        raise mismatch(encoder, "token ids [length] with a vocabulary", spec, "tokens")
    return spec.shape[0]


def feature_shape(spec: InputSpec, encoder: str, *, positions: bool = False) -> tuple[int, ...]:
    """(width,) or (length, width) of a feature view; with ``positions`` only the latter will do.

    Raises:
        ConfigError: the view gives something else.
    """
    if len(spec.shape) not in (1, 2) or spec.vocabulary:
        raise mismatch(encoder, "features [width] or [length, width]", spec, "features")
    if positions and len(spec.shape) == 1:
        raise mismatch(encoder, "features by position [length, width] for pie", spec, "features with pool: tokens")
    return spec.shape


def check_channels(given: int, needed: int, encoder: str, weights: str | None) -> None:
    """Raise ConfigError if pretrained weights take ``needed`` channels and the view gives another number."""
    if given != needed:
        raise ConfigError(f"encoder '{encoder}': weights '{weights}' take {needed} channels, its view gives {given}")


def check_patches(shape: tuple[int, int, int], patch: int, encoder: str) -> None:
    """Raise ConfigError if patches of a side do not divide images [channels, height, width]."""
    _, height, width = shape
    if height % patch or width % patch:
        raise ConfigError(
            f"encoder '{encoder}': patch {patch} does not divide images of {height}x{width}; change patch or the "
            "view's size"
        )


def mismatch(encoder: str, needs: str, spec: InputSpec, view: str) -> ConfigError:
    """Error for a view that does not give what an encoder needs; ``view`` is a view that does."""
    words = f" and a vocabulary of {len(spec.vocabulary)}" if spec.vocabulary else ""
    got = f"shape {list(spec.shape)}{words}"
    return ConfigError(f"encoder '{encoder}' needs {needs}, its view gives {got}; set its view to {view}")
