"""GPT models of Megatron-core on the CPU from its own specifications: ours against Megatron's."""

import megatron_layouts as layouts
import torch
import torch.nn.functional as F
from megatron_pair import Float64Inside, assert_close, fill, paired_gradients
from on_cpu import CausalAttention

from fmoe_ext.megatron.core import MegatronCoreMLP


def block_spec_of(config):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization
    )
    return on_cpu(spec)


def on_cpu(spec):
    """The specification of a block or layer, with an attention that the CPU has."""
    for layer_spec in getattr(spec, "layer_specs", [spec]):
        layer_spec.submodules.self_attention.submodules.core_attention = CausalAttention
    return spec


def model_of(config, spec, **options):
    from megatron.core.models.gpt import GPTModel

    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(config.params_dtype)  # Megatron's local norms take no dtype
    try:
        return GPTModel(config, spec, layouts.VOCAB, layouts.SEQ_LEN, parallel_output=False, **options)
    finally:
        torch.set_default_dtype(default_dtype)


def pairs_of_layers(ours, theirs):
    """[(prefix of its parameters, our MoE layer, Megatron's)] of two models."""
    modules = dict(theirs.named_modules())
    return [(n, m, modules[n]) for n, m in ours.named_modules() if isinstance(m, MegatronCoreMLP)]


def fill_both(ours, theirs):
    layers = pairs_of_layers(ours, theirs)
    dense = {n: p for n, p in ours.named_parameters() if not any(n.startswith(f"{m}.") for m, *_ in layers)}
    theirs.load_state_dict({n: p.detach() for n, p in dense.items()}, strict=False)
    for _, mine, their in layers:
        fill(mine, their)
    return layers, dense


def train(model):
    """Loss and {name: gradient} of a training step."""
    (tokens, targets), *_ = layouts.microbatches(0)
    positions = torch.arange(layouts.SEQ_LEN).expand_as(tokens)
    torch.manual_seed(3)
    with Float64Inside():
        logits = model(tokens, positions, None)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters()}


def assert_equal_models(ours, theirs, train=train):
    layers, dense = fill_both(ours, theirs)
    (loss, grads), (expected, their_grads) = train(ours), train(theirs)
    pairs = {"loss": (loss, expected)} | {name: (grads[name], their_grads[name]) for name in dense}
    for prefix, *_ in layers:
        mine, their = (
            {n.removeprefix(f"{prefix}."): g for n, g in all_grads.items() if n.startswith(f"{prefix}.")}
            for all_grads in (grads, their_grads)
        )
        pairs |= {f"{prefix}.{n}": pair for n, pair in paired_gradients(mine, their).items()}
    assert_close(pairs, 1e-9)
    return layers
