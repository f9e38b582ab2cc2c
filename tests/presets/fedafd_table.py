"""The values of FedAFD: its paper's (CVPR 2026) and its released code's (Chao2433/FedAFD, built on CreamFL's)."""

from __future__ import annotations

from creamfl_table import SHARED, published_backbones, recurrent, small_backbones
from stated import Entries, Table

ARGS, COCO, MM = "code, src/fedafd.py", "code, src/coco.yaml", "code, src/f30k.yaml"
UNI, PAIRED = "code, src/algorithms/ClientTrainer_fedafd.py", "code, src/algorithms/MMClientTrainer_fedafd.py"
SERVER, DATA = "code, algorithms/MMFL_fedafd.py", "code, src/datasets/load_FL_datasets.py"
EQ1, FUSED = "supplement, Eq. 1", "code, resnet_client.py and language_model.py: class_fc alone on the fused feature"
COSTS = "supplement, section C.1"

FEDERATION = SHARED.changed(
    sourced={
        "server.task.folds": ([5], f"{SERVER}, n_crossfolds: rsum is of the five folds"),
        "clients.paired.task.folds": ([5], "code, eval_coco_finetune.py: rsum is of the five folds"),
        "*.model*.dim": (256, COSTS),
        "server.training.optimizer.lr": (1e-5, f"{ARGS}, server_lr"),
        "server.training.optimizer.clip": (2.0, f"{COCO}, grad_clip"),
        "server.training.schedule.t_max": (40, COCO),
        "server.training.batch_size": (128, COCO),
        "clients.paired.training.optimizer.lr": (1e-5, MM),
        "clients.paired.training.optimizer.clip": (2.0, f"{MM}, grad_clip"),
        "clients.paired.training.batch_size": (128, MM),
        "clients.image.training.optimizer.lr": (0.05, f"{UNI}, init_lr"),
        "clients.text.training.optimizer.lr": (0.02, UNI),
        "clients.image.training.optimizer.clip": (None, f"{UNI} never clips"),
        "clients.text.training.optimizer.clip": (None, f"{UNI} never clips"),
        "clients.image.training.batch_size": (256, f"{ARGS}, batch_size"),
        "clients.text.training.batch_size": (256, f"{ARGS}, batch_size"),
        "clients.image.count": (3, f"{ARGS}, num_img_clients"),
        "clients.text.count": (3, f"{ARGS}, num_txt_clients"),
        "clients.paired.count": (4, f"{ARGS}, num_mm_clients"),
        "clients.*.items": (None, DATA),
        "clients.*.partition.alpha": (0.1, f"{ARGS}, alpha"),
        "clients.text.partition.min_size": (3000, DATA),
        "clients.paired.partition.per_client": (13, "code, client_flicker30k_noniid.pkl"),
        "clients.paired.partition.total": (200, "code, client_flicker30k_noniid.pkl"),
        "clients.*.task.margin": (0.0, UNI),
        # methods.md, section 3.2, has no bias and the factor 128 for image clients: the code multiplies features by 128
        # before it normalises them, where that cancels, and its class_fc is an nn.Linear with its default bias
        "clients.image.task.scale": (1.0, FUSED),
        "clients.text.task.scale": (1.0, FUSED),
        "clients.*.task.bias": (True, f"{FUSED}; nn.Linear by its default"),
        "clients.image.models.0.encoders.image.view.size": (64, DATA),
        "clients.image.models.0.encoders.image.view.augment.crop.scale": ([0.836, 0.836], f"{DATA}: 64 of 70 pixels"),
        **recurrent("clients.text.models.0.encoders.text", 256, drop=0.0, text="code, dataset_L.py"),
        **recurrent("clients.paired.models.0.encoders.text", 256, drop=0.1, text=f"{MM}, caption_drop_prob"),
        "algorithm.name": ("fedafd", EQ1),
        "algorithm.local_epochs": (5, f"{ARGS}, local_epochs"),
        "algorithm.beta": (0.5, "supplement, Table 6"),
        "algorithm.discriminator.optimizer.kind": ("adam", UNI),
        "algorithm.discriminator.optimizer.lr": (1e-4, UNI),
        "algorithm.discriminator.optimizer.weight_decay": (0.0, UNI),
        "algorithm.fusion": ("vectors", "supplement, Eq. 1: of representations"),
        "algorithm.fuse": ("representations", f"{UNI}: outputs of unit norm"),
        "algorithm.fusion_training.optimizer.kind": ("adam", UNI),
        "algorithm.fusion_training.optimizer.lr": (0.005, UNI),
        "algorithm.fusion_training.optimizer.weight_decay": (0.01, UNI),
        "algorithm.fusion_training_several.optimizer.kind": ("adam", PAIRED),
        "algorithm.fusion_training_several.optimizer.lr": (1e-4, PAIRED),
        "algorithm.fusion_training_several.optimizer.weight_decay": (0.1, PAIRED),
        "algorithm.*.optimizer.clip": (None, f"{UNI} and MMClientTrainer_fedafd.py clip the model alone"),
        "algorithm.*.schedule.kind": ("constant", UNI),
        "algorithm.broadcast_every": (1, COSTS),
        "algorithm.send_encoders": ("all", f"{COSTS}: both encoders"),
        "algorithm.aggregation.name": ("sed", "supplement, Table 9"),
        "algorithm.aggregation.temperature": (1.0, f"{SERVER}, SED has none"),
        "algorithm.server_first": (True, "supplement, section A.1.2; code, MMFL_fedafd.py"),
        "algorithm.kd_weight": (0.4, f"{ARGS}, kd_weight"),
        "algorithm.public_batch_size": (128, COCO),
        "run.rounds": (40, f"{ARGS}, comm_rounds"),
        "run.seed": (2024, ARGS),
        "run.sampling.cohort": (None, f"{SERVER}: all clients"),
    },
    idle={"algorithm.*.batch_size": "their steps go with public and private batches"},
)

