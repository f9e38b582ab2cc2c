"""GRU, bag, transformer and BERT encoders."""

import pytest
import torch
from encoder_cases import CONTEXT, TEXTS, TOKENS

from polyfed.data.view import InputSpec
from polyfed.models.encoders.from_config import Bert
from polyfed.models.encoders.words import GRU, Bag, final_state
from polyfed.models.towers import last_valid


def test_gru_readout_last_equals_a_bidirectional_gru_gathered_at_the_last_word():
    model = GRU(width=8, readout="last").build(10, TEXTS, CONTEXT).eval()
    both = torch.nn.GRU(8, 5, batch_first=True, bidirectional=True)
    with torch.no_grad():
        for name, weight in model.forwards.named_parameters():
            getattr(both, name).copy_(weight)
        for name, weight in model.backwards.named_parameters():
            getattr(both, f"{name}_reverse").copy_(weight)
    for row, length in zip(TOKENS, [4, 1, 6], strict=True):
        states, _ = both(model.embedding(row[:length].unsqueeze(0)))
        torch.testing.assert_close(model(row.unsqueeze(0)), states[:, -1])


def test_packed_and_gathered_states_agree():
    gru = torch.nn.GRU(3, 4, batch_first=True)
    x, lengths = torch.randn(3, 6, 3), torch.tensor([4, 1, 6])
    torch.testing.assert_close(final_state(gru, x, lengths), last_valid(gru(x)[0], lengths))


def test_gru_projects_only_where_needed():
    assert isinstance(GRU().build(10, TEXTS, CONTEXT).project, torch.nn.Identity)
    assert isinstance(GRU().build(11, TEXTS, CONTEXT).project, torch.nn.Linear)
    assert isinstance(GRU(project=True).build(10, TEXTS, CONTEXT).project, torch.nn.Linear)


def test_creamfl_text_client_has_its_published_size():
    # creamfl.md 1.3: 4.0 M at d = 256, 4.6 M at d = 512 (GloVe-300, 11,755 words, bidirectional GRU, PIE)
    spec = InputSpec((40,), tuple(f"w{i}" for i in range(11_755)))
    for dim, expected in ((256, 4.0e6), (512, 4.6e6)):
        with torch.device("meta"):
            model = GRU(pie=True).build(dim, spec, CONTEXT)
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(expected, rel=0.02)


def test_bag_is_the_projected_mean_of_its_words():
    model = Bag(width=8).build(10, TEXTS, CONTEXT).eval()
    table = model.embedding.weight
    expected = torch.stack([table[[5, 3, 7, 9]].mean(0), table[2], table[1:7].mean(0)])
    torch.testing.assert_close(model(TOKENS), model.project(expected))


@pytest.mark.parametrize("frozen", [False, True])
def test_bag_is_the_same_where_no_gradient_is_kept_also_for_empty_texts(frozen):
    model = Bag(width=8, freeze_embedding=frozen).build(10, TEXTS, CONTEXT).eval()
    tokens = torch.cat([TOKENS, torch.zeros_like(TOKENS[:1])])  # the last has no word
    expected = model(tokens)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), expected)


def test_bert_base_has_the_published_parameter_counts():
    spec = InputSpec((40,), tuple(f"w{i}" for i in range(30_522)))
    counts = {}
    for pooling in ("pooler", "cls"):
        with torch.device("meta"):
            model = Bert(size="base", pooling=pooling).build(256, spec, CONTEXT)
        counts[pooling] = sum(p.numel() for p in model.parameters())
    # methods.md 3.2: FedAFD counts BERT-base with its pooler, and 768->256
    assert counts == {"pooler": 109_679_104, "cls": 109_679_104 - 590_592}
