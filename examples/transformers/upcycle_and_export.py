"""A dense Qwen3 becomes an MoE model, is trained with Trainer, and leaves as a Qwen3-MoE that plain Transformers loads.

    python examples/transformers/upcycle_and_export.py --out out/upcycle

Everything is made on the spot: the text (Python's own documentation strings), the tokenizer, the model.
"""

import argparse
import inspect
import subprocess
import sys
import tarfile
import textwrap
import threading
from pathlib import Path

import tokenizers
import torch
import transformers

import fmoe_ext

# A program that does not import fmoe_ext.
PLAIN_TRANSFORMERS = """
import sys, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
ids = tokenizer(sys.argv[2], return_tensors="pt").input_ids
with torch.no_grad():
    torch.save(model(input_ids=ids).logits, sys.argv[3])
assert "fmoe_ext" not in sys.modules
print("plain Transformers has loaded a", type(model).__name__)
print("it writes:", repr(tokenizer.decode(model.generate(ids[:, :8], max_new_tokens=12, do_sample=False)[0])))
"""
SENTENCE = "The file is closed when the block has ended, and the default value is None."


class MoETrainer(transformers.Trainer):
    """Trainer, with the balance loss of the gates in the loss."""

    def compute_loss(self, model, inputs, return_outputs=False, **options):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **options)
        if model.training:
            loss = loss + 0.01 * fmoe_ext.gates.total_loss(model)
        return (loss, outputs) if return_outputs else loss


def make_text() -> str:
    modules = (argparse, inspect, subprocess, tarfile, textwrap, threading)
    return "\n".join(inspect.getsource(module) for module in modules)


def make_tokenizer(text: str, vocab_size: int) -> transformers.PreTrainedTokenizerFast:
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    bpe_trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False
    )
    bpe.train_from_iterator([text], bpe_trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|end|>", pad_token="<|end|>"
    )


def make_model(tokenizer: transformers.PreTrainedTokenizerFast) -> transformers.Qwen3ForCausalLM:
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return transformers.Qwen3ForCausalLM(config)


def train(trainer_class, model, examples, folder: Path, steps: int) -> list[float]:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        logging_steps=max(1, steps // 5),
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = trainer_class(model=model, args=arguments, train_dataset=examples)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def logits(model, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


def main() -> None:
    options = parse()
    if options.out.exists():
        sys.exit(f"{options.out} exists already: give another --out, or remove it")
    torch.manual_seed(0)
    text = make_text()
    tokenizer = make_tokenizer(text, vocab_size=512)
    ids = torch.tensor(tokenizer(text).input_ids)
    examples = [{"input_ids": row, "labels": row} for row in ids[: len(ids) // 64 * 64].view(-1, 64)]
    sentence = tokenizer(SENTENCE, return_tensors="pt").input_ids

    model = make_model(tokenizer)
    print("dense: loss", *train(transformers.Trainer, model, examples, options.out / "dense", options.steps))
    dense_logits = logits(model, sentence)

    fmoe_ext.fmoefy(model, num_experts=8, top_k=2, init="upcycle")
    print(model.fmoe_report)
    difference = (logits(model, sentence) - dense_logits).abs().max().item()
    print(f"first output of the MoE model: off by {difference:.1e} from the dense one")
    print("MoE: loss", *train(MoETrainer, model, examples, options.out / "moe", options.steps))

    folder = fmoe_ext.export(model, options.out / "qwen3_moe", "qwen3_moe", tokenizer=tokenizer)
    print("exported", *sorted(file.name for file in folder.iterdir()))
    theirs = options.out / "logits.pt"
    command = [sys.executable, "-c", PLAIN_TRANSFORMERS, str(folder), SENTENCE, str(theirs)]
    subprocess.run(command, check=True)
    expected = logits(model, sentence)
    error = ((torch.load(theirs) - expected).abs().max() / expected.abs().max()).item()
    if not error < 1e-5:
        sys.exit(f"plain Transformers has other logits, by {error:.1e} of the largest")
    print(f"plain Transformers has the same logits: off by {error:.1e} of the largest, in float32")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out/upcycle"), help="a folder that does not exist yet"
    )
    parser.add_argument("--steps", type=int, default=100, help="of the dense model, and of the MoE model")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, but is {options.steps}")
    return options


if __name__ == "__main__":
    main()
