"""The balance loss under Trainer, accelerate and Lightning, against loops written by hand."""

import json
from itertools import pairwise

import pytest
import torch
from torch import nn

from fmoe_ext import FMoETransformerMLP, fmoefy
from fmoe_ext.gates import SigmoidGate, SoftmaxGate, total_loss
from fmoe_ext.integrations import huggingface

transformers = pytest.importorskip("transformers")

VOCAB, WEIGHT, LR = 31, 0.3, 1e-2
GATES = {"softmax": SoftmaxGate, "sigmoid": SigmoidGate}


def make_model(gate="softmax"):
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = fmoefy(transformers.LlamaForCausalLM(config).double(), num_experts=4, gate=GATES[gate])
    return model.train()


def make_examples(number=10):
    """Sequences of which different numbers of labels count."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCAB, (number, 8), generator=generator)
    labels = [row.masked_fill(torch.arange(8) < i % 5, -100) for i, row in enumerate(ids)]
    return [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]


def train_by_trainer(model, folder, seen, callback, **changes):
    def collate(rows):
        seen.append({key: torch.stack([row[key] for row in rows]) for key in rows[0]})
        return seen[-1]

    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,  # 5 microbatches an epoch: 2, 2 and 1
        learning_rate=LR,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        max_grad_norm=0.1,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        **changes,
    )
    trainer = transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=make_examples(),
        data_collator=collate,
        callbacks=[callback],
    )
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def num_labels(batch):
    return (batch["labels"][:, 1:] != -100).sum()


def train_by_hand(model, microbatches, by_tokens):
    """by_tokens: each microbatch counts by its labels; else all alike -> the losses of the steps, of the gates'."""
    optimizer = torch.optim.AdamW(model.parameters(), LR, weight_decay=0.0)
    losses, balances = [], []
    for group in (microbatches[begin:end] for begin, end in pairwise((0, 2, 4, 5, 7, 9, 10))):
        total = sum(map(num_labels, group))
        loss_of_step, balance_of_step = 0.0, 0.0
        for batch in group:
            if by_tokens:
                own = model(**batch, num_items_in_batch=total).loss  # a sum over the labels, divided by total
                loss = own + num_labels(batch) / total.double() * WEIGHT * (balance := total_loss(model))
            else:
                loss = (model(**batch).loss + WEIGHT * (balance := total_loss(model))) / len(group)
            loss.backward()
            loss_of_step += loss.item()
            balance_of_step += balance.item() / len(group)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss_of_step)
        balances.append(balance_of_step)
    return losses, balances


