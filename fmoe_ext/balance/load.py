"""Count how many tokens each expert gets while a model trains, without a host synchronisation in the step.

    monitor = balance.watch(model)
    for step, batch in enumerate(batches):
        train(model, batch)
        if step % 100 == 0:
            balance.write(monitor.collect(step), "out/load.jsonl")
    monitor.plot("out/load.png")

A forward hook of each gate counts on the device (counters.py). In a training loop only collect() waits for
the device to read the counts, and summarize() makes numbers of them: how uneven the load is, how many experts are dead,
how many choices were dropped.
"""

import json
import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fmoe_ext.balance.counters import LayerCounters
from fmoe_ext.balance.views import GateView, views_of
from fmoe_ext.step import is_counted

# {"step": its number, "layers": {name of the gate: summarize(...)}}
Record: TypeAlias = dict[str, Any]

SUMMARY_NUMBERS = ("max_over_mean", "cv", "entropy", "dropped_share", "dead_experts", "gate_entropy")


def summarize(
    tokens_per_expert: torch.Tensor,
    num_dropped: float = 0,
    gate_entropy_sum: float = 0.0,
    num_tokens: float = 0,
) -> dict[str, Any]:
    """Summarise a load [E] as numbers of Python.

    -> dict with
      tokens_per_expert: the load, as a list
      max_over_mean: largest load / mean load; 1 is balanced; a step takes as long as the largest load
      cv: standard deviation / mean of the load; 0 is balanced
      entropy: of the load, over log E; 1 is balanced, 0 one expert for all
      dropped_share: dropped choices / all choices
      dead_experts: the number of experts without a token
      gate_entropy: of a token's K weights, over log K, mean over (a sample of) the tokens; 1: its experts count alike,
        0: one of them decides, or K = 1
    If all choices were dropped, the numbers of the load are 0 and dead_experts is E; without tokens the rest is 0, too.

    Example:

        >>> load = summarize(torch.tensor([6, 2, 0, 0]))
        >>> load["max_over_mean"], load["dead_experts"]
        (3.0, 2)
    """
    load = tokens_per_expert.double().cpu()
    total = load.sum().item()
    numbers = dict.fromkeys(SUMMARY_NUMBERS, 0.0)
    numbers["dead_experts"] = int((load == 0).sum())
    if total > 0:
        mean, share = load.mean(), load / total
        numbers["max_over_mean"] = (load.max() / mean).item()
        numbers["cv"] = (load.std(unbiased=False) / mean).item()
        if load.numel() > 1:
            numbers["entropy"] = -torch.xlogy(share, share).sum().item() / math.log(load.numel())
    numbers["dropped_share"] = num_dropped / max(total + num_dropped, 1)
    numbers["gate_entropy"] = gate_entropy_sum / max(num_tokens, 1)
    return {"tokens_per_expert": load.long().tolist(), **numbers}


