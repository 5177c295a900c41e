"""Compute the experts of Hugging Face Transformers by our operators: register(), then experts_implementation="fmoe".

Transformers decorates every experts module that may run elsewhere with facts about its weights: is_transposed,
is_concatenated, has_gate, has_bias, has_post_expert_norm (added over time; absent means the default). It then calls
experts_forward in place of the module's forward. That reads the facts, brings tokens to the ranks of their experts if
these are spread (ep.py), and compute() takes one of three routes:

    a usual MLP      one operator: ops.expert_mlp, or frozen.frozen_mlp with packed weights or adapters
    any other MLP    two grouped products with the module's own activation between them (_compute_apart), which is one
                     operator where glu.py knows it
    rounded adapters lattice.py, which comes back to compute() with the rounded weights

T tokens of width D, K experts a token, H hidden width, N tokens that this rank has received, R = N * K rows sorted
by expert.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from fmoe_ext import frozen, ops
from fmoe_ext._require import require
from fmoe_ext._sharded import is_dtensor
from fmoe_ext.adapters import Lora, take
from fmoe_ext.dispatch import combine, dispatch
from fmoe_ext.ep.process_groups import Group
from fmoe_ext.ep.wrappers import check_wrappers
from fmoe_ext.experts import activation_name
from fmoe_ext.huggingface.glu import apply_gate
from fmoe_ext.huggingface.lattice import is_rounded, run_rounded
from fmoe_ext.linear import DTYPES, adapted_gemm, with_adapter
from fmoe_ext.models.recognize import GATED
from fmoe_ext.routing import widen

_NAME = "fmoe"
_OLDEST_TRANSFORMERS = "5.7"  # the first whose models accept a registered name


def register() -> None:
    """Make "fmoe" an experts implementation of Transformers; calling it again changes nothing.

    Then `model.set_experts_implementation("fmoe")` or `from_pretrained(..., experts_implementation="fmoe")` runs
    the experts of every architecture that uses Transformers' experts interface on fmoe_ext. A Trainer that resumes such
    a model, or loads the best one at the end, needs use(model) as well: Transformers alone loads no experts there, and
    the first training forward warns of it.
    Raises ImportError if Transformers is missing or older than 5.7.

    Example:

        >>> from transformers import MixtralConfig, MixtralForCausalLM
        >>> config = MixtralConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        ...     num_attention_heads=2, num_key_value_heads=2, num_local_experts=4)
        >>> register()
        >>> model = MixtralForCausalLM(config)
        >>> model.set_experts_implementation("fmoe")
        >>> model.config._experts_implementation
        'fmoe'
    """
    require_transformers(f'experts_implementation="{_NAME}"')
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(_NAME, experts_forward)
    ALL_FP8_EXPERTS_FUNCTIONS.register(_NAME, _refuse_fp8)


def require_transformers(needed_by: str) -> None:
    """Raise ImportError, with the name of what needs it, if Transformers is missing or too old."""
    transformers = require("transformers", needed_by, f"transformers>={_OLDEST_TRANSFORMERS}")
    oldest = tuple(map(int, _OLDEST_TRANSFORMERS.split(".")))
    if tuple(map(int, transformers.__version__.split(".")[:2])) < oldest:
        raise ImportError(
            f"{needed_by} needs Transformers {_OLDEST_TRANSFORMERS} or newer, but this is "
            f"{transformers.__version__}: pip install -U 'transformers>={_OLDEST_TRANSFORMERS}'"
        )


def use(model: Any) -> Any:
    """Call register() and model.set_experts_implementation("fmoe") -> the model; warn if that changes nothing.

    From then on model.load_state_dict() also takes the names that save_pretrained() writes, where each expert is a
    tensor. Trainer.train(resume_from_checkpoint=) loads these, and without it drops all experts with a line in the log.
    Some MoE models compute their experts in ways of their own and stay eager, without a word of Transformers, for
    example Llama4, SwitchTransformers and JetMoe.

    Example:

        >>> from transformers import MixtralConfig, MixtralForCausalLM
        >>> config = MixtralConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        ...     num_attention_heads=2, num_key_value_heads=2, num_local_experts=4)
        >>> model = use(MixtralForCausalLM(config))
        >>> model(torch.tensor([[1, 2, 3]])).logits.shape
        torch.Size([1, 3, 64])
    """
    register()
    model.set_experts_implementation(_NAME)
    if not any(hasattr(module, "is_transposed") for module in model.modules()):
        warnings.warn(
            f"{type(model).__name__} has no experts module that Transformers lets others compute: its experts stay "
            f"eager, whatever the experts implementation. fmoefy(model, ...) replaces dense MLPs only",
            stacklevel=2,
        )
    model.register_load_state_dict_pre_hook(_take_names_of_files)
    for module in model.modules():
        if hasattr(module, "is_transposed"):
            module.loads_names_of_files = True
    return model


def _warn_of_resume(experts: Any) -> None:
    """Warn once if a Trainer's resume may lose these experts, which are trained without use(model)."""
    # here, since no public hook sees load_state_dict() of a model that was never given to us
    if getattr(experts, "loads_names_of_files", False) or not any(
        p.requires_grad for p in experts.parameters()
    ):
        return
    warnings.warn(
        f"{type(experts).__name__} is trained, but its model was not given to fmoe_ext.huggingface.use(): where "
        "save_pretrained() writes a tensor for each expert, Trainer.train(resume_from_checkpoint=) and "
        "load_best_model_at_end load no experts. Call huggingface.use(model) once after loading the model",
        stacklevel=2,
    )
    experts.loads_names_of_files = True  # said once for each module


