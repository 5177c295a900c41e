"""The load of experts in TensorBoard and other loggers, by the interfaces of Transformers and Lightning."""

import pytest
import torch

from fmoe_ext import balance, huggingface
from tests.huggingface.test_balance_callback import WEIGHT, make_examples, make_model, train_by_trainer
from tests.huggingface.test_lightning import Small

transformers = pytest.importorskip("transformers")


def scalars(folder):
    """{tag: [(step, value)]} of the events of TensorBoard under a folder."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (file,) = {found.parent for found in folder.rglob("events.out.tfevents.*")}
    read = events.EventAccumulator(str(file)).Reload()
    return {tag: [(event.step, event.value) for event in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def test_tensorboard_of_trainer_gets_the_load(tmp_path, monkeypatch):
    """report_to's callbacks stand before those of the user, and read the logs first."""
    pytest.importorskip("tensorboard")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    callback = huggingface.balance_callback(WEIGHT)
    logs = train_by_trainer(make_model(), tmp_path, [], callback, report_to=["tensorboard"])
    written = scalars(tmp_path / "board")
    for name in ("balance_loss", "max_over_mean", "dropped_share", "dead_experts"):
        expected = [(step, entry[f"moe/{name}"]) for step, entry in enumerate(logs, 1)]
        assert written[f"train/moe/{name}"] == [(s, pytest.approx(value, rel=1e-6)) for s, value in expected]


class Recorder(transformers.TrainerCallback):
    """As those of Weights & Biases and others: keeps what it is given to log."""

    def __init__(self):
        self.begun, self.seen = 0, []

    def on_train_begin(self, args, state, control, **kwargs):
        self.begun += 1

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen.append(dict(logs))


def test_callbacks_before_ours_are_called_once_and_see_its_numbers(tmp_path):
    before, after = Recorder(), Recorder()
    arguments = transformers.TrainingArguments(
        **{"output_dir": str(tmp_path), "max_steps": 2, "logging_steps": 1, "report_to": []},
        **{"save_strategy": "no", "use_cpu": True, "disable_tqdm": True},
    )
    callbacks = [before, huggingface.balance_callback(WEIGHT), after]
    transformers.Trainer(make_model(), arguments, train_dataset=make_examples(), callbacks=callbacks).train()
    assert (before.begun, after.begun) == (1, 1)
    assert before.seen == after.seen
    assert ["moe/balance_loss" in logs for logs in before.seen] == [
        True,
        True,
        False,
    ]  # the last: the run's times


def test_tensorboard_of_lightning_gets_the_load(tmp_path):
    pytest.importorskip("tensorboard")
    lightning = pytest.importorskip("pytorch_lightning")
    seen = []

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.small = Small()

        def training_step(self, batch, number):
            return self.small.loss(batch[0])

        def on_train_batch_end(self, *_):  # docs/transformers.md
            layers = monitor.collect(self.global_step)["layers"]
            seen.append(layers["small.mlp.gate"]["max_over_mean"])
            self.log_dict(
                {f"moe/max_over_mean/{name}": layer["max_over_mean"] for name, layer in layers.items()}
            )

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    module = Module()
    monitor = balance.watch(module)
    trainer = lightning.Trainer(
        **{"accelerator": "cpu", "max_epochs": 1, "log_every_n_steps": 1, "enable_progress_bar": False},
        **{"enable_checkpointing": False, "enable_model_summary": False},
        logger=lightning.loggers.TensorBoardLogger(str(tmp_path)),
    )
    x = torch.randn(12, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    trainer.fit(module, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=4))
    written = scalars(tmp_path)["moe/max_over_mean/small.mlp.gate"]
    assert [value for _, value in written] == pytest.approx(seen, rel=1e-6) and len(seen) == 3


def test_names_of_weights_and_biases():
    """docs/transformers.md names them; the package is not needed for that."""
    from transformers.integrations import integration_utils

    assert integration_utils.INTEGRATION_TO_CALLBACK["wandb"] is integration_utils.WandbCallback
    lightning = pytest.importorskip("pytorch_lightning")
    assert {"TensorBoardLogger", "WandbLogger"} <= set(dir(lightning.loggers))
