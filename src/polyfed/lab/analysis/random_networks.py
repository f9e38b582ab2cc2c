"""Networks as large as pretrained ones, with random weights, of which only ``config.json`` is read."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from polyfed.core.randomness import isolated
from polyfed.data.backbone_inputs import InputKind, input_kind
from polyfed.data.backbones import NO_CODE, locate, outline, quiet


@dataclass(frozen=True)
class RandomNetworks:
    """Stand-ins for the networks of encoders ``hf``.

    Attributes:
        weights: folder that names of pretrained networks start from.
        place: folder for the stand-ins.
    """

    weights: Path | None
    place: Path

    def stand_in(self, encoder: Mapping[str, Any], length: int = 64) -> dict[str, Any]:
        """The settings of an encoder, of random weights, on pictures or on hashed words.

        Args:
            encoder: settings of an encoder ``hf``.
            length: tokens of a text where the view does not say.

        Raises:
            ConfigError: its ``config.json`` cannot be had, or its tower is not there.
        """
        folder = locate(encoder["weights"], self.weights, key="encoder hf, weights", files=("*.json", "*.txt"))
        config: Any = outline(folder, "tokens", encoder["tower"]).body.config
        view = encoder["view"]
        words = {"name": "hashing", "size": getattr(config, "vocab_size", None)}
        shown: dict[InputKind, dict[str, Any]] = {
            "text": {"name": "tokens", "length": view.get("length", length), "tokenizer": words},
            "picture": {"name": "pixels", "size": view.get("size") or getattr(config, "image_size", 224)},
            "sound": {
                "name": "mel",
                "layout": "positions",
                "bands": getattr(config, "num_mel_bins", None),
                "frames": getattr(config, "max_length", None),
            },
        }
        return {**encoder, "weights": str(self._saved(folder)), "view": shown[input_kind(folder, encoder["tower"])]}

    def _saved(self, folder: Path) -> Path:
        from transformers import AutoConfig, AutoModel

        auto: Any = AutoModel
        path = self.place / hashlib.sha256(str(folder).encode()).hexdigest()[:16]
        if not path.exists():
            with quiet(), isolated("random network"):
                config = AutoConfig.from_pretrained(folder, local_files_only=True, **NO_CODE)
                # half precision halves the files, and they are loaded as float32
                auto.from_config(config, **NO_CODE).to(torch.bfloat16).save_pretrained(path)
        return path
