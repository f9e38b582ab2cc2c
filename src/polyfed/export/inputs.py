"""How inputs of an exported model are prepared without polyfed: facts, words and code for each view."""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from polyfed.data.images import PixelScale, as_rgb, eight_bits, mean_std, scaling_of
from polyfed.data.tokenizers import Hashing, PretrainedTokenizer, Vocabulary, word_splitter
from polyfed.data.view import DataContext, InputSpec, View
from polyfed.data.views.pixels import Pixels
from polyfed.data.views.tokens import Tokens


@dataclass(frozen=True)
class Recipe:
    """How inputs of one modality are prepared.

    Attributes:
        facts: entries for ``config.json``.
        words: sentence for readers.
        code: Python function called ``PREPARE`` from a list of raw values to a batch.
        example: argument for it.
        takes: type of these values.
        imports: import lines that it needs.
        functions: code that it calls.
    """

    facts: Mapping[str, Any]
    words: str
    code: str
    example: str
    takes: Literal["pictures", "texts", "numbers"] = "numbers"
    imports: tuple[str, ...] = ()
    functions: str = ""

    @property
    def packages(self) -> list[str]:
        """Packages needed in addition to torch."""
        modules = {line.split()[1] for line in self.imports}
        return [package for module, package in _PACKAGES.items() if module in modules]


_PACKAGES = {"numpy": "numpy", "PIL": "pillow", "tokenizers": "tokenizers", "transformers": "transformers"}


def identifier(modality: str) -> str:
    return re.sub(r"\W", "_", modality)


def import_lines(recipes: Mapping[str, Recipe], *more: str) -> list[str]:
    """Import lines of the code of recipes: plain imports first, then those with from, in alphabetical order."""
    lines = {line for recipe in recipes.values() for line in recipe.imports} | {*more}
    return sorted(lines, key=lambda line: (line.startswith("from"), line))


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
    """The recipe of a view; files that it needs (a tokenizer) are written into ``folder``.

    Args:
        view: presentation of the modality to its encoder.
        spec: shape and vocabulary of the encoder's input.
        modality: name of the modality.
        context: folders in which the view looks for its vocabulary.
        folder: folder of the export.
        suffix: part of file names that distinguishes modalities.
        fixed_length: length to which token rows must be padded, if any.
    """
    if isinstance(view, Pixels):
        return _of_pixels(view)
    if isinstance(view, Tokens):
        return _of_tokens(view, view.tokenizer.ready(modality, context), context, folder, suffix, fixed_length)
    # preparation by polyfed alone, or by code outside of it: inputs are taken unchanged
    name = view.component_name()
    words = f"float32 {list(spec.shape)} as polyfed's view `{name}` makes it, see `config.json`."
    comment = f"# made by the view {name}"
    example = f"torch.zeros(1, {', '.join(map(str, spec.shape))}).tolist()"
    return Recipe({"view": view.model_dump(mode="json")}, words, _AS_IS.format(comment=comment), example)


def _of_pixels(view: Pixels) -> Recipe:
    mean, std = mean_std(view.normalise)
    sides, resampling = f"({view.size}, {view.size})", f"Image.Resampling.{view.resampling.upper()}"
    crop = view.fit == "crop"
    resize = f"ImageOps.fit(upright, {sides}, {resampling})" if crop else f"upright.resize({sides}, {resampling})"
    fit = "the short side resized and the middle cut out" if crop else "both sides resized"
    return Recipe(
        facts={"view": view.model_dump(mode="json"), "channels": "RGB", "mean": mean, "std": std},
        words=f"upright RGB images of {view.size} x {view.size} pixels ({fit}, {view.resampling}), "
        f"transparency on white, 0 to 1, minus mean {list(mean)}, divided by standard deviation {list(std)}.",
        code=_PIXELS.format(resize=resize, draft=2 * view.size, mean=list(mean), std=list(std)),
        example='[Image.new("RGB", (80, 60), "red")]',
        takes="pictures",
        imports=("import numpy as np", "from PIL import Image, ImageOps", "from typing import NamedTuple"),
        functions=_image_functions(),
    )


@functools.cache
def _image_functions() -> str:
    """Source of polyfed's own conversion to 8 bits per channel, which images of 16 bits need."""
    code = "\n\n".join(inspect.getsource(part) for part in (PixelScale, scaling_of, as_rgb, eight_bits))
    return re.sub(r'\w+\[np\.ndarray, "[^"]*"\]', "np.ndarray", code)


