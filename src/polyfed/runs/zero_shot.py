"""The twin zero-shot: the server's pretrained encoders as they come, and which experiments have it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any


def zero_shot_obstacle(server: Mapping[str, Any] | None) -> str:
    """What keeps an experiment from a twin zero-shot, by the server's resolved settings; empty if nothing does."""
    if not server:
        return "there is no server model"
    encoders = server["model"]["encoders"]
    new = ", ".join(name for name, encoder in encoders.items() if encoder.get("projection") != "own")
    if new:
        return f"the encoders of {new} end in a layer that is new, not in a common space"
    task = server["task"]
    if any(one.get("name") == "classification" and not one.get("names") for one in task.get("tasks", [task])):
        return "the classifier of server.task is new; classify by names of classes (server.task.names)"
    return ""


def untouched_server(server: Mapping[str, Any]) -> dict[str, Any]:
    """The server's settings with its encoders as they come: nothing of them is trained."""
    untouched = copy.deepcopy(dict(server))
    encoders = untouched["model"]["encoders"]
    for name, encoder in encoders.items():
        kept = {key: value for key, value in encoder.items() if key not in ("trainable", "adapter")}
        if encoder["view"]["name"] == "states":  # the view of what is trained no more
            kept["view"] = {key: encoder["view"][key] for key in ("size", "fit", "length", "precision")}
        encoders[name] = kept
    if untouched.get("training"):
        untouched["training"].pop("schedule", None)  # of training that there is not
    return untouched