PAPER_METHOD = Table(
    sourced={
        "algorithm.baa_update": ("joint", EQ1),
        "algorithm.adversarial": ("minimax", EQ1),
        "algorithm.double_sigmoid": (False, "supplement, section A.2.1: one sigmoid, log D"),
        "algorithm.shared_global_branch": (False, "supplement, Eq. 4 and 5"),
        "algorithm.reset_fusion": (False, "supplement, section A.1.1: part of the local model w_c"),
        "algorithm.kd_loss": ("l2", "paper, ensemble distillation: mean L2 norm"),
        "algorithm.share_discriminators": (False, "supplement, section A.1.1: a pair for a modality"),
    },
    chosen={
        "algorithm.public_augment": (False, "public samples in evaluation mode and view"),
        "algorithm.extraction": ("eval", "public samples in evaluation mode and view"),
        "algorithm.public_batches_per_epoch": (None, "one public batch a private one"),
        "algorithm.kd_optimizer": ("own", "an optimiser of its own for the distillation"),
        "algorithm.renormalise": (True, "fused vectors of unit norm"),
        "algorithm.cache_global_features": (True, "features of the global encoders computed once a broadcast"),
    },
)

RELEASED_METHOD: Entries = {
    "algorithm.baa_update": ("alternate", UNI),
    "algorithm.adversarial": ("non_saturating", UNI),
    "algorithm.double_sigmoid": (True, f"{UNI}: Sigmoid, then binary_cross_entropy_with_logits"),
    "algorithm.share_discriminators": (True, PAIRED),
    "algorithm.shared_global_branch": (True, f"{UNI}, iAFF.forward: global_att twice"),
    "algorithm.reset_fusion": (True, f"{UNI}, run"),
    "algorithm.renormalise": (False, PAIRED),
    "algorithm.cache_global_features": (False, UNI),
    "algorithm.kd_loss": ("mse", f"{SERVER}, distill"),
    "algorithm.kd_optimizer": ("shared", f"{SERVER}, distill"),
    "algorithm.public_augment": (True, f"{SERVER}: train_subset loader"),
    "algorithm.public_batches_per_epoch": (None, f"{UNI}: all of P"),
    "algorithm.extraction": ("train", f"{UNI}, test() ends with train(); {SERVER}: no eval()"),
}

SMALL_DATA: Entries = {
    "public.items": (1000, "2,000 public pairs"),
    "public.per_item": (2, "2,000 public pairs"),
    "server.expected_test_items": (None, "recalls are of folds of 200 pictures"),
}
SMALL = SMALL_DATA | small_backbones(("medium", "medium"), (64, 64))
del SMALL["clients.image.models.0.encoders.image.view.size"]  # 64 pixels are the code's own

_PUBLISHED = published_backbones()
PAPER = FEDERATION.changed(PAPER_METHOD.sourced, PAPER_METHOD.chosen | SMALL)
RELEASED = FEDERATION.changed(RELEASED_METHOD, SMALL | {"run.precision": ("float32", "full precision")})
PAPER_SCALE = FEDERATION.changed(
    PAPER_METHOD.sourced
    | _PUBLISHED.sourced
    | {
        "public.items": (10_000, COSTS),
        "server.expected_test_items": (5000, f"{SERVER}: five folds of COCO's 5,000 test pictures"),
    },
    PAPER_METHOD.chosen | _PUBLISHED.chosen | {"public.per_item": (1, "one caption of each public picture")},
    _PUBLISHED.idle,
)

TABLES = {"fedafd-paper": PAPER, "fedafd-released": RELEASED, "fedafd-paper-scale": PAPER_SCALE}
ROWS = {"papers/fedafd-t1: fedafd": PAPER_SCALE}
