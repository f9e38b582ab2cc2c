import copy
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from polyfed.core.errors import ConfigError
from polyfed.data.view import DataContext, InputSpec
from polyfed.data.views.tokens import Tokens
from polyfed.models.encoders.words import Bag, FrozenEmbedding, embedding_table, frozen_embedding
from polyfed.models.frozen import frozen_parts
from polyfed.models.model import ModelSettings, trained_in

VOCABULARY = ("<pad>", "<unk>", "dog", "Cat", "zebra")


def write_vectors(folder: Path, words: dict[str, list[float]]) -> None:
    folder.mkdir()
    (folder / "words.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    save_file({"vectors": torch.tensor(list(words.values()))}, folder / "vectors.safetensors")


@pytest.fixture
def context(tmp_path) -> DataContext:
    write_vectors(tmp_path / "one", {"dog": [1.0, 2.0], "cat": [3.0, 5.0]})
    write_vectors(tmp_path / "two", {"zebra": [7.0, 8.0, 9.0], "dog": [4.0, 5.0, 6.0]})
    return DataContext(tmp_path / "cache", weights=tmp_path)


def test_folders_stand_side_by_side_and_unknown_words_are_random(context):
    table = embedding_table(InputSpec((8,), VOCABULARY, pad=0), context, width=300, vectors=("one", "two")).weight
    assert table.shape == (5, 5)
    assert table[2].tolist() == [1, 2, 4, 5, 6]
    assert table[3, :2].tolist() == [3, 5]
    assert table[4, 2:].tolist() == [7, 8, 9]
    assert (table[0] == 0).all()
    assert (torch.cat([table[1], table[3, 2:], table[4, :2]]) != 0).all()


def test_words_without_vector_are_a_tenth_as_spread_as_the_vectors(tmp_path):
    write_vectors(tmp_path / "wide", {"dog": [10.0, -10.0], "cat": [10.0, -10.0]})
    context = DataContext(tmp_path, weights=tmp_path)
    vocabulary = ("<pad>", "dog", *(f"w{i}" for i in range(2000)))
    table = embedding_table(InputSpec((8,), vocabulary), context, width=1, vectors=("wide",)).weight
    spread = torch.tensor([10.0, -10.0, 10.0, -10.0]).std().item()
    assert table[2:].std().item() == pytest.approx(0.1 * spread, rel=0.05)


def test_padding_stays_zero_in_training(context):
    table = embedding_table(InputSpec((8,), VOCABULARY, pad=1), context, width=4)
    table(torch.tensor([0, 1, 2])).sum().backward()
    assert (table.weight[1] == 0).all()
    assert (table.weight.grad[1] == 0).all()
    assert (table.weight.grad[0] == 1).all()


def test_random_start(context):
    spec = InputSpec((8,), VOCABULARY)
    torch.manual_seed(3)
    first = embedding_table(spec, context, width=4).weight
    torch.manual_seed(3)
    assert torch.equal(first, embedding_table(spec, context, width=4).weight)
    assert first.abs().max() <= 0.1


@pytest.mark.parametrize("vectors", [(), ("one", "two")])
def test_frozen_embeddings_are_one_table_for_all_models_and_no_part_of_their_state(context, vectors):
    spec = InputSpec((8,), VOCABULARY)
    one, other = (Bag(width=5, vectors=vectors, freeze_embedding=True).build(3, spec, context) for _ in range(2))
    for model in (other, copy.deepcopy(one)):
        assert model.embedding.weight.data_ptr() == one.embedding.weight.data_ptr()
    assert not [name for name in one.state_dict() if "embedding" in name]
    assert not [name for name in trained_in(one) if "embedding" in name]
    assert frozen_parts(one)["embedding"] is one.embedding
    tokens = torch.tensor([[2, 4, 0], [1, 0, 0]])
    assert torch.equal(one.embedding(tokens), one.embedding.weight[tokens])


def test_frozen_embeddings_depend_on_vocabulary_vectors_and_seed_alone(context):
    def built(context, vocabulary=VOCABULARY, **settings) -> FrozenEmbedding:
        torch.rand(3)  # whatever was drawn before
        return frozen_embedding(InputSpec((8,), vocabulary), context, **{"width": 4, "vectors": ("one",)} | settings)

    first, again = built(context), built(replace(context, fitted={}))
    assert torch.equal(first.weight, again.weight)
    assert first.digest == again.digest
    assert re.fullmatch("5x[0-9a-f]{8}", first.digest)
    changes = {"vocabulary": VOCABULARY[::-1]}, {"vectors": ("two",)}, {"vectors": ()}, {"vectors": (), "width": 3}
    others = [built(replace(context, fitted={}, seed=1)), *(built(context, **change) for change in changes)]
    assert len({first.digest, *(other.digest for other in others)}) == 6
    assert torch.equal(first.weight[2:4], others[0].weight[2:4])  # words with vectors
    assert not torch.equal(first.weight[4], others[0].weight[4])


def test_what_is_frozen_is_part_of_the_name_of_the_architecture(context):
    class Words(Tokens):
        def spec(self, modality, context) -> InputSpec:
            return InputSpec((8,), VOCABULARY)

    def model(**settings) -> ModelSettings:
        return ModelSettings(dim=3, encoders={"text": Bag(view=Words(), vectors=("one",), **settings)})

    frozen, trained = model(freeze_embedding=True), model()
    assert trained.architecture_in(context) == trained.architecture
    digest = frozen_embedding(InputSpec((8,), VOCABULARY), context, width=1, vectors=("one",)).digest
    assert frozen.architecture_in(context) == f"{frozen.architecture}-{digest}"


def test_vectors_are_read_once(context):
    spec = InputSpec((8,), VOCABULARY)
    embedding_table(spec, context, width=4, vectors=("one",))
    (context.weights / "one" / "words.txt").unlink()
    assert embedding_table(spec, context, width=4, vectors=("one",)).weight.shape == (5, 2)


def test_errors_name_folder_and_remedy(context, tmp_path):
    spec = InputSpec((8,), VOCABULARY)
    with pytest.raises(ConfigError, match=r"no folder 'three'.*POLYFED_WEIGHTS"):
        embedding_table(spec, context, width=4, vectors=("three",))
    with pytest.raises(ConfigError, match="none of the 2 words"):
        embedding_table(InputSpec((8,), ("<pad>", "ox")), context, width=4, vectors=("one",))
    (tmp_path / "two" / "words.txt").write_text("dog\n")
    with pytest.raises(ConfigError, match="1 words but 2 vectors"):
        embedding_table(spec, context, width=4, vectors=("two",))
    (tmp_path / "one" / "vectors.safetensors").write_bytes(b"x")
    fresh = DataContext(tmp_path / "cache", weights=tmp_path)
    with pytest.raises(ConfigError, match=r"needs words\.txt and vectors\.safetensors"):
        embedding_table(spec, fresh, width=4, vectors=("one",))
