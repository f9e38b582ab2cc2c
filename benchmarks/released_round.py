"""CreamFL's round against the procedure of its released code, written anew from a description of it: the same figures.

The released procedure decodes pictures and splits texts again for every batch, for text clients too; encodes a public
sample again for each of its captions, and a second time by the model as it was, for the representations that Eq. 2
calls previous; forms pairs one by one through lists of indices; and aggregates by dense |P| x |P| matrices. Its
augmentation and its faults are left out on both sides, as figures could not agree. polyfed's time has the decoding of
each picture, once.

What is left to save depends on the encoder: training a ResNet on a CPU takes both the same time; next to a perceptron
data count, as they do on a GPU.

Limit: 4 times as fast with the perceptron; the ResNet has none.
"""

from __future__ import annotations

import argparse
import copy
import io
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import federations
import harness
import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from losses import pair_by_pair
from polyfed.algorithms.creamfl import CreamFL
from polyfed.core.randomness import generator
from polyfed.data.samples import Batch, Samples
from polyfed.data.tokenizers import Vocabulary
from polyfed.data.views.pixels import Pixels
from polyfed.models.model import Model
from polyfed.runs.session import Session
from polyfed.wire.ledger import Ledger

LIMITS = {"perceptron": 4.0, "resnet": None}
SIZE, LENGTH, CAPTIONS = 64, 16, 5
BATCH, RATE, MOMENTUM, CLIP = 64, 1e-4, 0.9, 2.0
GAMMA, TAU, KD_WEIGHT, EPOCHS = 0.5, 0.5, 0.6, 5  # of the released code
OTHER = {"image": "text", "text": "image"}
ENCODERS: Mapping[str, Any] = {
    "perceptron": federations.Perceptron(view=Pixels(size=SIZE)),
    "resnet": {"name": "resnet", "size": "tiny", "stem": "large", "view": {"name": "pixels", "size": SIZE}},
}


def content(image: Any, public: int, side: int) -> dict[str, Any]:
    """A server and one client of each kind, with ``public`` pictures of ``side`` pixels in P."""
    view = {"name": "tokens", "length": LENGTH, "tokenizer": "words"}
    text = {"name": "bag", "width": 64, "dropout": 0.0, "view": view}
    sgd = {"kind": "sgd", "lr": RATE, "momentum": MOMENTUM, "clip": CLIP}
    training = {"training": {"batch_size": BATCH, "optimizer": sgd}}
    pairs, others = (
        {"source": source, "task": task, **training}
        for source, task in (("pairs", "retrieval"), ("others", "classification"))
    )
    both = {"dim": 256, "encoders": {"image": image, "text": text}}
    return {
        "data": {
            "sources": {
                "pairs": federations.Noise(count=public + 40, side=side, captions=CAPTIONS),
                "others": federations.Noise(count=200, side=32),
            }
        },
        "public": {"source": "pairs", "items": public},
        "server": pairs | {"model": both},
        "clients": {
            "image": others | {"count": 1, "model": {"dim": 256, "encoders": {"image": image}}},
            "text": others | {"count": 1, "model": {"dim": 256, "encoders": {"text": text}}},
            "paired": pairs | {"count": 1, "model": both},
        },
        "algorithm": {
            "name": "creamfl",
            "local_epochs": EPOCHS,
            "contrast": {
                "weight": GAMMA,
                "inter": {"tau": TAU},
                "intra": {"tau": TAU, "reduction": "mean"},
                "schedule": "separate_pass",
                "batch_size": BATCH,
            },
            "teacher": {"weights": {"name": "gca", "include_self": True}, "diagnostic_samples": 0},
            "task": {"order": "first"},
            "distiller": {"loss": "mse", "weight": KD_WEIGHT, "optimizer": "shared"},
        },
        "run": {"threads": torch.get_num_threads(), "device": "cpu"},
    }


# ---- loaders that keep nothing


