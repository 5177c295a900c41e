"""A Qwen3-MoE of Transformers with its experts on two processes: train, generate, save; then load it on one.

python examples/transformers/qwen3_moe_ep.py [folder]    # a small model made on the spot; nothing is downloaded
On GPUs, one process each: torchrun --nproc-per-node 8 with main_of_rank()'s lines in a script of your own.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers

from fmoe_ext import huggingface
from fmoe_ext.distributed import DistributedGroupedDataParallel, clip_grad_norm_

RANKS, VOCAB, STEPS, BATCH = 2, 64, 60, 16


def make_model() -> transformers.Qwen3MoeForCausalLM:
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        norm_topk_prob=True,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return transformers.Qwen3MoeForCausalLM(config)


def sequences(number: int, seed: int) -> torch.Tensor:
    """Sequences that count upwards, each from another number: something to learn."""
    first = torch.randint(VOCAB, (number, 1), generator=torch.Generator().manual_seed(seed))
    return (first + torch.arange(16)) % VOCAB


def main_of_rank(rank: int, folder: Path) -> None:
    store = f"file://{folder.absolute() / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    model = huggingface.expert_parallel(make_model())
    wrapped = DistributedGroupedDataParallel(model, auto_allreduce=True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(STEPS):
        ids = sequences(BATCH, step).chunk(RANKS)[rank]
        loss = wrapped(input_ids=ids, labels=ids).loss
        loss.backward()
        clip_grad_norm_(wrapped, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step in (0, STEPS - 1):
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    prompt = torch.tensor([[10 + rank, 11 + rank, 12 + rank]])
    text = model.eval().generate(prompt, max_new_tokens=8, do_sample=False)
    torch.save(text, folder / f"text-{rank}.pt")
    model.save_pretrained(folder)
    dist.destroy_process_group()


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "store").unlink(missing_ok=True)
    mp.spawn(main_of_rank, (folder,), nprocs=RANKS)
    (folder / "store").unlink(missing_ok=True)
    model = transformers.Qwen3MoeForCausalLM.from_pretrained(folder)  # all experts, plain Transformers
    for rank in range(RANKS):
        text = torch.load(folder / f"text-{rank}.pt")
        alone = model.generate(text[:, :3], max_new_tokens=8, do_sample=False)
        same = "the same" if torch.equal(alone, text) else f"ANOTHER: {alone.tolist()}"
        print(f"rank {rank} wrote {text[0].tolist()}; one process that loaded the model writes {same}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder", nargs="?", type=Path, default=Path("out/qwen3_moe_ep"), help="for what is saved"
    )
    main(parser.parse_args().folder)
