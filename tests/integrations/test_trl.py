"""TRL's SFTTrainer with the callback for the balance loss, against a loop written by hand."""

import pytest
import torch

from fmoe_ext.gates import total_loss
from fmoe_ext.integrations import huggingface
from tests.integrations.test_balance_callback import (
    VOCAB,
    WEIGHT,
    assert_same_state,
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


def train_by_trl(model, folder, callbacks):
    """-> the microbatches that it trained on."""
    seen = []

    def collate(rows):
        seen.append({key: torch.tensor([row[key] for row in rows]) for key in ("input_ids", "labels")})
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
    assert_same_state(model, by_hand)
    train_by_trl(without, tmp_path / "without", [])
    gates = [name for name in model.state_dict() if name.endswith("gate.gate.weight")]
    assert gates
    for name in gates:
        assert not torch.allclose(model.state_dict()[name], without.state_dict()[name], rtol=1e-6)
