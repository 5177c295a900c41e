"""GRPO with and without batch_invariant(): the probabilities that were sampled are those that are trained, or nearly.

A small Qwen3-MoE learns to reverse digits, by TRL's GRPOTrainer. GRPO weighs each sampled token by the ratio of its
probability in the policy that trains to that in the policy that sampled. Right after sampling both are one policy, and
the ratio should be 1. But generation computes a token at a time, training whole texts, so usually the two differ in
their last bits. Inside batch_invariant() they do not: the ratio is 1, and the KL between the two exactly 0.

The model first learns from answers of which 40 % of the digits are wrong. GRPO finds out that they are.
"""

import argparse
import copy
import json
import random
import shutil
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import datasets
import matplotlib.pyplot as plt
import pyarrow
import tokenizers
import torch
import transformers
import trl
from torch import Tensor
from trl.kernels import ChunkedLogProbFunction

import fmoe_ext

DIGITS = "012345"
WORDS = {word: i for i, word in enumerate(["<pad>", "<end>", "=", *DIGITS])}
PAD, END = WORDS["<pad>"], WORDS["<end>"]
ERRORS = 0.4  # share of the digits in the answers that the model begins with
LENGTHS = range(2, 6)  # digits of a prompt; shorter ones are padded on the left
MOST_NEW = max(LENGTHS) + 1  # tokens of an answer
NUM_PROMPTS, NUM_SAMPLES = 16, 8  # of a batch; of each prompt
NUM_ITERATIONS = 2  # steps by each batch; the ratio is 1 at the first
NUM_BATCHES = 60
SEED = 1
USUAL, OURS = "usual", "batch_invariant()"


def make_model() -> transformers.Qwen3MoeForCausalLM:
    torch.manual_seed(SEED)
    config = transformers.Qwen3MoeConfig(
        vocab_size=len(WORDS),
        hidden_size=128,
        intermediate_size=128,
        moe_intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        pad_token_id=PAD,
        eos_token_id=END,
        bos_token_id=None,
    )
    model = fmoe_ext.huggingface.use(transformers.Qwen3MoeForCausalLM(config))
    model.register_forward_pre_hook(give_positions, with_kwargs=True)
    return model


def give_positions(model, args, kwargs):
    """Count positions from a text's first token, as generate() does; TRL's forward would count its padding too."""
    mask = kwargs.get("attention_mask")
    if mask is not None and kwargs.get("position_ids") is None:
        kwargs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    return args, kwargs


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, unk_token="<pad>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<end>", unk_token="<pad>", padding_side="left"
    )


def make_prompts(number: int, seed: int) -> list[str]:
    """Texts such as "4 7 1 ="."""
    chance = random.Random(seed)
    return [" ".join([*chance.choices(DIGITS, k=chance.choice(LENGTHS)), "="]) for _ in range(number)]


def answer(prompt: str) -> list[int]:
    return [*(WORDS[digit] for digit in reversed(prompt.split()[:-1])), END]


def reward(prompts, completion_ids, **_) -> list[float]:
    """The share of the answer's tokens that stand where they should."""
    scores = []
    for prompt, found in zip(prompts, completion_ids, strict=True):
        right = answer(prompt)
        num_right = sum(a == b for a, b in zip(right, found, strict=False))
        scores.append(num_right / max(len(right), len(found)))
    return scores


