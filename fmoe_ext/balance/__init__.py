"""Counts, logs and replays of what the gates of a model choose (docs/telemetry.md).

watch()          counts each expert's tokens while a model trains (load.py); write() and draw() take its records
log_choices()    writes every choice to a file, for read_log() and `fmoe balance report` (choices.py, report.py)
RoutingReplay    records choices in memory and makes gates choose them again (replay.py);
                 load_routed_experts() takes an inference engine's choices
"""

from fmoe_ext.balance.choices import BadLog, Choice, ChoiceLog, log_choices, read_log
from fmoe_ext.balance.counters import LayerCounters
from fmoe_ext.balance.load import SUMMARY_NUMBERS, LoadMonitor, Record, draw, summarize, watch, write
from fmoe_ext.balance.replay import Choices, RoutingReplay
from fmoe_ext.balance.routed_experts import (
    decode_routed_experts,
    encode_routed_experts,
    load_routed_experts,
    routed_experts,
)

__all__ = [
    "SUMMARY_NUMBERS",
    "BadLog",
    "Choice",
    "ChoiceLog",
    "Choices",
    "LayerCounters",
    "LoadMonitor",
    "Record",
    "RoutingReplay",
    "decode_routed_experts",
    "draw",
    "encode_routed_experts",
    "load_routed_experts",
    "log_choices",
    "read_log",
    "routed_experts",
    "summarize",
    "watch",
    "write",
]
