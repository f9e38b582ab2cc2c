"""Parts of a model that are never trained: neither exchanged nor kept, and held once per process."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

_Place = tuple[torch.device, torch.dtype]


class Frozen(nn.Module):
    """A network of which no tensor is trained, or few, such as adapters or its last layers.

    Its other tensors follow from settings, seed and files alone, so that they can be made again. They are absent from
    ``Model.trained`` and ``Model.exchanged``; a saved model has them in a file of their own. Copies share one of each
    per device and dtype.

    Attributes:
        module: the network.
        digest: size and digest of the frozen values (``123x0123abcd``): models with others cannot be averaged.
    """

    def __init__(
        self,
        module: nn.Module,
        digest: str,
        *,
        trained: Collection[str] = (),
        still: Iterable[nn.Module] | None = None,
        shared: dict[_Place, dict[str, Tensor]] | None = None,
    ) -> None:
        """Freeze a network.

        Args:
            module: the network; its tensors are shared from here on.
            digest: digest of the frozen values.
            trained: names of its tensors that are trained.
            still: parts that stay in evaluation mode; None: the whole network.
            shared: tensors of networks made before of the same settings; None: only copies of this one share.
        """
        super().__init__()
        self.module, self.digest = module, digest
        self._trained = frozenset(trained)
        self._still = [module] if still is None else list(still)
        for name, value in module.named_parameters():
            value.requires_grad_(name in self._trained)
        first = next(itertools.chain(module.parameters(), module.buffers()))
        self._place: _Place = (first.device, first.dtype)
        self._shared = {} if shared is None else shared
        self._shared.setdefault(self._place, dict(self.tensors()))
        self._prefix = ""
        cast("Any", self).register_load_state_dict_post_hook(_without_frozen)  # untyped in torch
        self.train(self.training)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.module(*inputs, **named)

    def train(self, mode: bool = True) -> Self:
        """Training mode, except for parts that are still and for batch norms of frozen statistics."""
        super().train(mode)
        for part in self._still:
            part.eval()
        for name, part in self.module.named_modules():
            if isinstance(part, _BatchNorm) and f"{name}.running_mean" not in self._trained:
                part.eval()
        return self

    def tensors(self) -> dict[str, Tensor]:
        """Frozen tensors by their names in ``module``."""
        return {name: value for name, value in self.module.state_dict().items() if name not in self._trained}

    def replace(self, tensors: Mapping[str, Tensor]) -> None:
        """Take other frozen tensors, as of a saved model; copies made before keep theirs.

        Raises:
            RuntimeError: a tensor is missing, or has another shape.
        """
        own = {}
        for name, value in self.tensors().items():
            shape = list(tensors[name].shape) if name in tensors else None
            if shape != list(value.shape):
                raise RuntimeError(f"frozen '{name}' is {list(value.shape)} in the model, {shape} among those given")
            own[name] = tensors[name].detach().to(value.device, value.dtype, copy=True)
        self._hold(own)
        self._shared = {self._place: own}

    def _hold(self, tensors: Mapping[str, Tensor]) -> None:
        for name, value in tensors.items():
            path, _, leaf = name.rpartition(".")
            part = self.module.get_submodule(path)
            if leaf in part._parameters:
                part._parameters[leaf] = nn.Parameter(value, requires_grad=False)
            else:
                part._buffers[leaf] = value

    # ---- methods that torch calls

    def state_dict(self, *args: Any, **named: Any) -> Any:
        """The tensors that are trained."""
        state = super().state_dict(*args, **named)
        prefix = named.get("prefix", args[1] if len(args) > 1 else "")
        for name in [name for name in state if self._is_left_out(name, prefix)]:
            del state[name]
        return state

    def _is_left_out(self, name: str, prefix: str) -> bool:
        start = f"{prefix}module."
        return name.startswith(start) and name.removeprefix(start) not in self._trained

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        self._prefix = prefix  # which the hook after loading does not receive
        super()._load_from_state_dict(state_dict, prefix, *others)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        device, dtype = self._place
        moved = fn(torch.empty(0, device=device, dtype=dtype))
        place = (moved.device, moved.dtype)
        frozen = self._shared[self._place]
        if place != self._place and place not in self._shared:
            self._shared[place] = {name: fn(value) for name, value in frozen.items()}
        # away while torch walks over the others, or each copy would move them for itself
        self._hold({name: value.new_empty(0) for name, value in frozen.items()})
        cast("Any", super())._apply(fn, recurse)
        self._hold(self._shared[place])
        self._place = place
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # new tensors in any case: one whose memory is changed later must not be that of another copy
        for name, value in itertools.chain(self.module.named_parameters(), self.module.named_buffers()):
            made = value.detach().clone() if name in self._trained else value.detach()
            is_parameter = isinstance(value, nn.Parameter)
            memo[id(value)] = nn.Parameter(made, requires_grad=value.requires_grad) if is_parameter else made
        memo[id(self._shared)] = self._shared
        other = self.__class__.__new__(self.__class__)
        memo[id(self)] = other
        other.__dict__ = {name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()}
        return other


def _without_frozen(part: Frozen, incompatible: Any) -> None:
    missing: list[str] = incompatible.missing_keys
    missing[:] = [name for name in missing if not part._is_left_out(name, part._prefix)]


def frozen_parts(model: nn.Module) -> dict[str, Frozen]:
    return {name: part for name, part in model.named_modules() if isinstance(part, Frozen)}


def frozen_tensors(model: nn.Module) -> dict[str, Tensor]:
    """All tensors of a model that are not exchanged, by their names in its parts."""
    return {
        f"{name}.{key}": value for name, part in frozen_parts(model).items() for key, value in part.tensors().items()
    }


def replace_frozen(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """The inverse of ``frozen_tensors``; tensors of other names are ignored.

    Raises:
        RuntimeError: a tensor is missing, or has another shape.
    """
    for name, part in frozen_parts(model).items():
        prefix = f"{name}."
        part.replace({key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)})
