"""The balance loss under Trainer and accelerate, against loops written by hand."""

import copy
import json
import pickle
from itertools import pairwise
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import nn

from fmoe_ext import FMoETransformerMLP, fmoefy, huggingface
from fmoe_ext.gates import SigmoidGate, SoftmaxGate, total_loss

transformers = pytest.importorskip("transformers")

VOCAB, WEIGHT, LR = 31, 0.3, 1e-2
GATES = {"softmax": SoftmaxGate, "sigmoid": SigmoidGate}


SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    pad_token_id=0,
)


def make_model(gate="softmax"):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).double()
    return fmoefy(model, num_experts=4, gate=GATES[gate]).train()


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
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        **{"report_to": []} | changes,
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


def remember_inputs(model):
    """-> a list that gets the inputs of every forward with a gradient."""
    seen = []

    def remember(module, args, kwargs):
        if torch.is_grad_enabled():
            seen.append({key: kwargs[key] for key in ("input_ids", "attention_mask") if key in kwargs})

    model.register_forward_pre_hook(remember, with_kwargs=True)
    return seen


def assert_balance_gradient(start, seen, model, without):
    """A step of SGD with lr 1 and the callback differs by the gradient of start's balance loss on what was seen.

    -> the mean of the gates' losses. The norms of Llama compute in float32.
    """
    losses = []
    for inputs in seen:
        start(**inputs)
        losses.append(total_loss(start))
        (WEIGHT * losses[-1] / len(seen)).backward()
    parameters = zip(start.named_parameters(), model.parameters(), without.parameters(), strict=True)
    for (path, p), ours, theirs in parameters:
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        torch.testing.assert_close(
            theirs - ours, grad, rtol=1e-4, atol=1e-6, msg=lambda m, path=path: f"{path}: {m}"
        )
    gates = [p.grad for path, p in start.named_parameters() if "mlp.gate" in path and p.requires_grad]
    assert gates and all(grad.norm() > 1e-3 for grad in gates)
    return sum(losses).item() / len(losses)


def mean_of_logits(outputs, labels, num_items_in_batch=None):
    return outputs.logits.float().square().sum() / num_items_in_batch


def classifier():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_labels=1)
    return fmoefy(transformers.LlamaForSequenceClassification(config).double(), num_experts=4).train()


def adapted():
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj"], modules_to_save=["mlp.gate"], init_lora_weights=False
    )
    return peft.get_peft_model(make_model(), config).train()


# name: (model, changes of the arguments of Trainer, of TrainingArguments)
OTHER_LOSSES = {
    "classification": (classifier, {}, {}),
    "compute_loss_func": (make_model, {"compute_loss_func": mean_of_logits}, {}),
    "label smoothing": (make_model, {}, {"label_smoothing_factor": 0.1}),
    "peft": (adapted, {}, {}),
}


def one_step(name, folder, callbacks):
    """-> the model after two microbatches of two sequences of as many labels."""
    make, options, changes = OTHER_LOSSES[name]
    model = make()
    seen = remember_inputs(model)
    rows = [{"input_ids": example["input_ids"]} for example in make_examples(4)]
    for row in rows:
        row["labels"] = torch.tensor(1.0) if name == "classification" else row["input_ids"]
    arguments = transformers.TrainingArguments(
        **{"output_dir": str(folder), "max_steps": 1, "per_device_train_batch_size": 2},
        **{"gradient_accumulation_steps": 2, "learning_rate": 1.0, "lr_scheduler_type": "constant"},
        **{"optim": "sgd", "max_grad_norm": 0.0, "report_to": [], "save_strategy": "no", "use_cpu": True},
        **{"disable_tqdm": True, "logging_steps": 1},
        **changes,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, callbacks=callbacks, **options)
    trainer.train()
    assert "compute_loss" not in vars(trainer)
    return model, seen


@pytest.mark.parametrize("name", OTHER_LOSSES)
def test_step_adds_the_gradient_of_the_balance_loss(name, tmp_path):
    """Losses that the model does not return, or not alone."""
    model, seen = one_step(name, tmp_path / "with", [huggingface.balance_callback(WEIGHT)])
    without, _ = one_step(name, tmp_path / "without", [])
    assert len(seen) == 2
    assert_balance_gradient(OTHER_LOSSES[name][0](), seen, model, without)


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
    with pytest.raises(ValueError, match=r"LlamaForCausalLM returned no loss .*add_balance_loss\(trainer\)"):
        model(input_ids=make_examples()[0]["input_ids"][None])
    with pytest.raises(ValueError, match="Linear has no gate of fmoe_ext"):
        huggingface.add_balance_loss(nn.Linear(2, 2))


def test_trainer_keeps_a_compute_loss_of_the_user(tmp_path):
    model = make_model()
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    trainer = transformers.Trainer(model, arguments)

    def twice(model, inputs, return_outputs=False, num_items_in_batch=None):
        return 2 * model(**inputs).loss

    trainer.compute_loss = twice
    batch = {key: value[None] for key, value in make_examples()[0].items()}
    expected = trainer.compute_loss(model, batch).detach()
    total_loss(model)  # or the next forward warns that nobody has read it
    added = huggingface.add_balance_loss(trainer, WEIGHT)
    with_balance = trainer.compute_loss(model, batch)
    assert with_balance > expected + 0.5 * WEIGHT
    added.remove()
    assert trainer.compute_loss is twice
    torch.testing.assert_close(trainer.compute_loss(model, batch), expected, rtol=0, atol=0)


class Output(NamedTuple):
    loss: torch.Tensor
    rows: torch.Tensor


