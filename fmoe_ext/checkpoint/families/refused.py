"""Model types with experts that import_model() refuses: {model_type of the text configuration: why}.

The reason ends the error "... is not imported, for ...". huggingface.use(model) runs their experts on our operators,
except those of NOT_USED; their own save_pretrained writes them.
"""

from collections.abc import Mapping
from types import MappingProxyType

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "diffusion_gemma_text": "its encoder and its decoder share their experts",
        "dots3_note_text": "the tower for its images has experts too, by another router",
        "ernie4_5_vl_moe_text": "each layer has two gates and two sets of experts, for text and for images",
        "inkling_text": "its router weighs the shared experts together with the chosen ones",
        "longcat_flash": "some of its experts compute nothing",
        "muse_spark_text": "a norm follows each of its experts",
        "openai_privacy_filter": "its router divides the weights by top_k, and it labels tokens",
        "phimoe": "its router is SparseMixer, which masks the logits anew for each choice",
        "zaya": "its router is an MLP with a state that passes from layer to layer, and a choice of no expert",
    }
)
# Those whose experts are outside of Transformers' experts interface: use() warns, and they stay eager
NOT_USED = ("longcat_flash",)
