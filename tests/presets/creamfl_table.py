"""The values of CreamFL: its paper's (Yu et al., ICLR 2023) and its released code's (FLAIR-THU/CreamFL)."""

from __future__ import annotations

from stated import Entries, Table

SETUP, README = "paper, section 4.1", "code, README's command"
MAIN, MM, UNI = "code, src/main.py", "code, src/f30k.yaml", "code, src/algorithms/ClientTrainer.py"
COCO, VIEWS = "code, src/coco.yaml", "code, src/datasets/_transforms.py"
CNN, GRU = "code, src/networks/resnet_client.py", "code, src/networks/language_model.py"
CHOICE, SMALL, ONE_VIEW = "public samples in evaluation mode and view", "backbones", "views"

SHARDS = "paired clients have equal shards of pictures, as released (paper - Dirichlet 0.1"

# ---- what views, models and training of the released FedAFD have in common with these: it is built on this code

SCENES: Entries = {
    "*.{}.view.name": ("pixels", VIEWS),
    "*.{}.view.normalise": ("imagenet", f"{VIEWS}, imagenet_normalize"),
    "*.{}.view.augment.rotate": (None, VIEWS),
    "*.{}.view.augment.crop.scale": ([0.08, 1.0], f"{VIEWS}, RandomResizedCrop by its defaults"),
    "*.{}.view.augment.crop.ratio": ([0.75, 4 / 3], f"{VIEWS}, RandomResizedCrop by its defaults"),
    "*.{}.view.augment.flip.p": (0.5, f"{VIEWS}, RandomHorizontalFlip"),
    "*.{}.view.augment.erase.p": (0.2, f"{COCO}, random_erasing_prob"),
}


def _scenes(where: str) -> Entries:
    return {key.replace("*.{}", where): entry for key, entry in SCENES.items()}


