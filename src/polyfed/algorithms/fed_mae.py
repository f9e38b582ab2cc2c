"""Federated masked autoencoders (Yan et al. 2023)."""

from __future__ import annotations

from typing import Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from polyfed.algorithms.algorithm import Client, Cohort, LocalEpochs, Reply, Server, Weights, client_step, each
from polyfed.algorithms.fedavg import FedAvg
from polyfed.core.errors import ConfigError
from polyfed.data.samples import Batch
from polyfed.models import masked
from polyfed.models.model import Embedder, Model

_DECODER = "mae_"


class FedMAE(FedAvg):
    """Federated masked autoencoding (Yan et al. 2023, with the autoencoder of He et al., CVPR 2022).

    Clients rebuild the hidden patches of their images from the visible ones, in addition to their own task (in FedAID's
    comparison an image-text contrast) or, with ``task_weight`` 0, instead of it. Encoder and decoder
    are averaged by sample count; the decoder is exchanged within a type of clients. It needs ``blocks`` encoders of
    images (or of their frozen features by position, which are then hidden and rebuilt): a client without any
    trains its task alone. The metrics ``reconstruction`` (mean loss of a round) and
    ``mae_clients`` (clients that rebuild) show it.

    >>> FedMAE(mask_ratio=0.6).decoder_depth
    8
    """

    local_epochs: LocalEpochs = 1
    task_weight: float = Field(default=1.0, ge=0, description="factor of the client's own task; 0: none")
    mae_weight: float = Field(default=1.0, gt=0, description="factor of the reconstruction")
    mask_ratio: float = Field(default=0.75, gt=0, lt=1, description="share of hidden patches; more is harder, cheaper")
    decoder_depth: int = Field(default=8, ge=1, description="blocks of the decoder")
    decoder_width: int = Field(default=512, ge=4, multiple_of=4, description="width of the decoder")
    decoder_heads: int = Field(default=16, ge=1, description="attention heads of the decoder, which divide its width")
    normalise_patches: bool = Field(default=True, description="rebuild each patch at mean 0 and deviation 1")

    @model_validator(mode="after")
    def _sensible(self) -> Self:
        if self.decoder_width % self.decoder_heads:
            raise ValueError(f"decoder_heads {self.decoder_heads} does not divide decoder_width {self.decoder_width}")
        return self

    def add_modules(self, model: Model) -> None:
        for modality, encoder in model.encoders.items():
            blocks = masked.maskable(encoder)
            if blocks is not None:
                # under a name with the modality, as clients of one type average decoders by name
                decoder = masked.PatchDecoder(blocks, self.decoder_width, self.decoder_depth, self.decoder_heads)
                model.extras[f"{_DECODER}{modality}"] = decoder

    # ---- server half

    def setup(self, server: Server) -> None:
        """Start the global models.

        Raises:
            ConfigError: no client can rebuild images, or one that cannot has no task either.
        """
        unable = [
            client.id
            for name, client_type in server.types.items()
            if not any(tensor.startswith(f"extras.{_DECODER}") for tensor in server.global_models.initial(name))
            for client in client_type.clients
        ]
        if unable and (self.task_weight == 0 or len(unable) == len(server.clients)):
            advice = "" if self.task_weight else ", or set algorithm.task_weight"
            raise ConfigError(
                f"algorithm 'fed_mae' rebuilds patches of images, and {', '.join(unable)} cannot: give them an "
                f"encoder 'blocks' of images with at least two patches{advice}"
            )
        server.share_weights(self.averaging)

    def round(self, server: Server, cohort: Cohort) -> None:
        """Broadcast, train, average; record the mean reconstruction loss over clients, by sample count."""
        means, losses = server.new_means(self.averaging, cohort), list[tuple[float, int]]()
        for reply in cohort.ask(self.fit, weights=each(server.weights_for)):
            means[reply.type].add(reply.weights, reply.num_examples)
            if "reconstruction" in reply.payload.scalars:
                losses.append((reply.reconstruction, reply.num_examples))
        server.update_weights(server.averaged(self.averaging, means))
        total = sum(count for _, count in losses)
        if total:
            mean = sum(loss * count for loss, count in losses) / total
            server.record(reconstruction=mean, mae_clients=float(len(losses)))

    # ---- client half

    @client_step(float, weights=Weights, num_examples=int, mean_by="num_examples")
    def fit(self, client: Client, weights: Weights) -> Reply:
        """Train the received model and decoder; replies with the mean ``reconstruction`` loss if there is one."""
        client.load_weights(weights)
        losses: list[Tensor] = []
        # a stream of its own: masks are the same whatever the task draws
        masks = client.generator("masks")
        able = any(name.startswith(_DECODER) for name in client.model.extras)

        def rebuild(model: Embedder, batch: Batch) -> Tensor:
            loss = self.reconstruction(client, batch, masks)
            losses.append(loss.detach())
            return self.mae_weight * loss

        client.fit(
            client.train,
            epochs=self.local_epochs,
            steps=self.local_steps,
            task_weight=self.task_weight,
            regulariser=rebuild if able else None,
        )
        means = {"reconstruction": float(torch.stack(losses).mean())} if losses else {}
        return Reply(weights=client.weights, num_examples=client.num_examples, **means)

    def reconstruction(self, client: Client, batch: Batch, masks: torch.Generator) -> Tensor:
        losses = list[Tensor]()
        for modality, own in batch.by_modality():
            x = own.inputs[modality]
            # batches also hold modalities that only the task sees, such as texts
            encoder = masked.maskable(client.model.encoders[modality])
            if encoder is None:
                continue
            patches = masked.patches_of(encoder, x)
            masking = masked.random_masking(len(x), patches.shape[1], self.mask_ratio, masks).to(x.device)
            decoder = client.model.extras[f"{_DECODER}{modality}"]
            predicted = decoder(masked.encode_visible(encoder, x, masking), masking.restore).float()
            losses.append(
                masked.reconstruction_loss(predicted, patches, masking.hidden, normalise=self.normalise_patches)
            )
        return torch.stack(losses or [batch.no_loss]).sum()
