"""Notes of fmoefy in the configuration of a Transformers model, which save_pretrained saves.

The configuration gets the entry "fmoe_ext", from which huggingface.from_pretrained builds the model
again, and its activations become NEEDS: a dense model built from it fails with that text. Where it names none, the
dtype in the file becomes NEEDS. The name of the dense model goes: nothing reads a dense model in its place by it.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterator, Sequence
from typing import Any

from fmoe_ext.experts import activation_name
from fmoe_ext.gates import GATES
from fmoe_ext.models.target import Options, Target
from fmoe_ext.transformer import FMoETransformerMLP

KEY = "fmoe_ext"
VERSION = 1
NEEDS = "needs fmoe_ext.huggingface.from_pretrained"
_NO_NAME = (
    "(fmoefied in memory, which no name loads: give ref_model=copy.deepcopy(model), or the tokenizer, itself)"
)
# of this process, or in the entry
NOT_SAVED = (
    "moe_group",
    "world_size",
    "expert_dp_comm",
    "gate_group",
    "bias",
)


def note(
    model: Any,
    kind: str,
    targets: Sequence[Target],
    layers: Sequence[FMoETransformerMLP],
    options: Options,
) -> str:
    """Notes in model.config what became of the targets -> in which formats the model can be written, for the report.

    Nothing, and "", for a model that has no save_pretrained().
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(model, "save_pretrained") or not hasattr(config, "to_json_string"):
        return ""
    record = getattr(config, KEY, None)
    if record is None:
        config = _own_config(model)
        record = {"version": VERSION, "dense": _mark(config), "layers": []}
    entries = [
        {"kind": kind, "matched": options.match is not None} | _entry(target, moe, options)
        for target, moe in zip(targets, layers, strict=True)
    ]
    setattr(config, KEY, record | {"layers": [*record["layers"], *entries]})
    config._name_or_path = _NO_NAME
    from fmoe_ext.checkpoint.families import formats_for  # it brings torch.distributed.checkpoint

    formats = " or ".join(formats_for(config.model_type))
    if formats:
        return f"export() can write it as {formats}, if gate and experts compute what such a layer does"
    return (
        f"no format of export() holds {config.model_type} models with MoE layers: save_pretrained() writes a folder "
        "for huggingface.from_pretrained()"
    )


def _own_config(model: Any) -> Any:
    """A copy of model.config in its place, also in its submodules: other models may be made of the original."""
    copies: dict[int, Any] = {}
    config = copy.deepcopy(model.config, copies)
    for module in model.modules():
        own = copies.get(id(vars(module).get("config")))
        if own is not None:
            module.config = own
    return config


def take_record(values: dict[str, Any]) -> dict[str, Any] | None:
    """Takes the entry out of the values of a configuration, which are the dense model's then -> it, None if none."""
    record = values.pop(KEY, None)
    for name, value in (record or {}).get("dense", {}).items():
        *parents, last = name.split(".")
        functools.reduce(lambda part, parent: part[parent], parents, values)[last] = value
    return record


def _entry(target: Target, moe: FMoETransformerMLP, options: Options) -> dict[str, Any]:
    activation = moe.experts.activation
    kwargs = {name: value for name, value in options.moe_kwargs.items() if name not in NOT_SAVED}
    saved = {name: value for name, value in kwargs.items() if _is_json(value)}
    entry = {
        "path": target.path,
        "num_experts": moe.num_experts,
        "top_k": moe.top_k,
        "d_model": moe.d_model,
        "d_hidden": moe.d_hidden,
        "activation": activation_name(activation),
        "bias": moe.experts.htoh4.bias is not None,
        "gate": _name_of(options.gate),
        "options": {name: value for name, value in target.moe_kwargs.items() if name == "gate_bias"} | saved,
    }
    missing = {name: str(kwargs[name]) for name in kwargs.keys() - saved.keys()}
    if entry["activation"] is None and options.activation is not None:  # else the dense MLP has it
        missing["activation"] = str(activation)
    if entry["gate"] is None:
        missing["gate"] = str(options.gate)
    return entry | {"missing": missing}


def _name_of(gate: Any) -> dict[str, Any] | None:
    """A gate of GATES as {"name", "options"}; None for one that has to be given again."""
    options = {}
    if isinstance(gate, functools.partial) and not gate.args:
        gate, options = gate.func, gate.keywords
    name = "softmax" if gate is None else gate
    for known, maker in GATES.items():
        if maker is gate:
            name = known
    return {"name": name, "options": options} if isinstance(name, str) and _is_json(options) else None


def _is_json(value: Any) -> bool:
    try:
        return json.loads(json.dumps(value)) == value
    except (TypeError, ValueError):
        return False


def _mark(config: Any) -> dict[str, str]:
    """Replace the configuration's activations by NEEDS -> {dotted name: what was there}."""
    from transformers.activations import ACT2FN

    found = {}
    for prefix, part in _parts(config, ""):
        for name, value in list(vars(part).items()):
            if not isinstance(value, str):
                continue
            if ("act" in name and value in ACT2FN) or name == "feed_forward_proj":
                found[prefix + name] = value
                setattr(part, name, NEEDS)
    return found


def _parts(config: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """(dotted prefix, config) of a configuration and those inside it."""
    yield prefix, config
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_json_string") and hasattr(value, "model_type"):
            yield from _parts(value, f"{prefix}{name}.")
