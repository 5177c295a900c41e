"""TRL's SFTTrainer with the callback for the balance loss, against a loop written by hand."""

import pytest
import torch

from fmoe_ext.gates import total_loss
from fmoe_ext.integrations import huggingface
from tests.integrations.test_balance_callback import (
    VOCAB,
    WEIGHT,
    make_examples,
    make_model,
    num_labels,
)

transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl", reason="pip install trl")
datasets = pytest.importorskip("datasets", reason="pip install trl")
pyarrow = pytest.importorskip("pyarrow", reason="pip install trl")
tokenizers = pytest.importorskip("tokenizers")

STEPS, LR = 3, 0.1


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
        per_device_train_batch_size=2,
        learning_rate=LR,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        remove_unused_columns=False,
        dataset_kwargs={"skip_prepare_dataset": True},  # it has token numbers already
        disable_tqdm=True,
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


def test_other_losses_are_refused(tmp_path):
    callback = huggingface.balance_callback(WEIGHT)
    with pytest.raises(ValueError, match=r'makes its loss of log_probs.*loss_type="nll"'):
        train_by_trl(make_model(), tmp_path, [callback], loss_type="dft")
