"""Telemetry of the gates: the load of experts, logs of choices, and their replay (docs/telemetry.md)."""

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