def teach(model, tokenizer, steps: int) -> None:
    """Train on answers with errors, which GRPO is to remove."""
    chance = random.Random(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        prompts = make_prompts(64, seed=1_000 + step)
        given = tokenizer(prompts, return_tensors="pt", padding=True)
        answers = [
            [
                i if i == END or chance.random() > ERRORS else WORDS[chance.choice(DIGITS)]
                for i in answer(prompt)
            ]
            for prompt in prompts
        ]
        answers = torch.tensor([a + [PAD] * (MOST_NEW - len(a)) for a in answers])
        tokens = torch.cat((given.input_ids, answers), 1)
        mask = torch.cat((given.attention_mask, (answers != PAD).long()), 1)
        labels = tokens.masked_fill(mask == 0, -100)
        labels[:, : given.input_ids.shape[1]] = -100
        loss = model(input_ids=tokens, attention_mask=mask, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def sample(prompts: list[str], trainer) -> dict[str, list]:
    """Generate an answer to each prompt, with log-probabilities of its tokens; TRL calls it as rollout_func."""
    tokenizer, model = trainer.processing_class, trainer.accelerator.unwrap_model(trainer.model)
    given = tokenizer(prompts, return_tensors="pt", padding=True)
    model.eval()
    with torch.no_grad(), trainer.accelerator.autocast():
        out = model.generate(
            **given,
            max_new_tokens=MOST_NEW,
            do_sample=True,
            top_k=0,
            output_hidden_states=True,
            return_dict_in_generate=True,
        )
        tokens = out.sequences[:, given.input_ids.shape[1] :]  # [B, C]
        # what the head got for each token, [B, C, D]; of the first step there is a row for each token of the prompt
        hidden = torch.stack([of_layers[-1][:, -1] for of_layers in out.hidden_states], 1)
        # the trainer's own function of the head: log_softmax would round otherwise
        logps = ChunkedLogProbFunction.apply(
            hidden.flatten(0, 1), model.lm_head.weight, None, tokens.flatten(), 1.0, 32768, None, 1.0, ()
        )[0].view_as(tokens)
    model.train()
    lengths = ((tokens == END).cumsum(1) - (tokens == END).long() == 0).sum(1).tolist()  # up to the first end
    return {
        "prompt_ids": [
            ids[m.bool()].tolist() for ids, m in zip(given.input_ids, given.attention_mask, strict=True)
        ],
        "completion_ids": [row[:n].tolist() for row, n in zip(tokens, lengths, strict=True)],
        "logprobs": [row[:n].tolist() for row, n in zip(logps, lengths, strict=True)],
    }


class Trainer(trl.GRPOTrainer):
    """GRPO whose ratio is that to the policy that sampled; .differences has a record for each sampled batch."""

    def __init__(self, model, **options) -> None:
        super().__init__(model, **options)
        self.differences: list[dict[str, float]] = []
        self.trained: Tensor | None = None  # log-probabilities [B, C] of the last forward of training
        model.register_forward_hook(self.keep)

    def keep(self, model, args, out) -> None:
        logps = getattr(out, "log_probs", None)
        if logps is not None:
            self.trained = logps.detach()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        sampled, mask = inputs["sampling_per_token_logps"], inputs["completion_mask"].bool()
        # TRL's are those of a second forward of training
        inputs = {**inputs, "old_per_token_logps": sampled}
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self.state.global_step % self.num_iterations == 0:  # no step since these were sampled
            trained = self.trained[:, -sampled.shape[1] :]
            self.differences.append(compare(trained[mask].double(), sampled[mask].double()))
        return loss


def compare(trained: Tensor, sampled: Tensor) -> dict[str, float]:
    """Both [N], log-probabilities of sampled tokens."""
    log_ratio = trained - sampled
    return {
        "largest": log_ratio.abs().max().item(),
        # from the policy that sampled to the one that trains; no token's part is negative
        "kl": (log_ratio.expm1() - log_ratio).mean().item(),
        "equal": (log_ratio == 0).double().mean().item(),
    }


def train(start, tokenizer, invariant: bool, options: argparse.Namespace, out: Path) -> dict:
    """-> {"records": one for each batch of samples, "seconds": of the processor}"""
    model = copy.deepcopy(start)
    rows = [{"prompt": prompt} for prompt in make_prompts(NUM_PROMPTS * options.batches, seed=SEED)]
    arguments = trl.GRPOConfig(
        output_dir=str(out),
        max_steps=NUM_ITERATIONS * options.batches,
        num_iterations=NUM_ITERATIONS,
        per_device_train_batch_size=NUM_PROMPTS * NUM_SAMPLES,
        num_generations=NUM_SAMPLES,
        max_completion_length=MOST_NEW,
        learning_rate=7e-4,
        lr_scheduler_type="constant",
        beta=0.0,
        bf16=options.dtype == "bfloat16",
        gradient_checkpointing=True,
        seed=SEED,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(
        model,
        args=arguments,
        reward_funcs=reward,
        train_dataset=datasets.Dataset(pyarrow.Table.from_pylist(rows), fingerprint=f"prompts {SEED}"),
        processing_class=tokenizer,
        rollout_func=sample,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    began = time.process_time()
    with fmoe_ext.batch_invariant() if invariant else nullcontext():
        trainer.train()
    seconds = time.process_time() - began
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    records = [{**d, "reward": r} for d, r in zip(trainer.differences, rewards, strict=True)]
    return {"records": records, "seconds": seconds}


def draw(runs: dict[str, dict], dtype: str, file: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name, run in runs.items():
        left.plot([record["kl"] for record in run["records"]], ".-", label=name)
        right.plot([record["reward"] for record in run["records"]], label=name)
    usual = [record["kl"] for record in runs[USUAL]["records"] if record["kl"] > 0]
    left.set_yscale("symlog", linthresh=min(usual, default=1e-15))  # 0 is a place too
    left.set_title(f"KL from the policy that sampled, {dtype}")
    left.set(xlabel="batch of samples", ylabel="nats a token")
    right.set_title("Reward")
    right.set(xlabel="batch of samples", ylabel="share of right tokens", ylim=(0, 1))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
    figure.savefig(file, dpi=120)


def print_table(runs: dict[str, dict]) -> None:
    print(f"{'':6}{USUAL:^42}{OURS:^42}")
    print("batch " + f"{'KL':>10}{'largest':>10}{'equal':>10}{'reward':>10}  " * 2)
    num = len(runs[OURS]["records"])
    for i in [*range(0, num - 1, max(1, num // 10)), num - 1]:
        cells = [
            f"{r['kl']:10.1e}{r['largest']:10.1e}{r['equal']:10.1%}{r['reward']:10.2f}"
            for r in (run["records"][i] for run in runs.values())
        ]
        print(f"{i:5} {'  '.join(cells)}")
    print("      " + "  ".join(f"{run['seconds']:32.0f} s of processor" for run in runs.values()))


def check(runs: dict[str, dict], rewards: bool) -> bool:
    """Print whether what has to hold on any processor does."""
    of_ours = runs[OURS]["records"]
    found = {
        "inside batch_invariant() KL and every difference are exactly 0": all(
            (r["kl"], r["largest"], r["equal"]) == (0, 0, 1) for r in of_ours
        )
    }
    if rewards:
        for name, run in runs.items():
            values = [record["reward"] for record in run["records"]]
            first, last = (sum(part) / len(part) for part in (values[:5], values[-5:]))
            found[f"{name}: reward {first:.2f} -> {last:.2f}"] = last > first + 0.1
    for text, holds in found.items():
        print("ok    " if holds else "FAILED", text)
    return all(found.values())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", default="out/grpo", help="folder to write; what is in it is removed")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of products")
    parser.add_argument("--making-steps", type=int, default=200, help="to teach the model before GRPO")
    parser.add_argument(
        "--batches", type=int, default=NUM_BATCHES, help="of samples; with fewer the rewards are not checked"
    )
    options = parser.parse_args()
    out = Path(options.out)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    tokenizer, start = make_tokenizer(), make_model()
    teach(start, tokenizer, options.making_steps)
    runs = {name: train(start, tokenizer, name == OURS, options, out) for name in (USUAL, OURS)}
    print_table(runs)
    (out / "grpo.json").write_text(json.dumps({"dtype": options.dtype, "runs": runs}, indent=1))
    draw(runs, options.dtype, out / "grpo.png")
    print(f"picture: {out / 'grpo.png'}; numbers: {out / 'grpo.json'}")
    return 0 if check(runs, options.batches >= NUM_BATCHES) else 1


if __name__ == "__main__":
    sys.exit(main())
