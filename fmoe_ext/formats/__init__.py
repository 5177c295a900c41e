"""Models in the formats that other programs read: export() and import_model(). docs/formats.md has the table."""

from fmoe_ext.formats.imports import import_model
from fmoe_ext.formats.writing import check_export, export

__all__ = ["check_export", "export", "import_model"]
