"""Encoder settings: one modality's network, from its view to a d-dimensional embedding."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from pydantic import SerializeAsAny
from torch import nn

from polyfed.core.settings import Component
from polyfed.data.view import DataContext, InputSpec, View


class Encoder(Component):
    """Architecture of one modality. Subclasses live in ``polyfed.models.encoders``, one a module.

    Subclasses give ``view`` a default that suits them.
    """

    home: ClassVar[str] = "polyfed.models.encoders"
    projecting: ClassVar[tuple[str, ...]] = ("pie",)
    """Settings that concern the projection to d alone, and so nothing where an align module takes its place."""

    view: SerializeAsAny[View]

    @abstractmethod
    def build(self, dim: int, spec: InputSpec, context: DataContext) -> nn.Module:
        """A module that maps the view's input [b, ...] to an embedding [b, dim], not normalised.

        Weights are drawn from torch's global generator (or loaded, where the settings say so).
        """
