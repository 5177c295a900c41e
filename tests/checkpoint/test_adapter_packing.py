"""Adapters that were not used to choose the bound of packing.py: named rightly, or called undecidable."""

import collections
import random

import pytest
import torch
from safetensors.torch import load_file, save_file

from fmoe_ext.finetune.adapters.reading import read_adapter
from tests.checkpoint.adapter_models import by_expert, rewritten, trained

BASES = ["qwen3_moe", "mixtral", "gpt_oss", "olmoe", "ernie4_5_moe"]
NUM_TRAINED = 60


def recipes():
    """(base, rank, steps, learning rate, as PEFT before 0.19, seed) of each training."""
    choose = random.Random(20261123).choice
    for seed in range(NUM_TRAINED):
        old = choose([False, False, True])
        yield (
            BASES[seed % len(BASES)],
            choose([2, 4, 8, 16]),
            choose([1, 2, 5, 20, 100]),
            choose([1e-4, 1e-3, 1e-2]),
            old,
            seed,
        )


@pytest.mark.slow
def test_fresh_trained_adapters_are_never_named_wrongly(tmp_path):
    """Each training is packed both ways: 120 adapters of ranks 2 to 16, after 1 to 100 steps."""
    said = collections.Counter()
    for name, rank, steps, lr, old, seed in recipes():
        folder = tmp_path / str(seed)
        trained(name, folder, rank, steps, old, lr, seed)
        for packing in ("rank_major", "expert_major"):
            if packing == "expert_major":
                rewritten(folder, by_expert(rank))
            adapter = read_adapter(folder)
            assert adapter.packing in (packing, "undecidable"), (name, rank, steps, lr, seed)
            # PEFT before 0.19 turns no parameter of GPT-OSS, which has [E, in, out].
            assert adapter.orientation == ("in_out" if old and name != "gpt_oss" else "out_in")
            said[adapter.packing == packing, rank > 2] += 1
    print({f"named: {named}, rank over 2: {rank}": count for (named, rank), count in said.items()})
    assert said[True, True] >= 80 and said[True, False] >= 15  # of 90 and 30


@pytest.mark.slow
def test_untrained_adapters_are_undecidable(tmp_path):
    trained("mixtral", tmp_path, rank=8)
    start = load_file(tmp_path / "adapter_model.safetensors")
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        random_b = {
            k: torch.randn(v.shape, generator=generator) if "lora_B" in k else v.float()
            for k, v in start.items()
        }
        save_file(random_b, tmp_path / "adapter_model.safetensors")
        assert read_adapter(tmp_path).undecided, seed
