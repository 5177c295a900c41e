"""prune(merge=): experts that resemble each other become one, and so do their rows of the router."""

import pytest
import torch
from safetensors.torch import load_file

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.compress import measure, prune
from fmoe_ext.compress.prune import best, best_merged, similarities
from tests.compress import planted
from tests.finetune.streamed_models import resident, save
from tests.formats.format_models import without_float32

COPIES = {3: 1, 6: 4}
APART = 1e-13  # of the router's rows, so that each of two copies has about half of their tokens


def tokens(count=2000):
    return torch.randint(3, 1009, (count,), generator=torch.Generator().manual_seed(3))


def test_copies_are_merged_and_logits_stay(tmp_path):
    folder = planted.make(tmp_path / "model", [], COPIES, APART)
    with without_float32():
        report = prune(folder, tmp_path / "out", tokens(), experts=6, seq_len=40, merge=0.99)
        for layer in report["layers"].values():
            pairs = {frozenset(map(int, pair)) for pair in layer["merged"].items()}
            assert pairs == {frozenset(pair) for pair in COPIES.items()}
            assert all(one["tokens"] > 0 for one in layer["pruned"].values()) and layer["lost_mass"] == 0
        ids = tokens(40).view(2, 20)
        with torch.no_grad():
            before, after = (resident(tmp_path / name)(input_ids=ids).logits for name in ("model", "out"))
    torch.testing.assert_close(after, before, rtol=0, atol=1e-11)
    assert before.std() > 0.1


def test_merged_weights_and_rows_are_averages_by_use(tmp_path):
    folder = save(tmp_path / "model", num_hidden_layers=2)
    text = tokens(600).remainder(58) + 3
    report = prune(folder, tmp_path / "out", text, experts=4, seq_len=20, merge=1e-9)
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    path, layer = next(iter(report["layers"].items()))
    counts = measure(resident(folder), text[:540].view(27, 1, 20), "frequency").count[path]
    assert layer["merged"]
    for new, old in enumerate(layer["kept"]):
        group = [old, *(int(e) for e, into in layer["merged"].items() if into == old)]
        used = counts[group].double()
        share = used / used.sum()
        expected = sum(s * before[f"{path}.{e}.up_proj.weight"] for s, e in zip(share, group, strict=True))
        torch.testing.assert_close(after[f"{path}.{new}.up_proj.weight"], expected, rtol=1e-12, atol=0)
        gate = path.replace("experts", "gate.weight")
        expected = sum(s * before[gate][e] for s, e in zip(share, group, strict=True))
        torch.testing.assert_close(after[gate][new], expected, rtol=1e-12, atol=0)


def test_most_similar_experts_go_first_and_others_by_score():
    cosine = torch.zeros(5, 5, dtype=torch.float64)
    cosine[0, 1] = cosine[1, 0] = 0.99
    cosine[2, 3] = cosine[3, 2] = 0.95
    scores, count = torch.tensor([5.0, 4, 3, 2, 1]), torch.tensor([30, 10, 5, 5, 0])
    assert best_merged(scores, count, cosine, 4, 0.9) == {
        0: {0: 0.75, 1: 0.25},
        2: {2: 1},
        3: {3: 1},
        4: {4: 1},
    }
    assert best_merged(scores, count, cosine, 3, 0.9)[2] == {2: 0.5, 3: 0.5}
    assert list(best_merged(scores, count, cosine, 2, 0.9)) == [0, 2]
    assert list(best_merged(scores, count, cosine, 2, 0.999)) == [0, 1]


def test_first_of_equal_scores_stays():
    """The last ones stayed where no pair was similar, against best() and the pairs."""
    scores, count, apart = (
        torch.tensor([0.0, 1, 0, 0], dtype=torch.float64),
        torch.ones(4).long(),
        torch.zeros(4, 4),
    )
    assert list(best_merged(scores, count, apart, 2, 0.9)) == best(scores, 2) == [0, 1]


def test_similarity_is_the_cosine_over_all_projections():
    w1, w2 = torch.randn(3, 7), torch.randn(3, 5)
    both = torch.cat((w1, w2), 1).double()
    expected = torch.nn.functional.cosine_similarity(both[:, None], both[None], dim=-1).fill_diagonal_(0)
    torch.testing.assert_close(similarities([w1, w2]), expected, rtol=1e-5, atol=1e-6)


def test_models_that_are_not_merged_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="merge must be above 0"):
        prune(save(tmp_path / "a"), tmp_path / "out", tokens(), experts=4, merge=2.0)
    changes = {"num_hidden_layers": 3, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    folder = save(tmp_path / "b", "DeepseekV3ForCausalLM", **changes)
    with pytest.raises(CheckpointError, match="of groups are not merged: prune without merging"):
        prune(folder, tmp_path / "out", tokens(), experts=4, merge=0.9)
