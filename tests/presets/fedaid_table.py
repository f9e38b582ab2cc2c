"""The values of FedAID (arXiv 2404.03854, second version) and FedDRA, its third (BioMed-AI-Lab-U-Michgan/TMLR_FedDRA).

FedAID's own code is not public. Where its paper gives no value, the released code of its third version does; pictures
are prepared as in MGCA (HKU-MedAI/MGCA), which the paper says that it follows and on which that code is built.
"""

from __future__ import annotations

from stated import Entries, Table

SETUP, B1 = "paper, section 5.1", "paper, appendix B.1"
LOOP = "code, mgca/models/mgca/FedAvg_SLIA_HC.py"
MODULE = "code, mgca/models/mgca/SLIA_module.py"
ENCODER, PAIRS = "code, mgca/models/backbones/encoder.py", "code, mgca/datasets/pretrain_dataset.py"
SAMPLES = "code, mgca/datasets/data_module.py, test_dataloader"
MGCA = "MGCA, mgca/datasets/transforms.py, which section 5.1 follows"
DISEASES = ["edema", "pleural_effusion", "consolidation", "pneumothorax", "pneumonia"]

FEDERATION = Table(
    sourced={
        "public": (None, "paper, section 3: private data alone"),
        "clients.hospital.count": (5, f"{SETUP}; {LOOP}, n_client"),
        "clients.hospital.items": (None, SETUP),
        "clients.hospital.test": ("dealt", f"{SETUP}: each has train and test splits"),
        "clients.hospital.partition.name": ("dirichlet", SETUP),
        "clients.hospital.partition.alpha": (1.0, f"{SETUP}: heterogeneity degree 1"),
        "clients.hospital.partition.min_size": (10, "the splitter of Yan et al. (2023), which section 5.1 follows"),
        "clients.hospital.partition.of": (DISEASES, B1),
        "run.rounds": (25, f"{SETUP}; {LOOP}, num_com"),
        "run.sampling.kind": ("uniform", "paper, Algorithm 1"),
        "run.sampling.cohort": (None, "paper, Algorithm 1: all clients"),
        # the task
        "*.task.name": ("convirt", f"{SETUP}: image-text contrast"),
        "*.task.temperature": (0.07, f"{MODULE}, softmax_temperature"),
        "*.task.learn_temperature": (False, MODULE),
        "*.task.weight": (0.5, f"{MODULE}: both directions alike"),
        "*.task.reduction": ("sum", f"{MODULE}: loss0 + loss1"),
        "*.task.mask_siblings": (False, MODULE),
        # the models
        "*.model*.dim": (128, f"{MODULE}, emb_dim"),
        "*.model*.final_norm": (False, MODULE),
        "*.encoders.*.name": ("hf", f"{SETUP}: ViT-base and Bert-base, whose sizes and dropout come with the weights"),
        "*.encoders.*.trainable": ("all", f"{MODULE}, freeze_bert, and no other freezing"),
        "*.encoders.image.weights": ("facebook/deit-base-patch16-224", ENCODER),
        "*.encoders.image.view.name": ("pixels", SETUP),
        "*.encoders.image.view.size": (224, "paper, appendix B.3"),
        "*.encoders.image.view.normalise": ("half", MGCA),
        "*.encoders.image.view.augment.*": (None, f"{MGCA}: random crops alone"),
        "*.encoders.image.view.augment.crop.scale": ([0.765625, 0.765625], f"{MGCA}: 224 of 256 pixels"),
        "*.encoders.image.view.augment.crop.ratio": ([1.0, 1.0], f"{MGCA}, RandomCrop"),
        "*.encoders.text.weights": ("google-bert/bert-base-cased", ENCODER),
        "*.encoders.text.view.name": ("tokens", PAIRS),
        "*.encoders.text.view.length": (112, f"{PAIRS}, max_words"),
        "*.encoders.text.view.drop": (0.0, PAIRS),
        "*.encoders.text.view.delete": (0.0, PAIRS),
        "*.encoders.text.view.tokenizer.name": ("pretrained", PAIRS),
        "*.encoders.text.view.tokenizer.path": (
            "google-bert/bert-base-cased",
            f"{PAIRS}: Bio_ClinicalBERT, whose vocabulary is this one",
        ),
        "*.encoders.*.pooling": ("cls", ENCODER),
        "*.aligner.layers": (1, f"{SETUP}: an additional transformer layer"),
        "*.aligner.heads": (12, f"{SETUP}: a layer of ViT-base and of Bert-base"),
        "*.aligner.expansion": (4.0, f"{SETUP}: a layer of ViT-base and of Bert-base"),
        "*.aligner.norm.text": ("post", f"{SETUP}: a layer of Bert-base"),
        "*.aligner.head": ("mlp", f"{ENCODER}, GlobalEmbedding"),
        "*.aligner.hidden": (2048, f"{ENCODER}, GlobalEmbedding"),
        "*.aligner.head_norm": ("batch", f"{ENCODER}, GlobalEmbedding"),
        "*.aligner.local": (False, f"{MODULE} uses no local_embed"),
        # local training
        "clients.hospital.training.optimizer.kind": ("adamw", f"{MODULE}, configure_optimizers"),
        "clients.hospital.training.optimizer.lr": (2e-5, f"{B1}; {MODULE}, learning_rate"),
        "clients.hospital.training.optimizer.weight_decay": (0.05, f"{MODULE}, weight_decay"),
        "clients.hospital.training.optimizer.clip": (None, f"{LOOP}: the trainer is given none"),
        "clients.hospital.training.schedule.kind": ("constant", f"{MODULE}, configure_optimizers"),
        # the method
        "algorithm.guidance.distance": ("l2", "paper, Eq. 1"),
        "algorithm.local_steps": (50, f"{SETUP}; {LOOP}, max_steps of the second stage"),
        "algorithm.guidance.weight": (1.0, f"paper, Eq. 2; {MODULE}, lambda_2"),
        "algorithm.task_weight": (1.0, f"{B1}: alpha; {MODULE}, lambda_1"),
    },
    chosen={
        "clients.hospital.partition.together": ("patient", "whole patients dealt out"),
        "*.encoders.image.view.fit": ("squash", "pictures squashed to the square"),
        "run.precision": ("bfloat16", "bfloat16"),
        "run.seed": (0, "seed 0"),
    },
    idle={
        **dict.fromkeys(
            ("*.encoders.*.dropout", "*.encoders.*.pie", "*.encoders.*.standardise"),
            "an align module takes the place of the projection",
        ),
        "*.task.folds": "the paper's recalls are within batches",
        "server.expected_test_items": "the paper's recalls are within batches",
        "server.training.*": "the server trains nothing (paper, Algorithm 1)",
        "algorithm.local_epochs": "batches are counted (local_steps)",
    },
)

