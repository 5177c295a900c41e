"""GLM-5: DeepSeek-V3 with indexers, which choose the tokens that a layer attends to."""

from types import MappingProxyType
from typing import Any

from torch import Tensor

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.gguf.architecture import Fields, Shapes, Values
from fmoe_ext.gguf.architectures.deepseek2 import DeepseekV2, DeepseekV3

_INDEXER = MappingProxyType(
    {
        "attention.indexer.head_count": "index_n_heads",
        "attention.indexer.key_length": "index_head_dim",
        "attention.indexer.top_k": "index_topk",
    }
)
_TYPES = "attention.indexer.types"


class GlmDsa(DeepseekV3):
    name = "glm-dsa"
    model_type = "glm_moe_dsa"
    keys = MappingProxyType({**DeepseekV3.keys, **_INDEXER, _TYPES: "indexer_types"})
    needs = (*DeepseekV2.needs[1:], *_INDEXER)
    defaults = DeepseekV2.defaults

    def config(self, fields: Fields, shapes: Shapes, factors: Tensor | None) -> Values:
        values = super().config(fields, shapes, factors)
        num_layers = values["num_hidden_layers"]
        usual = None if values["max_position_embeddings"] >= 2**20 else [True] * num_layers
        types = values.get("indexer_types", usual)
        if not isinstance(types, list) or len(types) < num_layers:
            raise CheckpointError(
                f"{self.name}.{_TYPES} is {types!r}, expected a list of {num_layers} entries"
            )
        values["indexer_types"] = ["full" if full else "shared" for full in types[:num_layers]]
        return values

    def fields(self, config: Any) -> dict[str, Any]:
        return {
            **super().fields(config),
            **{key: getattr(config, attribute) for key, attribute in _INDEXER.items()},
            _TYPES: [kind == "full" for kind in config.indexer_types],
        }
