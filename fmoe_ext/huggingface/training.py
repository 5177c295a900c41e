"""Add the gates' balance loss in training loops that others run: Trainer, TRL, accelerate, Lightning.

It joins the loss where the loop takes it, so that nobody overrides compute_loss. There are three such places:

    model            what its forward returns: a forward hook (_AfterForward)
    LightningModule  what its training_step returns (_training_step)
    Trainer          what its compute_loss returns (_to_trainer), for trainers of TRL that compute the loss themselves

Under accumulation each microbatch counts by its share of the batch's labels where the loop has counted them, since the
model's own loss is then divided by that number; elsewhere the loop divides both. Biases of SigmoidGate need nothing:
they move by themselves at the optimizer's step.
"""

from __future__ import annotations

import functools
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from numbers import Real
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from fmoe_ext.gates import BaseGate, total_loss

_IGNORED_LABEL = -100


def add_balance_loss(model: Any, weight: float = 0.01) -> BalanceLoss:
    """Add weight * gates.total_loss(model) to the training loss -> a handle to remove().

    model: one of
      a model whose forward returns a loss (output.loss, output["loss"], the first of a tuple, as Transformers'
      models do, or the loss itself): added to that loss, in train() only;
      a LightningModule: added to what training_step returns;
      a Trainer of Transformers or TRL: added to what compute_loss returns in training, whatever computes that loss.
    Under accumulation the loss of each microbatch counts as the model's own does: by its share of num_items_in_batch
    where the loop divides by this number, else wholly, for the loop (accelerator.backward, Lightning) to divide both.
    The loss is of a microbatch's tokens; gates.WholeBatch makes it of the whole batch. A loss that was added
    before to the same gates is removed, with a warning: it would be the only one that counts. Raises ValueError for a
    model without gates, for a weight that is no number of at least 0, and in training for an output without a loss.
    Equivalent to: loss + weight * total_loss(model).

    Example:

        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        ...     num_attention_heads=2, num_key_value_heads=2)
        >>> model = fmoe_ext.fmoefy(LlamaForCausalLM(config), num_experts=4, gate="softmax").train()
        >>> ids = torch.tensor([[1, 2, 3]])
        >>> plain = model(input_ids=ids, labels=ids).loss
        >>> handle = add_balance_loss(model, weight=0.01)
        >>> loss = model(input_ids=ids, labels=ids).loss
        >>> torch.allclose(loss, plain + 0.01 * fmoe_ext.gates.total_loss(model))
        True
    """
    # Check before anything changes.
    trained = model.model if _is_trainer(model) else model
    gates = [module for module in trained.modules() if isinstance(module, BaseGate)]
    if not gates:
        raise ValueError(f"{type(trained).__name__} has no gate of fmoe_ext, whose loss could be added")
    check_weight(weight)
    # Remove what was added before: reading a gate's loss takes it, so that the second reader gets none.
    references = [_added_to.pop(gate, None) for gate in gates]
    earlier = [None if reference is None else reference() for reference in references]
    for before in (*earlier, *_in_copy(trained)):
        if before is not None and before.is_attached:
            before.remove()
            warnings.warn(
                f"the balance loss of weight {before.weight} that was added to this model before is removed: a gate "
                "gives its loss once",
                stacklevel=2,
            )
    added = BalanceLoss(model, weight)
    _added_to.update(dict.fromkeys(gates, weakref.ref(added)))
    return added


# The loss that is added to a gate's model; weak, since a BalanceLoss may hold the model.
_added_to: WeakKeyDictionary[BaseGate, weakref.ref[BalanceLoss]] = WeakKeyDictionary()


def _in_copy(model: nn.Module) -> Iterator[BalanceLoss]:
    """Yield losses that copy.deepcopy or pickle took along: a copy's gates are new ones, which _added_to has not."""
    for module in model.modules():
        hooks = [hook for hook in module._forward_hooks.values() if isinstance(hook, _AfterForward)]
        yield from (hook.balance for hook in hooks)
        step = vars(module).get("training_step")
        if isinstance(step, functools.partial) and step.func is _training_step:
            yield step.args[1]


def check_weight(weight: float, name: str = "the weight of the balance loss") -> None:
    """Raise ValueError unless it is a finite number of at least 0."""
    if not isinstance(weight, Real) or isinstance(weight, bool) or not 0 <= weight < float("inf"):
        raise ValueError(f"{name} must be a number of at least 0, but got {weight!r}")