class Returns(nn.Module):
    """Apply a function to the rows of a layer."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.mlp, self.function = FMoETransformerMLP(4, 6, 5, gate=SoftmaxGate), function

    def forward(self, x):
        return self.function(self.mlp(x))


def test_loss_is_added_to_a_tensor_only_if_it_is_a_loss():
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    model = Returns(lambda rows: rows.square().mean())
    expected = model(x) + WEIGHT * total_loss(model)
    huggingface.add_balance_loss(model, WEIGHT)
    torch.testing.assert_close(model(x), expected)
    model.function = lambda rows: rows.square().mean().reshape(1)
    torch.testing.assert_close(model(x), expected.reshape(1))
    model.function = lambda rows: rows  # logits
    with pytest.raises(ValueError, match="Returns returned no loss"):
        model(x)
    with pytest.raises(ValueError, match="Returns returned no loss"):
        model(x[:1])


def test_named_tuple_keeps_its_names():
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    model = Returns(lambda rows: Output(rows.square().mean(), rows))
    plain = model(x)
    expected = plain.loss + WEIGHT * total_loss(model)
    huggingface.add_balance_loss(model, WEIGHT)
    output = model(x)
    assert type(output) is Output
    torch.testing.assert_close(output.loss, expected)
    torch.testing.assert_close(output.rows, plain.rows, rtol=0, atol=0)


@pytest.mark.parametrize("weight", [-0.1, float("nan"), float("inf"), "0.01", None, True])
def test_weights_that_are_none(weight):
    with pytest.raises(ValueError, match="weight of the balance loss must be a number of at least 0"):
        huggingface.add_balance_loss(make_model(), weight)
    with pytest.raises(ValueError, match="weight of the balance loss must be a number of at least 0"):
        huggingface.balance_callback(weight)


def test_second_loss_takes_the_place_of_the_first(tmp_path):
    """Gates give their loss once: the first of two counted, and the log of the second said 0."""
    alone, twice = make_model(), make_model()
    expected = train_by_trainer(alone, tmp_path / "a", [], huggingface.balance_callback(WEIGHT))
    first = huggingface.add_balance_loss(twice, 7.0)
    with pytest.warns(UserWarning, match=r"balance loss of weight 7\.0 that was added .* is removed"):
        got = train_by_trainer(twice, tmp_path / "b", [], huggingface.balance_callback(WEIGHT))
    first.remove()  # once more does nothing
    key = "moe/balance_loss"
    assert [entry[key] for entry in got] == [entry[key] for entry in expected]
    assert_same_state(twice, alone)


def test_accelerate_equals_a_loop_by_hand():
    accelerate = pytest.importorskip("accelerate")
    # where a Trainer that another test ended in the middle has left its data loader: the last batch is always near
    accelerate.state.GradientState._reset_state()
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


def test_pickled_model_keeps_the_balance_loss():
    model = make_model()
    huggingface.add_balance_loss(model, WEIGHT)
    batch = {key: value[None] for key, value in make_examples()[0].items()}
    other = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(other(**batch).loss, model(**batch).loss, rtol=0, atol=0)
    assert other(**batch).loss > other.eval()(**batch).loss + 0.5 * WEIGHT


def test_loss_of_a_copy_is_replaced():
    model = make_model()
    handle = huggingface.add_balance_loss(model, WEIGHT)
    batch = {key: value[None] for key, value in make_examples()[0].items()}
    other = copy.deepcopy(model)
    expected = model(**batch).loss
    with pytest.warns(UserWarning, match=r"balance loss of weight 0\.3 that was added .* is removed"):
        huggingface.add_balance_loss(other, WEIGHT)
    torch.testing.assert_close(other(**batch).loss, expected)
    assert handle.is_attached
    torch.testing.assert_close(model(**batch).loss, expected)


def test_number_of_labels_of_a_batch():
    """Its share is counted by labels; none in all is a share of zero, not NaN."""
    model = make_model()
    huggingface.add_balance_loss(model, WEIGHT)
    batch = {key: value[None] for key, value in make_examples()[0].items()}
    with pytest.raises(ValueError, match=r"LlamaForCausalLM returned no loss .*add_balance_loss\(trainer\)"):
        model(input_ids=batch["input_ids"], num_items_in_batch=7)  # as Trainer calls it with label smoothing
    ids, attention, labels = batch["input_ids"], torch.ones_like(batch["input_ids"]), batch["labels"]
    with pytest.raises(ValueError, match="num_items_in_batch without the keywords labels or shift_labels"):
        model(ids, attention, None, None, None, labels, num_items_in_batch=7)
    none = torch.full_like(labels, -100)
    for total in (0, torch.tensor(0)):
        share = huggingface.training._share_of_batch(model, {"labels": none, "num_items_in_batch": total})
        assert share == 0


@pytest.mark.parametrize(
    ("processes", "tensor_parallel", "expected"), [(4, 1, 1.0), (4, 2, 0.5), (1, 1, 0.25)]
)
def test_share_among_ranks_that_average_tokens(processes, tensor_parallel, expected):
    """Ranks of one tensor-parallel group have one batch: num_items_in_batch counts it once."""
    trainer = SimpleNamespace(
        model=make_model(),
        model_accepts_loss_kwargs=True,
        compute_loss_func=None,
        args=SimpleNamespace(average_tokens_across_devices=True, n_gpu=1),
        accelerator=SimpleNamespace(num_processes=processes),
        get_tp_size=lambda: tensor_parallel,
    )
    inputs = {"labels": torch.ones(1, 8, dtype=torch.int64)}  # 7 are predicted
    assert huggingface.training._share_in(trainer, inputs, torch.tensor(28)) == expected
