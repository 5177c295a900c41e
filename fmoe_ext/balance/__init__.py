"""Telemetry of the gates: which experts get how many tokens, and every choice of a run (docs/telemetry.md)."""

from fmoe_ext.balance.choices import BadLog, Choice, ChoiceLog, log_choices, read_log
from fmoe_ext.balance.counters import LayerCounters
from fmoe_ext.balance.load import SUMMARY_NUMBERS, LoadMonitor, Record, draw, summarize, watch, write

__all__ = [
    "SUMMARY_NUMBERS",
    "BadLog",
    "Choice",
    "ChoiceLog",
    "LayerCounters",
    "LoadMonitor",
    "Record",
    "draw",
    "log_choices",
    "read_log",
    "summarize",
    "watch",
    "write",
]
