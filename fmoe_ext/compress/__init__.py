"""Remove experts from a model: measure which ones a text needs (scores.py), and write the model with them alone."""

from fmoe_ext.compress.prune import prune
from fmoe_ext.compress.scores import CRITERIA, Scores, measure

__all__ = ["CRITERIA", "Scores", "measure", "prune"]
