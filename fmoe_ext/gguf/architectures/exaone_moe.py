"""K-EXAONE: three layers of four have a sliding window, or those that the file says."""

from types import MappingProxyType
from typing import Any

from fmoe_ext.gguf.architecture import Architecture, Fields

_PATTERN = "attention.sliding_window_pattern"


class ExaoneMoe(Architecture):
    name = "exaone-moe"
    model_type = "exaone_moe"
    keys = MappingProxyType(
        {"leading_dense_block_count": "first_k_dense_replace", "attention.sliding_window": "sliding_window"}
    )
    read = (_PATTERN,)
    needs = ("expert_gating_func", "attention.sliding_window")
    fixed = MappingProxyType({"tie_word_embeddings": False})
    has_mtp = True

    def layer_types(self, fields: Fields, num_layers: int) -> list[str]:
        windows = fields.get(_PATTERN, [(i + 1) % 4 != 0 for i in range(num_layers)])
        if not isinstance(windows, list):
            raise TypeError(f"{self.name}.{_PATTERN} is {windows!r}, expected a list")
        return ["sliding_attention" if windows[i] else "full_attention" for i in range(num_layers)]

    def fields(self, config: Any) -> dict[str, Any]:
        pattern = [kind == "sliding_attention" for kind in config.layer_types]
        return {**super().fields(config), _PATTERN: pattern}
