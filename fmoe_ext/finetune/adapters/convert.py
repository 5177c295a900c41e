"""Write an adapter in another layout: the same change of every expert, or an error that names the reason.

`fmoe adapter convert --to` takes the names in LAYOUTS, after the programs that read them. Layouts differ in four ways:

    a tensor for all experts (flat, stacked), or for each (numbered)
    gate and up as one parameter (flat) or two
    lora_A reads the input of the projection (out_in), or PEFT before 0.19 turned it around (in_out)
    columns of a flat lora_B lie by rank or by expert (packing.py)

Two projections become one by blocks, with zeros where a factor belongs to the other one, and their ranks add up:

    a = [a_gate]    b = [b_gate   0 ]      unless they share a:   a = a_gate    b = [b_gate]
        [a_up  ]        [  0    b_up]                                               [b_up  ]
"""

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from fmoe_ext.checkpoint.base_experts import BaseExperts
from fmoe_ext.checkpoint.card import render_card, shown, write_card
from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.families import FAMILIES
from fmoe_ext.checkpoint.files import locked, made_folder, write_json
from fmoe_ext.checkpoint.model_folder import ModelFolder
from fmoe_ext.checkpoint.safetensors_file import OURS, StoredTensor, write_safetensors
from fmoe_ext.checkpoint.shards import check_is_free, new_folder
from fmoe_ext.finetune.adapters.delta import (
    half_rows,
    interleaves,
    lacks_gate,
    model_type,
    module_of,
    plain_pairs,
)
from fmoe_ext.finetune.adapters.packing import EXPERT_MAJOR, RANK_MAJOR, packed
from fmoe_ext.finetune.adapters.reading import (
    CONFIG,
    PARAMETERS,
    PREFIX,
    WEIGHTS,
    Adapter,
    Factors,
    Pair,
    name_for_patterns,
)


class _Layout(NamedTuple):
    """Form of the tensors that a program reads."""

    form: str  # of Adapter
    in_out: bool = False  # lora_A and lora_B have each other's sizes
    packing: str = RANK_MAJOR  # of the columns of lora_B
    needs_both: bool = False  # down_proj and gate_up_proj of each layer
    one_rank: bool = False  # and one lora_alpha, for all modules


LAYOUTS = MappingProxyType(
    {
        "peft-0.19": _Layout("flat"),
        "peft-0.18": _Layout("flat", in_out=True),
        "unsloth": _Layout("flat", packing=EXPERT_MAJOR),
        "vllm": _Layout("flat", needs_both=True, one_rank=True),
        "per-expert": _Layout("numbered"),
        "sglang": _Layout("stacked", one_rank=True),
    }
)
# peft_version of adapter_config.json, by which readers tell the orientation
_VERSIONS = MappingProxyType({"peft-0.19": "0.19.1", "peft-0.18": "0.18.1"})
READ_BY_PEFT = ("peft-0.19", "vllm", "per-expert")  # by an installed one, of 0.19 or later
_HALVES = ("gate", "up")


def convert(
    adapter: Adapter, to: str, out: Path, base: ModelFolder | None = None, *, check: bool = True
) -> None:
    """Write an adapter to a new folder in one of LAYOUTS; atomically.

    base: the model, for what the adapter does not say about it. check: where PEFT is installed and reads the layout, it
    must read the same adapter from the folder; not checked without base, and per-expert is then refused. Raises
    CheckpointError for what the layout cannot hold, and for what PEFT would read otherwise.
    """
    # What the layout cannot hold is an error before anything is written.
    layout = LAYOUTS[to]
    adapter.require_whole()
    if not adapter.layers:
        raise CheckpointError(f"{adapter.folder} has no adapters of experts to convert")
    adapter.require_decided()
    of_base = None if base is None else BaseExperts(base)
    layers = _all_fitted(adapter, layout, of_base)
    config = _config(adapter, layers, layout, to, of_base)
    # Tensors that read and turn their factors when they are written, so that one is in memory at a time.
    write = {"flat": _flat, "numbered": _numbered, "stacked": _stacked}[layout.form]
    tensors = dict(adapter.others)
    for layer, parts in layers.items():
        tensors |= write(adapter, layer, parts, layout, of_base)
    out = Path(out)
    check_is_free(out)
    lock = out.with_name(f".{out.name}.lock")
    with made_folder(out.parent), locked(lock, f"converting into {out}"), new_folder(out) as folder:
        note = {"packing": layout.packing} if layout.form == "flat" else {}
        write_safetensors(folder / WEIGHTS, tensors, {OURS: json.dumps(note)})
        write_json(folder / CONFIG, config)
        if check and to in READ_BY_PEFT:
            _check_by_peft(adapter, to, folder, of_base)
        model = config.get("base_model_name_or_path")
        facts = {"made from": shown(adapter.folder), "layers of experts": len(layers), "layout": to}
        command = f"fmoe adapter convert {shown(adapter.folder)} --to {to} -o {out.name}"
        what = "A LoRA adapter of a model's experts, in another layout."
        write_card(folder, render_card(out.name, what, model, facts, command, library="peft", tags=["lora"]))