def _take_names_of_files(model: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Put what save_pretrained() wrote under the names that the modules have."""
    # the hook runs for each submodule too, with its prefix: once, for the whole model, is enough
    if prefix == "" and not state_dict.keys() <= model.state_dict().keys():
        from fmoe_ext.checkpoint.weight_names import as_in_modules  # it brings torch.distributed.checkpoint

        found = as_in_modules(model, state_dict)
        state_dict.clear()
        state_dict |= found


def expert_parallel(model: Any, group: Group = None, *, expert_dp_comm: str = "none") -> Any:
    """Spread the experts of a Transformers MoE model over the ranks of a group -> the model.

    Every rank calls it with the same whole model and keeps E / ranks experts of each layer, rank r the r-th part;
    tokens travel to their experts and back by fmoe_ext's exchange. group: a ProcessGroup, a DeviceMesh or None for all
    ranks; expert_dp_comm: the tag of the experts' parameters (FMoE.mark_parallel_comm). For training wrap the model in
    fmoe_ext.distributed.DistributedGroupedDataParallel; torch's DistributedDataParallel is refused. From then on all
    ranks call the forward, generate() (which waits for the last to finish) and save_pretrained() (which writes the
    whole model, for any layout) together. The loss of output_router_logits is of each rank's tokens.
    Raises ValueError for a model without experts that can be spread, TypeError for quantised or sharded ones.
    """
    from fmoe_ext.huggingface.ep import spread_experts

    spread_experts(model, group, expert_dp_comm)
    return use(model)


def balance_callback(weight: float = 0.01, file: str | None = None) -> Any:
    """Make a callback for Trainers of Transformers and TRL: the balance loss in the loss, experts' load in the logs.

    weight: of the balance loss; file: of JSON lines for the load of every layer (balance.write).
    `Trainer(..., callbacks=[huggingface.balance_callback(0.01)])`: huggingface.trainer.BalanceCallback.
    """
    from fmoe_ext.huggingface.trainer import BalanceCallback

    return BalanceCallback(weight, file)


def experts_forward(
    experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Compute an experts module; Transformers calls it instead of the module's forward.

    hidden_states [T, D]; top_k_index [T, K], entries from num_experts on (experts of other ranks) are dropped;
    top_k_weights [T, K] floating -> [T, D] of the dtype of hidden_states.
    Raises TypeError for quantised weights.
    Equivalent to: experts.forward(hidden_states, top_k_index, top_k_weights) with experts_implementation="eager".
    """
    # The weights are in files: finetune/streaming reads them, and calls compute().
    streamed = getattr(experts, "streamed", None)
    if streamed is not None:
        result: Tensor = streamed.forward(experts, hidden_states, top_k_index, top_k_weights)
        return result
    if (
        experts.training
        and torch.is_grad_enabled()
        and not (torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting())
    ):
        _warn_of_resume(experts)
    # Weights, biases and adapters.
    has_bias = experts.has_bias
    up = "gate_up_proj" if experts.has_gate else "up_proj"
    taken = take(experts)  # adapters that lora.fuse()'s wrappers hand over for this call
    adapters = taken.get(up), taken.get("down_proj")
    parallel = getattr(experts, "expert_parallel", None)
    w1 = getattr(experts, up)
    # PEFT's LoRA adds up a weight where it is read. Reading the second after the first product lets backward release
    # it, and its gradient, before it computes the first one's.
    w2 = None if w1.grad_fn is not None and parallel is None else experts.down_proj
    b1, b2 = (getattr(experts, up + "_bias"), experts.down_proj_bias) if has_bias else (None, None)
    # Tokens and choices.
    x = hidden_states.to(_compute_dtype(experts, (w1, w2)))
    topk_weights = widen(top_k_weights, x.dtype)
    num_experts = w1.shape[0] * (1 if parallel is None else parallel.size)  # of all ranks
    # Transformers' own expert parallelism marks choices of other ranks by numbers behind the last
    if getattr(experts, "_is_expert_parallel", True):
        top_k_index = top_k_index.masked_fill(top_k_index >= num_experts, -1)
    if parallel is not None:
        check_wrappers(experts)  # DistributedDataParallel would average experts that differ
    # To the experts, through them, and back.
    dispatched = dispatch(x, top_k_index, topk_weights, num_experts, parallel)
    for chunk in dispatched.chunks:
        tokens = chunk.receive()
        weights = (w1, b1, w2, b2)
        chunk.give_back(compute(experts, weights, tokens.x, tokens.topk_idx, tokens.topk_weights, adapters))
    out: Tensor = combine(dispatched)
    return out.to(hidden_states.dtype)


def compute(
    experts: Any,
    weights: Any,
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    adapters: tuple[Lora | None, Lora | None],
) -> Tensor:
    """Compute the experts of this rank on tokens x [N, D], topk_idx [N, K] (-1 for none) -> their weighted sums [N, D].

    weights: (w1, b1, w2, b2); w2 None is read from the experts after the first product. adapters: of w1 and w2.
    """
    w1, b1, w2, b2 = weights
    if is_rounded(adapters):  # the sum W + B A is the weight then, without an adapter beside it

        def run(x: Tensor, topk_weights: Tensor, w1: Any, w2: Any) -> Tensor:
            return compute(experts, (w1, b1, w2, b2), x, topk_idx, topk_weights, (None, None))

        return run_rounded(run, x, topk_weights, (w1, w2), adapters, experts.is_transposed)
    _, offs, row_idx, inverse = ops.sort_tokens(topk_idx, w1.shape[0])
    is_packed = isinstance(w1, frozen.Quantized)
    activation = None if w2 is None else activation_of(experts, is_packed)  # None: the products apart
    has_norm = getattr(experts, "has_post_expert_norm", False)
    if activation is None:
        rows = _compute_apart(experts, weights, x, (offs, row_idx, inverse), adapters)
    else:
        mlp = (x, row_idx, inverse, offs, w1, b1, w2, b2, None if has_norm else topk_weights, activation)
        if any(adapters) or is_packed:
            rows = frozen.frozen_mlp(*mlp, not has_norm, *adapters)
        else:
            rows = ops.expert_mlp(*mlp, combine=not has_norm)
        if not has_norm:
            return rows  # [N, D]: the operator has weighed and summed them
    # rows [R, D]
    if has_norm:
        rows = experts.post_expert_norm(rows)
    return ops.unpermute(rows, row_idx, inverse, topk_weights)


# Apart from compute(), so that what lies between the products is free before the rows are summed.
def _compute_apart(
    experts: Any,
    weights: Any,
    x: Tensor,
    sorted_rows: tuple[Tensor, Tensor, Tensor],
    adapters: tuple[Lora | None, Lora | None],
) -> Tensor:
    """Compute two products with the module's own activation between them -> rows [R, D] before they are weighed.

    sorted_rows: offs, row_idx and inverse of ops.sort_tokens().
    """
    w1, b1, w2, b2 = weights
    offs, row_idx, inverse = sorted_rows
    x_rows = ops.permute(x, row_idx, inverse)  # [R, D]
    h = _product(experts, x_rows, w1, offs, b1, adapters[0])  # [R, 2 H], or [R, H] without a gate
    a = apply_gate(experts, h) if experts.has_gate else experts.act_fn(h)  # [R, H]
    if w2 is None:
        w2 = experts.down_proj
        _compute_dtype(experts, (w2,))
    return _product(experts, a.to(x.dtype), w2, offs, b2, adapters[1])


def _product(
    experts: Any, rows: Tensor, weight: Any, offs: Tensor, bias: Tensor | None, adapter: Lora | None
) -> Tensor:
    """Multiply the rows of each expert by its weight, and add its bias and adapter's part; a packed weight stays so."""
    if isinstance(weight, frozen.Quantized):
        # columns as in the file: the module's own _apply_gate knows where its gates and ups are
        y = frozen.frozen_gemm(rows, replace(weight, interleaved=False), offs, bias)
        return with_adapter(y, rows, offs, adapter)
    return adapted_gemm(rows, weight, offs, bias, adapter, transposed=experts.is_transposed)


def fused_activation(experts: Any) -> str | None:
    """Return the activation with which ops.expert_mlp computes an experts module; None if it cannot."""
    if experts.is_transposed:
        return None
    from transformers import activations

    act_fn = getattr(experts, "act_fn", None)
    if isinstance(act_fn, activations.SiLUActivation):
        name: str | None = "silu"
    elif isinstance(act_fn, activations.GELUActivation):
        name = "gelu"
    elif isinstance(act_fn, (activations.GELUTanh, activations.NewGELUActivation)):
        name = "gelu_tanh"
    elif isinstance(act_fn, activations.ReLUSquaredActivation):
        name = "relu2"
    else:
        name = activation_name(act_fn) if callable(act_fn) else None
    if not experts.has_gate:
        return name
    # a class that gates its own way defines _apply_gate; the others get the one of Transformers' decorator
    is_usual_gate = experts._apply_gate.__module__ == "transformers.integrations.moe"
    if not is_usual_gate or not getattr(experts, "is_concatenated", True):
        return None
    return None if name is None else GATED.get(name)


def activation_of(experts: Any, is_packed: bool) -> str | None:
    """Return the activation with which one operator computes an experts module, packed or not; None if none does."""
    # frozen_mlp puts the gates and ups of packed weights in order, so that GPT-OSS's fit too, with these constants
    if is_packed and (getattr(experts, "alpha", None), getattr(experts, "limit", None)) == (1.702, 7.0):
        is_gpt_oss = experts._apply_gate.__module__ == "transformers.models.gpt_oss.modeling_gpt_oss"
        return "clamped_swiglu" if is_gpt_oss else None
    return fused_activation(experts)


def _compute_dtype(experts: Any, weights: tuple[Tensor | None, ...]) -> torch.dtype:
    """Return the dtype to compute in, autocast's where that is on; TypeError for quantised weights."""
    for weight in filter(torch.is_tensor, weights):
        # a quantised subclass may report the dtype that it dequantises to, not the one it has
        is_subclass = hasattr(weight, "__tensor_flatten__") and not is_dtensor(weight)
        if is_subclass or weight.dtype not in DTYPES:
            raise TypeError(
                f'experts_implementation="{_NAME}" computes with plain float64, float32, bfloat16 or float16 weights, '
                f"but {type(experts).__name__} has {type(weight).__name__ if is_subclass else weight.dtype}: leave the "
                "experts out of the quantization, call model.dequantize(), put weight.dequantize() in their place, or "
                'set_experts_implementation to "eager"'
            )
    weight = next(filter(torch.is_tensor, weights))
    device = weight.device.type
    if torch.is_autocast_enabled(device) and weight.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return weight.dtype


def _refuse_fp8(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> NoReturn:
    raise TypeError(
        f'experts_implementation="{_NAME}" does not compute with FP8 weights: load the model with '
        'quantization_config=FineGrainedFP8Config(dequantize=True), or set_experts_implementation to "grouped_mm"'
    )