PAPER = FEDERATION.changed(
    sourced={
        "clients.hospital.training.batch_size": (388, B1),
        "*.task.in_batch": (388, "paper, appendix B.2: within a batch; B.1: of 388"),
        "algorithm.name": ("fedaid", "paper, Algorithm 1"),
        "algorithm.teacher.steps": (50, "paper, Algorithm 3: E steps as in Algorithm 2"),
        "algorithm.guidance.reduction": ("sum", "paper, Eq. 1"),
        "algorithm.teacher.reduction": ("sum", "paper, Eq. 5"),
        "algorithm.teacher.weights.gamma": (0.5, f"{LOOP}: gamma 0.01 for each of step_per_com 50"),
        "algorithm.teacher.weights.rho": (1.0, f"{B1}; {LOOP}, project_onto_chi_square_ball"),
        "algorithm.teacher.weights.divergence": ("chi_square", "paper, Eq. 4, section 4.2, by its reference"),
        "algorithm.teacher.beta": (2.0, B1),
        "algorithm.teacher.contrast.weight": (1.0, "paper, Eq. 5"),
        "algorithm.teacher.contrast.temperature": (0.07, f"{MODULE}, softmax_temperature"),
    },
    chosen={
        "algorithm.teacher.weights.use": ("aggregate", "w as shares of the teacher's mean"),
    },
)

RELEASED_METHOD: Entries = {
    "algorithm.name": ("feddra", LOOP),
    "algorithm.guidance.distance": ("l2", f"{MODULE}, mse_loss"),
    "algorithm.guidance.reduction": ("element", f"{MODULE}, mse_loss"),
    "algorithm.guidance.weight": (1.0, f"{MODULE}, lambda_2"),
    "algorithm.task_weight": (1.0, f"{MODULE}, lambda_1"),
    "algorithm.guidance.stages": ("both", f"{MODULE}, training_step"),
    "algorithm.frozen_encoder_mode": ("training", f"{MODULE}: no_grad, but no eval()"),
    "algorithm.aligner_in_stage_two": ("local", f"{LOOP}: only the global_ modules are loaded"),
    "algorithm.weights.gamma": (0.5, f"{LOOP}: gamma 0.01 for each of step_per_com 50"),
    "algorithm.weights.rho": (1.0, f"{LOOP}, project_onto_chi_square_ball"),
    "algorithm.weights.divergence": ("released", f"{LOOP}, project_onto_chi_square_ball"),
    "algorithm.weights.use": ("loss", f"{MODULE}, client_ratio"),
    "algorithm.weighted_stages": ("both", f"{MODULE}, client_ratio"),
    "algorithm.guidance.measured": (True, f"{MODULE}, test_step"),
    "algorithm.measured_on": ("aggregated", f"{LOOP}, test of the server"),
    "algorithm.measure_share": (0.1, SAMPLES),
}

RELEASED = FEDERATION.changed(
    sourced=RELEASED_METHOD
    | {
        "clients.hospital.training.batch_size": (72, f"{MODULE}, batch_size"),
        "*.task.in_batch": (72, SAMPLES),
        "algorithm.robust_steps": (20, f"{LOOP}, max_steps of the first stage"),
    }
)

TABLES = {"fedaid-mimic": PAPER, "feddra-mimic": RELEASED}
ROWS = {"fedaid/t1: fedaid": PAPER}
