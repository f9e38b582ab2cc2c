"""FedIoT: averaging in which clients with several modalities count more."""

from __future__ import annotations

from polyfed.aggregation.averagings.tensors import BySlot, MultimodalAveraging
from polyfed.algorithms.algorithm import Client, Cohort, Reply, Server, WeightAveraging, Weights, client_step, each
from polyfed.algorithms.fedavg import FedAvg


class FedIoT(FedAvg):
    """Multimodal federated averaging (Zhao et al., IoTDI 2022), on transformers as FedCola's authors adapt it.

    Blocks of a modality A are averaged over all who have it, and the sample counts of clients with several modalities
    AB are multiplied by alpha (``averaging.factor``):

        W_A <- (sum_{k in A} n_k W_k + alpha sum_{k in AB} n_k W_k,A) / (sum_{k in A} n_k + alpha sum_{k in AB} n_k).

    Heads, embeddings and final norms stay with their type. Encoders that have no blocks are shared whole with
    ``averaging: {name: fediot, layers: encoder}``,
    as in the original. Of the original, the split auto-encoders and the labels on the server are not part of this.

    As alpha multiplies n, what it amounts to depends on how many samples either side has: the share of clients with
    several modalities in the average of a round is recorded for every modality that is shared, ``share.<modality>``.
    """

    averaging: WeightAveraging = MultimodalAveraging()

    # ---- server half

    def round(self, server: Server, cohort: Cohort) -> None:
        """Broadcast, train, average with alpha; record what alpha amounts to."""
        means, sizes = server.new_means(self.averaging, cohort), dict.fromkeys(server.types, 0.0)
        for reply in cohort.ask(self.fit, weights=each(server.weights_for)):
            means[reply.type].add(reply.weights, reply.num_examples)
            sizes[reply.type] += reply.num_examples
        server.update_weights(server.averaged(self.averaging, means))
        server.record(**{f"share.{modality}": share for modality, share in self.shares(server, sizes).items()})

    @client_step(weights=Weights, num_examples=int, mean_by="num_examples")
    def fit(self, client: Client, weights: Weights) -> Reply:
        """FedAvg's step; declared again, as this round uses only its mean, too."""
        return super().fit(client, weights)

    def shares(self, server: Server, sizes: dict[str, float]) -> dict[str, float]:
        """Maps each modality to the weight that multimodal client types have in its shared slots.

        ``sizes`` are the samples of the clients that replied, by type.
        """
        if not isinstance(self.averaging, BySlot):
            return {}
        models = server.global_models.by_type()
        shares: dict[str, float] = {}
        for (_, slot), contributions in self.averaging.rule(models, sizes).items():
            # all shared slots of a modality have the same shares: the first is enough
            if contributions and self.averaging.covers(slot) and slot.modality not in shares:
                parts = [(len(models[part.source].modalities) > 1, part.coefficient) for part in contributions]
                shares[slot.modality] = sum(part for several, part in parts if several) / sum(part for _, part in parts)
        return shares