def _of_tokens(
    view: Tokens, vocabulary: Vocabulary, context: DataContext, folder: Path, suffix: str, fixed_length: int | None
) -> Recipe:
    name, shown = view.tokenizer.component_name(), view.model_dump(mode="json")
    if Path(path := shown["tokenizer"].get("path", "")).is_absolute():
        shown["tokenizer"]["path"] = Path(path).name  # the tokenizer itself is in the export
    facts = {"length": view.length, "pad": vocabulary.pad, "unknown": vocabulary.unknown}
    padded = f"to {fixed_length}" if fixed_length else "to the longest of the batch"
    words = f"at most {view.length} tokens, padded {padded} with {vocabulary.pad}; a text without tokens is one "
    words += f"{vocabulary.unknown}."
    example = '["a red square above a blue circle"]'
    if vocabulary.pipeline is not None:
        file = f"tokenizer{suffix}.json"
        texts = _written_out(vocabulary)  # before it is saved: texts must have been cut, for the side to be known
        import tokenizers

        pipeline = tokenizers.Tokenizer.from_str(vocabulary.pipeline.to_str())  # the view goes on using its own
        pipeline.enable_truncation(view.length, direction=(pipeline.truncation or {}).get("direction", "right"))
        pipeline.enable_padding(pad_id=vocabulary.pad, pad_token=vocabulary.tokens[vocabulary.pad], length=fixed_length)
        pipeline.save(str(folder / file))
        return Recipe(
            facts={"view": shown, "tokenizer": file, **facts},
            words=f"`{file}` of the library `tokenizers` (it was `{name}`): {words}",
            code=_TOKENIZER.format(file=file, texts=texts),
            example=example,
            takes="texts",
            imports=("from tokenizers import Tokenizer",),
        )
    # neither a hash nor a tokenizer that is written in Python has a file of that library
    file = f"vocabulary{suffix}.json"
    content = {"tokenizer": shown["tokenizer"], **facts, "tokens": vocabulary.tokens}
    (folder / file).write_text(json.dumps(content, ensure_ascii=False) + "\n", "utf-8")
    setup, row, longest = "", f"text[:{view.length}]", fixed_length or "max(map(len, rows))"
    takes: Literal["texts", "numbers"] = "texts"
    imports: tuple[str, ...] = ()
    if isinstance(view.tokenizer, Hashing):
        words_file = f"words{suffix}.json"
        word_splitter().save(str(folder / words_file))
        setup = _BUCKET.format(buckets=view.tokenizer.size - 2, file=words_file)
        row = f"[bucket(word) for word, _ in split(clean(text))[:{view.length}]]"
        imports = ("import hashlib", "from tokenizers import Tokenizer")
    elif isinstance(view.tokenizer, PretrainedTokenizer):
        path = f"tokenizer{suffix}"
        view.tokenizer.opened(context).save_pretrained(folder / path)
        setup = f'    tokenizer = AutoTokenizer.from_pretrained("{path}", trust_remote_code=False)\n'
        row = f'tokenizer(text, truncation=True, max_length={view.length})["input_ids"]'
        imports = ("from transformers import AutoTokenizer",)
    else:  # a tokenizer from outside of polyfed: ids are taken unchanged
        example, takes = f"[[{vocabulary.unknown}]]", "numbers"
    return Recipe(
        facts={"view": shown, "vocabulary": file, **facts},
        words=f"ids of `{file}` by `{name}`: {words}",
        code=_ROWS.format(setup=setup, row=f"{row} or [{vocabulary.unknown}]", pad=vocabulary.pad, longest=longest),
        example=example,
        takes=takes,
        imports=imports,
    )


def _written_out(vocabulary: Vocabulary) -> str:
    """The argument ``texts``, with empty ones replaced by a text that the tokenizer reads as the view reads them."""
    assert vocabulary.pipeline is not None
    wanted = vocabulary.encode([""], 8)[0] or [vocabulary.unknown]
    # the library pads an empty text, where the view makes one unknown token of it
    stand_ins = ("", " ", vocabulary.tokens[vocabulary.unknown])
    stand_in = next((text for text in stand_ins if vocabulary.pipeline.encode(text).ids == wanted), "")
    return f"[text or {json.dumps(stand_in)} for text in texts]" if stand_in else "texts"


_AS_IS = """
def PREPARE(values):
    {comment}
    return torch.tensor(values, dtype=torch.float32)
"""

# the code below is shown to readers of the export and runs as it stands
_PIXELS = """
def PREPARE(images):
    rows = []
    for image in images:  # or Image.open("a.jpg")
        image.draft(None, ({draft}, {draft}))  # a large JPEG is read at a half, quarter or eighth
        upright = as_rgb(ImageOps.exif_transpose(image))
        resized = {resize}
        rows.append(torch.from_numpy(np.array(resized)).permute(2, 0, 1))
    mean, std = torch.tensor({mean}).view(3, 1, 1), torch.tensor({std}).view(3, 1, 1)
    return (torch.stack(rows) / 255 - mean) / std
"""

_TOKENIZER = """
def PREPARE(texts):
    tokenizer = Tokenizer.from_file("{file}")
    encodings = tokenizer.encode_batch({texts})
    return torch.tensor([encoding.ids for encoding in encodings])
"""

_ROWS = """
def PREPARE(texts):
{setup}    rows = [{row} for text in texts]
    longest = {longest}
    return torch.tensor([row + [{pad}] * (longest - len(row)) for row in rows])
"""

_BUCKET = """    words = Tokenizer.from_file("{file}")
    clean, split = words.normalizer.normalize_str, words.pre_tokenizer.pre_tokenize_str

    def bucket(word):
        digest = hashlib.blake2b(word.encode(), digest_size=8).digest()
        return 2 + int.from_bytes(digest, "big") % {buckets}

"""
