"""Peak memory of federations of many clients against the same of few, each in a process of its own.

Limits: 100 KiB per client of two rounds of SCAFFOLD, in which every client sends its weights and a control variate and
keeps the latter, whatever the size of its model (16 MiB of kept states and 16 MiB of waiting replies may be in memory,
all others are in files); 1.5 times one client with the same images for 100 clients over one frozen DeiT-tiny, with
features in the cache, computed anew for every batch as on a full disk, and with low-rank adapters in all layers.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import federations
import harness
import torch

KIB_PER_CLIENT, BACKBONE_LIMIT = 100.0, 1.5
SIZES = {"10k": (12, 16), "500k": (620, 32)}
"""Weights -> width of the hidden layer, and d; images have 768 values, and there are 10 classes."""
FEW, MOST, SAMPLES, IMAGES = 10, 1000, 10, 200
IN_MEMORY = 16 << 20
FEATURES = ("features cached", "full disk", "adapters")


def scaffold(clients: int, size: str) -> dict[str, Any]:
    """SCAFFOLD with all clients in every round, and no evaluation."""
    hidden, dim = SIZES[size]
    training = {"optimizer": {"kind": "sgd", "lr": 0.05, "momentum": 0.9}, "batch_size": SAMPLES}
    content = federations.classification(
        {"noise": federations.Noise(count=MOST * SAMPLES)},
        {"count": clients, "items": clients * SAMPLES, "model": federations.image_model(dim, hidden)},
        training,
        {"name": "scaffold", "local_epochs": 1},
    )
    content["run"] |= {"state_memory": IN_MEMORY}
    return content | {"aggregation": {"clip": None}}


def backbone(clients: int, features: str, weights: Path) -> dict[str, Any]:
    """FedAvg of clients that classify images by a layer over a backbone, or by adapters within it."""
    encoder: dict[str, Any] = {"name": "hf", "weights": str(weights)}
    if features == "adapters":
        encoder |= {"adapter": {"name": "lora", "rank": 8}, "view": {"size": 96}}
    scenes = {"name": "scenes", "train": IMAGES, "validation": 4, "test": 20, "size": 64}
    scenes |= {"columns": {"image": "image"}, "targets": {"label": "label"}}
    group = {"count": clients, "model": {"dim": 64, "encoders": {"image": encoder}}}
    content = federations.classification({"scenes": scenes}, group, {"batch_size": 16}, "fedavg")
    content["run"] |= {"rounds": 1, "evaluate_clients": 1}
    return content


def deit_tiny(folder: Path) -> None:
    """An untrained backbone of DeiT-tiny's shape."""
    from transformers import ViTConfig, ViTModel

    sizes = {"hidden_size": 192, "num_hidden_layers": 12, "num_attention_heads": 3, "intermediate_size": 768}
    ViTModel(ViTConfig(**sizes, image_size=224, patch_size=16), add_pooling_layer=False).save_pretrained(folder)
    how = {"size": {"height": 224, "width": 224}, "resample": 3, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(how))


def full(*_: object) -> None:
    """Error of a full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def one(clients: int, case: str, folder: Path) -> None:
    """Run a federation, and print the peak of this process in bytes."""
    torch.set_num_threads(1)
    if case in SIZES:
        with federations.prepared(scaffold(clients, case)) as session:
            federations.rounds_of(session.loop(), 2)()
    else:
        from polyfed import Experiment, run

        os.environ["POLYFED_CACHE"] = str(folder / f"cache-{clients}-{case}")
        if case == "full disk":
            os.posix_fallocate = full
        run(Experiment.parse(backbone(clients, case, folder / "deit")), folder / f"run-{clients}-{case}", quiet=True)
    print(json.dumps(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))


def peak(clients: int, case: str, folder: str) -> int:
    """Peak of a process of its own, in bytes."""
    command = [sys.executable, __file__, "--one", str(clients), case, folder]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return int(output.splitlines()[-1])


def main() -> None:
    """Measure and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*SIZES, *FEATURES], default=[*SIZES, *FEATURES])
    parser.add_argument("--clients", nargs="+", type=int, default=[100, MOST], help=f"of SCAFFOLD, at most {MOST}")
    parser.add_argument("--one", nargs=3, metavar=("CLIENTS", "CASE", "FOLDER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        clients, case, place = given.one
        one(int(clients), case, Path(place))
        return
    with tempfile.TemporaryDirectory() as folder:
        for size in (case for case in given.only if case in SIZES):
            few = peak(FEW, size, folder)
            for clients in given.clients:
                more = peak(clients, size, folder) - few - 2 * IN_MEMORY
                name = f"{clients:,} clients of SCAFFOLD, {size} weights: memory per client"
                kib = max(more / (clients - FEW) / 1024, 0.0)
                harness.report(name, ratio=kib, unit="KiB", against=f"{FEW} clients", limit=KIB_PER_CLIENT)
        if not {*given.only} <= {*SIZES}:
            deit_tiny(Path(folder) / "deit")
        for case in (case for case in given.only if case in FEATURES):
            ratio = peak(100, case, folder) / peak(1, case, folder)
            name = f"100 clients over a frozen DeiT-tiny, {case}: peak memory"
            harness.report(name, ratio=ratio, against="one client with the same images", limit=BACKBONE_LIMIT)


if __name__ == "__main__":
    main()
