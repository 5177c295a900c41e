"""The balance loss under Lightning, against loops written by hand."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from fmoe_ext import FMoETransformerMLP, huggingface
from fmoe_ext.gates import SigmoidGate, total_loss

LR, WEIGHT = 1e-2, 0.3


def assert_same_state(model, expected):
    for (name, ours), theirs in zip(model.state_dict().items(), expected.state_dict().values(), strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=1e-11, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}"
        )


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.mlp = FMoETransformerMLP(4, 6, 5, gate=partial(SigmoidGate, balance_loss="global")).double()

    def loss(self, x):
        return self.mlp(x).square().mean()


def lightning_module(skipped=()):
    """A LightningModule whose training_step returns None for these batches."""
    lightning = pytest.importorskip("pytorch_lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.small = Small()

        def training_step(self, batch, number):
            return None if number in skipped else {"loss": self.small.loss(batch[0])}

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), LR)

    quiet = dict(
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False
    )
    return Module(), partial(lightning.Trainer, accelerator="cpu", max_epochs=1, **quiet)


def test_lightning_skips_batches_without_a_loss(tmp_path):
    (module, trainer), expected = lightning_module(skipped={1}), Small()
    huggingface.add_balance_loss(module, WEIGHT)
    x = torch.randn(3, 6, 6, dtype=torch.float64)
    trainer = trainer(default_root_dir=str(tmp_path))
    trainer.fit(module, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=None))
    optimizer = torch.optim.AdamW(expected.parameters(), LR)
    for part in (x[0], x[2]):
        optimizer.zero_grad()
        (expected.loss(part) + WEIGHT * total_loss(expected)).backward()
        optimizer.step()
    assert_same_state(module.small, expected)
    module.automatic_optimization = False
    with pytest.raises(ValueError, match="Module returned no loss"):
        module.training_step([x[1]], 1)


def test_copy_of_a_lightning_module_computes_with_its_own_parameters():
    module, _ = lightning_module()
    handle = huggingface.add_balance_loss(module, WEIGHT)
    other = copy.deepcopy(module)
    x = torch.randn(6, 6, dtype=torch.float64)
    loss = other.training_step([x], 0)["loss"]
    torch.testing.assert_close(loss, other.small.loss(x) + WEIGHT * total_loss(other))
    assert total_loss(other) > 0.9
    loss.backward()
    assert all(p.grad is None for p in module.parameters())
    assert other.small.mlp.gate.gate.weight.grad.norm() > 0
    handle.remove()
    torch.testing.assert_close(module.training_step([x], 0)["loss"], module.small.loss(x))
    assert "training_step" in vars(other) and "training_step" not in vars(module)


def test_lightning_equals_a_loop_by_hand(tmp_path):
    x = torch.randn(8, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).flatten(0, 1)
    (module, trainer), expected = lightning_module(), Small()
    huggingface.add_balance_loss(module, WEIGHT)
    trainer = trainer(accumulate_grad_batches=2, default_root_dir=str(tmp_path))
    trainer.fit(module, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=6))

    optimizer = torch.optim.AdamW(expected.parameters(), LR)
    for number, part in enumerate(x.split(6)):
        ((expected.loss(part) + WEIGHT * total_loss(expected)) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_state(module.small, expected)
    assert expected.mlp.gate.expert_bias.abs().max() <= 2.1e-3
