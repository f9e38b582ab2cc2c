"""Folders of small pretrained networks, drawn at random, with preprocessor or tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from polyfed.data.backbones import quiet

WIDTH, LAYERS, ROOM = 16, 3, 12
SIZES = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "intermediate_size": 32}
PICTURES = {"image_size": 32, "patch_size": 8}
WORDS = ["<pad>", "<unk>", "<begin>", *(f"w{number}" for number in range(26)), "<end>"]
TEXTS = {"vocab_size": len(WORDS), "max_position_embeddings": ROOM}
MARKS = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 29, "cls_token_id": 2, "sep_token_id": 29}
PREPROCESSOR = {"do_resize": True, "size": {"height": 32, "width": 32}, "resample": 3, "do_normalize": True}
PREPROCESSOR |= {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.25, 0.3], "rescale_factor": 1 / 255}


def network(name: str) -> Any:
    """A small network of a family."""
    quick = {"num_hidden_layers": LAYERS, "num_attention_heads": 2}
    resnet = hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    # a CLIP whose texts end in their padding token, as the published ones do
    ends = {"bos_token_id": 2, "eos_token_id": 29, "pad_token_id": 29}
    towers = {"vision_config": SIZES | PICTURES, "text_config": SIZES | TEXTS}
    made = {
        "vit": lambda: hf.ViTModel(hf.ViTConfig(**SIZES, **PICTURES), add_pooling_layer=False),
        "deit": lambda: hf.DeiTModel(hf.DeiTConfig(**SIZES, **PICTURES), add_pooling_layer=False),
        "dinov2": lambda: hf.Dinov2Model(hf.Dinov2Config(hidden_size=WIDTH, **quick, **PICTURES)),
        "clip": lambda: hf.CLIPModel(hf.CLIPConfig(**towers | {"text_config": SIZES | TEXTS | ends}, projection_dim=6)),
        "siglip": lambda: hf.SiglipModel(hf.SiglipConfig(**towers)),
        "beit": lambda: hf.BeitModel(hf.BeitConfig(**SIZES, **PICTURES)),
        "mobilenet": lambda: hf.MobileNetV2Model(hf.MobileNetV2Config(depth_multiplier=0.1)),
        "resnet": lambda: hf.ResNetModel(resnet),
        "bert": lambda: hf.BertModel(hf.BertConfig(**SIZES, **TEXTS)),
        "roberta": lambda: hf.RobertaModel(
            hf.RobertaConfig(**SIZES, **TEXTS | {"max_position_embeddings": ROOM + 1}, pad_token_id=0)
        ),
        "modernbert": lambda: hf.ModernBertModel(hf.ModernBertConfig(**SIZES, **TEXTS, **MARKS)),
        "distilbert": lambda: hf.DistilBertModel(
            hf.DistilBertConfig(dim=WIDTH, hidden_dim=32, n_layers=LAYERS, n_heads=2, **TEXTS)
        ),
        "mpnet": lambda: hf.MPNetModel(
            hf.MPNetConfig(**SIZES, **TEXTS | {"max_position_embeddings": ROOM + 1}, pad_token_id=0)
        ),
    }[name]
    with quiet():
        model = made().eval()
    for part in model.modules():
        if isinstance(part, torch.nn.Linear):  # or all inputs would give nearly the same
            torch.nn.init.normal_(part.weight, std=0.3)
    return model


def tokenizer(pad: str = "<pad>", *, begins: bool = True) -> Any:
    """Whole words, between marks of begin and end; or with the latter alone."""
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    marks = [("<begin>", WORDS.index("<begin>")), ("<end>", WORDS.index("<end>"))]
    single = "<begin> $A <end>" if begins else "$A <end>"
    words.post_processor = processors.TemplateProcessing(single=single, special_tokens=marks if begins else marks[1:])
    special = {"bos_token": "<begin>", "eos_token": "<end>", "pad_token": pad, "unk_token": "<unk>"}
    return hf.PreTrainedTokenizerFast(tokenizer_object=words, **special)


def save(name: str, folder: Path, model: Any = None) -> Path:
    """A folder with a network of a family and what prepares its inputs."""
    torch.manual_seed(len(name))
    model = model or network(name)
    both = name in ("clip", "siglip")
    with quiet():
        model.save_pretrained(folder / name)
        if both or model.main_input_name == "pixel_values":
            (folder / name / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
        if both or model.main_input_name == "input_ids":
            made = tokenizer("<end>" if name == "clip" else "<pad>", begins=name != "siglip")
            made.save_pretrained(folder / name)
    return folder / name
