"""A tokenizer that comes with a pretrained model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from polyfed.core.errors import ConfigError
from polyfed.data.backbones import NO_CODE
from polyfed.data.tokenization import Tokenizer, Vocabulary
from polyfed.data.view import DataContext


class Pretrained(Tokenizer):
    """A Hugging Face tokenizer, from a local folder, a WordPiece ``vocab.txt``, or the hub.

    Its own marks of begin and end ([CLS], [SEP]) are put around each text and count towards the length.
    """

    path: str = Field(
        description="folder or vocab.txt, absolute or relative to the weights folder; else a name on the hub"
    )
    lowercase: bool = Field(default=True, description="lower-case texts; only for a bare vocab.txt")

    def load(self, modality: str, context: DataContext) -> Vocabulary:
        tokenizer = self.opened(context)
        missing = [kind for kind in ("pad", "unk") if getattr(tokenizer, f"{kind}_token_id") is None]
        if missing:
            raise ConfigError(f"tokenizer '{self.path}' has no {missing[0]} token; choose one that has")

        def encode(texts: Sequence[str], length: int) -> list[list[int]]:
            rows: list[list[int]] = tokenizer(list(texts), truncation=True, max_length=length)["input_ids"]
            return rows

        ids: dict[str, int] = tokenizer.get_vocab()
        tokens = [""] * (max(ids.values()) + 1)  # some tokenizers leave ids out
        for token, number in ids.items():
            tokens[number] = token
        fixed = {*tokenizer.all_special_ids} - {tokenizer.unk_token_id}
        return Vocabulary(
            tokens=tuple(tokens),
            encode=encode,
            pad=tokenizer.pad_token_id,
            unknown=tokenizer.unk_token_id,
            fixed=tuple(sorted(fixed)),
            pipeline=getattr(tokenizer, "backend_tokenizer", None),
        )

    def opened(self, context: DataContext) -> Any:
        """The tokenizer as ``transformers`` gives it."""
        import transformers  # takes seconds, and most runs do not need it
        from huggingface_hub import constants

        constants.HF_HUB_DISABLE_TELEMETRY = True
        local = (context.weights or Path()) / self.path
        words = local / "vocab.txt" if local.is_dir() else local
        try:
            # a bare vocab.txt is all that BERT's tokenizer needs, and AutoTokenizer does not open it
            if words.is_file() and not (words.parent / "tokenizer.json").exists():
                return transformers.BertTokenizer(vocab=str(words), do_lower_case=self.lowercase)
            place = str(local) if local.exists() else self.path
            return transformers.AutoTokenizer.from_pretrained(place, **NO_CODE)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"tokenizer '{self.path}' can be loaded neither from '{local}' nor the hub "
                f"({str(error).splitlines()[0]}); correct it, or set data.weights_dir or POLYFED_WEIGHTS"
            ) from error
