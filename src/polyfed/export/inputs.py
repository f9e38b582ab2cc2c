"""How inputs of an exported model are prepared without polyfed: facts, words and code for each view."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import singledispatch
from pathlib import Path
from typing import Any

from polyfed.data.images import MEAN_STD
from polyfed.data.tokenization import Tokenizer, Vocabulary
from polyfed.data.tokenizers.glove import Glove
from polyfed.data.tokenizers.hashing import Hashing
from polyfed.data.tokenizers.pretrained import Pretrained
from polyfed.data.tokenizers.wordpiece import Wordpiece
from polyfed.data.tokenizers.words import Words
from polyfed.data.view import DataContext, InputSpec, View
from polyfed.data.views.features import Features
from polyfed.data.views.pixels import Pixels
from polyfed.data.views.tokens import Tokens


@dataclass(frozen=True)
class Recipe:
    """How inputs of one modality are prepared.

    Attributes:
        facts: for ``config.json``.
        words: one sentence for people.
        code: a Python function called ``PREPARE`` from a list of raw values to a batch.
        example: an argument for it.
        imports: what it needs.
    """

    facts: Mapping[str, Any]
    words: str
    code: str
    example: str
    imports: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Place:
    modality: str
    context: DataContext
    folder: Path
    suffix: str
    fixed_length: int | None


def recipe(
    view: View,
    spec: InputSpec,
    *,
    modality: str,
    context: DataContext,
    folder: Path,
    suffix: str = "",
    fixed_length: int | None = None,
) -> Recipe:
    """The recipe of a view; files that it needs (a vocabulary) are written into ``folder``.

    Args:
        view: how the modality is presented to its encoder.
        spec: what the encoder receives.
        modality: its name.
        context: where the view finds its vocabulary.
        folder: of the export.
        suffix: part of file names that tells modalities apart.
        fixed_length: length that token rows must be padded to, if any.
    """
    return _of_view(view, spec, _Place(modality, context, folder, suffix, fixed_length))


@singledispatch
def _of_view(view: View, spec: InputSpec, place: _Place) -> Recipe:
    """A view of somebody else's: its inputs are taken as they are."""
    kind = view.component_name()
    return Recipe(
        facts={"view": view.model_dump(mode="json")},
        words=f"float32 {list(spec.shape)} as polyfed's view `{kind}` makes it, see `config.json`.",
        code=_AS_IS.format(comment=f"# made by the view {kind}"),
        example=f"torch.zeros(1, {', '.join(map(str, spec.shape))}).tolist()",
    )


@_of_view.register
def _of_pixels(view: Pixels, spec: InputSpec, place: _Place) -> Recipe:
    mean, std = MEAN_STD[view.normalise]
    filter_name = f"Image.Resampling.{view.resampling.upper()}"
    if view.fit == "crop":
        resize = f"ImageOps.fit(upright, ({view.size}, {view.size}), {filter_name})"
    else:
        resize = f"upright.resize(({view.size}, {view.size}), {filter_name})"
    fit = "the short side resized and the middle cut out" if view.fit == "crop" else "both sides resized"
    return Recipe(
        facts={"view": view.model_dump(mode="json"), "channels": "RGB", "mean": mean, "std": std},
        words=f"upright RGB pictures of {view.size} x {view.size} pixels ({fit}, {view.resampling}), "
        f"transparency on white, 0 to 1, minus mean {list(mean)}, divided by standard deviation {list(std)}.",
        code=_PIXELS.format(resize=resize, size=view.size, mean=list(mean), std=list(std)),
        example='[Image.new("RGB", (80, 60), "red")]',
        imports=("from PIL import Image, ImageOps",),
    )


@_of_view.register
def _of_features(view: Features, spec: InputSpec, place: _Place) -> Recipe:
    facts = view.model_dump(mode="json", exclude={"batch_size", "precision"})
    shape = " by position, zero where there is padding" if len(spec.shape) > 1 else ""
    return Recipe(
        facts={"view": facts, "backbone": view.backbone, "shape": list(spec.shape)},
        words=f"features {list(spec.shape)}{shape} of the frozen backbone `{view.backbone}` "
        f"(pool `{view.pool}`, tower `{view.tower}`), which is not part of this export: only what was "
        "trained on top of it is.",
        code=_AS_IS.format(comment=f"# features of the frozen backbone {view.backbone}, pool {view.pool}"),
        example=f"torch.zeros(1, {', '.join(map(str, spec.shape))}).tolist()",
    )


