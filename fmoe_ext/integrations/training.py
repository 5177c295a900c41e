"""The gates' balance loss in training loops that others run: Trainer, TRL, accelerate, Lightning.

It joins the loss where a model returns it, so that nobody overrides compute_loss. Biases of SigmoidGate need nothing:
they move by themselves at the optimizer's step.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from fmoe_ext.gates import BaseGate, total_loss

IGNORED_LABEL = -100


def add_balance_loss(model: nn.Module, weight: float = 0.01) -> BalanceLoss:
    """Adds weight * gates.total_loss(model) to the loss that a model returns while it trains -> a handle to remove().

    model: one whose forward returns a loss (output.loss, output["loss"] or the first of a tuple, as Transformers'
    models do), or a LightningModule: then to what training_step returns. In eval() nothing is added.
    Under accumulation the loss of each microbatch counts as the model's own does: where the forward is told
    num_items_in_batch, as by Transformers' Trainer, with its share of these labels; else wholly, for the loop
    (accelerator.backward, Lightning) to divide both. The loss is that of a microbatch's tokens; gates.WholeBatch has
    that of the whole batch. A loss that was added before to the same gates is taken off, with a warning: it would be
    the only one that counts. Raises ValueError for a model without gates, for a weight that is no number of at least 0,
    and in training for an output without a loss.
    Equivalent to: loss + weight * total_loss(model).
    """
    gates = [module for module in model.modules() if isinstance(module, BaseGate)]
    if not gates:
        raise ValueError(f"{type(model).__name__} has no gate of fmoe_ext, whose loss could be added")
    check_weight(weight)
    _take_off(gates)
    added = BalanceLoss(model, weight)
    _added_to.update(dict.fromkeys(gates, weakref.ref(added)))
    return added


# The loss that is added to a gate's model; weak, since a BalanceLoss may hold the model.
_added_to: WeakKeyDictionary[BaseGate, weakref.ref[BalanceLoss]] = WeakKeyDictionary()


def _take_off(gates: Iterable[BaseGate]) -> None:
    for gate in gates:
        reference = _added_to.pop(gate, None)
        before = None if reference is None else reference()
        if before is not None and before.is_attached:
            before.remove()
            warnings.warn(
                f"the balance loss of weight {before.weight} that was added to this model before is taken off: a gate "
                "gives its loss once",
                stacklevel=3,
            )


def check_weight(weight: float) -> None:
    """ValueError unless it is a finite number of at least 0."""
    if not isinstance(weight, Real) or not 0 <= weight < float("inf"):
        raise ValueError(f"the weight of the balance loss must be a number of at least 0, but got {weight!r}")


class BalanceLoss:
    """What add_balance_loss() has attached to a model; remove() takes it off.

    sums_log_probs: whether the loop makes its loss of output.log_probs, as TRL's SFTTrainer does since 1.0: minus their
    sum, divided by the number of labels.
    """

    def __init__(self, model: nn.Module, weight: float) -> None:
        self.weight = weight
        self.sums_log_probs = False
        self._sum: torch.Tensor | float = 0.0
        self._count = 0
        attach = _after_step if hasattr(model, "training_step") else _after_forward
        self._remove: Callable[[], None] | None = attach(model, self)

    @property
    def is_attached(self) -> bool:
        """Whether remove() has not been called."""
        return self._remove is not None

    def remove(self) -> None:
        """Takes it off the model; nothing if it is off already."""
        if self._remove is not None:
            self._remove()
            self._remove = None

    def pop_mean(self) -> float:
        """The mean of the gates' losses, without the weight, since the last call; waits for the device."""
        mean = float(self._sum) / max(self._count, 1)
        self._sum, self._count = 0.0, 0
        return mean

    def add(self, model: nn.Module, kwargs: Mapping[str, Any], output: Any) -> Any:
        """output with the gates' losses of the forward that made it."""
        loss = _loss_of(output)
        if loss is None:
            raise ValueError(
                f"{type(model).__name__} returned no loss to which the gates' loss could be added: give it labels "
                "(label smoothing and compute_loss_func keep them from it), or add gates.total_loss(model) where your "
                "loss is made"
            )
        if kwargs.get("fused_lm_head") and not self.sums_log_probs:
            raise ValueError(
                f"{type(model).__name__} is trained by a trainer of TRL that makes its loss of log_probs, to which the "
                'gates\' loss cannot be added: use SFTTrainer with loss_type="nll" and balance_callback(), or '
                "transformers.Trainer"
            )
        balance = total_loss(model)
        self._sum = self._sum + torch.as_tensor(balance).detach()
        self._count += 1
        share = share_of_batch(model, kwargs)
        if self.sums_log_probs and kwargs.get("fused_lm_head"):
            log_probs = output["log_probs"]
            output["log_probs"] = (log_probs - self.weight * balance * output["label_mask"]).to(
                log_probs.dtype
            )
        return _with_loss(output, (loss + self.weight * share * balance).to(loss.dtype))


def share_of_batch(model: Any, kwargs: Mapping[str, Any]) -> torch.Tensor | float:
    """The part of num_items_in_batch that a forward with these arguments has; 1.0 where it is not told that number."""
    total = kwargs.get("num_items_in_batch")
    if total is None:
        return 1.0
    labels = kwargs.get("shift_labels")
    if labels is None:
        labels = kwargs["labels"][..., 1:] if _shifts_labels(model) else kwargs["labels"]
    return labels.ne(IGNORED_LABEL).sum().double() / total


def _shifts_labels(model: Any) -> bool:
    """Whether a Transformers model predicts label i + 1 at position i, so that its first label counts for nothing."""
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    is_causal = LOSS_MAPPING.get(str(getattr(model, "loss_type", ""))) is ForCausalLMLoss
    return is_causal and not getattr(model.config, "is_encoder_decoder", False)


def _after_forward(model: nn.Module, balance: BalanceLoss) -> Callable[[], None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        return balance.add(module, kwargs, output) if module.training else None

    return model.register_forward_hook(hook, with_kwargs=True).remove


def _after_step(module: Any, balance: BalanceLoss) -> Callable[[], None]:
    own = module.training_step

    @functools.wraps(own)
    def training_step(*args: Any, **kwargs: Any) -> Any:
        return balance.add(module, {}, own(*args, **kwargs))

    module.training_step = training_step
    return functools.partial(delattr, module, "training_step")


def _loss_of(output: Any) -> torch.Tensor | None:
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping):
        return output.get("loss")
    first = output[0] if isinstance(output, tuple) and output else None
    return first if isinstance(first, torch.Tensor) and first.dim() == 0 else None


def _with_loss(output: Any, loss: torch.Tensor) -> Any:
    if isinstance(output, torch.Tensor):
        return loss
    if isinstance(output, tuple):
        return (loss, *output[1:])
    output["loss"] = loss
    return output
