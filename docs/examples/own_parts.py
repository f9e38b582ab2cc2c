import numpy as np
from torch import nn
from torch.utils.data import Dataset

from polyfed import Experiment, register_data, register_module, run


def backbone(width: int) -> nn.Module:
    """Images [b, 3, s, s] to vectors [b, k]: any such module, such as ``timm.create_model`` below."""
    return nn.Sequential(nn.Conv2d(3, width, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


class Discs(Dataset):
    """Your own data set class: an item is a dictionary of columns."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, object]:
        image = np.full((32, 32, 3), 60 + 100 * (index % 2), np.uint8)
        image[8:24, 8:24] = index % 200
        return {"image": image, "label": index % 2}


register_module("backbone", backbone)
sets = {"train": Discs(80), "validation": Discs(20), "test": Discs(40)}
register_data("discs", sets)

image = {"name": "registered", "module": "backbone", "options": {"width": 32}, "view": {"name": "pixels", "size": 32}}
shops = {"count": 2, "source": "discs", "task": "classification", "model": {"dim": 32, "encoders": {"image": image}}}
discs = {"name": "memory", "data": "discs", "columns": {"image": "image"}, "targets": {"label": "label"}}
content = {"name": "discs", "data": {"sources": {"discs": discs}}, "clients": {"shops": shops}, "algorithm": "fedavg"}
print(run(Experiment.load(content, ["run.rounds=2"]), out="runs/discs").metrics("shops-0"))
