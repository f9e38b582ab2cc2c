"""The values of FedCola: its paper's (Sun et al., ECCV 2024) and its released code's (imguangyu/FedCola)."""

from __future__ import annotations

from stated import Entries, Table

FL, MODEL = "paper, section 5, FL settings", "paper, section 5, model architecture"
B1, SCRIPT = "supplement, section B.1", "code, scripts/flickr.sh"
CLIENT, SERVER = "code, src/client/fedavgclient.py", "code, src/server/fedavgserver.py"
MOME = "code, src/models/mome.py"
SIZES = "supplement, section B.2: no Dirichlet of classes, which Flickr10k lacks, but a non-IID number of samples"
DATA, SPLIT = "code, src/loaders/data.py", "code, src/loaders/split.py"
BACKBONE, ADAPTED = "backbones", "pictures of 64 pixels"

COMMON = Table(
    sourced={
        # the federation
        "public": (None, "paper, section 2: without any public data"),
        "clients.image.count": (12, FL),
        "clients.text.count": (12, FL),
        "clients.paired.count": (8, FL),
        "clients.image.partition.name": ("dirichlet", FL),
        "clients.text.partition.name": ("dirichlet", FL),
        "clients.*.partition.alpha": (0.5, FL),
        "clients.*.partition.min_size": (10, SPLIT),
        "clients.paired.partition.name": ("drop", f"{SIZES}; {SPLIT}"),
        "clients.*.partition.keep_least": (0.95, SPLIT),
        "clients.*.partition.keep_most": (0.99, SPLIT),
        "clients.image.items": (None, "paper, section 5, datasets"),
        "clients.text.items": (None, "paper, section 5, datasets"),
        "run.rounds": (30, FL),
        "run.seed": (1, "supplement, section B.3"),
        "run.sampling.kind": ("stratified", "paper, section 3: a share of each modality type"),
        "run.sampling.cohort": (0.25, FL),
        # tasks
        "clients.image.task.name": ("classification", "paper, section 5, datasets"),
        "clients.text.task.name": ("classification", "paper, section 5, datasets"),
        "clients.*.task.margin": (0.0, f"{CLIENT}: cross-entropy"),
        "clients.*.task.separation": (0.0, f"{CLIENT}: cross-entropy"),
        "clients.*.task.non_negative": (False, MOME),
        "clients.*.task.bias": (True, MOME),
        "server.task.name": ("retrieval", "paper, section 3"),
        "clients.paired.task.name": ("retrieval", "paper, section 3"),
        "*.task.objective": ("info_nce", "paper, section 5, datasets: contrastive loss"),
        "*.task.temperature": (0.07, "code, src/criterions: CLIP's first value"),
        "*.task.mask_siblings": (False, "code, src/criterions"),
        "server.task.folds": ([5, 1], "paper, section 5, evaluation metrics: 1k and 5k test images"),
        # models
        "*.encoders.*.name": ("blocks", MODEL),
        "server.model.final_norm": (True, f"{MOME}: one norm of both modalities"),
        "clients.paired.models.0.final_norm": (True, f"{MOME}: one norm of both modalities"),
        "clients.image.models.0.final_norm": (False, MOME),
        "clients.text.models.0.final_norm": (False, MOME),
        "server.model.encoders.*.final_norm": (False, f"{MOME}: the model's"),
        "clients.paired.models.0.encoders.*.final_norm": (False, f"{MOME}: the model's"),
        "clients.image.models.0.encoders.image.final_norm": (True, MOME),
        "clients.text.models.0.encoders.text.final_norm": (True, MOME),
        "*.encoders.*.drop_path": (0.1, MOME),
        "*.encoders.*.pooling": ("cls", MOME),
        "*.encoders.image.view.name": ("pixels", MODEL),
        "*.encoders.image.view.fit": ("squash", f"{DATA}, Resize to a square"),
        "*.encoders.image.view.normalise": ("half", f"{SCRIPT}, imnorm"),
        "clients.image.models.0.encoders.image.view.normalise": ("cifar100", f"{DATA}, MEANS and STDS"),
        "*.encoders.image.view.augment.*": (None, f"{SCRIPT} asks for none"),
        "*.encoders.text.view.name": ("tokens", MODEL),
        "*.encoders.text.view.length": (40, MODEL),
        "*.encoders.text.view.drop": (0.0, DATA),
        "*.encoders.text.view.delete": (0.0, DATA),
        "*.encoders.text.view.tokenizer.name": ("pretrained", MODEL),
        # local training
        "clients.*.training.optimizer.kind": ("adamw", B1),
        "clients.*.training.optimizer.lr": (1e-4, B1),
        "clients.*.training.optimizer.weight_decay": (0.0, "code, main.py, weight_decay"),
        "clients.*.training.optimizer.clip": (None, "code, main.py, max_grad_norm 0: none"),
        "clients.*.training.schedule.kind": ("exponential", B1),
        "clients.*.training.schedule.decay": (0.99, B1),
        "clients.*.training.batch_size": (112, B1),
        # the method
        "algorithm.name": ("fedcola", "paper, section 4"),
        "algorithm.local_epochs": (5, FL),
        "algorithm.local_steps": (None, FL),
        "algorithm.averaging.name": ("fedcola", "paper, section 4.3"),
        "algorithm.averaging.layers": ("attention", "paper, section 4.3"),
        "algorithm.averaging.range": ("modality", "paper, section 4.3"),
        "algorithm.averaging.compensation": (True, "paper, section 4.3"),
        "algorithm.averaging.factor": (1.0, "paper, section 4.3"),
        "algorithm.complement.layers": ("blocks", "paper, section 4.2 and Table 3"),
        "algorithm.complement.train_out": (True, "paper, section 6.1 and Table 3"),
        "algorithm.complement.send": ("modules", "paper, section 4.2: the transformer blocks; Table 3: 371.26 MB"),
        "algorithm.averaging.server_optimizer.name": ("replace", "paper, section 3"),
    },
    chosen={"*.encoders.image.pretrained_embedding": (True, "the ViT's patch embedding too")},
    idle={
        "*.encoders.*.size": "comes with the weights",
        "*.encoders.*.patch": "comes with the weights, 16 as in the paper; texts have none",
        "*.encoders.image.mask_padding": "pictures have no padding",
        "*.encoders.text.pretrained_embedding": "texts have an embedding of their own",
        "clients.*.task.scale": "a plain linear classifier has none",
        "clients.paired.task.folds": "paired clients are not tested",
        "server.training.*": "the server trains nothing (paper, section 3)",
        "algorithm.averaging.denominator": "acts only without compensation",
    },
)

