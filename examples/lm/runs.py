"""One model in training: the step, the schedule, validation, what is reported and what is saved."""

import math
import time

import torch
import torch.nn.functional as F
from model import LanguageModel

from fmoe_ext import balance


class DivergedError(Exception):
    """The loss is not a number any more; what was saved before is good."""


class Run:
    """A model, its optimizer and its counters; `state_dict` holds all that the next step depends on."""

    def __init__(self, name, config, options, device, dtype):
        self.name, self.options, self.device, self.dtype = name, options, device, dtype
        torch.manual_seed(options.seed)
        self.model = LanguageModel(config).to(device)
        matrices = [p for p in self.model.parameters() if p.dim() >= 2]
        vectors = [p for p in self.model.parameters() if p.dim() < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors}],
            lr=options.lr,
            weight_decay=0.0,
            betas=(0.9, 0.95),
            fused=True,
        )
        self.monitor = None if config.dense else balance.watch(self.model)
        self.seconds = 0.0  # spent in training steps
        self.clear_window()

    def clear_window(self):
        """Starts the sums that the next report averages."""
        self.window_steps, self.window_start = 0, self.seconds
        self.window_sums = torch.zeros(3, dtype=torch.float64, device=self.device)  # loss, balance loss, norm

    def autocast(self):
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def learning_rate(self, step):
        """Linear warm-up, then a cosine to a tenth of the peak at the last step; steps count from 1."""
        warmup, steps, peak = self.options.warmup, self.options.steps, self.options.lr
        if step <= warmup:
            return peak * step / warmup
        progress = (step - warmup) / max(steps - warmup, 1)
        return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))

    def train_step(self, step, inputs, targets):
        started = time.perf_counter()
        inputs, targets = inputs.to(self.device), targets.to(self.device)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(step)
        with self.autocast():
            logits = self.model(inputs)
            balance_loss = self.model.pop_balance_loss()
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        (loss + self.options.balance_weight * balance_loss).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.window_sums += torch.stack([loss.detach(), balance_loss.detach(), norm.detach()])
        self.window_steps += 1
        self.seconds += time.perf_counter() - started

    @torch.inference_mode()
    def validate(self, batches):
        """Mean loss over the validation windows, in nats per byte."""
        self.model.eval()
        total, count = 0.0, 0
        for inputs, targets in batches:
            with self.autocast():
                logits = self.model(inputs.to(self.device))
            total += F.cross_entropy(
                logits.float().flatten(0, 1), targets.to(self.device).flatten(), reduction="sum"
            ).item()
            count += targets.numel()
        self.model.train()
        return total / count

    def check_finite(self, step):
        """Raises DivergedError if a loss since the last report was not finite; waits for the device."""
        loss = self.window_sums[0].item()
        if not math.isfinite(loss):
            raise DivergedError(f"the {self.name} loss is {loss} at step {step}: lower --lr")

    def report(self, step):
        """The record of the steps since the last report: means, speed, each expert's share of the choices."""
        started = time.perf_counter()
        self.check_finite(step)
        loss, balance_loss, norm = (self.window_sums / self.window_steps).tolist()
        self.seconds += time.perf_counter() - started
        tokens = self.window_steps * self.options.batch_size * self.options.seq_len
        record = {
            "run": self.name,
            "step": step,
            "loss": loss,
            "bits_per_byte": loss / math.log(2),
            "grad_norm": norm,
            "lr": self.learning_rate(step),
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(tokens / (self.seconds - self.window_start)),
        }
        if self.monitor:
            record["balance_loss"] = balance_loss
            layers = self.monitor.collect(step)["layers"].values()
            record["expert_load"] = [share_of_choices(layer["tokens_per_expert"]) for layer in layers]
            record["dropped_share"] = [round(layer["dropped_share"], 4) for layer in layers]
        self.clear_window()
        return record

    def state_dict(self):
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "seconds": self.seconds,
            "window": (self.window_steps, self.window_start, self.window_sums),
            "monitor": self.monitor and self.monitor.state_dict(),
        }

    def load_state_dict(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.seconds = state["seconds"]
        self.window_steps, self.window_start, self.window_sums = state["window"]
        self.window_sums = self.window_sums.to(self.device)
        if self.monitor:
            self.monitor.load_state_dict(state["monitor"])


def share_of_choices(tokens_per_expert):
    total = max(sum(tokens_per_expert), 1)
    return [round(count / total, 4) for count in tokens_per_expert]