class LoadMonitor:
    """Counts the choices of every gate of a model while it trains (model.train()); made by watch().

    counters: {name of the gate: LayerCounters}. history: what collect() returned so far, for plot().
    Works with custom gates (subclasses of BaseGate) and with the routers of Transformers 5 and Megatron-core; padding
    (fmoe_ext.valid_tokens) does not count. Forwards that activation checkpointing repeats count once. A deepcopy of the
    model counts into the same counters while it is in train(), also after remove().
    """

    def __init__(self, model: nn.Module, warn_after: int = 1000) -> None:
        views = views_of(model, "watch")
        if warn_after < 1:
            raise ValueError(f"warn_after must be at least 1, but got {warn_after}")
        self.warn_after = warn_after
        self.counters: dict[str, LayerCounters] = {}
        self.history: list[Record] = []
        self._hooks: list[RemovableHandle] = []
        for name, view in views.items():
            # on the CPU for a gate without parameters; the first count moves them to the device of its choices
            device = next((p.device for p in view.module.parameters()), torch.device("cpu"))
            counters = self.counters[name] = LayerCounters(view.num_experts, device)

            # a function and not a partial: deepcopy() leaves functions alone, but would copy a partial's counters,
            # whose lock cannot be copied
            def count(
                gate: nn.Module,
                _: Any,
                output: Any,
                view: GateView = view,
                counters: LayerCounters = counters,
            ) -> None:
                if gate.training and is_counted():
                    topk_idx, topk_weights = view.read_real(output)
                    counters.count(topk_idx, topk_weights, view.top_k)

            self._hooks.append(view.module.register_forward_hook(count))

    def collect(
        self,
        step: int | None = None,
        *,
        sum_over_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None,
        reset: bool = True,
    ) -> Record:
        """Summarise every layer since the last reset; this waits for the device.

        sum_over_ranks: a function tensor -> its sum over the ranks, to see the load of all of them.
        reset=False: counts go on, so that the record is not for plot(), which adds the records of the history up.
        -> {"step": step, "layers": {name of the gate: summarize(...)}}, which also joins the history. Warns about
        experts that got no token in the last warn_after forwards.
        """
        # of a copy: an all_reduce() writes into its argument
        total = (lambda x: x) if sum_over_ranks is None else (lambda x: sum_over_ranks(x.clone()))
        layers = {}
        for name, counters in self.counters.items():
            # total() may be a collective: every rank calls it as often, in this order
            layers[name] = summarize(
                total(counters.tokens_per_expert),
                total(counters.num_dropped).item(),
                total(counters.gate_entropy_sum).item(),
                total(counters.num_tokens).item(),
            )
            # idle everywhere: an expert that any rank has used is alive
            num_ranks_with_token = total((counters.idle_steps < self.warn_after).long())  # [E]
            idle = (num_ranks_with_token == 0).nonzero().flatten().tolist()
            if idle:
                warnings.warn(
                    f"gate {name!r}: no token for the experts {idle} in the last {self.warn_after} forwards; "
                    "a balance loss or SigmoidGate's bias would bring them back",
                    stacklevel=2,
                )
            if reset:  # idle_steps stay: warn_after may span several calls
                counters.reset()
        record = {"step": len(self.history) if step is None else step, "layers": layers}
        self.history.append(record)
        return record

    def plot(self, path: str | Path) -> None:
        """Draw the history: the mean load of layers x experts as a heat map, and over the steps max/mean and cv."""
        draw(self.history, path)

    def remove(self) -> None:
        """Stop counting."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def state_dict(self) -> dict[str, Any]:
        """Return counters and history, for a checkpoint."""
        counters = {
            name: {key: getattr(layer, key).clone() for key in LayerCounters.NAMES}
            for name, layer in self.counters.items()
        }
        return {"counters": counters, "history": list(self.history)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state_dict(); ValueError for the state of other gates, or with other numbers of experts."""
        if state["counters"].keys() != self.counters.keys():
            raise ValueError(
                f"the state is of the gates {list(state['counters'])}, but the model has {list(self.counters)}"
            )
        for name, saved in state["counters"].items():
            ours, num = self.counters[name].tokens_per_expert, len(saved["tokens_per_expert"])
            if num != len(ours):
                raise ValueError(f"gate {name!r} has {len(ours)} experts, but the state is of {num}")
        for name, saved in state["counters"].items():
            for key in LayerCounters.NAMES:
                getattr(self.counters[name], key).copy_(saved[key])
        self.history = list(state["history"])


def watch(model: nn.Module, warn_after: int = 1000) -> LoadMonitor:
    """Begin to count the tokens of every expert of a model -> LoadMonitor.

    warn_after: collect() warns about experts that got no token in this many forwards. ValueError for a model without
    gates.

    Example:

        >>> mlp = fmoe_ext.FMoETransformerMLP(num_expert=4, d_model=8, d_hidden=16, gate="softmax")
        >>> monitor = watch(mlp)
        >>> y = mlp(torch.randn(10, 8))
        >>> record = monitor.collect(step=1)
        >>> sum(record["layers"]["gate"]["tokens_per_expert"])  # 10 tokens, 2 choices each
        20
    """
    return LoadMonitor(model, warn_after)


