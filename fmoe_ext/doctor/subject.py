"""Subject: the model, batch and training that the doctor examines, and how to make one.

read() makes it of the command's argument: "file.py:make", or a folder or name of a Transformers model, of which a small
one with random weights is built. check() makes it of (model, batch). Fields that are not given have the defaults that
most training loops share: AdamW, state_dict(), torch's activation checkpointing.
"""

from __future__ import annotations

import copy
import copyreg
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from fmoe_ext.audit.cases import AuditError
from fmoe_ext.audit.shrink import shrunk_config
from fmoe_ext.audit.source import find
from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.model_folder import errors_of_transformers, local_path, model_class
from fmoe_ext.model_files import open_config

Batch: TypeAlias = Any
Loss: TypeAlias = Callable[[nn.Module, Batch], torch.Tensor]


def _output_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the model's own loss, else a fixed random function of its first floating-point output."""
    output = model(**batch) if isinstance(batch, Mapping) else model(batch)
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    if isinstance(output, torch.Tensor):
        values: Iterable[Any] = [output]
    else:
        values = output.values() if hasattr(output, "values") else output
        values = values if isinstance(values, Iterable) else []
    floating = (v for v in values if isinstance(v, torch.Tensor) and v.is_floating_point())
    value = next(floating, None)
    if value is None:
        raise ValueError("the model returns no floating-point tensor")
    weights = drawn_numbers(value.shape[1:], 5).to(value.device)
    # linear and square parts, so that neither a sign nor a permutation of the columns goes unseen
    return (value.double().square() * (1 + weights.abs()) + value.double() * weights).mean()


def drawn_numbers(shape: Sequence[int], seed: int) -> torch.Tensor:
    """Draw from N(0, 1) in float64 on the CPU, so that every device sees the same numbers."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch], loss: Loss
) -> None:
    """Accumulate the mean gradient of the microbatches, then step the optimizer."""
    optimizer.zero_grad()
    for batch in batches:
        (loss(model, batch) / len(batches)).backward()
    optimizer.step()


def _load_by_name(model: nn.Module, saved: Mapping[str, torch.Tensor]) -> Any:
    """Load the saved tensors whose names the model has; return torch's lists of the others."""
    return model.load_state_dict(saved, strict=False)


def _recomputed(forward: Callable[..., Any], *args: Any) -> Any:
    """Run a layer under torch's activation checkpointing, which computes it again in the backward."""
    return checkpoint(forward, *args, use_reentrant=False)


