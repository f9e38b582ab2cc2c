from __future__ import annotations

from pathlib import Path

import pytest
import torch

from polyfed.analysis.public_samples import one_of_each_item, represented
from polyfed.core.errors import DataError
from polyfed.runs.opened import open_run


def test_representations_are_in_the_order_that_is_asked_for(fedafd_run: Path) -> None:
    opened = open_run(fedafd_run).kept_clients()
    member = opened.run.federation.members["paired-1"]
    public = opened.run.federation.public_samples({name: each.view for name, each in member.model.encoders.items()})
    assert public is not None
    model, index = opened.model("paired-1"), torch.tensor([7, 3, 12])
    found = represented(model, "text", public, index, 2, "client")
    whole = model.represent("text", public.batch(torch.arange(20)).inputs["text"])
    torch.testing.assert_close(found, whole[index])
    model.encoders["text"].register_forward_hook(lambda *_: torch.full((1, 8), torch.nan))
    with pytest.raises(DataError, match="representations of 'text' by client hold NaN or infinity"):
        represented(model, "text", public, index, 9, "client")


def test_one_sample_of_each_item() -> None:
    assert one_of_each_item(torch.tensor([5, 5, 2, 9, 2, 5, 9])).tolist() == [0, 2, 3]
