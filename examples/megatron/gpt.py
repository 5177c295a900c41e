"""A small GPTModel of Megatron-core, on the CPU or on GPUs, and its training step by Megatron's schedules.

train.py calls make_config(), make_chunks() and forward_backward(); so do the tests of fmoe_ext.megatron.
"""

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from on_cpu import CausalAttention


def make_config(device="cpu", dtype=torch.float32, **options):
    """A TransformerConfig without dropout and fused kernels; options are its fields."""
    defaults = {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "use_cpu_initialization": device == "cpu",
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
    }
    return TransformerConfig(**(defaults | options))


def make_chunks(
    config, vocab_size, seq_len, device="cpu", mlp=None, norm=None, with_experts=None, **model_options
):
    """The model chunks of this pipeline stage, usually one.

    mlp: a ModuleSpec in the place of that of the dense MLP; norm: a class in the place of PyTorch's norms.
    with_experts: what to do with Megatron's own specification, by the config, of all layers; replaces mlp and norm.
    """
    num_chunks = config.virtual_pipeline_model_parallel_size or 1
    chunks = []
    for vp_stage in [None] if num_chunks == 1 else range(num_chunks):
        if with_experts is None:
            spec = _layer_spec(config, device, mlp, norm, vp_stage)
        else:
            spec = with_experts(_block_spec(config, device, vp_stage))
        chunks.append(_make_chunk(config, spec, vocab_size, seq_len, device, vp_stage, model_options))
    return chunks


def _layer_spec(config, device, mlp, norm, vp_stage):
    spec = get_gpt_layer_local_spec(normalization=config.normalization)
    if device == "cpu":
        spec.submodules.self_attention.submodules.core_attention = CausalAttention
    if mlp is not None:
        spec.submodules.mlp = mlp
    if norm is not None:
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = norm
        spec = TransformerBlockSubmodules([spec] * get_num_layers_to_build(config, vp_stage), layer_norm=norm)
    return spec


def _block_spec(config, device, vp_stage):
    stage = {} if vp_stage is None else {"vp_stage": vp_stage}
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, **stage
    )
    for layer_spec in spec.layer_specs:
        if device == "cpu":
            layer_spec.submodules.self_attention.submodules.core_attention = CausalAttention
    return spec


def _make_chunk(config, spec, vocab_size, seq_len, device, vp_stage, model_options):
    stage = {"ignore_virtual": False, "vp_stage": vp_stage}
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(config.params_dtype)  # Megatron's local norms take no dtype
    try:
        model = GPTModel(
            config,
            spec,
            vocab_size=vocab_size,
            max_sequence_length=seq_len,
            pre_process=parallel_state.is_pipeline_first_stage(**stage),
            post_process=parallel_state.is_pipeline_last_stage(**stage),
            parallel_output=False,
            vp_stage=vp_stage,
            **({"position_embedding_type": "learned_absolute"} | model_options),
        )
    finally:
        torch.set_default_dtype(default_dtype)
    return model.to(device)


def forward_step(batches, model):
    """Megatron's forward_step_func: batches yields (inputs, targets) [b, s]."""
    inputs, targets = next(batches)
    positions = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
    logits = model(inputs, positions, None)

    def loss_func(logits):
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return loss, {"loss": loss.detach().clone()}

    return logits, loss_func


def forward_backward(chunks, microbatches, seq_len):
    """Gradients of the mean loss over the microbatches, a list of (inputs, targets) -> losses, on the last stage."""
    inputs = microbatches[0][0]
    outputs = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(microbatches) for _ in chunks],
        model=chunks,
        num_microbatches=len(microbatches),
        seq_length=seq_len,
        micro_batch_size=inputs.shape[0],
    )
    return [output["loss"] for output in outputs]