class BalanceLoss:
    """The balance loss that add_balance_loss() has added to a model, a LightningModule or a Trainer."""

    def __init__(self, model: Any, weight: float) -> None:
        self.weight = weight
        # of losses since pop_mean(), on the device: adding does not wait for it
        self._sum: torch.Tensor | float = 0.0
        self._count = 0  # of them
        self._remove: Callable[[], None] | None = None  # takes it out of the model; None afterwards
        if _is_trainer(model):
            self._remove = _to_trainer(model, self)
        elif hasattr(model, "training_step"):
            # partials, which copy.deepcopy copies with their arguments: a copy of the module gets a step of the copy
            own, before = model.training_step, vars(model).get("training_step")
            step = functools.partial(_training_step, model, self, before)
            model.training_step = functools.update_wrapper(step, own)
            self._remove = functools.partial(_restore, model, "training_step", before)
        else:
            self._remove = model.register_forward_hook(_AfterForward(self), with_kwargs=True).remove

    @property
    def is_attached(self) -> bool:
        """True until remove() is called."""
        return self._remove is not None

    def remove(self) -> None:
        """Remove it from the model; a second call does nothing."""
        if self._remove is not None:
            self._remove()
            self._remove = None

    def pop_mean(self) -> float:
        """Return the mean of the gates' losses since the last call, without the weight; waits for the device."""
        mean = float(self._sum) / max(self._count, 1)
        self._sum, self._count = 0.0, 0
        return mean

    def add(
        self, loss: torch.Tensor, balance: torch.Tensor | float, share: torch.Tensor | float
    ) -> torch.Tensor:
        """Add the gates' loss of a microbatch to its loss; share: its share of the batch."""
        self._sum = self._sum + (balance.detach() if isinstance(balance, torch.Tensor) else balance)
        self._count += 1
        return (loss + self.weight * share * balance).to(loss.dtype)


def _share_of_batch(model: Any, kwargs: Mapping[str, Any]) -> torch.Tensor | float:
    """Return the part of num_items_in_batch that a forward with these arguments has; 1.0 without that number."""
    total = kwargs.get("num_items_in_batch")
    if total is None:
        return 1.0
    labels = kwargs.get("shift_labels")
    if labels is None:
        labels = kwargs.get("labels")
        if labels is None:
            raise ValueError(
                f"{type(model).__name__} got num_items_in_batch without the keywords labels or shift_labels, so that "
                "the share of this microbatch is unknown: pass labels by name, or leave num_items_in_batch out"
            )
        from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

        # A causal model predicts label i + 1 at position i, so its first label does not count. shift_labels are shifted
        # already.
        is_causal = LOSS_MAPPING.get(str(getattr(model, "loss_type", ""))) is ForCausalLMLoss
        if is_causal and not getattr(model.config, "is_encoder_decoder", False):
            labels = labels[..., 1:]
    total = total.clamp(min=1) if isinstance(total, torch.Tensor) else max(total, 1)  # no label counts: 0 / 1
    return labels.ne(_IGNORED_LABEL).sum().double() / total


class _AfterForward:
    """A forward hook that adds the gates' loss; an object, so that a model with it can be pickled."""

    def __init__(self, balance: BalanceLoss) -> None:
        self.balance = balance

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if not module.training:
            return None
        if kwargs.get("fused_lm_head"):
            raise ValueError(
                f"{type(module).__name__} is trained by a trainer of TRL that computes its loss itself: add the gates' "
                "loss there, by huggingface.balance_callback() or add_balance_loss(trainer)"
            )
        own_loss = _own_loss(output, module)
        return _with_balance(output, own_loss, self.balance, module, _share_of_batch(module, kwargs))


def _training_step(module: Any, balance: BalanceLoss, own: Any, *args: Any, **kwargs: Any) -> Any:
    """Run own, or the step of the module's class, and add the gates' loss."""
    # own: a step that was set on the instance before ours
    step = functools.partial(type(module).training_step, module) if own is None else own
    output = step(*args, **kwargs)
    if output is None and getattr(module, "automatic_optimization", False):
        return None  # Lightning skips this batch
    return _with_balance(output, _own_loss(output, module), balance, module, 1.0)


def _restore(owner: Any, method: str, before: Any) -> None:
    """Give an object its method of before: one that was set on the instance, or None for the class's."""
    delattr(owner, method)
    if before is not None:
        setattr(owner, method, before)


