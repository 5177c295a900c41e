"""LoRA on the experts of a fmoefied Llama: PEFT adapts, saves, loads and merges them as it does dense layers.

python examples/transformers/peft_experts.py [folder]    # a small model made on the spot; nothing is downloaded
"""

import argparse
from pathlib import Path

import peft
import torch
import transformers

from fmoe_ext import fmoefy

VOCAB, STEPS = 64, 60
EXPERTS = ["mlp.experts.htoh4.weight", "mlp.experts.h4toh.weight"]  # stacked: one low-rank matrix an expert


def make_model() -> torch.nn.Module:
    """A dense Llama whose MLPs became four experts each, two for every token."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    return fmoefy(transformers.LlamaForCausalLM(config), num_experts=4, init="upcycle")


def sequences(number: int) -> torch.Tensor:
    """Sequences that count upwards, each from another number: something to learn."""
    return (torch.randint(VOCAB, (number, 1)) + torch.arange(16)) % VOCAB


def train(model: torch.nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    losses = []
    for _ in range(STEPS):
        ids = sequences(16)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(folder: Path) -> None:
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "gate.gate"], target_parameters=EXPERTS)
    model = peft.get_peft_model(make_model(), config)
    model.print_trainable_parameters()
    losses = train(model)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {STEPS} steps of adapters alone")

    model.save_pretrained(folder)
    ids = sequences(4)
    with torch.no_grad():
        unmerged = model(input_ids=ids).logits
        loaded = peft.PeftModel.from_pretrained(make_model(), folder)
        again = loaded(input_ids=ids).logits
        merged = loaded.merge_and_unload()(input_ids=ids).logits
    print(f"saved, loaded: logits {'equal' if torch.equal(again, unmerged) else 'DIFFER'}")
    print(f"merged into the experts: largest difference of logits {(merged - unmerged).abs().max():.1e}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder", nargs="?", type=Path, default=Path("out/peft_experts"), help="for what is saved"
    )
    main(parser.parse_args().folder)
