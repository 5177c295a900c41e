"""Options of Megatron-core's TransformerConfig that concern an MoE layer: how a row of the table works.

Nothing that a config asks for may be lost in silence. So each field that looks like one about MoE (MOE_FIELD)
has a row in table.py: it is honoured, has no effect for a reason, or is refused by name; a field that a newer
Megatron adds has none, and is refused unless it has its default. check_options() applies the rows when a
layer is built, docs/megatron.md shows them, and tests/megatron_lm/test_megatron_values.py sets each field of
the installed Megatron to each of its values.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Fields whose name contains one of these need a row in the table, or are refused unless they have their default.
MOE_FIELD = re.compile("moe|expert|router|fp8|fp4|quant_recipe|cuda_graph")


@dataclass(frozen=True)
class Option:
    """One field of TransformerConfig."""

    name: str
    default: Any  # Megatron's
    honoured: str = ""  # what honours it, or "no effect: " and why; empty if only the default is accepted
    refused: str = ""  # the refused values and the reason; completes "moe_...=value is refused: "
    refuses: Callable[[Any], bool] | None = None  # finds them in a config; None: all but the default
    values: tuple[
        str, ...
    ] = ()  # names that it accepts, alone or in a list; others are numbers, bools, None, functions
    describes_router: bool = False  # gate= replaces the router: beside it all but the default is refused

    def why_refused(self, config: Any) -> str | None:
        """The reason to refuse the value of this config, None if it is accepted."""
        value = getattr(config, self.name, self.default)
        if self.honoured and self.is_set(config) and not set(_names(value)) <= set(self.values):
            known = ", ".join(map(repr, self.values)) or "no name"
            return f"this version of fmoe_ext knows {known} here"
        if not self.refused:
            return None
        is_refused = self.is_set(config) if self.refuses is None else self.refuses(config)
        return self.refused if is_refused else None

    def is_set(self, config: Any) -> bool:
        """True if config has another value than the default."""
        return not is_default(getattr(config, self.name, self.default), self.default)

    @property
    def has_no_effect(self) -> bool:
        return self.honoured.startswith("no effect")


def is_default(value: Any, default: Any) -> bool:
    """True if value is the default; None, False and an empty list are the same."""
    nothing = [x is None or x is False or (isinstance(x, (list, tuple)) and not x) for x in (value, default)]
    return value == default or all(nothing)


def names_of(config: Any, name: str) -> set[str]:
    """The names in a field that holds a name, an enum member or a list of them."""
    return set(_names(getattr(config, name, None)))


def _names(value: Any) -> list[str]:
    values = value if isinstance(value, (list, tuple, set)) else (value,)
    return [v.name if isinstance(v, enum.Enum) else v for v in values if isinstance(v, (str, enum.Enum))]


def layers_with_experts(config: Any) -> list[bool]:
    """moe_layer_freq for each layer of the decoder; an integer N puts experts in every N-th layer, from the first."""
    frequency = config.moe_layer_freq
    if isinstance(frequency, (list, tuple)):
        return [bool(has_experts) for has_experts in frequency]
    return [number % frequency == 0 for number in range(config.num_layers)]
