"""Peak memory of 100 clients over one frozen DeiT-tiny, against one client with the same pictures: at most 1.5 times.

Once with features in the cache, once on a full disk, where they are computed anew for every batch, and once with
low-rank adapters in all layers. Each federation runs in a process of its own: a round of FedAvg over generated
pictures, with weights that are drawn at random.
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

import harness

LIMIT = 1.5
PICTURES = 200


def deit_tiny(folder: Path) -> None:
    """An untrained backbone of DeiT-tiny's shape."""
    from transformers import ViTConfig, ViTModel

    sizes = {"hidden_size": 192, "num_hidden_layers": 12, "num_attention_heads": 3, "intermediate_size": 768}
    ViTModel(ViTConfig(**sizes, image_size=224, patch_size=16), add_pooling_layer=False).save_pretrained(folder)
    how = {"size": {"height": 224, "width": 224}, "resample": 3, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(how))


def federation(clients: int, weights: Path, kind: str) -> dict[str, Any]:
    """Clients that classify pictures by a layer over the backbone, and by adapters within it."""
    encoder: dict[str, Any] = {"name": "hf", "weights": str(weights)}
    if kind == "adapters":
        encoder |= {"adapter": {"name": "lora", "rank": 8}, "view": {"size": 96}}
    scenes = {"name": "scenes", "train": PICTURES, "validation": 4, "test": 20, "size": 64}
    scenes |= {"columns": {"image": "image"}, "targets": {"label": "label"}}
    group = {
        "count": clients,
        "source": "scenes",
        "task": "classification",
        "model": {"dim": 64, "encoders": {"image": encoder}},
    }
    return {
        "name": "backbone",
        "data": {"sources": {"scenes": scenes}},
        "clients": {"image": group | {"training": {"batch_size": 16}}},
        "algorithm": {"name": "fedavg", "local_epochs": 1},
        "run": {"rounds": 1, "threads": 1, "device": "cpu", "output": {"plots": False}, "evaluate_clients": 1},
    }


def full(*_: object) -> None:
    """What a full disk answers."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def one(clients: int, kind: str, folder: Path) -> None:
    """Run a federation, and print the peak of this process in bytes."""
    from polyfed import Experiment, run

    os.environ["POLYFED_CACHE"] = str(folder / f"cache-{clients}-{kind}")
    if kind == "full disk":
        os.posix_fallocate = full
    run(Experiment.parse(federation(clients, folder / "deit", kind)), folder / f"run-{clients}-{kind}")
    print(json.dumps(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))


def main() -> None:
    """Measure and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", nargs=3, metavar=("CLIENTS", "KIND", "FOLDER"), help="a single federation")
    options = parser.parse_args()
    if options.one:
        clients, kind, place = options.one
        one(int(clients), kind, Path(place))
        return
    with tempfile.TemporaryDirectory() as folder:
        deit_tiny(Path(folder) / "deit")
        for kind in ("features cached", "full disk", "adapters"):
            peaks = {}
            for clients in (1, 100):
                command = [sys.executable, __file__, "--one", str(clients), kind, folder]
                told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
                peaks[clients] = int(told.splitlines()[-1])
            ratio = peaks[100] / peaks[1]
            mib = {f"mib_{clients}": peak / 2**20 for clients, peak in peaks.items()}
            name = f"100 clients over a frozen DeiT-tiny, {kind}: peak memory"
            harness.report(name, ratio=ratio, against="one client with the same pictures", limit=LIMIT, **mib)


if __name__ == "__main__":
    main()
