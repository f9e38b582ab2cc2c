"""What a pretrained network takes: pictures or spectrograms as its processor makes them, token ids of its tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pydantic import Field

from polyfed.data.backbone_inputs import (
    ImagePreparation,
    InputKind,
    SoundPreparation,
    input_kind,
    require_tokenizer,
)
from polyfed.data.backbones import BackboneTower, locate, most_tokens
from polyfed.data.images import Augment, MeanStd
from polyfed.data.pictures import ImageFit
from polyfed.data.samples import Inputs
from polyfed.data.source import Column
from polyfed.data.tokenizers import PretrainedTokenizer
from polyfed.data.view import DataContext, InputSpec, View
from polyfed.data.views.mel import Mel
from polyfed.data.views.pixels import Pixels
from polyfed.data.views.tokens import Tokens


class Native(View):
    """Pixels, tokens or spectrograms as a pretrained network's folder says: size, filter, mean, spread, tokenizer."""

    backbone: str = Field(min_length=1, description="folder below data.weights_dir, or hub name owner/name")
    tower: BackboneTower = Field(default="whole", description="vision or text, of networks with both (CLIP)")
    size: int | None = Field(
        default=None, ge=8, le=2048, description="image side in pixels; the network's own by default"
    )
    fit: ImageFit | None = Field(default=None, description="squash or crop; as the network's processor by default")
    augment: Augment = Field(default=Augment(), description="random changes of pictures in the training view")
    length: int = Field(default=64, ge=2, le=8192, description="tokens of a text, the rest is cut off")

    def open(self, column: Column, modality: str, context: DataContext) -> Inputs:
        return self.resolved(modality, context).open(column, modality, context)

    def spec(self, modality: str, context: DataContext) -> InputSpec:
        return self.resolved(modality, context).spec(modality, context)

    def resolved(self, modality: str, context: DataContext) -> Pixels | Tokens | Mel:
        """The view with what the network's folder says.

        Raises:
            ConfigError: the folder cannot be had, or lacks its preprocessor or tokenizer.
        """
        folder = locate(self.backbone, context.weights, key="view native, backbone", hub=context.hub)
        of: dict[InputKind, Callable[[Path], Pixels | Tokens | Mel]]
        of = {"picture": self._pixels, "text": self._tokens, "sound": self._mel}
        return of[input_kind(folder, self.tower)](folder)

    def _mel(self, folder: Path) -> Mel:
        own = SoundPreparation.of(folder)
        return Mel(rate=own.rate, bands=own.bands, frames=own.frames, mean=own.mean, std=own.std, layout="positions")

    def _pixels(self, folder: Path) -> Pixels:
        own = ImagePreparation.of(folder, self.size, self.fit)
        # pixels from 0 to 1 are 255 factors
        span = 255 * own.factor
        red, green, blue = (value / span for value in own.mean)
        constants = MeanStd(mean=(red, green, blue), std=tuple(value / span for value in own.std))
        return Pixels(size=own.size, fit=own.fit, resampling=own.resampling, normalise=constants, augment=self.augment)

    def _tokens(self, folder: Path) -> Tokens:
        require_tokenizer(folder)
        most = most_tokens(folder)
        length = self.length if most is None else min(self.length, most)
        return Tokens(tokenizer=PretrainedTokenizer(path=str(folder)), length=length)