def _is_trainer(model: Any) -> bool:
    """Return True for a Trainer of Transformers, and so for TRL's, by name: Transformers need not be there."""
    return any(c.__module__ == "transformers.trainer" for c in type(model).__mro__)


def _to_trainer(trainer: Any, balance: BalanceLoss) -> Callable[[], None]:
    """Wrap trainer.compute_loss, which may call the model several times; forwards without a gradient do not count."""
    own, before = trainer.compute_loss, vars(trainer).get("compute_loss")
    parameters = inspect.signature(own)
    losses: list[torch.Tensor | float] = []  # of the forwards of one compute_loss()

    def after_forward(module: nn.Module, *_: Any) -> None:
        if module.training and torch.is_grad_enabled():
            losses.append(total_loss(module))

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        if not trainer.model.training:
            return own(*args, **kwargs)
        losses.clear()
        given = parameters.bind(*args, **kwargs).arguments  # by name, however the trainer passes them
        share = _share_in(trainer, given["inputs"], given.get("num_items_in_batch"))
        result = own(*args, **kwargs)
        own_loss, *outputs = result if isinstance(result, tuple) else (result,)
        # a trainer that calls a part of the model leaves out the hook
        mean = sum(losses) / len(losses) if losses else total_loss(trainer.model)
        loss = balance.add(own_loss, mean, share)
        return (loss, *outputs) if outputs else loss

    hook = trainer.model.register_forward_hook(after_forward)
    trainer.compute_loss = compute_loss

    def remove() -> None:
        hook.remove()
        _restore(trainer, "compute_loss", before)

    return remove


def _share_in(trainer: Any, inputs: Mapping[str, Any], num_items: Any) -> torch.Tensor | float:
    """Return the factor of a microbatch's balance loss in what compute_loss returns: 1, or its share of the batch."""
    # Does compute_loss divide by the whole batch's number, or the trainer by the number of microbatches?
    is_scaled = getattr(trainer, "loss_is_scaled_for_ga", None)  # older Transformers lack it
    if is_scaled is None:
        uses_num_items = num_items is not None and trainer.model_accepts_loss_kwargs
        is_scaled = uses_num_items or trainer.compute_loss_func is not None
    if not is_scaled:
        return 1.0  # the trainer divides by the number of microbatches
    # the share by labels; an equal one where no labels are counted
    if num_items is None or not ("labels" in inputs or "shift_labels" in inputs):
        return 1 / trainer.current_gradient_accumulation_steps
    share = _share_of_batch(trainer.model, {**inputs, "num_items_in_batch": num_items})
    if trainer.args.average_tokens_across_devices:
        # num_items counts the labels of all devices then, and averaging the gradients divides by their number again
        num_gpus = trainer.args.n_gpu
        # ranks of one tensor-parallel group have the same batch
        num_ranks = trainer.accelerator.num_processes // trainer.get_tp_size()
        share = share * (num_ranks if num_gpus <= 1 else num_gpus)
    return share


def _own_loss(output: Any, model: nn.Module) -> torch.Tensor:
    """Find the loss in what a forward or a training step returned; ValueError without one."""
    own_loss: torch.Tensor | None = None
    if isinstance(output, torch.Tensor):
        # logits have more dimensions; a loss may be [1]
        own_loss = output if output.dim() <= 1 and output.numel() == 1 else None
    elif isinstance(output, Mapping):
        own_loss = output.get("loss")
    elif isinstance(output, tuple) and output:
        first = output[0]  # without labels these are the logits
        own_loss = first if isinstance(first, torch.Tensor) and first.dim() == 0 else None
    if own_loss is None:
        raise ValueError(
            f"{type(model).__name__} returned no loss to which the gates' loss could be added: give it labels, or add "
            "gates.total_loss(model) where your loss is made; under a Trainer that makes the loss itself use "
            "huggingface.balance_callback() or add_balance_loss(trainer)"
        )
    return own_loss


def _with_balance(
    output: Any, own_loss: torch.Tensor, balance: BalanceLoss, model: nn.Module, share: torch.Tensor | float
) -> Any:
    """Add to an output the gates' losses of the forward that made it."""
    loss = balance.add(own_loss, total_loss(model), share)
    if isinstance(output, torch.Tensor):
        return loss
    if isinstance(output, tuple):
        if hasattr(output, "_fields"):  # a NamedTuple
            made: Any = output
            return made._replace(**{made._fields[0]: loss})
        return (loss, *output[1:])
    output["loss"] = loss
    return output
