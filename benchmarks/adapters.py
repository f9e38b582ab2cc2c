"""A round of FedIT against a plain loop of peft, and its bytes against full fine-tuning.

The networks have DeiT-tiny's shape and weights that are drawn at random; four clients train low-rank adapters of
queries and values for ten batches each, of pictures that are there already. CPU time of rounds 2 and 3 over that of the
loop: at most 1.1. Bytes that a client sends a round over those of the whole network: at most 2 %.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import harness
import torch
from backbone import deit_tiny

LIMIT, SHARE = 1.1, 0.02
WHAT = "FedIT, DeiT-tiny at 96 pixels, rank 4"
CLIENTS, STEPS, BATCH, SIZE = 4, 10, 16, 96


def federation(weights: Path) -> dict[str, Any]:
    """Clients that classify pictures with adapters."""
    encoder = {"name": "hf", "weights": str(weights), "view": {"size": SIZE}}
    encoder |= {"adapter": {"name": "lora", "rank": 4, "targets": "query_value"}}
    scenes = {"name": "scenes", "train": CLIENTS * STEPS * BATCH, "validation": 4, "test": 20, "size": 64}
    scenes |= {"columns": {"image": "image"}, "targets": {"label": "label"}}
    group = {"count": CLIENTS, "source": "scenes", "task": "classification"}
    group |= {"model": {"dim": 64, "encoders": {"image": encoder}}}
    group |= {"training": {"batch_size": BATCH, "optimizer": {"kind": "adamw", "lr": 0.001}}}
    run = {
        "rounds": 3,
        "threads": 1,
        "device": "cpu",
        "output": {"plots": False},
        "evaluate_clients": False,
        "eval_every": 3,
    }
    algorithm = {"name": "fedit", "local_steps": STEPS}
    return {"name": "adapters", "data": {"sources": {"scenes": scenes}}, "clients": {"image": group}} | {
        "algorithm": algorithm,
        "run": run,
    }


def loop(weights: Path) -> float:
    """CPU seconds of as many steps, written with peft and torch alone."""
    from peft import LoraConfig, get_peft_model
    from transformers import ViTModel

    network = ViTModel.from_pretrained(weights, add_pooling_layer=False)
    network = get_peft_model(network, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]))
    behind = torch.nn.Sequential(torch.nn.LayerNorm(192, elementwise_affine=False), torch.nn.Linear(192, 64))
    head = torch.nn.Linear(64, 18)
    trained = [value for part in (network, behind, head) for value in part.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.001)
    x, y = torch.randn(BATCH, 3, SIZE, SIZE), torch.randint(18, (BATCH,))
    begun = time.process_time()
    for _ in range(CLIENTS * STEPS):
        states = network(pixel_values=x, interpolate_pos_encoding=True).last_hidden_state
        loss = torch.nn.functional.cross_entropy(head(behind(states[:, 0])), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return time.process_time() - begun


def main() -> None:
    """Measure and compare."""
    import polyfed
    from polyfed import Experiment
    from polyfed.runs.events import Callback

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        weights, ticks = Path(name) / "deit", []
        deit_tiny(weights)

        class Clock(Callback):
            """Notes the CPU time at the end of each round."""

            def handle(self, event: object) -> None:
                if type(event).__name__ == "RoundComplete":
                    ticks.append(time.process_time())

        ours, plain = [], []
        for number in range(3):
            ticks.clear()
            run = polyfed.run(Experiment.parse(federation(weights)), Path(name) / str(number), callbacks=[Clock()])
            ours += [(ticks[-1] - ticks[1]) / 2]
            plain.append(loop(weights))
        ratio = min(ours) / min(plain)
        seconds = {"seconds": min(ours), "plain": min(plain)}
        harness.report(
            f"{WHAT}: a round", ratio=ratio, against="a plain loop of peft, CPU time", limit=LIMIT, **seconds
        )
        sent = sum(line.bytes for line in run.records.transfers if line.direction == "up" and line.round == 2) / CLIENTS
        whole = sum(path.stat().st_size for path in weights.glob("*.safetensors"))
        share = sent / whole
        harness.report(f"{WHAT}: what a client sends", ratio=share, against="the network", limit=SHARE, sent=sent)


if __name__ == "__main__":
    main()
