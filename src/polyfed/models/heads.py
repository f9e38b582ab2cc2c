"""Classifier heads on un-normalised embeddings, of one modality or of several together, or by the names of classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.core.errors import ConfigError, nearest
from polyfed.data.source import text_column
from polyfed.data.view import DataContext
from polyfed.losses.precision import in_full_precision
from polyfed.models.encoder import Encoder

Fusion = Literal["product", "concat", "both"]


class LinearHead(nn.Linear):
    """Logits [b, classes] from an embedding [b, d]: the plain linear classifier.

    >>> LinearHead(dim=4, classes=3)(torch.zeros(2, 4)).shape
    torch.Size([2, 3])
    """

    def __init__(self, dim: int, classes: int, *, bias: bool = True) -> None:
        super().__init__(dim, classes, bias=bias)


class NonNegativeHead(nn.Module):
    """CreamFL's classifier: ``scale * f relu(W)^T``, by default without bias.

    The released code multiplies features by 128 before the classifier; the separation of classes,
    ``CE(relu(W) relu(W)^T, identity)``, is a loss on ``positive_weight``. Weights start positive (the
    absolute values of Xavier's): one that starts below zero would never receive a gradient. A bias may be negative.

    >>> head = NonNegativeHead(dim=4, classes=3, scale=128.0)
    >>> bool((head.positive_weight >= 0).all()), head(torch.zeros(2, 4)).shape
    (True, torch.Size([2, 3]))
    """

    def __init__(self, dim: int, classes: int, *, scale: float = 128.0, bias: bool = False) -> None:
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(nn.init.xavier_uniform_(torch.empty(classes, dim)).abs())
        self.bias = nn.Parameter(torch.zeros(classes)) if bias else None

    @property
    def positive_weight(self) -> Float[Tensor, "classes d"]:
        """``relu(W)``, the weights in effect."""
        return self.weight.relu()

    def forward(self, embedding: Float[Tensor, "b d"]) -> Float[Tensor, "b classes"]:
        return F.linear(self.scale * embedding, self.positive_weight, self.bias)


class SimilarityHead(nn.Module):
    """Logits [b, classes] from an embedding [b, d]: its cosines with unit vectors of the classes, over a temperature.

    Args:
        vectors: [classes, d], of unit norm.
        temperature: divisor of the cosines.

    >>> vectors = torch.eye(2)
    >>> [SimilarityHead(vectors, temperature)(torch.tensor([[3.0, 0.0]])).tolist() for temperature in (1.0, 0.5)]
    [[[1.0, 0.0]], [[2.0, 0.0]]]
    """

    def __init__(self, vectors: Float[Tensor, "classes d"], temperature: float) -> None:
        super().__init__()
        self.vectors, self.temperature = vectors, temperature

    @in_full_precision  # a temperature of 0.01 makes much of small differences
    def forward(self, embedding: Float[Tensor, "b d"]) -> Float[Tensor, "b classes"]:
        return F.normalize(embedding, dim=-1) @ self.vectors.float().T / self.temperature


class NamesHead(nn.Module):
    """Names of classes as texts that the model itself encodes (CLIP; Radford et al., ICML 2021, section 3.1).

    It has no parameters: training changes the encoder of the texts, or that of the classified samples.

    Args:
        texts: one for each class, in label order.
        modality: modality of the encoder that reads them.
        temperature: see ``SimilarityHead``.
    """

    inputs: Tensor

    def __init__(self, texts: Sequence[str], modality: str, temperature: float) -> None:
        super().__init__()
        self.texts, self.modality, self.temperature = tuple(texts), modality, temperature
        # unused before ``read``, and neither exchanged nor saved
        self.register_buffer("inputs", torch.empty(0), persistent=False)

    def read(self, encoders: Mapping[str, Encoder], context: DataContext) -> None:
        """Turn the texts into inputs of the model's encoder; called when the model is built.

        Raises:
            ConfigError: the model has no such encoder.
        """
        if self.modality not in encoders:
            where = nearest(self.modality, encoders)
            raise ConfigError(f"task.names.modality is '{self.modality}', of which the model has no encoder; {where}")
        rows = encoders[self.modality].view.open(text_column(self.texts, "names"), self.modality, context)
        self.inputs = rows(torch.arange(len(self.texts)))

    def against(self, represent: Callable[[str, Tensor], Float[Tensor, "n d"]]) -> SimilarityHead:
        """The classifier that these texts make with a model's present weights.

        Args:
            represent: function of the model: modality and inputs [n, ...] -> representations of unit norm.
        """
        return SimilarityHead(represent(self.modality, self.inputs), self.temperature)


def class_count(head: nn.Module) -> int:
    """Number of classes of a classifier of one embedding."""
    return len(head.texts if isinstance(head, NamesHead) else head.get_parameter("weight"))


class FusedHead(nn.Module):
    """Logits over answers from an embedding of each modality: ``MLP(h(u_1, ..., u_m))`` with one hidden layer.

    Every embedding is first brought to zero mean and unit variance (layer norm without affine): encoders of different
    modalities differ in scale, and a product would be ruled by the larger. Then h is their elementwise product (as in
    Antol et al., ICCV 2015), their concatenation, or both next to each other. A single embedding is taken as it is.

    Args:
        dim: width d of the embeddings.
        modalities: their number m.
        answers: number of classes.
        fusion: type of h.
        hidden: width of the hidden layer (GELU).
        dropout: share dropped of h and of the hidden layer in training.

    >>> head = FusedHead(dim=4, modalities=2, answers=3, fusion="both", hidden=8)
    >>> image, question = torch.randn(5, 4), torch.randn(5, 4)
    >>> head.fuse([image, question]).shape, head([image, question]).shape
    (torch.Size([5, 12]), torch.Size([5, 3]))
    """

    def __init__(
        self, dim: int, modalities: int, answers: int, *, fusion: Fusion, hidden: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.fusion: Fusion = fusion
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)
        # a single embedding is taken as it is, whatever the fusion
        parts = {"product": 1, "concat": modalities, "both": modalities + 1}[fusion] if modalities > 1 else 1
        self.hidden = nn.Linear(dim * parts, hidden)
        self.output = nn.Linear(hidden, answers)
        self.dropout = nn.Dropout(dropout)

    @property
    def answers(self) -> int:
        return self.output.out_features

    def fuse(self, embeddings: Sequence[Float[Tensor, "b d"]]) -> Float[Tensor, "b w"]:
        """h of the embeddings, in the order in which they are given."""
        normed: list[Tensor] = [self.norm(embedding) for embedding in embeddings]
        if len(normed) == 1:
            return normed[0]
        product = [torch.stack(normed).prod(0)]
        return torch.cat({"product": product, "concat": normed, "both": normed + product}[self.fusion], dim=1)

    def forward(self, embeddings: Sequence[Float[Tensor, "b d"]]) -> Float[Tensor, "b answers"]:
        logits: Tensor = self.output(self.dropout(F.gelu(self.hidden(self.dropout(self.fuse(embeddings))))))
        return logits
