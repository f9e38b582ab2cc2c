"""What the test of all settings cannot derive from a setting's type: (method or "" for all, field) -> what it needs."""

from __future__ import annotations

from typing import Any

_ABSOLUTE = {"targets": "absolute"}
_FAST = {"optimizer": {"kind": "adam", "lr": 0.05}}
_SCORES = {"scores": True, "exchange": "scores"}
_NOT_JOINT = {"kd_joint": False}
_SHARED = {"name": "by_slot", "layers": "blocks"}

VALUES: dict[tuple[str, str], Any] = {
    ("", "averaging"): _SHARED,
    ("", "counted_groups"): ["paired"],
    ("", "diagnostic_samples"): 4,
    ("", "digest_batch_size"): 4,
    ("", "digest_loss"): "mse",
    ("", "kd_loss"): "mse",
    ("", "largest_score"): 1e-3,
    ("", "public_batch_size"): 4,
    ("", "public_batches_per_epoch"): 1,
    ("", "queue"): 4,
    ("", "weights.rho"): 1e-4,
    ("", "teacher.weights.rho"): 1e-4,
    ("change_distillation", "digest"): "gradient",
    ("creamfl_averaged", "aggregation"): {"name": "sed", "temperature": 0.01},
    ("creamfl_averaged", "gamma"): 5.0,
    ("creamfl_averaged", "kd_loss"): "l2",
    ("fed_mae", "decoder_heads"): 4,
    ("fed_mae", "decoder_width"): 16,
    ("fedaid", "guidance"): None,
    ("fedaid", "local_epochs"): 2,
    ("fedaid", "teacher"): None,
    ("fedcola", "averaging"): "by_type",
    ("fedcola", "complement"): {"layers": "mlp"},
    ("fedema", "blending"): {"lam": 0.5},
    ("fedema", "byol"): {"predictor_width": 8, "weight": 0.5},
    ("feddra", "guidance"): None,
    ("feddra", "local_epochs"): 2,
    ("feddra", "weights"): {"gamma": 5.0},
    ("feddra", "measure_share"): 1.0,
    ("fedet", "largest_update"): 1e-3,
    ("fediot", "averaging"): "by_type",
    ("fedproto", "largest_norm"): 1.0,
    ("fedproto", "shared"): {"text": "texts"},
    ("fedmd", "first_private_until"): {"patience": 1, "rise": 100.0},
    ("fedmd", "first_public_until"): {"patience": 1, "rise": 100.0},
    ("fedprox", "mu"): 1.0,
    ("fedtgp", "largest_norm"): 1.0,
    ("fedtgp", "margin_threshold"): 0.01,
    ("fedtgp", "server_batch_size"): 2,
    ("fedtgp", "shared"): {"text": "texts"},
}
"""Values that are valid and can make a difference in a tiny federation."""

COMPANIONS: dict[tuple[str, str], dict[str, Any]] = {
    ("", "alignment_penalty"): {"alignment": "ridge"},
    ("", "exchange"): {"scores": True},
    ("", "first_public_epochs"): _SCORES,
    ("", "kd_temperature"): {"kd_loss": "similarity"},
    ("", "largest_score"): _SCORES,
    ("change_distillation", "alignment"): _ABSOLUTE,
    ("change_distillation", "alignment_penalty"): _ABSOLUTE | {"alignment": "ridge"},
    ("change_distillation", "digest"): {"linear": True},
    ("change_distillation", "digest_penalty"): {"linear": True},
    ("change_distillation", "distillation"): _NOT_JOINT,
    ("change_distillation", "kd_optimizer"): _NOT_JOINT,
    ("change_distillation", "renormalise_target"): _ABSOLUTE,
    ("change_distillation", "server_epochs"): _NOT_JOINT,
    ("change_distillation", "server_first"): _NOT_JOINT,
    ("creamfl_averaged", "aggregation"): {"distillation": _FAST},
    ("creamfl_averaged", "public_batch_size"): {"gamma": 5.0},
    ("creamfl_averaged", "tau_inter"): {"gamma": 5.0},
    ("creamfl_averaged", "tau_intra"): {"gamma": 5.0},
    ("fedaid", "guidance"): {"local_steps": 3},  # in the first step the anchors are met exactly
    ("fedaid", "guidance.weight"): {"local_steps": 3},
    ("fedaid", "guidance.temperature"): {"guidance": {"distance": "contrastive"}},
    ("fedaid", "local_epochs"): {"local_steps": None},
    ("fedaid", "teacher.aligner"): {"teacher": {"steps": 3}},  # in the first step nothing is distorted yet
    ("fedaid", "teacher.weights.divergence"): {"teacher": {"weights": {"rho": 1e-3}}},
    ("feddra", "guidance.measured"): {"measured_on": "aggregated"},
    ("feddra", "guidance.temperature"): {"guidance": {"distance": "contrastive"}},
    ("feddra", "local_epochs"): {"local_steps": None},
    ("feddra", "weighted_stages"): {"weights": {"use": "loss"}},
    ("feddra", "weights.divergence"): {"weights": {"rho": 1e-3}},
    ("fedgems", "judge_clients"): {"aggregation": "mean"},  # else samples that nobody knows have no target
    ("fedmd", "first_private_until"): {"first_private_epochs": 4},
    ("fedmd", "first_public_until"): _SCORES | {"first_public_epochs": 4},
    ("fedmd", "server_first"): {"aggregation": "sed"},
    ("fedprox", "norm"): {"mu": 1.0},
}
"""Other settings without which a setting is refused, or makes no difference in a tiny federation."""

AVERAGINGS: dict[tuple[str, str], tuple[dict[str, Any], Any]] = {
    ("by_slot", "compensation"): (_SHARED, True),
    ("by_slot", "denominator"): (_SHARED, "model"),
    ("by_slot", "factor"): (_SHARED, 0.5),
    ("by_slot", "layers"): (_SHARED, "mlp"),
    ("by_slot", "range"): (_SHARED, "all"),
    ("fedcola", "layers"): ({"name": "fedcola"}, "mlp"),
    ("fediot", "layers"): ({"name": "fediot"}, "mlp"),
}
"""(averaging, field) -> other settings of it, and a value that makes a difference; others are derived."""

EQUAL: dict[tuple[str, str], str] = {
    ("creamfl", "i_prev"): "memory or time, unless the training view or mode makes them differ, see public_augment",
    ("fedafd", "cache_global_features"): "memory or time",
}
"""Settings that are to leave the result as it is, up to rounding, and why."""
