"""For pretrain_gpt.py with --moe-layer-freq: --spec moe_block_spec block_spec, with this folder in PYTHONPATH.

Megatron's own block specification of this pipeline stage, with our layer in the place of each of its MoE layers.
pretrain_gpt.py imports it when it builds the model: its options are known then, and the process groups exist.
An interleaved pipeline needs a specification for each chunk: call with_experts in a model provider of your own.
"""

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.training import get_args
from megatron.training.arguments import core_transformer_config_from_args

from fmoe_ext.megatron import with_experts

args = get_args()
block_spec = with_experts(
    get_gpt_decoder_block_spec(
        core_transformer_config_from_args(args),
        use_transformer_engine=args.transformer_impl == "transformer_engine",
        normalization=args.normalization,
        qk_l2_norm=args.qk_l2_norm,
    )
)