def _check_by_peft(adapter: Adapter, to: str, folder: Path, of_base: BaseExperts | None) -> None:
    """Raise CheckpointError if PEFT reads another adapter, and for per-expert if that cannot be known."""
    # PEFT reads flat tensors of every model, per-expert ones only where it converts the model type: it must be asked.
    unchecked = "--unchecked writes it for vLLM and SGLang"
    try:
        from fmoe_ext.finetune.adapters.peft_reads import why_not
    except ImportError as error:
        if to == "per-expert":
            raise CheckpointError(
                f"PEFT reads per-expert of some models alone, so that it is asked ({error}): "
                f"pip install peft transformers; {unchecked}"
            ) from None
        return
    if of_base is None:
        if to == "per-expert":
            raise CheckpointError(f"PEFT reads per-expert of some models alone: give --base; {unchecked}")
        return
    # gate and up joined, since that is the parameter in the model that PEFT loads the folder into
    layers = _all_fitted(adapter, LAYOUTS["peft-0.19"], of_base)
    if reason := why_not(adapter, layers, folder, of_base.base):
        raise CheckpointError(f"{adapter.folder} cannot be written as {to}: {reason}; {unchecked}")


def _all_fitted(
    adapter: Adapter, layout: _Layout, of_base: BaseExperts | None
) -> dict[str, dict[str, Factors]]:
    """Join gate and up for flat tensors and split them for others -> {layer: projections as a layout has them}."""
    if lacks_gate(adapter, of_base):
        if with_gate := [
            layer for layer, parts in adapter.layers.items() if {"gate", "gate_up"} & parts.keys()
        ]:
            raise CheckpointError(f"{with_gate[0]}: a gate is adapted, but the base's experts have none")
        return adapter.layers
    in_turn = interleaves(adapter, of_base)  # None: unknown, an error only where it matters

    def half(whole: Factors, role: str) -> Pair:  # the same a, and the rows of b that are gate's or up's
        a, b = whole.read()
        return a, b[:, half_rows(role, whole.d_out // 2, bool(in_turn))]

    fitted = {}
    for layer, parts in adapter.layers.items():
        joins = layout.form == "flat" and bool(parts.keys() & set(_HALVES))
        splits = layout.form != "flat" and "gate_up" in parts
        if (joins or splits) and in_turn is None:
            raise CheckpointError(
                f"{adapter.folder} does not say whether gate and up are in turn (as in GPT-OSS): give --base"
            )
        if joins:
            if not {*_HALVES} <= parts.keys():
                raise CheckpointError(
                    f"{layer}: gate and up are one parameter in this layout, but only one is adapted"
                )
            whole = _joined(adapter, layer, parts["gate"], parts["up"], bool(in_turn))
            rest = {role: factors for role, factors in parts.items() if role not in _HALVES}
            fitted[layer] = {"gate_up": whole, **rest}
        elif splits:
            whole = parts["gate_up"]
            halves = {
                role: replace(whole, d_out=whole.d_out // 2, read=partial(half, whole, role))
                for role in _HALVES
            }
            fitted[layer] = halves | {role: factors for role, factors in parts.items() if role != "gate_up"}
        else:
            fitted[layer] = parts
    return fitted


def _joined(adapter: Adapter, layer: str, gate: Factors, up: Factors, in_turn: bool) -> Factors:
    """Join gate and up: of the same rank if they share a, else of both ranks with blocks in b."""
    if gate.scaling != up.scaling or gate.dtype != up.dtype or gate.d_out != up.d_out:
        raise CheckpointError(
            f"{layer}: gate and up differ in scaling, dtype or width, so that they cannot be joined"
        )
    shared = gate.rank == up.rank and torch.equal(gate.read()[0], up.read()[0])
    if not shared and adapter.config.get("use_rslora"):
        raise CheckpointError(
            f"{layer}: joining gate and up changes the rank, which changes the scaling of rsLoRA"
        )
    rank = gate.rank if shared else gate.rank + up.rank

    def read() -> Pair:
        (a1, b1), (a2, b2) = gate.read(), up.read()
        b = b1.new_zeros(gate.num_experts, 2 * gate.d_out, rank)
        b[:, half_rows("gate", gate.d_out, in_turn), : gate.rank] = b1
        b[:, half_rows("up", gate.d_out, in_turn), rank - up.rank :] = b2  # all columns if a is shared
        return (a1 if shared else torch.cat([a1, a2], 1)), b

    return Factors(gate.num_experts, rank, gate.d_in, 2 * gate.d_out, gate.scaling, gate.dtype, read)


def _lazy(
    factors: Factors, which: int, shape: Iterable[int], change: Callable[[torch.Tensor], torch.Tensor]
) -> StoredTensor:
    """Make a tensor of a (which=0) or b (which=1) that is read, and changed to its shape, when it is written."""
    return StoredTensor(shape, factors.dtype, lambda: change(factors.read()[which]).contiguous())


def _flat(
    adapter: Adapter, layer: str, parts: dict[str, Factors], layout: _Layout, of_base: BaseExperts | None
) -> dict[str, StoredTensor]:
    if layout.needs_both and parts.keys() not in ({"gate_up", "down"}, {"up", "down"}):
        raise CheckpointError(
            f"{layer}: vLLM's stacked names need gate_up and down, here is {', '.join(parts)}"
        )
    in_out = layout.in_out
    if in_out and adapter.orientation != "in_out":
        # no version of PEFT turns experts around that the model stores [E, in, out]
        if of_base is not None:
            in_out = not any(e.turned for at in adapter.layers if (e := of_base.at(at)))
        elif family := FAMILIES.get(model_type(adapter, of_base)):
            in_out = not family.in_modules.turned
        else:
            raise CheckpointError("what PEFT before 0.19 expects depends on the model: give --base")

    def oriented(value: torch.Tensor) -> torch.Tensor:  # b [E, out, r] becomes lora_A, a [E, r, in] lora_B
        return value.transpose(1, 2) if in_out else value

    tensors = {}
    for role, factors in parts.items():
        # PEFT wraps the experts once a parameter: the wrapper of down_proj is the outer one
        inner = ".base_layer" if role != "down" and "down" in parts else ""
        count = factors.num_experts * factors.rank
        first, second = (1, 0) if in_out else (0, 1)
        widths = (factors.d_out, factors.d_in) if in_out else (factors.d_in, factors.d_out)
        tensors[f"{PREFIX}{layer}{inner}.lora_A.weight"] = _lazy(
            factors, first, (count, widths[0]), lambda a: oriented(a).flatten(0, 1)
        )
        tensors[f"{PREFIX}{layer}{inner}.lora_B.weight"] = _lazy(
            factors, second, (widths[1], count), lambda b: packed(oriented(b), layout.packing)
        )
    return tensors


def _numbered(
    adapter: Adapter, layer: str, parts: dict[str, Factors], layout: _Layout, of_base: BaseExperts | None
) -> dict[str, StoredTensor]:
    leaves = _leaves(adapter, of_base)
    tensors = {}
    for role, factors in parts.items():
        for e in range(factors.num_experts):
            name = f"{PREFIX}{layer}.{e}.{leaves[role]}"
            take = itemgetter(e)
            tensors[f"{name}.lora_A.weight"] = _lazy(factors, 0, (factors.rank, factors.d_in), take)
            tensors[f"{name}.lora_B.weight"] = _lazy(factors, 1, (factors.d_out, factors.rank), take)
    return tensors


def _leaves(adapter: Adapter, of_base: BaseExperts | None) -> dict[str, str]:
    """Name gate, up and down of one expert as the base's files do, else as its family, else as most models."""
    found = map(of_base.at, adapter.layers) if of_base is not None else ()
    for experts in found:
        if experts is not None and not experts.is_stack:
            first = ((role, names[0].removesuffix(".weight")) for role, names in experts.names.items())
            return {role: name.partition(".experts.0.")[2] for role, name in first}
    family = FAMILIES.get(model_type(adapter, of_base))
    names = (family.files.per_expert if family else None) or ("gate_proj", "up_proj", "down_proj")
    return dict(zip(("gate", "up", "down"), (name.removesuffix(".weight") for name in names), strict=True))


def _stacked(
    adapter: Adapter, layer: str, parts: dict[str, Factors], layout: _Layout, of_base: BaseExperts | None
) -> dict[str, StoredTensor]:
    tensors = {}
    for role, f in parts.items():
        name = f"{PREFIX}{layer}.{ {'gate': 'w1', 'up': 'w3', 'down': 'w2'}[role] }"
        tensors[f"{name}.lora_A.weight"] = _lazy(f, 0, (f.num_experts, f.rank, f.d_in), lambda a: a)
        tensors[f"{name}.lora_B.weight"] = _lazy(f, 1, (f.num_experts, f.d_out, f.rank), lambda b: b)
    return tensors


def _config(
    adapter: Adapter,
    layers: dict[str, dict[str, Factors]],
    layout: _Layout,
    to: str,
    of_base: BaseExperts | None,
) -> dict[str, Any]:
    """Make adapter_config.json of the result: which modules or parameters, and rank and alpha of each."""
    # The names of the experts' projections in this layout.
    config = dict(adapter.config)
    config["rank_pattern"] = dict(config.get("rank_pattern") or {})
    config["alpha_pattern"] = dict(config.get("alpha_pattern") or {})
    if layout.form == "flat":
        leaves = dict(PARAMETERS)
    elif layout.form == "numbered":
        leaves = _leaves(adapter, of_base)
    else:
        leaves = {"gate": "w1", "up": "w3", "down": "w2"}
    names = [f"{layer}.{leaves[role]}" for layer, parts in layers.items() for role in parts]
    # target_parameters: the experts' parameters if they are flat, and others that were adapted so.
    config["target_parameters"] = [
        *(names if layout.form == "flat" else ()),
        *(
            n
            for n in config.get("target_parameters") or ()
            if not str(n).endswith(tuple(PARAMETERS.values()))
        ),
    ] or None
    # target_modules: what the other tensors adapt, and the leaves of experts if these are modules.
    modules = set() if layout.form == "flat" else {n.rpartition(".")[2] for n in names}
    given = adapter.config.get("target_modules")
    others = {k.removeprefix(PREFIX).rpartition(".lora_")[0] for k in adapter.others if ".lora_" in k}
    others = {name for name in others if name_for_patterns(adapter.config, name) == name}
    if isinstance(given, list):  # its short names, less those of experts that no other module has
        experts = {"w1", "w2", "w3", "gate_proj", "up_proj", "down_proj"}
        others = {n for n in given if n not in experts or any(o.endswith(f".{n}") for o in others)}
    config["target_modules"] = sorted(others | modules)
    # Rank and lora_alpha of each leaf: patterns where they are not the config's own.
    is_rslora = bool(config.get("use_rslora"))
    used = [(leaves[role], f.rank, f.scaling) for parts in layers.values() for role, f in parts.items()]
    if layout.one_rank:  # of every other module, too
        pairs = plain_pairs(adapter, whole_modules=True)
        used += [(module_of(key), a.shape[0], scaling) for key, (a, _, scaling) in pairs.items()]
    ranks: dict[str, set[tuple[int, float]]] = {}
    for name, rank, scaling in used:
        alpha = scaling * (rank**0.5 if is_rslora else rank)
        said = float(config["lora_alpha"])  # rounding of the scaling would change it by a bit
        if math.isclose(alpha, said, rel_tol=1e-12):
            alpha = said
        ranks.setdefault(name, set()).add((rank, alpha))
    if layout.one_rank:
        expected = config["r"], config["lora_alpha"]
        if differing := {name: found for name, found in ranks.items() if found != {expected}}:
            first = ", ".join(f"{sorted(found)} of {name}" for name, found in [*differing.items()][:3])
            raise CheckpointError(
                f"{to} has one rank and one lora_alpha for all modules, here {expected}, but {len(differing)} have "
                f"others, {first}: use per-expert if gate and up have factors of their own; else merge, since "
                "vLLM and SGLang do not read rank_pattern and alpha_pattern"
            )
        # what is left are patterns of modules that are not adapted, which SGLang refuses, too
        config |= {"rank_pattern": {}, "alpha_pattern": {}}
        if to == "sglang" and is_rslora:  # which SGLang does not read: it divides by r
            config |= {"use_rslora": False, "lora_alpha": config["lora_alpha"] * config["r"] ** 0.5}
        return config
    for leaf, found in ranks.items():
        if len(found) > 1:
            raise CheckpointError(f"the layers differ in rank or lora_alpha of {leaf}: {sorted(found)}")
        ((rank, alpha),) = found
        # PEFT takes the first pattern that matches, so these stand before the others, and an old one of the name goes
        pattern = rf".*\.experts\..*{leaf}"
        for option, value, usual in (
            ("rank_pattern", rank, config["r"]),
            ("alpha_pattern", alpha, config["lora_alpha"]),
        ):
            others = config[option]
            others.pop(pattern, None)
            if value != usual or others:
                config[option] = {pattern: value, **others}
    if to in _VERSIONS:
        config["peft_version"] = _VERSIONS[to]
    return config
