"""Make a small network of two towers that retrieves as it comes: DeiT-tiny and MiniLM, joined on some pairs.

    python scripts/two_towers.py --data DATA --weights WEIGHTS --out WEIGHTS/two-towers-flickr8k

Both networks stay as they are; their poolers and the two projections learn from the last 2,000 training images of
Flickr8k, with an InfoNCE loss. The folder is a ``VisionTextDualEncoderModel`` of ``transformers``, with preprocessor
and tokenizer of the two. A comparison with it must not deal out those images again.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn
from torch.nn import functional as F

IMAGES, WIDTH, EPOCHS, BATCH = 2000, 128, 20, 200
WORDS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")


def rows(data: Path) -> list[dict[str, Any]]:
    """The last training items."""
    files = sorted((data / "flickr8k").glob("train-*.parquet"))
    table = pa.concat_tables(map(pq.read_table, files))
    return list(table.slice(len(table) - IMAGES).to_pylist())


@torch.no_grad()
def first_states(model: Any, items: list[dict[str, Any]], weights: Path) -> tuple[Tensor, Tensor]:
    """First states of the two networks: of each image [n, v], of each of its captions [n, 5, t]."""
    from transformers import AutoTokenizer

    from polyfed.data.backbones import ImagePreparation

    prepare = ImagePreparation.of(weights / "deit-tiny-patch16-224", None, None)
    tokenizer = AutoTokenizer.from_pretrained(weights / "all-MiniLM-L6-v2")
    images, texts = [], []
    for start in range(0, len(items), 16):
        part = items[start : start + 16]
        pixels = prepare([item["image"] for item in part]).x
        images.append(model.vision_model(pixel_values=pixels).last_hidden_state[:, 0])
        words = [caption for item in part for caption in item["captions"][:5]]
        read = tokenizer(words, padding=True, truncation=True, max_length=32, return_tensors="pt")
        states = model.text_model(input_ids=read["input_ids"], attention_mask=read["attention_mask"]).last_hidden_state
        texts.append(states[:, 0].view(len(part), 5, -1))
    return torch.cat(images), torch.cat(texts)


def train(model: Any, images: Tensor, texts: Tensor) -> None:
    """Poolers and projections, by InfoNCE in both directions over one caption per image."""
    image = nn.Sequential(model.vision_model.pooler.dense, nn.Tanh(), model.visual_projection)
    text = nn.Sequential(model.text_model.pooler.dense, nn.Tanh(), model.text_projection)
    trained = [value for part in (image, text) for value in part.parameters()]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(images) // BATCH)
    for _ in range(EPOCHS):
        for index in torch.randperm(len(images)).split(BATCH):
            chosen = texts[index, torch.randint(5, (len(index),))]
            scores = F.normalize(image(images[index]), dim=1) @ F.normalize(text(chosen), dim=1).T / 0.05
            same = torch.arange(len(index))
            loss = F.cross_entropy(scores, same) + F.cross_entropy(scores.T, same)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()


def main() -> None:
    """Build, train, save."""
    from transformers import BertModel, VisionTextDualEncoderModel, ViTModel

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("data", "weights", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    options = parser.parse_args()
    torch.manual_seed(0)
    vision = ViTModel.from_pretrained(options.weights / "deit-tiny-patch16-224")
    words = BertModel.from_pretrained(options.weights / "all-MiniLM-L6-v2")
    model: Any = VisionTextDualEncoderModel(vision_model=vision, text_model=words)
    model.visual_projection = nn.Linear(vision.config.hidden_size, WIDTH, bias=False)
    model.text_projection = nn.Linear(words.config.hidden_size, WIDTH, bias=False)
    model.config.projection_dim = WIDTH
    model.eval()
    train(model, *first_states(model, rows(options.data), options.weights))
    model.save_pretrained(options.out)
    shutil.copy(options.weights / "deit-tiny-patch16-224" / "preprocessor_config.json", options.out)
    for name in WORDS:
        shutil.copy(options.weights / "all-MiniLM-L6-v2" / name, options.out)


if __name__ == "__main__":
    main()
