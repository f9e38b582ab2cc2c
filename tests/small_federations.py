"""Experiments for tests: small federations on generated scenes, built of common parts and varied by keyword."""

from __future__ import annotations

import atexit
import copy
import functools
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from polyfed.algorithms.algorithm import Algorithm
from polyfed.core.randomness import isolated
from polyfed.data.backbones import quiet
from polyfed.runs.config_files import merged

Config = dict[str, Any]

METHODS = tuple(Algorithm.available())
ADAPTED = ("fedit", "ffa_lora", "flora", "fedex_lora", "hetlora", "flexlora")
"""Methods of low-rank adapters."""
NAMED = ("promptfl", "fedclip")
"""Methods that classify images by the names of classes."""
CAPTIONS = {"columns": {"image": "image", "text": "captions"}}
RETRIEVAL = {"name": "retrieval", "objective": "info_nce"}

ENGINES: dict[str, Config] = {
    "serialized": {"name": "local", "serialize": True},
    "ray": {"name": "ray", "workers": 2},
    "flower": {"name": "flower", "nodes": 2},
}
"""Engines on which a run ends in the bits of the local one."""

# ---- parts


def pixels() -> Config:
    return {"name": "pixels", "size": 16}


def words(length: int = 16, size: int | None = None) -> Config:
    """The view of a text; ``size`` entries of a hashing tokenizer, which need not be trained."""
    return {"name": "tokens", "length": length} | ({"tokenizer": {"name": "hashing", "size": size}} if size else {})


def resnet() -> Config:
    return {"name": "resnet", "widths": [8, 8], "depths": [1, 1], "block": "basic", "view": pixels()}


def bag(view: Config, width: int = 8) -> Config:
    return {"name": "bag", "width": width, "view": view}


def training(kind: str, lr: float, batch_size: int, **optimizer: Any) -> Config:
    return {"optimizer": {"kind": kind, "lr": lr} | optimizer, "batch_size": batch_size}


def plain(lr: float, batch_size: int) -> Config:
    """SGD that a loop can do by hand."""
    return training("sgd", lr, batch_size, momentum=0.0, clip=None)


def sgd(rate: float) -> Config:
    """Settings of a training of its own, with SGD that a loop can do by hand."""
    return {"optimizer": {"kind": "sgd", "lr": rate, "momentum": 0.0, "clip": None}}


def scenes(train: int, validation: int, test: int, **more: Any) -> Config:
    return {"name": "scenes", "train": train, "validation": validation, "test": test, "size": 16} | more


def three_sources(sets: Config, paired: Config) -> Config:
    """Pairs, images alone, and texts alone with their topics."""
    return {
        "scenes": sets | paired,
        "pictures": sets | {"seed": 1, "columns": {"image": "image"}},
        "texts": sets | {"seed": 2, "columns": {"text": "text"}, "targets": {"topic": "topic"}},
    }


def group(count: int, source: str, encoders: Config, training: Config, target: str = "label", dim: int = 64) -> Config:
    """Clients that classify."""
    model, task = {"dim": dim, "encoders": encoders}, {"name": "classification", "target": target}
    return {"count": count, "source": source, "model": model, "task": task, "training": training}


def experiment(name: str, sources: Config, algorithm: Config, rounds: int = 2, **sections: Any) -> Config:
    run = {"rounds": rounds, "threads": 1, "device": "cpu", "output": {"plots": False}}
    return {"name": name, "data": {"sources": sources}, **sections, "algorithm": algorithm, "run": run}


def _trained(algorithm: Config) -> Config:
    return algorithm if algorithm.get("local_steps") else {"local_epochs": 1} | algorithm


def in_steps(algorithm: Config, steps: int) -> Config:
    """Settings of a method whose clients train for so many batches, not for epochs."""
    return {key: value for key, value in algorithm.items() if key != "local_epochs"} | {"local_steps": steps}


# ---- federations


def tiny_experiment() -> Config:
    """The smallest complete experiment: two paired clients, one of images, a server that retrieves, a public set."""
    both = {"dim": 8, "encoders": {"image": resnet(), "text": bag(words())}}
    adam = training("adam", 0.01, 16)
    paired = {"source": "scenes", "model": both, "task": "retrieval", "training": adam}
    image = {"source": "private", "model": {"dim": 8, "encoders": {"image": both["encoders"]["image"]}}}
    return experiment(
        "tiny",
        {"scenes": scenes(48, 12, 12), "private": scenes(24, 8, 8, seed=1)},
        {"name": "fedavg", "local_epochs": 1},
        public={"source": "scenes", "items": 16},
        server=dict(paired),
        clients={
            "paired": {"count": 2} | paired,
            "image": {"count": 1} | image | {"task": "classification", "training": adam},
        },
    )