def _in_folder(path: str | Path) -> Path:
    """Return the path; make its folder, because a run must not end when it first reports."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    return Path(path)


def write(record: Record, target: Any) -> None:
    """Write one result of LoadMonitor.collect(): as a line of JSON to a path, or to a TensorBoard writer.

    target: a path, to which the line is appended, or an object with add_scalar(tag, value, step), which gets
    "<number>/<gate>" for each gate and "<number>/all", their mean. Where a disk is full, raises OSError with the path,
    and the file keeps its whole lines.

    Example:

        >>> import json
        >>> mlp = fmoe_ext.FMoETransformerMLP(num_experts=4, d_model=8, d_hidden=16, top_k=2)
        >>> monitor = fmoe_ext.balance.watch(mlp)
        >>> _ = mlp(torch.randn(10, 8))
        >>> write(monitor.collect(step=1), "load.jsonl")
        >>> with open("load.jsonl") as file:
        ...     sum(json.loads(file.readline())["layers"]["gate"]["tokens_per_expert"])
        20
    """
    if hasattr(target, "add_scalar"):  # a TensorBoard writer, of whatever package
        for number in SUMMARY_NUMBERS:
            values = {name: layer[number] for name, layer in record["layers"].items()}
            for name, value in values.items():
                target.add_scalar(f"{number}/{name}", value, record["step"])
            target.add_scalar(f"{number}/all", sum(values.values()) / len(values), record["step"])
        return
    path, line = _in_folder(target), f"{json.dumps(record)}\n".encode()
    # unbuffered: a write that fails fails here, and what it left of the line is cut off again
    with path.open("ab", buffering=0) as lines:
        size = lines.tell()
        try:
            while line:
                line = line[lines.write(line) :]
        except OSError as error:
            lines.truncate(size)
            raise OSError(error.errno, error.strerror, str(path)) from None


def draw(history: Sequence[Record], path: str | Path) -> None:
    """Draw the picture of LoadMonitor.plot() from records, for example those that write() wrote to a file."""
    if not history:
        raise RuntimeError("nothing to plot: call collect() first")
    from matplotlib import colormaps  # optional: imported at its first use
    from matplotlib.figure import Figure

    names = list(history[-1]["layers"])
    load = {
        name: torch.tensor([r["layers"][name]["tokens_per_expert"] for r in history], device="cpu")
        for name in names
    }
    num_experts = max(counts.shape[1] for counts in load.values())
    # left: each layer's load over its mean; layers with fewer experts end in NaN, which has no colour
    relative = torch.full((len(names), num_experts), torch.nan, device="cpu")
    for row, counts in zip(relative, load.values(), strict=True):
        total = counts.sum(0).double()
        row[: len(total)] = total / total.mean().clamp(min=1e-9)
    steps = [record["step"] for record in history]
    figure = Figure(figsize=(13, max(3.6, 1.2 + 0.28 * len(names))), layout="constrained")
    axes = figure.subplots(1, 3, width_ratios=(1.5, 1, 1))
    image = axes[0].imshow(
        relative.numpy(), aspect="auto", cmap="RdBu_r", vmin=0, vmax=2, interpolation="nearest"
    )
    axes[0].set_yticks(range(len(names)), names, fontsize=8)
    axes[0].set_xlabel("expert")
    axes[0].set_title("load, 1 = even share", fontsize=10)
    axes[0].xaxis.get_major_locator().set_params(integer=True)
    figure.colorbar(image, ax=axes[0], extend="max", fraction=0.04, pad=0.02)
    # beside it: a curve for each layer, the first ones dark
    curves = (("max_over_mean", "largest load / mean load"), ("cv", "standard deviation / mean of the load"))
    for axis, (number, title) in zip(axes[1:], curves, strict=True):
        for index, name in enumerate(names):
            values = [record["layers"][name][number] for record in history]
            color = colormaps["viridis"](index / max(len(names) - 1, 1))
            axis.plot(steps, values, ".-", color=color, label=name, linewidth=1.4)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.xaxis.get_major_locator().set_params(integer=True)
    if len(names) <= 12:  # a longer legend leaves the curves no room
        figure.legend(*axes[2].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    figure.savefig(_in_folder(path), dpi=120)