@dataclass(frozen=True)
class Decoding:
    """Pictures, decoded whenever they are asked for."""

    encoded: list[bytes]

    def __len__(self) -> int:
        return len(self.encoded)

    def __call__(self, rows: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Normalised pictures."""
        return torch.stack([self.picture(row) for row in rows.tolist()])

    def picture(self, row: int) -> Tensor:
        """One of them, in +-1."""
        with Image.open(io.BytesIO(self.encoded[row])) as image:
            pixels = np.asarray(image.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BICUBIC))
        return torch.from_numpy(pixels.copy()).permute(2, 0, 1).float() / 127.5 - 1


@dataclass(frozen=True)
class Splitting:
    """Texts, split into words whenever they are asked for."""

    texts: list[str]
    vocabulary: Vocabulary

    def __len__(self) -> int:
        return len(self.texts)

    def __call__(self, rows: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Token ids, padded."""
        ids = [torch.tensor(self.vocabulary.encode([self.texts[row]], LENGTH)[0]) for row in rows.tolist()]
        return nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=self.vocabulary.pad)


def unkept(session: Session, samples: Samples, source: str, split: str) -> Samples:
    """The same samples, loaded again for every batch."""
    opened = session.experiment.data.sources[source].open(split, name=source, data_dir=None)
    inputs: dict[str, Any] = dict(samples.inputs)
    if "image" in inputs:
        inputs["image"] = Decoding([entry["bytes"] for entry in opened.read("image").flat_values().to_pylist()])
    if "text" in inputs:
        inputs["text"] = Splitting(opened.read("text").texts(), inputs["text"].vocabulary)
    return replace(samples, inputs=inputs)


# ---- the released procedure


class Party:
    """Server or client: its model, optimiser and private samples."""

    def __init__(self, name: str, model: Model, samples: Samples | None = None) -> None:
        self.name, self.model, self.samples = name, model, samples
        (self.head,) = model.heads.values()
        self.optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)

    def batches(self, samples: Samples, number: int, purpose: str) -> Iterator[Batch]:
        """A shuffled pass, in training mode."""
        self.model.train()
        for index in torch.randperm(len(samples), generator=generator(0, number, self.name, purpose)).split(BATCH):
            yield samples.batch(index)

    def task_loss(self, batch: Batch) -> Tensor:
        """Of pairs, or of classes."""
        if len(self.model.modalities) == 2:
            u, v = (self.model.represent(name, batch.inputs[name]) for name in ("image", "text"))
            return pair_by_pair(u, v, self.head.shift, self.head.scale)
        (name,) = self.model.modalities
        return F.cross_entropy(self.head(self.model.embed(name, batch.inputs[name])), batch.targets["label"])

    def step(self, loss: Tensor) -> None:
        """One of the optimiser."""
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()

    @torch.no_grad()
    def represent(self, public: Samples) -> dict[str, Tensor]:
        """All public samples, one after the other."""
        self.model.eval()
        parts: dict[str, list[Tensor]] = {name: [] for name in self.model.modalities}
        for index in torch.arange(len(public)).split(256):
            batch = public.batch(index)
            for name, rows in parts.items():
                rows.append(self.model.represent(name, batch.inputs[name]))
        return {name: torch.cat(rows) for name, rows in parts.items()}


class Released:
    """Rounds by the released procedure, from the initial models of a session."""

    def __init__(self, session: Session) -> None:
        population = session.federation
        self.server = Party("server", population.server_model())
        public = session.server.public_set
        self.public = unkept(session, public, "pairs", "train")
        sources = {"image": "others", "text": "others", "paired": "pairs"}
        self.clients = [
            Party(
                member.id,
                population.client_model(member),
                unkept(session, population.train(member), sources[member.group], "train"),
            )
            for member in population.members.values()
        ]

    def round(self, number: int) -> dict[str, Tensor]:
        """One round; returns what was aggregated."""
        server = self.server
        for batch in server.batches(self.public, number, "task-0"):
            server.step(server.task_loss(batch))
        goals, sent = server.represent(self.public), dict[str, list[Tensor]]()
        for client in self.clients:
            self.train(client, goals, number)
            for name, rows in client.represent(self.public).items():
                sent.setdefault(name, []).append(rows)
        targets = {name: aggregated(rows, goals[OTHER[name]]) for name, rows in sent.items()}
        for batch in server.batches(self.public, number, "distil-0"):
            outputs = {name: server.model.represent(name, batch.inputs[name]) for name in targets}
            server.step(KD_WEIGHT * sum(F.mse_loss(outputs[name], targets[name][batch.index]) for name in targets))
        return targets

    def train(self, client: Party, goals: Mapping[str, Tensor], number: int) -> None:
        """Private and public passes in turn."""
        old = copy.deepcopy(client.model).eval()
        assert client.samples is not None
        for epoch in range(EPOCHS):
            for batch in client.batches(client.samples, number, f"task-{epoch}"):
                client.step(client.task_loss(batch))
            for batch in client.batches(self.public, number, f"contrast-{epoch}"):
                client.step(GAMMA * contrasts(client.model, old, batch, goals))