PAPER_METHOD = Table(
    sourced={
        "algorithm.complement.first_out": ("other", "paper, section 4.2"),
        "algorithm.averaging.mean": ("exact", "paper, section 3"),
        "*.training.schedule.unit": ("epoch", f"{B1}: every epoch"),
    },
    chosen={
        "*.task.learn_temperature": (True, "a learnt temperature"),
        "*.encoders.text.mask_padding": (True, "padding left out of attention"),
    },
)

DEIT = "deit-tiny-patch16-224"
SMALL: Entries = {
    "*.model*.dim": (192, BACKBONE),
    "*.encoders.*.weights": (DEIT, "the first four blocks of DeiT-tiny"),
    "*.encoders.*.depth": (4, "the first four blocks of DeiT-tiny"),
    "*.encoders.image.view.size": (64, ADAPTED),
    "*.tokenizer.path": ("bert-base-uncased-vocab", "BERT's vocabulary"),
    "server.expected_test_items": (None, "1k and 5k recalls are of 200 and 1,000 pictures here"),
    "clients.paired.items": (None, "Flickr8k for Flickr30k"),
    "run.precision": ("float32", "small data"),
}

PAPER = COMMON.changed(PAPER_METHOD.sourced, PAPER_METHOD.chosen | SMALL)
RELEASED = COMMON.changed(
    {
        "algorithm.complement.first_out": ("own", "code, mome.py and fedavgserver.py: not yet replaced in round 1"),
        "algorithm.averaging.mean": ("sequential", "code, src/algorithm/fedavg.py"),
        "*.training.schedule.unit": ("round", f"{SCRIPT}, lr_decay_step 1"),
        "*.task.learn_temperature": (False, f"{CLIENT}: a new loss at each step"),
        "*.encoders.text.mask_padding": (False, f"{MOME}: no mask is passed"),
        "*.encoders.text.weights": (None, f"{MOME}: pretrained weights in the image slot alone"),
    },
    SMALL | {"*.encoders.text.size": ("tiny", BACKBONE)},
)
VIT = "WinKawaks/vit-small-patch16-224"
PAPER_SCALE = COMMON.changed(
    PAPER_METHOD.sourced
    | {
        "*.model*.dim": (384, f"{MODEL}: ViT-Small"),
        "*.encoders.*.size": ("small", f"{MODEL}: ViT-Small"),
        "*.encoders.*.weights": (VIT, f"{MODEL}: an ImageNet pre-trained ViT-Small"),
        "*.encoders.*.depth": (None, f"{MODEL}: all blocks"),
        "*.encoders.image.view.size": (224, MODEL),
        "*.tokenizer.path": ("google-bert/bert-base-uncased", MODEL),
        "server.expected_test_items": (5000, "paper, section 5, evaluation metrics: 1k and 5k test images"),
        "clients.paired.items": (10_000, "paper, section 5, datasets: Flickr10k"),
    },
    PAPER_METHOD.chosen | {"run.precision": ("bfloat16", "bfloat16")},
)
COCO = PAPER_SCALE.changed({"clients.*.training.batch_size": (96, f"{SCRIPT}, COCO")})
# rows of a study at the papers' size; the rest of them is fedcola-paper-scale
CA_ONLY = PAPER_SCALE.without(
    *(f"algorithm.complement.{key}" for key in ("layers", "send", "train_out", "first_out"))
).changed({"algorithm.complement": (None, "supplement, Table 6, CA-only")})
ATTN = PAPER_SCALE.changed({"algorithm.complement.layers": ("attention", "paper, Table 3, Attention")})

TABLES = {
    "fedcola-paper": PAPER,
    "fedcola-released": RELEASED,
    "fedcola-paper-scale": PAPER_SCALE,
    "fedcola-coco-paper-scale": COCO,
}
ROWS = {
    "fedcola/t6: fedcola": PAPER_SCALE,
    "fedcola/t6: fedcola, ca only": CA_ONLY,
    "fedcola/t6: fedcola, attn": ATTN,
    "fedcola/t3: attention": ATTN,
}
