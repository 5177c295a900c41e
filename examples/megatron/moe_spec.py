"""For Megatron-LM's pretrain_gpt.py, unchanged: --spec moe_spec layer_spec, with this folder in PYTHONPATH.

With Transformer Engine: get_gpt_layer_with_transformer_engine_spec() and moe_layer_spec(norm=True).
"""

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

from fmoe_ext.megatron import moe_layer_spec

layer_spec = get_gpt_layer_local_spec()
layer_spec.submodules.mlp = moe_layer_spec()
