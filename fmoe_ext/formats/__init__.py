"""Read and write models in the formats of other programs: import_model(), export(), `fmoe export` (docs/formats.md)."""

from fmoe_ext.formats.imports import import_model
from fmoe_ext.formats.writing import check_export, export

__all__ = ["check_export", "export", "import_model"]