def contrasts(model: Model, old: Model, batch: Batch, goals: Mapping[str, Tensor]) -> Tensor:
    """Eq. 1 by logits of the batch with all of P, Eq. 2 as a choice of two."""
    inter, choices = torch.zeros(()), []
    for name in model.modalities:
        u = model.represent(name, batch.inputs[name])
        with torch.no_grad():
            previous = old.represent(name, batch.inputs[name])
        inter = inter + F.cross_entropy(u @ goals[OTHER[name]].T / TAU, batch.index)
        choices.append(torch.stack([(u * goals[name][batch.index]).sum(1), (u * previous).sum(1)], 1) / TAU)
    rows = torch.cat(choices)
    return inter + F.cross_entropy(rows, torch.zeros(len(rows), dtype=torch.long))


def aggregated(sent: list[Tensor], other: Tensor) -> Tensor:
    """Eq. 4 to 6 by whole matrices, client by client."""
    scores = []
    for rows in sent:
        powers = (rows @ other.T).exp()
        scores.append((powers / powers.sum(1, keepdim=True)).log().diagonal().clone())
    weights = torch.stack(scores).softmax(0)
    return sum(weight[:, None] * rows for weight, rows in zip(weights, sent, strict=True))  # type: ignore[return-value]


# ---- both


def ours(session: Session, number: int) -> dict[str, Tensor]:
    """A round of polyfed; returns what was aggregated."""
    method, server = session.experiment.algorithm, session.server
    assert isinstance(method, CreamFL)
    server.begin(number)
    exchange = method.exchange(server)
    for reply in exchange.ask(session.cohort(number, Ledger()), method.fit, representations=exchange.pairs):
        exchange.add(reply, reply.representations)
    targets = exchange.targets()
    method.distil(server, targets)
    return {name: target.values for name, target in targets.items()}


def timed(rounds: int, round: Callable[[int], dict[str, Tensor]]) -> tuple[float, dict[str, Tensor]]:
    """CPU seconds of so many rounds, and what the last one aggregated."""
    began, targets = time.process_time(), dict[str, Tensor]()
    for number in range(1, rounds + 1):
        targets = round(number)
    return time.process_time() - began, targets


def bench(encoder: str, public: int, side: int, rounds: int) -> None:
    """Rounds of both from the same models, and how far their figures are apart."""
    opened: AbstractContextManager[Session] = federations.prepared(content(ENCODERS[encoder], public, side))
    with opened as session:
        session.experiment.algorithm.setup(session.server)
        released = Released(session)
        began = time.process_time()
        released.public.inputs["image"](torch.arange(public))
        once = time.process_time() - began  # what stands in the cache from the first round on
        own, targets = timed(rounds, lambda number: ours(session, number))
        rival, expected = timed(rounds, released.round)
        start, rows = Party("server", session.server.model), released.server.represent(released.public)
        final = start.represent(session.server.public_set)
        batch = session.server.public_set.batch(torch.arange(BATCH))
        with torch.no_grad():
            losses = [float(party.task_loss(batch)) for party in (start, released.server)]
    harness.report(
        f"a round of CreamFL, {encoder}, {CAPTIONS * public:,} public pairs: times as fast",
        ratio=rival / (own + once),
        against="the released procedure, CPU time",
        limit=LIMITS[encoder],
        better="larger",
        side=side,
        rounds=rounds,
        seconds=own,
        decoding_once=once,
        rival_seconds=rival,
        difference_of_targets=max(float((targets[name] - expected[name]).abs().max()) for name in expected),
        difference_of_server=max(float((final[name] - rows[name]).abs().max()) for name in rows),
        difference_of_loss=abs(losses[0] / losses[1] - 1),
    )


def main() -> None:
    """All encoders."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--public", type=int, nargs="+", default=[200], help="pictures of P")
    parser.add_argument("--encoders", nargs="+", default=list(ENCODERS), choices=list(ENCODERS))
    parser.add_argument("--side", type=int, default=224, help="pixels of a side of the pictures")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    for encoder in given.encoders:
        for public in given.public:
            bench(encoder, public, given.side, given.rounds)


if __name__ == "__main__":
    main()
