"""TRL's trainers with the callback for the balance loss, against losses written by hand."""

import copy

import pytest
import torch

from fmoe_ext import fmoefy, huggingface
from fmoe_ext.gates import total_loss
from tests.huggingface.test_balance_callback import (
    VOCAB,
    WEIGHT,
    assert_balance_gradient,
    classifier,
    make_examples,
    make_model,
    num_labels,
    remember_inputs,
)

transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl", reason="pip install trl")
datasets = pytest.importorskip("datasets", reason="pip install trl")
pyarrow = pytest.importorskip("pyarrow", reason="pip install trl")
tokenizers = pytest.importorskip("tokenizers")

STEPS, LR = 3, 0.1
PLAIN = dict(
    per_device_train_batch_size=2,
    lr_scheduler_type="constant",
    optim="sgd",
    max_grad_norm=0.0,
    report_to=[],
    save_strategy="no",
    use_cpu=True,
    bf16=False,
    gradient_checkpointing=False,
    disable_tqdm=True,
)


def tokenizer():
    words = {"[PAD]": 0} | {f"w{i}": i for i in range(1, VOCAB)}
    words_only = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[PAD]"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words_only, pad_token="[PAD]", eos_token="w1", unk_token="[PAD]"
    )


def train_by_trl(model, folder, callbacks, **options):
    """-> the microbatches that it trained on."""
    seen = []

    def collate(rows):
        seen.append({key: torch.tensor([row[key] for row in rows]) for key in ("input_ids", "labels")})
        seen[-1]["attention_mask"] = torch.ones_like(seen[-1]["input_ids"])
        return seen[-1]

    rows = [{key: value.tolist() for key, value in row.items()} for row in make_examples(6)]
    arguments = trl.SFTConfig(
        output_dir=str(folder),
        max_steps=STEPS,
        learning_rate=LR,
        remove_unused_columns=False,
        dataset_kwargs={"skip_prepare_dataset": True},  # it has token numbers already
        **PLAIN,
        **options,
    )
    trainer = trl.SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=datasets.Dataset(pyarrow.Table.from_pylist(rows), fingerprint="rows"),
        data_collator=collate,
        processing_class=tokenizer(),
        callbacks=callbacks,
    )
    trainer.train()
    return seen


def train_by_hand(model, microbatches):
    optimizer = torch.optim.SGD(model.parameters(), LR)
    for batch in microbatches:
        own = model(**batch, num_items_in_batch=num_labels(batch)).loss
        loss = own + WEIGHT * total_loss(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_three_steps_of_sft(tmp_path):
    model, by_hand, without = make_model(), make_model(), make_model()
    seen = train_by_trl(model, tmp_path / "with", [huggingface.balance_callback(WEIGHT)])
    train_by_hand(by_hand, seen)
    assert len(seen) == STEPS
    for ours, theirs in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)  # TRL's loss is computed in float32
    train_by_trl(without, tmp_path / "without", [])
    gates = [name for name in model.state_dict() if name.endswith("gate.gate.weight")]
    assert gates
    for name in gates:
        assert not torch.allclose(model.state_dict()[name], without.state_dict()[name], rtol=1e-6)


MICROBATCHES = 2
COMMON = dict(
    max_steps=1, logging_steps=1, gradient_accumulation_steps=MICROBATCHES, learning_rate=1.0, **PLAIN
)


def preferences():
    return {"prompt": ["w2 w3 w4"] * 4, "chosen": [" w5 w6"] * 4, "rejected": [" w7 w8"] * 4}


def judgements():
    return {"prompt": ["w2 w3 w4"] * 4, "completion": [" w5 w6", " w7 w8"] * 2, "label": [True, False] * 2}


def reward(completions, **_):
    return [float(len(set(completion.split()))) for completion in completions]


