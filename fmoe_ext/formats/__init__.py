"""Read and write models in the formats of other programs (docs/formats.md).

import_model() puts our layers into a Transformers model, export() writes such a model for Transformers or llama.cpp.
`fmoe export` packs any folder of float weights, without our layers.
"""

from fmoe_ext.formats.imports import import_model
from fmoe_ext.formats.writing import check_export, export

__all__ = ["check_export", "export", "import_model"]