def recurrent(where: str, dim: int, *, drop: float, text: str) -> Entries:
    """A text encoder of the clients, of the published code."""
    return {
        f"{where}.name": ("gru", SETUP),
        f"{where}.width": (300, f"{GRU}, word_dim"),
        f"{where}.freeze_embedding": (False, GRU),
        f"{where}.hidden": (dim // 2, f"{GRU}, embed_dim // 2"),
        f"{where}.bidirectional": (True, GRU),
        f"{where}.readout": ("last", f"{GRU}, gathered at the last position"),
        f"{where}.project": (False, GRU),
        f"{where}.pie": (True, f"{GRU}, PIENet"),
        f"{where}.dropout": (0.0, GRU),
        f"{where}.view.name": ("tokens", GRU),
        f"{where}.view.drop": (drop, text),
        f"{where}.view.delete": (drop, text),
        f"{where}.view.tokenizer.name": ("words", f"{VIEWS}, tokenize"),
        f"{where}.view.tokenizer.size": (11755, "code, coco_vocab.pkl"),
        f"{where}.view.length": (512, "code truncates nowhere; 512 is BERT's own limit, and no text here is longer"),
    }


SHARED = Table(
    sourced={
        **_scenes("server.model.encoders.image"),
        **_scenes("clients.paired.models.0.encoders.image"),
        # server
        "server.task.name": ("retrieval", SETUP),
        "*.task.objective": ("soft_contrastive", f"{COCO} and f30k.yaml, criterion pcme"),
        "*.task.shift": (15.0, f"{COCO}, init_shift"),
        "server.task.scale": (15.0, f"{COCO}, init_negative_scale"),
        "clients.paired.task.scale": (15.0, f"{MM}, init_negative_scale"),
        "*.task.reduction": ("sum", "code, src/criterions/probemb.py"),
        "*.task.mask_siblings": (False, "code, src/criterions/probemb.py: pairs of equal index alone are positive"),
        "server.model.encoders.image.name": ("resnet", SETUP),
        "server.model.encoders.image.pie": (True, "code, src/networks/models/image_encoder.py"),
        "server.model.encoders.image.dropout": (0.0, "code, src/networks/models/image_encoder.py"),
        "server.model.encoders.text.name": ("bert", SETUP),
        "server.model.encoders.text.pie": (False, "code, src/networks/models/pcme.py"),
        "server.model.encoders.text.dropout": (0.1, "bert-base-uncased, config.json"),
        "server.model.encoders.text.view.name": ("tokens", "code, src/networks/models/pcme.py"),
        "server.model.encoders.text.view.drop": (0.0, "code, src/networks/models/pcme.py: captions as they are"),
        "server.model.encoders.text.view.delete": (0.0, "code, src/networks/models/pcme.py: captions as they are"),
        "server.model.encoders.text.view.length": (512, "code truncates nowhere; 512 is BERT's own limit"),
        "server.training.optimizer.kind": ("adamp", SETUP),
        "server.training.optimizer.weight_decay": (0.0, COCO),
        "server.training.schedule.kind": ("cosine", SETUP),
        "server.training.schedule.minimum": (0.0, "code, src/algorithms/optimizers.py"),
        "server.training.batch_size": (128, COCO),
        # clients of one modality
        "clients.image.task.name": ("classification", "paper, section 4"),
        "clients.text.task.name": ("classification", "paper, section 4"),
        "clients.*.task.separation": (0.5, f"{UNI}, center_loss"),
        "clients.*.task.non_negative": (True, CNN),
        "clients.*.task.bias": (True, f"{CNN} and language_model.py, nn.Linear by its default"),
        "clients.*.partition.alpha": (0.1, SETUP),
        "clients.image.partition.name": ("dirichlet", SETUP),
        "clients.text.partition.name": ("dirichlet", SETUP),
        "clients.image.partition.min_size": (10, "code, src/datasets/load_FL_datasets.py"),
        "clients.image.models.0.encoders.image.name": ("resnet", SETUP),
        "clients.image.models.0.encoders.image.pie": (False, CNN),
        "clients.image.models.0.encoders.image.view.name": ("pixels", UNI),
        "clients.image.models.0.encoders.image.view.normalise": ("cifar100", "code, src/utils/color_lib.py"),
        "clients.image.models.0.encoders.image.view.augment.rotate.degrees": (10.0, UNI),
        "clients.image.models.0.encoders.image.view.augment.crop.ratio": ([1.0, 1.0], f"{UNI}, RandomCrop"),
        "clients.image.models.0.encoders.image.view.augment.flip.p": (0.5, UNI),
        "clients.image.models.0.encoders.image.view.augment.erase": (None, UNI),
        "clients.image.training.optimizer.kind": ("sgd", UNI),
        "clients.text.training.optimizer.kind": ("sgd", UNI),
        "*.training.optimizer.momentum": (0.9, UNI),
        "clients.image.training.optimizer.weight_decay": (5e-5, UNI),
        "clients.text.training.optimizer.weight_decay": (5e-5, UNI),
        "clients.image.training.optimizer.clip": (None, UNI),
        "clients.text.training.optimizer.clip": (None, UNI),
        "clients.image.training.schedule.kind": ("steps", f"{UNI}, lr_scheduler"),
        "clients.text.training.schedule.kind": ("steps", f"{UNI}, lr_scheduler"),
        "*.training.schedule.milestones": ([0.5, 0.8], f"{UNI}, lr_scheduler"),
        "*.training.schedule.drop": (0.1, f"{UNI}, lr_scheduler"),
        # paired clients
        "clients.paired.task.name": ("retrieval", "paper, section 4"),
        "clients.paired.partition.name": ("shards", "code, client_noniid_flicker30k.pkl"),
        "clients.paired.partition.order": ("random", "code, client_noniid_flicker30k.pkl"),
        "clients.paired.models.0.encoders.image.name": ("resnet", SETUP),
        "clients.paired.models.0.encoders.image.pie": (True, "code, src/networks/models/image_encoder.py"),
        "clients.*.encoders.image.dropout": (0.0, CNN),
        "clients.paired.training.optimizer.kind": ("adamp", MM),
        "clients.paired.training.optimizer.weight_decay": (0.0, MM),
        "clients.paired.training.schedule.kind": ("constant", "code, MMClientTrainer.py never steps its own"),
        "clients.paired.training.batch_size": (128, MM),
        # a round
        "algorithm.local_epochs": (5, f"{MAIN}, local_epochs"),
        "algorithm.task.epochs": (1, "code, src/algorithms/MMFL.py"),
        "algorithm.distiller.epochs": (1, "code, src/algorithms/MMFL.py"),
        "algorithm.teacher.renormalise": (False, "paper, Eq. 6; code, MMFL.distill"),
        "algorithm.public.samples": (None, "paper, Algorithm 1; code, MMFL.train"),
        "algorithm.*.mask_siblings": (False, "paper, Eq. 1 and 4"),
        "run.sampling.kind": ("uniform", SETUP),
        "*.model.final_norm": (False, "code, src/networks/models/pcme.py"),
        "clients.*.models.0.final_norm": (False, "code, src/networks/models/pcme.py"),
    },
    chosen={
        "server.model.encoders.image.view.fit": ("crop", "middle squares before crops"),
        "clients.*.encoders.image.view.fit": ("crop", "middle squares before crops"),
    },
)


def small_backbones(stems: tuple[str, str], sizes: tuple[int, int]) -> Entries:
    """Presets for two cores, in place of the published backbones: (image, paired) stems, (scene, CIFAR) sizes."""
    return {
        "server.model.encoders.image.widths": ([32, 64, 128, 256], SMALL),
        "server.model.encoders.image.depths": ([1, 1, 1, 1], SMALL),
        "server.model.encoders.image.stem": ("medium", SMALL),
        "server.model.encoders.image.view.size": (sizes[0], "pictures of"),
        "server.model.encoders.text.size": ("mini", "ResNets and BERT"),
        "server.model.encoders.text.pooling": ("mean", "BERT without a CLS token"),
        "server.model.encoders.text.view.tokenizer.name": ("wordpiece", SMALL),
        "server.model.encoders.text.view.tokenizer.size": (8000, SMALL),
        "clients.paired.models.0.encoders.image.stem": (stems[1], SMALL),
        "clients.paired.models.0.encoders.image.view.size": (sizes[0], "pictures of"),
        "clients.image.models.0.encoders.image.stem": (stems[0], SMALL),
        "clients.image.models.0.encoders.image.view.size": (sizes[1], "pictures of"),
        "*.encoders.text.vectors": ([], "no GloVe vectors"),
        "*.encoders.image.size": ("tiny", SMALL),
        "*.encoders.text.positions": (512, SMALL),
        "clients.*.encoders.image.widths": (None, SMALL),
        "clients.*.encoders.image.depths": (None, SMALL),
        "*.encoders.image.block": (None, SMALL),
        "run.precision": ("float32", "small data"),
    }


def published_backbones() -> Table:
    """The backbones of paper and code, at the papers' sizes: sizes, stems and BERT's dropout come with the weights."""
    cnn = f"{SETUP}; weights as in the code, ImageNet"
    pictures, texts = "code, src/networks/models/image_encoder.py", "code, src/networks/models/pcme.py"
    return Table(
        sourced={
            "server.model.encoders.image.name": ("hf", SETUP),
            "server.model.encoders.image.weights": ("microsoft/resnet-101", cnn),
            "server.model.encoders.image.trainable": ("all", f"{pictures}: requires_grad of the CNN"),
            "server.model.encoders.image.pooling": ("mean", f"{pictures}, avgpool"),
            "server.model.encoders.image.standardise": (False, f"{pictures}, fc"),
            "server.model.encoders.image.view.size": (224, f"{COCO}, crop_size"),
            "server.model.encoders.text.name": ("hf", SETUP),
            "server.model.encoders.text.weights": ("google-bert/bert-base-uncased", SETUP),
            "server.model.encoders.text.trainable": (
                "all",
                "code, src/algorithms/base.py: all parameters go to the optimiser",
            ),
            "server.model.encoders.text.pooling": ("cls", texts),
            "server.model.encoders.text.standardise": (False, f"{texts}, linear"),
            "server.model.encoders.text.dropout": (0.0, f"{texts}, linear"),
            "server.model.encoders.text.view.tokenizer.name": ("pretrained", texts),
            "server.model.encoders.text.view.tokenizer.path": ("google-bert/bert-base-uncased", SETUP),
            "clients.image.models.0.encoders.image.name": ("hf", SETUP),
            "clients.paired.models.0.encoders.image.name": ("hf", SETUP),
            "clients.*.encoders.image.weights": ("microsoft/resnet-18", cnn),
            "clients.*.encoders.image.trainable": ("all", f"{CNN} and image_encoder.py"),
            "clients.*.encoders.image.pooling": ("mean", f"{CNN} and image_encoder.py, avgpool"),
            "clients.*.encoders.image.standardise": (False, f"{CNN} and image_encoder.py, fc"),
            "clients.paired.models.0.encoders.image.view.size": (224, f"{MM}, crop_size"),
            "*.encoders.text.vectors": (["glove-840b-300d"], f"{GRU}, torchtext's GloVe by its defaults"),
            "server.expected_test_items": (5000, "paper, Table 1: 1K and 5K test images of MS-COCO"),
        },
        chosen={"run.precision": ("bfloat16", "bfloat16")},
    )


PAPER_METHOD = Table(
    sourced={
        "algorithm.name": ("creamfl", "paper, Algorithm 1"),
        "algorithm.contrast.weight": (0.5, f"{README}, interintra_weight"),
        "algorithm.contrast.inter.tau": (1.0, "paper, Eq. 1 has none"),
        "algorithm.contrast.intra.tau": (1.0, "paper, Eq. 2 has none"),
        "algorithm.contrast.inter.mask_siblings": (False, "paper, Eq. 1"),
        "algorithm.contrast.schedule": ("joint", "paper, Eq. 3"),
        "algorithm.contrast.batch_size": (128, COCO),
        "algorithm.teacher.weights.name": ("gca", "paper, section 3.3"),
        "algorithm.teacher.weights.tau": (1.0, "paper, Eq. 4 has none"),
        "algorithm.teacher.weights.include_self": (False, "paper, Eq. 4: j != k"),
        "algorithm.task.order": ("last", "paper, Algorithm 1, lines 3 and 11"),
        "algorithm.distiller.loss": ("l2", "paper, Eq. 7"),
        "algorithm.distiller.weight": (1.0, "paper, Eq. 7 has none"),
    },
    chosen={
        "algorithm.contrast.intra.reduction": ("sum", "intra-modal contrasts summed over modalities"),
        "algorithm.contrast.batches_per_epoch": (None, "one public batch a private one"),
        "algorithm.public.augment": (False, "public samples in evaluation mode and view"),
        "algorithm.public.extraction": ("eval", "public samples in evaluation mode and view"),
        "algorithm.contrast.intra.previous": ("cached", "previous representations as uploaded"),
        "algorithm.distiller.optimizer": ("own", "an optimiser of its own for the distillation"),
        # section 4.1 has Dirichlet 0.1 for Flickr30k too, which has no classes, and does not say of what
        "clients.paired.partition.name": ("shards", SHARDS),
        "clients.paired.partition.order": ("random", SHARDS),
        "clients.paired.partition.per_client": (10, SHARDS),
        "clients.paired.partition.total": (150, SHARDS),
    },
)


def _federation(dim: int, rate: float, rate_source: str, clip: float | None, clip_source: str) -> Table:
    captions = "code, src/f30k.yaml, caption_drop_prob"
    crop = ([0.83, 0.83], f"{UNI}: 256 of 281 pixels")
    return SHARED.changed(
        sourced={
            "server.task.folds": ([5, 1], "paper, Table 1: 1K and 5K"),
            "*.model*.dim": (dim, SETUP if dim == 512 else f"{MAIN}, feature_dim"),
            "server.training.optimizer.lr": (rate, rate_source),
            "server.training.optimizer.clip": (clip, clip_source),
            "server.training.schedule.t_max": (30, COCO),
            "clients.paired.training.optimizer.clip": (clip, clip_source),
            "clients.paired.training.optimizer.lr": (2e-4, MM),
            "clients.image.training.optimizer.lr": (1e-4, f"{UNI}, init_lr"),
            "clients.text.training.optimizer.lr": (1e-4, f"{UNI}, init_lr"),
            "clients.image.training.batch_size": (512, MAIN),
            "clients.text.training.batch_size": (512, MAIN),
            "clients.image.count": (10, SETUP),
            "clients.text.count": (10, SETUP),
            "clients.paired.count": (15, SETUP),
            "clients.paired.items": (None, "paper, section 4.1: all of Flickr30k"),
            "clients.*.items": (None, SETUP),
            "clients.paired.partition.per_client": (10, "code, client_noniid_flicker30k.pkl"),
            "clients.paired.partition.total": (150, "code, client_noniid_flicker30k.pkl"),
            "clients.paired.task.folds": ([5, 1], "code, src/algorithms/base.py: n_crossfolds 5, and all"),
            "clients.*.task.margin": (4.0, f"{UNI}, inter_distance"),
            "clients.image.task.scale": (128.0, f"{UNI}, scale"),
            "clients.text.task.scale": (128.0, f"{UNI}, scale"),
            "clients.image.models.0.encoders.image.view.augment.crop.scale": crop,
            **recurrent("clients.text.models.0.encoders.text", dim, drop=0.0, text="code, dataset_L.py"),
            **recurrent("clients.paired.models.0.encoders.text", dim, drop=0.1, text=captions),
            "run.rounds": (30, f"{MAIN}, comm_rounds"),
            "run.sampling.cohort": (10, SETUP),
        }
    )


SMALL_DATA: Entries = {
    "public.items": (1500, "3,000 public pairs"),
    "public.per_item": (2, "3,000 public pairs"),
    "server.expected_test_items": (None, "recalls are of 200 and 1,000 pictures"),
    "clients.text.partition.min_size": (10, "text clients of 10 texts or more instead of 3,000"),
    "run.seed": (0, "small data"),
}

PAPER = _federation(512, 2e-4, SETUP, 2.0, f"{COCO} and f30k.yaml, grad_clip").changed(
    PAPER_METHOD.sourced, PAPER_METHOD.chosen | SMALL_DATA | small_backbones(("small", "medium"), (64, 32))
)

NO_CLIP = "code, grad_clip 2 on half-precision copies of gradients, after the optimiser took them"
RELEASED = _federation(256, 1e-5, f"{README}, server_lr", None, NO_CLIP).changed(
    sourced=PAPER_METHOD.sourced
    | {
        "algorithm.contrast.inter.tau": (0.5, UNI),
        "algorithm.contrast.intra.tau": (0.5, UNI),
        "algorithm.contrast.intra.reduction": (
            "mean",
            "code, MMClientTrainer.py: CrossEntropyLoss over 2B stacked rows",
        ),
        "algorithm.contrast.schedule": ("separate_pass", UNI),
        "algorithm.contrast.batches_per_epoch": (None, f"{UNI}: all of P"),
        "algorithm.public.augment": (True, "code, src/algorithms/MMFL.py: train_subset loader"),
        "algorithm.contrast.intra.previous": ("on_the_fly", f"{UNI}, old_model"),
        "algorithm.public.extraction": ("train", f"{UNI} and MMFL.py: no eval()"),
        "algorithm.teacher.weights.include_self": (True, "code, MMFL.aggregation: sum over all logits"),
        "algorithm.task.order": ("first", "code, MMFL.train"),
        "algorithm.distiller.loss": ("mse", "code, MMFL.distill"),
        "algorithm.distiller.weight": (0.6, "code, MMFL.distill: 0.3, added twice a modality"),
        "algorithm.distiller.optimizer": ("shared", "code, MMFL.distill"),
    },
    chosen=SMALL_DATA
    | small_backbones(("small", "medium"), (64, 32))
    | {"run.precision": ("float32", "full precision")},
)

_PUBLISHED = published_backbones()
PAPER_SCALE = _federation(512, 2e-4, SETUP, 2.0, f"{COCO} and f30k.yaml, grad_clip").changed(
    PAPER_METHOD.sourced
    | _PUBLISHED.sourced
    | {
        "public.items": (50_000, SETUP),
        "clients.text.partition.min_size": (3000, "code, src/datasets/load_FL_datasets.py"),
        "clients.image.models.0.encoders.image.view.size": (256, f"{UNI}, imgsize"),
    },
    PAPER_METHOD.chosen
    | _PUBLISHED.chosen
    | {"public.per_item": (1, "one caption of each public picture"), "run.seed": (0, "polyfed's choices")},
)

OWN_HEAD = "The head, its training"
VQA = PAPER_SCALE.changed(
    sourced={"server.task.name": ("vqa", "paper, Table 2")},
    chosen={
        "server.task.target": ("answer", OWN_HEAD),
        "server.task.votes": ("leave_one_out", "by the votes of ten annotators"),
        "server.task.use": (None, OWN_HEAD),
        "server.task.fusion": ("product", OWN_HEAD),
        "server.task.hidden": (1024, OWN_HEAD),
        "server.task.dropout": (0.0, OWN_HEAD),
        "server.task.encoders": ("fine_tuned", OWN_HEAD),
        "server.expected_test_items": (None, "validation questions"),
        "public.per_item": (1, "one of each picture"),
    },
).without("server.task.folds", "server.task.scale")

TABLES = {"creamfl-paper": PAPER, "creamfl-released": RELEASED, "creamfl-paper-scale": PAPER_SCALE, "vqa-v2": VQA}
ROWS = {"creamfl/t1: creamfl": PAPER_SCALE, "creamfl/t2: creamfl": VQA}
