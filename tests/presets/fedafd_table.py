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
        "algorithm.adversarial.weight": (0.5, "supplement, Table 6"),
        "algorithm.adversarial.training.optimizer.kind": ("adam", UNI),
        "algorithm.adversarial.training.optimizer.lr": (1e-4, UNI),
        "algorithm.adversarial.training.optimizer.weight_decay": (0.0, UNI),
        "algorithm.fusion.level": ("vectors", "supplement, Eq. 1: of representations"),
        "algorithm.fusion.inputs": ("representations", f"{UNI}: outputs of unit norm"),
        "algorithm.fusion.training.optimizer.kind": ("adam", UNI),
        "algorithm.fusion.training.optimizer.lr": (0.005, UNI),
        "algorithm.fusion.training.optimizer.weight_decay": (0.01, UNI),
        "algorithm.fusion.training_several.optimizer.kind": ("adam", PAIRED),
        "algorithm.fusion.training_several.optimizer.lr": (1e-4, PAIRED),
        "algorithm.fusion.training_several.optimizer.weight_decay": (0.1, PAIRED),
        "algorithm.*.optimizer.clip": (None, f"{UNI} and MMClientTrainer_fedafd.py clip the model alone"),
        "algorithm.*.schedule.kind": ("constant", UNI),
        "algorithm.fusion.broadcast_every": (1, COSTS),
        "algorithm.fusion.send": ("all", f"{COSTS}: both encoders"),
        "algorithm.teacher.weights.name": ("sed", "supplement, Table 9"),
        "algorithm.teacher.weights.temperature": (1.0, f"{SERVER}, SED has none"),
        "algorithm.task.order": ("first", "supplement, section A.1.2; code, MMFL_fedafd.py"),
        "algorithm.distiller.weight": (0.4, f"{ARGS}, kd_weight"),
        "algorithm.adversarial.batch_size": (128, COCO),
        "run.rounds": (40, f"{ARGS}, comm_rounds"),
        "run.seed": (2024, ARGS),
        "run.sampling.cohort": (None, f"{SERVER}: all clients"),
    },
    idle={"algorithm.*.training*.batch_size": "their steps go with public and private batches"},
)

PAPER_METHOD = Table(
    sourced={
        "algorithm.adversarial.update": ("joint", EQ1),
        "algorithm.adversarial.loss": ("minimax", EQ1),
        "algorithm.adversarial.double_sigmoid": (False, "supplement, section A.2.1: one sigmoid, log D"),
        "algorithm.fusion.shared_global_branch": (False, "supplement, Eq. 4 and 5"),
        "algorithm.fusion.reset": (False, "supplement, section A.1.1: part of the local model w_c"),
        "algorithm.distiller.loss": ("l2", "paper, ensemble distillation: mean L2 norm"),
        "algorithm.adversarial.shared": (False, "supplement, section A.1.1: a pair for a modality"),
    },
    chosen={
        "algorithm.public.augment": (False, "public samples in evaluation mode and view"),
        "algorithm.public.extraction": ("eval", "public samples in evaluation mode and view"),
        "algorithm.adversarial.batches_per_epoch": (None, "one public batch a private one"),
        "algorithm.distiller.optimizer": ("own", "an optimiser of its own for the distillation"),
        "algorithm.fusion.renormalise": (True, "fused vectors of unit norm"),
        "algorithm.fusion.cache": (True, "features of the global encoders computed once a broadcast"),
    },
)

RELEASED_METHOD: Entries = {
    "algorithm.adversarial.update": ("alternate", UNI),
    "algorithm.adversarial.loss": ("non_saturating", UNI),
    "algorithm.adversarial.double_sigmoid": (True, f"{UNI}: Sigmoid, then binary_cross_entropy_with_logits"),
    "algorithm.adversarial.shared": (True, PAIRED),
    "algorithm.fusion.shared_global_branch": (True, f"{UNI}, iAFF.forward: global_att twice"),
    "algorithm.fusion.reset": (True, f"{UNI}, run"),
    "algorithm.fusion.renormalise": (False, PAIRED),
    "algorithm.fusion.cache": (False, UNI),
    "algorithm.distiller.loss": ("mse", f"{SERVER}, distill"),
    "algorithm.distiller.optimizer": ("shared", f"{SERVER}, distill"),
    "algorithm.public.augment": (True, f"{SERVER}: train_subset loader"),
    "algorithm.adversarial.batches_per_epoch": (None, f"{UNI}: all of P"),
    "algorithm.public.extraction": ("train", f"{UNI}, test() ends with train(); {SERVER}: no eval()"),
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
)

TABLES = {"fedafd-paper": PAPER, "fedafd-released": RELEASED, "fedafd-paper-scale": PAPER_SCALE}
ROWS = {"fedafd/t1: fedafd": PAPER_SCALE}