# name: (trainer, its configuration, model, rows, further arguments)
TRAINERS = {
    "grpo": (
        "GRPO",
        dict(num_generations=2, max_completion_length=4),
        make_model,
        lambda: {"prompt": ["w2 w3 w4"] * 4},
        dict(reward_funcs=reward),
    ),
    "reward": (
        "Reward",
        {},
        classifier,
        lambda: {key: [f"w2 w3{text}" for text in preferences()[key]] for key in ("chosen", "rejected")},
        {},
    ),
    "dpo": ("DPO", {}, make_model, preferences, dict(ref_model=make_model)),
    "kto": ("KTO", {}, make_model, judgements, dict(ref_model=make_model)),
    "sft dft": ("SFT", dict(loss_type="dft"), make_model, lambda: {"text": ["w2 w3 w4 w5 w6"] * 4}, {}),
}


def one_step(name, folder, callbacks):
    """-> the trained model, the inputs of its forwards."""
    kind, options, make, rows, arguments = TRAINERS[name]
    model = make()
    seen = remember_inputs(model)
    arguments = {key: value() if value is make_model else value for key, value in arguments.items()}
    trainer = getattr(trl, f"{kind}Trainer")(
        model=model,
        args=getattr(trl, f"{kind}Config")(output_dir=str(folder), **COMMON, **options),
        train_dataset=datasets.Dataset(pyarrow.table(rows())),
        processing_class=tokenizer(),
        callbacks=callbacks,
        **arguments,
    )
    trainer.train()
    return model, seen, trainer


@pytest.mark.parametrize("name", TRAINERS)
def test_step_of_trl_adds_the_gradient_of_the_balance_loss(name, tmp_path):
    """These trainers compute their loss outside of the model, which returns none."""
    model, seen, trainer = one_step(name, tmp_path / "with", [huggingface.balance_callback(WEIGHT)])
    without, seen_without, _ = one_step(name, tmp_path / "without", [])
    assert len(seen) == len(seen_without) == MICROBATCHES
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(seen, seen_without, strict=True))
    mean = assert_balance_gradient(TRAINERS[name][2](), seen, model, without)
    logged = [entry["moe/balance_loss"] for entry in trainer.state.log_history if "moe/balance_loss" in entry]
    assert logged == [pytest.approx(mean, rel=1e-9)]


def dpo(model, folder, **options):
    rows = [{"prompt": "w3 w4", "chosen": f"w{i}", "rejected": "w5 w6"} for i in range(7, 11)]
    arguments = trl.DPOConfig(
        output_dir=str(folder), report_to=[], use_cpu=True, bf16=False, max_steps=1, disable_tqdm=True
    )
    dataset = datasets.Dataset(pyarrow.Table.from_pylist(rows), fingerprint="pairs")
    return trl.DPOTrainer(
        model, args=arguments, train_dataset=dataset, processing_class=tokenizer(), **options
    )


def test_dpo_reference_is_never_the_dense_model(tmp_path):
    """TRL reads the reference by the model's name: that of the dense one would compute other numbers in silence."""
    dense = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        )
    )
    dense.save_pretrained(tmp_path / "dense")
    model = fmoefy(transformers.LlamaForCausalLM.from_pretrained(tmp_path / "dense"), 4)
    with pytest.raises(OSError, match=r"which no name loads: give ref_model=copy\.deepcopy\(model\)"):
        dpo(model, tmp_path / "out")
    model.save_pretrained(tmp_path / "moe")
    loaded = huggingface.from_pretrained(tmp_path / "moe")
    assert loaded.config._name_or_path == str(tmp_path / "moe")
    with pytest.raises(KeyError, match=r"needs fmoe_ext\.huggingface\.from_pretrained"):
        dpo(loaded, tmp_path / "out")
    trainer = dpo(loaded, tmp_path / "out", ref_model=copy.deepcopy(loaded))
    assert trainer.train().training_loss == pytest.approx(0.6931, abs=1e-3)  # log 2: both are the same model
