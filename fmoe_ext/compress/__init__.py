"""Fewer experts: measure which ones a text needs, and write the model without the others."""

from fmoe_ext.compress.prune import prune
from fmoe_ext.compress.scores import CRITERIA, Scores, measure

__all__ = ["CRITERIA", "Scores", "measure", "prune"]