@_of_view.register
def _of_tokens(view: Tokens, spec: InputSpec, place: _Place) -> Recipe:
    vocabulary, file = view.tokenizer.ready(place.modality, place.context), f"vocabulary{place.suffix}.json"
    facts = {"length": view.length, "pad": vocabulary.pad, "unknown": vocabulary.unknown}
    content = {"tokenizer": view.tokenizer.model_dump(mode="json"), **facts, "tokens": spec.vocabulary}
    (place.folder / file).write_text(json.dumps(content, ensure_ascii=False) + "\n", "utf-8")
    split = _split(view.tokenizer, vocabulary, place)
    return Recipe(
        facts={"view": view.model_dump(mode="json"), "vocabulary": file, **facts},
        words=f"{split.words}, at most {view.length} of them, as ids of `{file}`, padded "
        + (f"to {place.fixed_length}" if place.fixed_length else "to the longest of the batch")
        + f" with {vocabulary.pad}; a text without tokens is one {vocabulary.unknown}.",
        code=_TOKENS.format(
            file=file, setup=split.setup, row=split.row, longest=place.fixed_length or "max(map(len, rows))"
        ),
        example=split.example,
        imports=("import json", "from pathlib import Path", *split.imports),
    )


@dataclass(frozen=True)
class _Split:
    """How one text becomes ids: ``setup`` runs once, with ``vocabulary`` and ``ids``; ``row`` is a text's."""

    words: str
    row: str
    setup: str = ""
    example: str = '["a red square above a blue circle"]'
    imports: tuple[str, ...] = field(default=())


@singledispatch
def _split(tokenizer: Tokenizer, vocabulary: Vocabulary, place: _Place) -> _Split:
    """A tokenizer of somebody else's: ids are taken as they are."""
    return _Split(
        f"tokens of `{tokenizer.component_name()}`",
        'text[: vocabulary["length"]]',
        example=f"[[{vocabulary.unknown}]]",
    )


@_split.register(Words)
@_split.register(Glove)
def _split_words(tokenizer: Tokenizer, vocabulary: Vocabulary, place: _Place) -> _Split:
    row = f'[ids.get(word, vocabulary["unknown"]) for word in {_FIND}]'
    return _Split("lower-cased words (runs of letters and digits)", row, imports=("import re",))


@_split.register
def _split_hashing(tokenizer: Hashing, vocabulary: Vocabulary, place: _Place) -> _Split:
    return _Split(
        "lower-cased words (runs of letters and digits), each hashed to an id",
        f"[bucket(word) for word in {_FIND}]",
        setup=_BUCKET.format(buckets=tokenizer.size - 2),
        imports=("import hashlib", "import re"),
    )


@_split.register
def _split_pieces(tokenizer: Wordpiece, vocabulary: Vocabulary, place: _Place) -> _Split:
    return _Split(
        "pieces of lower-cased words (WordPiece)",
        'splitter.encode(text).ids[: vocabulary["length"]]',
        setup=_PIECES,
        imports=("from tokenizers import Tokenizer, models, normalizers, pre_tokenizers",),
    )


@_split.register
def _split_pretrained(tokenizer: Pretrained, vocabulary: Vocabulary, place: _Place) -> _Split:
    folder = f"tokenizer{place.suffix}"
    tokenizer.opened(place.context).save_pretrained(place.folder / folder)
    return _Split(
        f"tokens of the tokenizer in `{folder}` (it was `{tokenizer.path}`), marks of begin and end included",
        'splitter(text, truncation=True, max_length=vocabulary["length"])["input_ids"]',
        setup=f'splitter = AutoTokenizer.from_pretrained("{folder}", trust_remote_code=False)\n    ',
        imports=("from transformers import AutoTokenizer",),
    )


_FIND = 're.findall(r"[^\\W_]+", text.lower())[: vocabulary["length"]]'

_AS_IS = """
def PREPARE(values):
    {comment}
    return torch.tensor(values, dtype=torch.float32)
"""

_PIXELS = """
def PREPARE(pictures):
    rows = []
    for picture in pictures:  # or Image.open("picture.jpg")
        upright = ImageOps.exif_transpose(picture).convert("RGBA")
        upright = Image.alpha_composite(Image.new("RGBA", upright.size, "white"), upright).convert("RGB")
        resized = {resize}
        pixels = torch.frombuffer(bytearray(resized.tobytes()), dtype=torch.uint8)
        rows.append(pixels.view({size}, {size}, 3).permute(2, 0, 1))
    mean, std = torch.tensor({mean}).view(3, 1, 1), torch.tensor({std}).view(3, 1, 1)
    return (torch.stack(rows) / 255 - mean) / std
"""

_TOKENS = """
def PREPARE(texts):
    vocabulary = json.loads(Path("{file}").read_text("utf-8"))
    ids = {{token: number for number, token in enumerate(vocabulary["tokens"])}}
    {setup}rows = []
    for text in texts:
        row = {row}
        rows.append(row or [vocabulary["unknown"]])
    longest = {longest}
    return torch.tensor([row + [vocabulary["pad"]] * (longest - len(row)) for row in rows])
"""

_BUCKET = """def bucket(word):
        digest = hashlib.blake2b(word.encode(), digest_size=8).digest()
        return 2 + int.from_bytes(digest, "big") % {buckets}

    """

_PIECES = """splitter = Tokenizer(models.WordPiece(ids, unk_token="<unk>"))
    splitter.normalizer = normalizers.BertNormalizer(lowercase=True)
    splitter.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    """
