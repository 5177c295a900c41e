"""Models in the formats that other programs read: export() and import_model(). docs/formats.md has the table."""

from fmoe_ext.integrations.formats.imports import import_model
from fmoe_ext.integrations.formats.plan import check_export
from fmoe_ext.integrations.formats.writing import export

__all__ = ["check_export", "export", "import_model"]
