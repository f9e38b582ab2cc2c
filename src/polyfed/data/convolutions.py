"""The memory layout of convolutions, and a form of those whose gradient oneDNN gets wrong."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional


class SubsamplingConv(nn.Conv2d):
    """A strided 1 x 1 convolution that first takes the pixels it needs, which gives the same map.

    oneDNN's gradient of a plain one writes beyond its memory where fewer than 16 channels lie last and the batch is odd
    (oneDNN issue 6035).
    """

    @classmethod
    def of(cls, plain: nn.Conv2d) -> SubsamplingConv:
        """With the same parameters as a plain one, not copies."""
        kind = {"bias": plain.bias is not None, "groups": plain.groups, "device": "meta"}
        made = cls(plain.in_channels, plain.out_channels, 1, plain.stride, **kind)  # type: ignore[arg-type]
        made.weight, made.bias = plain.weight, plain.bias
        return made.train(plain.training)

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d i j"]:
        down, right = self.stride
        return functional.conv2d(x[..., ::down, ::right], self.weight, self.bias, groups=self.groups)


def channels_last(model: nn.Module) -> nn.Module:
    """The model with its convolutions in the memory layout that suits CPUs and GPUs; images follow suit.

    Strided 1 x 1 convolutions become ``SubsamplingConv``.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Conv2d and child.kernel_size == (1, 1) != child.stride and child.padding == (0, 0):
                setattr(parent, name, SubsamplingConv.of(child))
    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.to(memory_format=torch.channels_last)
    return model