def assert_same_state(model, expected):
    for (name, ours), theirs in zip(model.state_dict().items(), expected.state_dict().values(), strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=1e-11, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("by_tokens", [True, False])
def test_trainer_equals_a_loop_by_hand(gate, by_tokens, tmp_path):
    model, expected = make_model(gate), make_model(gate)
    model.accepts_loss_kwargs = by_tokens  # whether Trainer tells it num_items_in_batch
    seen = []
    logs = train_by_trainer(
        model, tmp_path, seen, huggingface.balance_callback(WEIGHT, tmp_path / "load.jsonl")
    )
    losses, balances = train_by_hand(expected, seen, by_tokens)
    assert_same_state(model, expected)
    assert [entry["loss"] for entry in logs] == pytest.approx(losses, rel=1e-4)  # rounded by Trainer
    assert [entry["moe/balance_loss"] for entry in logs] == pytest.approx(balances, rel=1e-12)
    assert all(entry["moe/max_over_mean"] >= 1 and entry["moe/dropped_share"] == 0 for entry in logs)
    loads = [json.loads(line)["layers"] for line in (tmp_path / "load.jsonl").read_text().splitlines()]
    counted = [sum(layer["tokens_per_expert"]) for layers in loads for layer in layers.values()]
    assert counted == [64, 64, 64, 64, 32, 32] * 2  # 8 tokens, 2 choices of each, 2 sequences a microbatch
    if gate == "sigmoid":
        biases = model.model.layers[0].mlp.gate.expert_bias.abs()
        assert 0 < biases.max() <= 6.1e-3  # once a step

    own = model(**seen[0]).loss  # the callback has gone
    torch.testing.assert_close(own, expected(**seen[0]).loss)


def test_evaluation_has_no_balance_loss(tmp_path):
    model = make_model()
    handle = huggingface.add_balance_loss(model, WEIGHT)
    batch = {key: value[None] for key, value in make_examples()[0].items()}
    in_training = model(**batch).loss
    plain = model.eval()(**batch).loss
    assert in_training > plain + 0.5 * WEIGHT
    as_tuple = model.train()(**batch, return_dict=False)[0]
    torch.testing.assert_close(as_tuple, in_training)
    handle.remove()
    torch.testing.assert_close(model(**batch).loss, plain)


def test_without_a_loss_or_gates():
    model = make_model()
    huggingface.add_balance_loss(model)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM returned no loss .*label smoothing"):
        model(input_ids=make_examples()[0]["input_ids"][None])
    with pytest.raises(ValueError, match="Linear has no gate of fmoe_ext"):
        huggingface.add_balance_loss(nn.Linear(2, 2))


@pytest.mark.parametrize("weight", [-0.1, float("nan"), float("inf"), "0.01", None])
def test_weights_that_are_none(weight):
    with pytest.raises(ValueError, match="weight of the balance loss must be a number of at least 0"):
        huggingface.add_balance_loss(make_model(), weight)
    with pytest.raises(ValueError, match="weight of the balance loss must be a number of at least 0"):
        huggingface.balance_callback(weight)


def test_a_second_loss_takes_the_place_of_the_first(tmp_path):
    """Gates give their loss once: the first of two counted, and the log of the second said 0."""
    alone, twice = make_model(), make_model()
    expected = train_by_trainer(alone, tmp_path / "a", [], huggingface.balance_callback(WEIGHT))
    first = huggingface.add_balance_loss(twice, 7.0)
    with pytest.warns(UserWarning, match=r"balance loss of weight 7\.0 that was added .* is taken off"):
        got = train_by_trainer(twice, tmp_path / "b", [], huggingface.balance_callback(WEIGHT))
    first.remove()  # once more does nothing
    key = "moe/balance_loss"
    assert [entry[key] for entry in got] == [entry[key] for entry in expected]
    assert_same_state(twice, alone)


def test_accelerate_equals_a_loop_by_hand():
    accelerate = pytest.importorskip("accelerate")
    examples = make_examples(8)
    microbatches = [
        {key: torch.stack([row[key] for row in examples[i : i + 2]]) for key in examples[0]}
        for i in range(0, 8, 2)
    ]
    model, expected = make_model(), make_model()
    huggingface.add_balance_loss(model, WEIGHT)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), LR))
    for batch in microbatches:
        with accelerator.accumulate(prepared):
            accelerator.backward(prepared(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()

    optimizer = torch.optim.AdamW(expected.parameters(), LR)
    for number, batch in enumerate(microbatches):
        ((expected(**batch).loss + WEIGHT * total_loss(expected)) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_state(model, expected)


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.mlp = FMoETransformerMLP(4, 6, 5, gate=SigmoidGate).double()
        self.mlp.gate.balance_loss = "global"

    def loss(self, x):
        return self.mlp(x).square().mean()


def test_lightning_equals_a_loop_by_hand(tmp_path):
    lightning = pytest.importorskip("pytorch_lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.small = Small()

        def training_step(self, batch, number):
            return {"loss": self.small.loss(batch[0])}

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), LR)

    x = torch.randn(8, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).flatten(0, 1)
    module, expected = Module(), Small()
    huggingface.add_balance_loss(module, WEIGHT)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(tmp_path),
    )
    trainer.fit(module, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=6))

    optimizer = torch.optim.AdamW(expected.parameters(), LR)
    for number, part in enumerate(x.split(6)):
        ((expected.loss(part) + WEIGHT * total_loss(expected)) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_state(module.small, expected)
    assert expected.mlp.gate.expert_bias.abs().max() <= 2.1e-3