@dataclass(frozen=True)
class Subject:
    """A model, its batch, and those functions of its training that are not the defaults."""

    model: nn.Module
    batch: Batch  # what the model takes: a tensor, or keyword arguments
    loss: Loss = _output_loss  # (model, batch) -> the tensor that is differentiated
    # (model, batch) -> (task loss, balance loss), for the checks of the balance loss
    parts: Callable[[nn.Module, Batch], tuple[torch.Tensor, torch.Tensor]] | None = None
    balance_weight: float = 1.0  # factor of the balance loss in the loss
    padded: Batch | None = None  # the batch with padding
    with_top_k: Callable[[int], nn.Module] | None = None  # the model with other K, the same weights
    # {name: the model with this option changed}
    options: Mapping[str, Callable[[], nn.Module]] = field(default_factory=dict)
    adapted: Sequence[str] = ()  # parts of parameters' names, each of which must have adapters
    merge: Callable[[Any], nn.Module] | None = None  # the model with its adapters merged into the weights
    # (model, max_norm): scales gradients, returns their norm
    clip: Callable[[nn.Module, float], Any] | None = None
    build: Callable[[], nn.Module] | None = None  # a fresh model of other random weights
    recompute: Callable[..., Any] = _recomputed  # (forward, *args): the training's activation checkpointing
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None  # None: AdamW
    step: Callable[..., None] = train_step  # (model, optimizer, microbatches, loss)
    save: Callable[[nn.Module], Mapping[str, torch.Tensor]] = nn.Module.state_dict  # returns a file's tensors
    load: Callable[[nn.Module, Mapping[str, torch.Tensor]], Any] = _load_by_name  # (model, saved)
    save_optimizer: Callable[[Any], Any] = torch.optim.Optimizer.state_dict
    upcycled: bool = False  # experts begin equal: whether they differ is asked after a step

    def task(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Compute the loss without the balance loss."""
        return self.loss(model, batch) if self.parts is None else self.parts(model, batch)[0]


def copied(model: nn.Module) -> nn.Module:
    """Copy a model deeply but for its process groups; tensors of a past graph that it keeps are detached."""
    # deepcopy refuses tensors that are not leaves, such as a balance loss that a gate keeps in an attribute, or in
    # an object that is one: they go into its memo, already copied
    owners = [vars(module) for module in model.modules()]
    owners += [vars(v) for values in owners for v in values.values() if hasattr(v, "__dict__")]
    kept = [v for values in owners for v in values.values() if isinstance(v, torch.Tensor)]
    # nor can it copy process groups; what reduces to a string it takes as it is
    shared = {dist.ProcessGroup: str} if dist.is_available() else {}
    with patch.dict(copyreg.dispatch_table, shared):
        return copy.deepcopy(model, {id(v): v.detach().clone() for v in kept if not v.is_leaf})


def double(value: Any) -> Any:
    """Copy a model in float64, or a batch with its floating-point tensors in float64."""
    if isinstance(value, nn.Module):
        result = copied(value).double()
        for module in result.modules():
            config: Any = getattr(module, "config", None)
            if hasattr(config, "_experts_implementation"):
                config._experts_implementation = "eager"  # torch's grouped_mm has no float64
        return result
    if isinstance(value, Mapping):
        return {name: double(part) for name, part in value.items()}
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def read(place: str) -> Subject:
    """Make a Subject of "file.py:make", which returns one or (model, batch), or a small one of a Transformers model."""
    if ":" in place:
        made = find(place)()
        if isinstance(made, Subject):
            return made
        if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
            return Subject(*made)
        raise AuditError(
            f"{place} must return a doctor.Subject or (model, batch), but returned {type(made).__name__}"
        )
    import transformers

    try:
        folder = local_path(place, ("config.json",))
        try:
            config = open_config(folder)
        except (OSError, CheckpointError) as error:
            raise AuditError(f"{folder} holds no configuration of Transformers: {error}") from error
        text = config.get_text_config(decoder=True)  # of a model for images too: the batch is of tokens
        with errors_of_transformers(folder):
            if type(text) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING or text is config:
                build: Callable[[Any], Any] = transformers.AutoModelForCausalLM.from_config
                small = shrunk_config(text, build)
                return from_transformers(lambda: build(small))
            # a model for images or sound: its language model alone, whose class only an instance tells
            with torch.device("meta"):
                decoder = type(model_class(config)(config).get_decoder())  # which has no head of its own
            small = shrunk_config(text, decoder)
            return from_transformers(lambda: decoder(small))
    except CheckpointError as error:
        raise AuditError(str(error)) from error


def from_transformers(build: Callable[[], Any]) -> Subject:
    """Make the Subject of a model of Transformers: random tokens, and labels where it computes a loss of them."""
    torch.manual_seed(0)
    model = build()
    text = model.config.get_text_config()
    generator = torch.Generator("cpu").manual_seed(1)
    tokens = torch.randint(3, text.vocab_size, (4, 8), generator=generator, device="cpu").to(model.device)
    if "labels" not in inspect.signature(model.forward).parameters:
        return Subject(model, {"input_ids": tokens}, build=build)
    batch: dict[str, Any] = {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}
    weight = getattr(text, "router_aux_loss_coef", None)
    if weight is None or not hasattr(text, "output_router_logits"):
        return Subject(model, batch, build=build)
    batch["output_router_logits"] = True
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}  # -100: cross entropy ignores it
    padded: dict[str, Any] = {n: torch.nn.functional.pad(batch[n], (0, 4), value=v) for n, v in fill.items()}
    padded["output_router_logits"] = True

    # Transformers adds the balance loss if it returns router logits: a second forward, from the same random numbers,
    # has the task loss alone
    def parts(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        random_state = torch.get_rng_state()
        output = model(**batch)
        torch.set_rng_state(random_state)
        balance = getattr(output, "aux_loss", None)
        if not isinstance(balance, torch.Tensor):
            balance = torch.zeros((), dtype=torch.float64, device="cpu")
        task = model(**{**batch, "output_router_logits": False}).loss
        return task, balance

    return Subject(model, batch, parts=parts, balance_weight=weight, padded=padded, build=build)
