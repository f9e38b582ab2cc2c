"""Values that the test of all settings cannot derive from a type: (method or "" for all, field) -> its needs."""

from __future__ import annotations

from typing import Any

_ABSOLUTE = {"targets": "absolute"}
_FAST = {"optimizer": {"kind": "adam", "lr": 0.05}}
_HALF = {"name": "momentum", "momentum": 0.0, "lr": 0.5}
_NOT_JOINT = {"task": {"order": "last"}}
_PROCRUSTES: dict[str, Any] = {"teacher": {"alignment": {"kind": "procrustes"}}}
_RIDGE: dict[str, Any] = {"teacher": {"alignment": {"kind": "ridge"}}}

VALUES: dict[tuple[str, str], Any] = {
    ("", "adversarial.batch_size"): 4,
    ("", "adversarial.batches_per_epoch"): 1,
    ("", "averaging"): {"name": "by_slot", "layers": "blocks"},
    ("", "contrast.batch_size"): 4,
    ("", "contrast.batches_per_epoch"): 1,
    ("", "contrast.queue"): 4,
    ("", "digest.batch_size"): 4,
    ("", "digest.loss"): "mse",
    ("", "distiller.loss"): "mse",
    ("", "weights.rho"): 1e-4,
    ("", "teacher.weights.rho"): 1e-4,
    ("", "study.batch_size"): 4,
    ("", "teacher.alignment"): {"kind": "procrustes"},
    ("", "teacher.alignment.kind"): "ridge",
    ("", "teacher.diagnostic_samples"): 4,
    ("", "teacher.groups"): ["paired"],
    ("change_distillation", "digest.by"): "gradient",
    ("creamfl_averaged", "teacher.weights"): {"name": "sed", "temperature": 0.01},
    ("creamfl_averaged", "contrast.weight"): 5.0,
    ("creamfl_averaged", "distiller.loss"): "l2",
    ("fed_mae", "decoder_heads"): 4,
    ("fed_mae", "decoder_width"): 16,
    ("fedaid", "guidance"): None,
    ("fedaid", "local_epochs"): 2,
    ("fedaid", "teacher"): None,
    ("fedcola", "averaging"): "by_type",
    ("fedcola", "complement"): {"layers": "mlp"},
    ("fedema", "blending"): {"lam": 0.5},
    ("fedema", "byol"): {"predictor_width": 8, "weight": 0.5},
    ("fedex_lora", "averaging"): {"server_optimizer": _HALF},
    ("fedit", "averaging"): "by_type",
    ("ffa_lora", "averaging"): {"server_optimizer": _HALF},
    ("flexlora", "averaging"): "separate",
    ("flora", "averaging"): {"server_optimizer": _HALF},
    ("hetlora", "averaging"): "separate",
    ("hetlora", "gamma"): 1.0,
    ("fedclip", "averaging"): "by_type",
    ("promptfl", "averaging"): "by_type",
    ("feddra", "guidance"): None,
    ("feddra", "local_epochs"): 2,
    ("feddra", "weights"): {"gamma": 5.0},
    ("feddra", "measure_share"): 1.0,
    ("fedet", "largest_update"): 1e-3,
    ("fediot", "averaging"): "by_type",
    ("fedprox", "mu"): 1.0,
}
"""Values that are valid and can make a difference in a tiny federation."""

COMPANIONS: dict[tuple[str, str], dict[str, Any]] = {
    ("", "distiller.temperature"): {"distiller": {"loss": "similarity"}},
    ("", "teacher.alignment.kind"): _PROCRUSTES,
    ("", "teacher.alignment.penalty"): _RIDGE,
    ("change_distillation", "digest.by"): {"linear": True},
    ("change_distillation", "digest.penalty"): {"linear": True},
    ("change_distillation", "distiller"): _NOT_JOINT,
    ("change_distillation", "distiller.optimizer"): _NOT_JOINT,
    ("change_distillation", "distiller.training"): _NOT_JOINT,
    ("change_distillation", "task.epochs"): _NOT_JOINT,
    ("change_distillation", "teacher.alignment"): _ABSOLUTE,
    ("change_distillation", "teacher.alignment.kind"): _ABSOLUTE | _PROCRUSTES,
    ("change_distillation", "teacher.alignment.penalty"): _ABSOLUTE | _RIDGE,
    ("change_distillation", "teacher.renormalise"): _ABSOLUTE,
    ("creamfl_averaged", "distiller.optimizer"): {"distiller": {"training": None}},
    ("creamfl_averaged", "teacher.weights"): {"distiller": {"training": _FAST}},
    ("creamfl_averaged", "contrast.batch_size"): {"contrast": {"weight": 5.0}},
    ("fedaid", "guidance"): {"local_steps": 3},  # in the first step the anchors are met exactly
    ("fedaid", "guidance.reduction"): {"local_steps": 3},
    ("fedaid", "guidance.weight"): {"local_steps": 3},
    ("fedaid", "local_epochs"): {"local_steps": None},
    ("fedaid", "teacher.weights.divergence"): {"teacher": {"weights": {"rho": 1e-3}}},
    ("feddra", "guidance.measured"): {"measured_on": "aggregated"},
    ("feddra", "local_epochs"): {"local_steps": None},
    ("feddra", "weighted_stages"): {"weights": {"use": "loss"}},
    ("feddra", "weights.divergence"): {"weights": {"rho": 1e-3}},
    ("fedema", "blending.divergence"): {"blending": {"lam": 0.5}},  # else one round sets the scale that the next uses
    ("fedmd", "task.order"): {"teacher": {"weights": "sed"}},
    ("fedprox", "norm"): {"mu": 1.0},
}
"""Other settings without which a setting is refused, or makes no difference in a tiny federation."""

EQUAL: dict[tuple[str, str], str] = {
    ("creamfl_averaged", "distiller.optimizer"): "the server trains nothing else",
    ("creamfl", "contrast.intra.previous"): "memory or time, unless the view or mode of training makes them differ",
    ("fedafd", "fusion.cache"): "memory or time",
}
"""Settings that are to leave the result as it is, up to rounding, and why."""

REFUSED: dict[tuple[str, str], str] = {("fedmkd", "task.order"): "its server trains its task last"}
"""Settings whose other values a method refuses, and why."""
