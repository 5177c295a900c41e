"""Options of Megatron-core's TransformerConfig that concern an MoE layer: how a row of the table works.

table.py has the rows. check_options() applies them when a layer is built, docs/megatron.md shows them, and
tests/megatron_lm/test_megatron_values.py sets each field of the installed Megatron to each of its values.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

# Fields whose name contains one of these need a row in the table, or are refused unless they have their default.
MOE_FIELD = re.compile("moe|expert|router|fp8|fp4|quant_recipe|cuda_graph")


@dataclass(frozen=True)
class Option:
    """One field of TransformerConfig.

    default: Megatron's. honoured: what honours it, or "no effect: " and why; empty if only the default is accepted.
    values: the names that the field accepts, alone or in a list. Empty: numbers, bools, None and functions.
    refused: the refused values and the reason; completes "moe_...=value is refused: ". refuses(config) finds them;
    without it, every value but the default is refused. describes_router: gate= replaces the router, so that any value
    but the default is refused beside it.
    """

    name: str
    default: Any
    honoured: str = ""
    refused: str = ""
    refuses: Callable[[Any], bool] | None = None
    values: tuple[str, ...] = ()
    describes_router: bool = False

    def why_refused(self, config: Any) -> str | None:
        """The reason to refuse the value of this config, None if it is accepted."""
        value = getattr(config, self.name, self.default)
        unknown = [name for name in _names(value) if name not in self.values]
        if self.honoured and unknown and not self._is_default(value):
            known = ", ".join(map(repr, self.values)) or "no name"
            return f"this version of fmoe_ext knows {known} here"
        if not self.refused:
            return None
        is_refused = not self._is_default(value) if self.refuses is None else self.refuses(config)
        return self.refused if is_refused else None

    def is_set(self, config: Any) -> bool:
        """True if config has another value than the default."""
        return not self._is_default(getattr(config, self.name, self.default))

    def _is_default(self, value: Any) -> bool:
        return is_default(value, self.default)

    @property
    def has_no_effect(self) -> bool:
        return self.honoured.startswith("no effect")


def is_default(value: Any, default: Any) -> bool:
    """True if value is the default; None, False and an empty list are the same."""
    return value == default or (_is_nothing(value) and _is_nothing(default))


def _is_nothing(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, (list, tuple)) and not value)


def names_of(config: Any, name: str) -> set[str]:
    """The names in a field that holds a name, an enum member or a list of them."""
    return set(_names(getattr(config, name, None)))


def _names(value: Any) -> list[str]:
    values = value if isinstance(value, (list, tuple, set)) else (value,)
    return [v.name if isinstance(v, enum.Enum) else v for v in values if isinstance(v, (str, enum.Enum))]


def check(options: tuple[Option, ...], config: Any, own_gate: bool) -> None:
    """Raise ValueError for an option that a layer of this config would ignore; the message begins with its name."""
    for option in options:
        value = getattr(config, option.name, option.default)
        if own_gate and option.describes_router:
            if option.is_set(config) and not option.has_no_effect:
                raise ValueError(
                    f"{option.name}={value!r} describes Megatron's router, but gate= is given: say it in the gate's "
                    f"own arguments and leave {option.name} at {option.default!r}, or leave gate= out"
                )
        elif (reason := option.why_refused(config)) is not None:
            raise ValueError(f"{option.name}={value!r} is refused: {reason} (docs/megatron.md)")
    for name, value, default in _unknown(config, {option.name for option in options}):
        raise ValueError(
            f"{name}={value!r} is refused: this version of fmoe_ext does not know the option; leave it at {default!r}"
        )


def check_dense(config: Any) -> None:
    """Raise ValueError for an option that describes no layer which replaces a dense MLP."""
    shared = config.moe_shared_expert_intermediate_size
    if shared is not None:
        raise ValueError(
            f"moe_shared_expert_intermediate_size={shared} is refused: the dense MLP that fmoefy replaces has no "
            "shared experts; moe_layer_spec builds them"
        )
    latent = getattr(config, "moe_latent_size", None)
    if latent is not None:
        raise ValueError(
            f"moe_latent_size={latent} is refused: experts in place of a dense MLP have the model's width; "
            "moe_layer_spec builds latent ones"
        )
    if not all(layers_with_experts(config)):
        raise ValueError(
            f"moe_layer_freq={config.moe_layer_freq!r} is refused: name the layers in fmoefy(model, layers=...)"
        )


def layers_with_experts(config: Any) -> list[bool]:
    """moe_layer_freq for each layer of the decoder; an integer N puts experts in every N-th layer, from the first."""
    frequency = config.moe_layer_freq
    if isinstance(frequency, (list, tuple)):
        return [bool(has_experts) for has_experts in frequency]
    return [number % frequency == 0 for number in range(config.num_layers)]


def _unknown(config: Any, known: set[str]) -> Iterator[tuple[str, Any, Any]]:
    """(name, value, default) of the fields that look like MoE options, have another value and no row in the table."""
    for field in dataclasses.fields(config):
        if MOE_FIELD.search(field.name) and field.name not in known:
            factory = field.default_factory
            default = field.default if factory is dataclasses.MISSING else factory()
            value = getattr(config, field.name)
            if not is_default(value, default):
                yield field.name, value, default


def table_of(options: tuple[Option, ...]) -> str:
    """The table as docs/megatron.md shows it: options without effect share a row with their reason."""
    rows, reasons = ["| option | default | honoured by | refused |", "|---|---|---|---|"], []
    for option in options:
        if option.has_no_effect and not option.refused:
            if option.honoured not in reasons:
                reasons.append(option.honoured)
            continue
        refused = option.refused if option.honoured else f"any other value: {option.refused}"
        cells = (f"`{option.name}`", f"`{option.default}`", option.honoured or "-", refused or "-")
        rows.append(f"| {' | '.join(cells)} |")
    for reason in reasons:
        names = ", ".join(f"`{option.name}`" for option in options if option.honoured == reason)
        rows.append(f"| {names} | | {reason} | - |")
    return "\n".join(rows)