def transformers(**algorithm: Any) -> Config:
    """One image, two text and two paired clients with exchangeable blocks, without a public set."""
    block = {"name": "blocks", "size": "pico", "depth": 1, "drop_path": 0.0}
    image, text = block | {"patch": 8, "view": pixels()}, block | {"view": words(24, 400)}
    without = {"final_norm": False}
    adam = training("adamw", 0.001, 16)
    both = {"dim": 64, "final_norm": True, "encoders": {"image": image | without, "text": text | without}}
    paired = {"source": "scenes", "model": both, "task": RETRIEVAL | {"mask_siblings": True}, "training": adam}
    return experiment(
        "transformers",
        three_sources(scenes(12, 6, 6), {}),
        _trained({"name": "fedavg"} | algorithm),
        server=dict(paired),
        clients={
            "image": group(1, "pictures", {"image": image}, adam),
            "text": group(2, "texts", {"text": text}, adam, target="topic"),
            "paired": {"count": 2} | paired,
        },
    )


@functools.cache
def pretrained_folder() -> Path:
    """Weights of a small ViT, BERT, RoBERTa and CLIP, as pretrained ones lie in a folder."""
    import transformers

    folder = Path(tempfile.mkdtemp(prefix="polyfed-weights-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    with isolated("pretrained"), quiet():
        vit = transformers.ViTModel(
            transformers.ViTConfig(**size, image_size=16, patch_size=8), add_pooling_layer=False
        )
        bert = transformers.BertModel(transformers.BertConfig(**size, vocab_size=200, max_position_embeddings=24))
        towers = {"vision_config": size | {"image_size": 16, "patch_size": 8}}
        towers |= {"text_config": size | {"vocab_size": 200, "max_position_embeddings": 24}}
        clip = transformers.CLIPModel(transformers.CLIPConfig(**towers, projection_dim=8))
        # one whose texts have an end, which is where they are padded
        towers["text_config"] |= {"eos_token_id": 0, "pad_token_id": 0, "bos_token_id": 1}
        reader = transformers.CLIPModel(transformers.CLIPConfig(**towers, projection_dim=8))
        # one whose padding is not the first token, and whose positions are counted from behind it
        texts = {"vocab_size": 200, "max_position_embeddings": 26, "pad_token_id": 1}
        roberta = transformers.RobertaModel(transformers.RobertaConfig(**size, **texts))
        for name, model in {"vit": vit, "bert": bert, "roberta": roberta, "clip": clip, "reader": reader}.items():
            model.save_pretrained(folder / name)
    return folder


def adapted(ranks: tuple[int, ...] = (2,), **algorithm: Any) -> Config:
    """One client of images, one of texts, two paired ones, with adapters of pretrained transformers."""
    lora = {"name": "lora", "offset": algorithm.get("name") in ("flora", "fedex_lora")}

    def encoders(rank: int) -> Config:
        common = {"name": "hf", "adapter": lora | {"rank": rank}}
        return {
            "image": common | {"weights": "vit", "view": pixels()},
            "text": common | {"weights": "bert", "view": words(16, 200)},
        }

    first, adam = encoders(ranks[0]), training("adam", 0.01, 8)
    models: list[Config] = [{"dim": 8, "encoders": encoders(rank)} for rank in ranks]
    paired = {"source": "scenes", "task": RETRIEVAL | {"mask_siblings": True}, "training": adam}
    made = experiment(
        "adapted",
        three_sources(scenes(12, 6, 6), {}),
        _trained({"name": "fedit"} | algorithm),
        server=paired | {"model": {"dim": 8, "encoders": first}},
        clients={
            "image": group(1, "pictures", {"image": first["image"]}, adam, dim=8),
            "text": group(1, "texts", {"text": first["text"]}, adam, target="topic", dim=8),
            "paired": {"count": 2} | ({"model": models[0]} if len(ranks) == 1 else {"models": models}) | paired,
        },
    )
    made["data"]["weights_dir"] = str(pretrained_folder())
    return made


def named(adapters: Config | None = None, **algorithm: Any) -> Config:
    """Three clients of images with two sets of classes, and a server, that classify by names with a CLIP."""
    method = algorithm.get("name", "promptfl")
    prompts = {"text": {"name": "prompts", "length": 2}}
    adapters = adapters or ({"image": "attention"} if method == "fedclip" else prompts)

    def encoder(modality: str, tower: str, view: Config) -> Config:
        own = {"adapter": adapters[modality]} if modality in adapters else {}
        return {"name": "hf", "weights": "reader", "tower": tower, "projection": "own", "view": view} | own

    encoders = {"image": encoder("image", "vision", pixels()), "text": encoder("text", "text", words(16, 200))}
    adam, names = training("adam", 0.01, 8), {"names": {"template": "{}", "temperature": 0.1}}

    def clients(count: int, source: str, target: str) -> Config:
        made = group(count, source, encoders, adam, target, dim=8)
        return made | {"task": made["task"] | names}

    topics = {"columns": {"image": "image"}, "targets": {"topic": "topic"}}
    many = clients(2, "pictures", "label")
    made = experiment(
        "named",
        {"pictures": scenes(24, 6, 6) | {"columns": {"image": "image"}}, "drawings": scenes(24, 6, 6, seed=2) | topics},
        _trained({"name": "promptfl"} | algorithm),
        server={key: value for key, value in many.items() if key != "count"},
        clients={"many": many, "few": clients(1, "drawings", "topic")},
    )
    made["data"]["weights_dir"] = str(pretrained_folder())
    return made


def three_kinds(**algorithm: Any) -> Config:
    """One image, one text and two paired clients, a server that retrieves, and public pairs."""
    image, text, descent = resnet(), bag(words()), plain(0.05, 12)
    both = {"dim": 8, "encoders": {"image": image, "text": text}}
    paired = {"source": "scenes", "model": both, "task": RETRIEVAL | {"temperature": 0.5}, "training": descent}
    return experiment(
        "three-kinds",
        three_sources(scenes(24, 8, 12), CAPTIONS | {"train": 16, "targets": {"label": "label"}}),
        _trained(algorithm),
        public={"source": "scenes", "items": 8, "per_item": 2},
        server=dict(paired),
        clients={
            "image": group(1, "pictures", {"image": image}, descent, dim=8),
            "text": group(1, "texts", {"text": text}, descent, target="topic", dim=8),
            "paired": {"count": 2} | paired,
        },
    )


FOUR = {"image": "image", "text": "text", "audio": "audio", "table": ["things", "colour", "size", "corners", "x", "y"]}
"""Columns of scenes in four modalities."""


def four_modalities(**algorithm: Any) -> Config:
    """A client of each of four modalities, one of two, one of all, with exchangeable blocks, and a public set."""
    block = {"name": "blocks", "size": "pico", "depth": 1, "drop_path": 0.0, "patch": 8}
    sound = {"name": "mel", "rate": 8000, "bands": 16, "frames": 32}
    cells = {"name": "table", "layout": "positions"}
    views = {"image": pixels(), "text": words(16, 200), "audio": sound, "table": cells}
    encoders = {name: block | {"view": view} for name, view in views.items()}
    pairs = [("image", "audio"), ("text", "table")]
    adam = training("adamw", 0.001, 12)

    def several(*pairs: tuple[str, str]) -> Config:
        names = [name for pair in pairs for name in pair]
        task: Any = [RETRIEVAL | {"between": list(pair)} for pair in pairs]
        model = {"dim": 64, "encoders": {name: encoders[name] for name in names}}
        return {"source": "scenes", "model": model, "task": task if len(task) > 1 else task[0], "training": adam}

    sets = scenes(24, 8, 8, columns=FOUR, targets={"label": "label"})
    alone = {name: group(1, "alone", {name: encoder}, adam, dim=64) for name, encoder in encoders.items()}
    return experiment(
        "four-modalities",
        {"scenes": sets, "alone": sets | {"seed": 1}},
        _trained(algorithm),
        public={"source": "scenes", "items": 8},
        server=several(*pairs),
        clients=alone | {"two": {"count": 1} | several(pairs[0]), "all": {"count": 1} | several(*pairs)},
    )


def aligned(**algorithm: Any) -> Config:
    """Three paired clients whose encoders have align modules, and a server that shows their model."""
    encoders = {"image": resnet(), "text": bag(words(16, 200))}
    task = RETRIEVAL | {"learn_temperature": False, "mask_siblings": True}
    model = {"dim": 8, "aligner": {"hidden": 16}, "encoders": encoders}
    participant = {"source": "scenes", "model": model, "task": task}
    return experiment(
        "aligned",
        {"scenes": scenes(18, 8, 12) | CAPTIONS},
        {"name": "fedaid"} | algorithm,
        server=participant,
        clients={"hospital": participant | {"count": 3, "training": training("adamw", 0.01, 12)}},
    )


def topics(**algorithm: Any) -> Config:
    """Two clients that classify texts by topic, one of six, by a bag of words: learnt in a second."""
    config = transformers(local_epochs=3, **algorithm)
    texts = config["data"]["sources"]["texts"] | {"difficulty": 0.0, "test": 200}
    client = config["clients"]["text"] | {"training": training("adam", 0.02, 32)}
    client["model"] = {"dim": 32, "encoders": {"text": bag(words(24, 400), 32)}}
    config |= {"clients": {"text": client}}
    config["data"]["sources"]["texts"] = texts | {"train": 600}
    del config["server"]
    return config


# ---- variations


def sized(config: Config, train: int) -> Config:
    """The same federation with so many training items in every source."""
    for source in config["data"]["sources"].values():
        source["train"] = train
    return config


def plain_sgd(config: Config, batch_size: int = 12) -> Config:
    """The same federation with plain SGD everywhere, which ``by_hand.plain_training`` does."""
    for clients in config["clients"].values():
        clients["training"] = plain(0.001, batch_size)
    return config


def one_classification(config: Config) -> Config:
    """``three_kinds`` with one classification for clients and server, whose classes public samples have too."""
    task = {"name": "classification", "target": "label", "classes": 18}
    config["data"]["sources"]["texts"]["targets"] = {"label": "label"}
    clients = {name: participant | {"task": task} for name, participant in config["clients"].items()}
    return config | {"clients": clients, "server": config["server"] | {"task": task}}


def participants(config: Config) -> Iterator[Config]:
    """Sections of the server and of all groups."""
    yield from config["clients"].values()
    if "server" in config:
        yield config["server"]


# ---- one for every method

_SMALL: dict[str, Config] = {
    "change_distillation": {"warmup_rounds": 0},
    "fedema": {"byol": {"predictor_width": 8}},
    "fed_mae": {"decoder_depth": 1, "decoder_width": 8, "decoder_heads": 2},
    "fedmkd": {"byol": {"predictor_width": 8}},
    "fedaid": {"local_steps": 1, "teacher": {"steps": 1}},
    "feddra": {"local_steps": 1, "robust_steps": 1},
}
_LITTLE: dict[str, Config] = {"resnet": {"widths": [4], "depths": [1]}, "blocks": {"depth": 1}}
_RANDOM: dict[str, Config] = {"pixels": {"augment": {"flip": True}}, "tokens": {"drop": 0.2}}


def federation_for(method: str, *, linear: bool = False, **algorithm: Any) -> Config:
    """A federation in which a method can do all that it does; settings that only cost time are small.

    With ``linear`` clients have texts alone, and one linear layer over fixed features.
    """
    build = _kind(method)
    config = build(name=method, **merged(_SMALL.get(method, {}), algorithm))
    if method == "server_only":
        config["algorithm"].pop("local_epochs", None)
    if method == "creamfl_averaged":
        config["public"] = {"source": "scenes", "items": 8, "per_item": 1}
    if method == "centralised":
        config["clients"]["paired"]["count"] = 1
    # SGD feels a factor of the loss
    _shrink(config, {"kind": "sgd", "lr": 0.001} if build is aligned else {"kind": "adam", "lr": 0.01})
    if linear:
        config["clients"] = {"text": copy.deepcopy(config["clients"]["text"])}
        config["clients"]["text"]["model"]["encoders"]["text"]["freeze_embedding"] = True
    return config


def _kind(method: str) -> Any:
    if method in ("fedaid", "feddra"):
        return aligned
    if method in ADAPTED:
        return adapted
    if method in NAMED:
        return named
    exchanges_weights = Algorithm.named(method).has_global_models and method not in ("centralised", "fedet")
    return transformers if exchanges_weights else three_kinds


def _shrink(config: Config, optimizer: Config) -> None:
    for source in config["data"]["sources"].values():
        source |= {"train": 14 if "public" in config else 10, "validation": 4, "test": 4}
    for participant in participants(config):
        participant["training"] = {"optimizer": optimizer, "batch_size": 8}
        for encoder in participant["model"]["encoders"].values():
            encoder |= _LITTLE.get(encoder["name"], {})
            encoder["view"] = encoder["view"] | _RANDOM[encoder["view"]["name"]]
    for clients in config["clients"].values():
        if clients["count"] > 1:
            clients["partition"] = {"name": "quantity", "min_size": 3}
