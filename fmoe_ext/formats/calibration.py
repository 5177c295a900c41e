"""Measure how much each input of a weight matters in a text, by which `fmoe export --text` chooses scales.

An error d of a weight's row changes an output by x d, so the mean of its square over a text is d E[x x^T] d. The
diagonal of E[x x^T], the mean square of each input, stands for all of it, as in llama.cpp's importance matrix: one
number for each input. The model is streamed over the text within a budget of memory. Hooks see the inputs of linear
layers and of experts; an expert's second weight has inputs that no hook sees, so the hook computes its first product
again. quantized.py calls measure(), and gives the means to frozen.quantize().
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.safetensors_file import StoredTensor
from fmoe_ext.checkpoint.weight_names import up_of
from fmoe_ext.finetune.streaming import stream
from fmoe_ext.huggingface.glu import apply_gate
from fmoe_ext.model_files import FolderModel, experts_modules

# Tokens with the mean squares of all experts that are added to each expert's, for those that few tokens chose
_PRIOR_TOKENS = 16


@torch.no_grad()
def measure(
    files: FolderModel,
    linear: Mapping[str, Any],
    weights: Mapping[str, StoredTensor],
    batches: tuple[Tensor, ...],
    memory: int | str,
) -> dict[str, Tensor]:
    """Compute {parameter: mean squares of its inputs}, float32 [in] for linear layers and [E, in] for experts.

    linear: {parameter: layer} and weights: {parameter: values of all experts} to measure. batches: ids [B, L].
    """
    model = stream(files, memory)
    sums: dict[str, Tensor] = {}  # of squares, float64 [in] or [E, in]
    counts: dict[str, Tensor | float] = {}  # of rows; [E, 1] for experts

    def add(parameter: str, squares: Tensor, count: Tensor | float) -> None:
        sums[parameter] = sums.get(parameter, 0) + squares
        counts[parameter] = counts.get(parameter, 0) + count

    def of_linear(parameter: str) -> Callable[..., None]:
        def see(_: Any, args: tuple[Tensor, ...]) -> None:
            rows = args[0].flatten(0, -2).double()
            add(parameter, rows.square().sum(0), len(rows))

        return see

    def of_experts(path: str) -> Callable[..., None]:
        def see(experts: Any, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            order = ("hidden_states", "top_k_index")
            x, topk_idx = (kwargs[name] if name in kwargs else args[i] for i, name in enumerate(order))
            up, down = f"{path}.{up_of(experts)}", f"{path}.down_proj"
            bias = getattr(experts, f"{up_of(experts)}_bias") if experts.has_bias else None
            E = weights[up].shape[0]
            squares: dict[str, list[Tensor]] = {up: [], down: []}
            count = torch.zeros(E, 1, dtype=torch.float64, device=x.device)
            for e in range(E):
                rows = x[(topk_idx == e).any(-1)]  # tokens that chose it [rows, in]
                count[e] = len(rows)
                # the expert's first product again, to see the inputs of its second weight
                w = weights[up].rows(e, e + 1)[0].to(x.dtype)
                h = rows @ (w if experts.is_transposed else w.mT)  # [rows, 2H or H]
                if bias is not None:
                    h = h + bias[e]
                h = apply_gate(experts, h) if experts.has_gate else experts.act_fn(h)
                squares[up].append(rows.double().square().sum(0))
                squares[down].append(h.double().square().sum(0))
            for parameter, of_each in squares.items():
                add(parameter, torch.stack(of_each), count)

        return see

    # Read the text
    hooks = [
        model.get_submodule(parameter.rpartition(".")[0]).register_forward_pre_hook(of_linear(parameter))
        for parameter in linear
    ]
    hooks += [
        module.register_forward_pre_hook(of_experts(path), with_kwargs=True)
        for path, module in experts_modules(model).items()
    ]
    for batch in batches:
        model(input_ids=batch, use_cache=False)
    for hook in hooks:
        hook.remove()
    # Means
    found = {}
    for parameter, squares in sums.items():
        count = counts[parameter]
        if squares.dim() == 2:
            # [E, in]: add the mean over all experts, as _PRIOR_TOKENS more rows of each
            assert isinstance(count, Tensor)  # [E, 1] of experts
            mean = squares.sum(0) / count.sum().clamp(min=1)
            squares, count = squares + _PRIOR_TOKENS * mean, count + _PRIOR_TOKENS
        if not bool(squares.isfinite().all()):
            raise CheckpointError(
                f"inputs of {parameter} are infinite or not a number in this text: export without a text, or read the "
                "folder in a wider dtype"
            )
        found[parameter] = (squares / count).float()
    return found
