"""How convolutions lie in memory, and one that oneDNN gets wrong."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional


class SubsamplingConv(nn.Conv2d):
    """A convolution of single pixels with a stride, by taking the pixels first.

    With channels last, fewer than 16 of them and an odd batch, the kernel of oneDNN for its gradient writes beyond its
    memory (its issue 6035).
    """

    @classmethod
    def of(cls, plain: nn.Conv2d) -> SubsamplingConv:
        """With the very parameters of a plain one."""
        kind = {"bias": plain.bias is not None, "groups": plain.groups, "device": "meta"}
        made = cls(plain.in_channels, plain.out_channels, 1, plain.stride, **kind)  # type: ignore[arg-type]
        made.weight, made.bias = plain.weight, plain.bias
        return made.train(plain.training)

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d i j"]:
        down, right = self.stride
        return functional.conv2d(x[..., ::down, ::right], self.weight, self.bias, groups=self.groups)


def channels_last(model: nn.Module) -> nn.Module:
    """The model with its convolutions in the memory layout that suits CPUs and GPUs; images follow suit."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Conv2d and child.kernel_size == (1, 1) != child.stride and child.padding == (0, 0):
                setattr(parent, name, SubsamplingConv.of(child))
    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.to(memory_format=torch.channels_last)
    return model
