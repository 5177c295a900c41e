"""Family (family.py) of Hunyuan-A13B, whose config.json may say a number for each layer: they must agree."""

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.families.family import PROJECTIONS, Family, Layout, Values

_LISTS = ("num_experts", "moe_topk")


def _one_value(values: Values) -> Values:
    """Make a number of each list with one number a layer; CheckpointError if the layers differ."""
    for key in _LISTS:
        if isinstance(values.get(key), list) and len(set(values[key])) != 1:
            raise CheckpointError(f"config.{key}={values[key]}: the layers of hunyuan_v1_moe differ here")
    return {k: v[0] if k in _LISTS and isinstance(v, list) else v for k, v in values.items()}


_FAMILY = Family(
    name="hunyuan_v1_moe",
    holds=("hunyuan_v1_moe",),
    files=Layout(gate="gate.wg", per_expert=PROJECTIONS, shared="shared_mlp."),
    config={"num_experts": "num_experts", "d_hidden": "intermediate_size", "top_k": "moe_topk"},
    fixed={"normalize": True},
    read=_one_value,
)

FAMILIES = (_FAMILY,)
