"""Note in the configuration of a Transformers model what fmoefy did to it, so that save_pretrained() saves it.

note() writes the entry "fmoe_ext"; huggingface.from_pretrained (saved.py) takes it out again (take_record) and builds
the model from it:

    {"hidden_act": "needs fmoe_ext.huggingface.from_pretrained",                      <- NEEDS
     "fmoe_ext": {"version": 1, "dense": {"hidden_act": "silu"}, "layers": [{"path": "model.layers.0.mlp", ...}, ...]}}

Without fmoe_ext the same config.json would make a dense model, silently, with random MLPs. So its activations become
NEEDS, and a dense model built from it fails with that text; where it names no activation, saving.py puts NEEDS in place
of the dtype. What was there before is in "dense", and take_record() puts it back. The dense model's name goes, so
that no library loads the dense model by it.
"""

from __future__ import annotations

import copy
import functools
import json
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from fmoe_ext.experts import activation_name
from fmoe_ext.gates import GATES
from fmoe_ext.layers import keywords_of
from fmoe_ext.models.target import Options, Target
from fmoe_ext.ops.activations import ACTIVATIONS
from fmoe_ext.transformer import FMoETransformerMLP

KEY = "fmoe_ext"
_VERSION = 1
NEEDS = "needs fmoe_ext.huggingface.from_pretrained"
_JSON = MappingProxyType(
    {
        dict: "an object",
        list: "a list",
        str: "a text",
        int: "a whole number",
        bool: "true or false",
        type(None): "null",
    }
)
_RECORD: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {
        "version": (int,),
        "dense": (dict,),  # {dotted name in the configuration: what stood where NEEDS stands}
        "layers": (list,),  # in the order in which fmoefy made them
    }
)
_GATE: Mapping[str, tuple[type, ...]] = MappingProxyType({"name": (str,), "options": (dict,)})
_LAYER: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {
        "kind": (str,),  # which finder of fmoefy found the MLP
        "matched": (bool,),  # by match= of the user
        "path": (str,),  # dotted name in the model
        "num_experts": (int,),  # of all ranks
        "top_k": (int,),
        "d_model": (int,),
        "d_hidden": (int,),
        "activation": (str, type(None)),  # null: the dense MLP's own, or in missing
        "bias": (bool,),
        "gate": (dict, type(None)),  # null: in missing
        "options": (dict,),  # further keywords of FMoETransformerMLP that are values of JSON
        "missing": (dict,),  # {keyword: how it printed} of those that are not: to be given again
    }
)
_NO_NAME = (
    "(fmoefied in memory, which no name loads: give ref_model=copy.deepcopy(model), or the tokenizer, itself)"
)
# keywords of this process, and one that the entry has itself
_NOT_SAVED = ("moe_group", "world_size", "expert_dp_comm", "gate_group", "bias")
_NEVER = (*_NOT_SAVED, "num_expert", "mask", "mask_dict", "gate_hook")  # no values of JSON, or another entry


def note(
    model: Any,
    kind: str,
    targets: Sequence[Target],
    layers: Sequence[FMoETransformerMLP],
    options: Options,
) -> str:
    """Note in model.config what became of the targets -> in which formats the model can be written, for the report.

    A model that has no save_pretrained() gets no note, and the report "".
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(model, "save_pretrained") or not hasattr(config, "to_json_string"):
        return ""
    # A second fmoefy adds its layers to the entry of the first.
    record = getattr(config, KEY, None)
    if record is not None:
        check_record(record, f"{type(model).__name__}.config")
    else:
        # mark a copy, here and in the submodules that hold the same one: other models may be made of the original
        copies: dict[int, Any] = {}  # {id of what was copied: its copy}
        config = copy.deepcopy(config, copies)
        for module in model.modules():
            own = copies.get(id(vars(module).get("config")))
            if own is not None:
                module.config = own
        record = {"version": _VERSION, "dense": _mark(config), "layers": []}
    entries = [_entry(kind, target, moe, options) for target, moe in zip(targets, layers, strict=True)]
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


def take_record(values: dict[str, Any], where: str) -> dict[str, Any] | None:
    """Take the entry out of the values of a configuration, and make them the dense model's -> it, None without one.

    where: what has the values, for errors. Raises CheckpointError for an entry that note() has not written.
    """
    record: Any = values.pop(KEY, None)
    if record is None:
        return None
    check_record(record, where)
    # Put back what stood where NEEDS stands.
    for name, value in record["dense"].items():
        *parents, last = name.split(".")
        part: Any = values
        for parent in parents:
            part = part.get(parent) if isinstance(part, dict) else None
        # another value was written over ours by hand: neither it nor the noted one may be dropped
        if not isinstance(part, dict) or part.get(last) != NEEDS:
            found = part.get(last) if isinstance(part, dict) else None
            raise _damaged(
                where, f"dense.{name}", value, f"{name} is {found!r} there, where it must be {NEEDS!r}"
            )
        part[last] = value
    for name in _places_of(NEEDS, values):  # one that "dense" does not have
        raise _damaged(where, f"dense.{name}", "missing", f"it must say what {name} was")
    return record


def _places_of(value: Any, part: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of the places in a nest of objects that hold a value."""
    for name, other in part.items() if isinstance(part, dict) else ():
        if other == value:
            yield prefix + name
        yield from _places_of(value, other, f"{prefix}{name}.")


def check_record(record: Any, where: str) -> Any:
    """Check that an entry has the keys, types and ranges of one that note() writes -> it; CheckpointError if not.

    The file may be a stranger's: models are built from what it says.
    """
    _check_keys(record, _RECORD, where, "")
    if record["version"] != _VERSION:
        raise _damaged(where, "version", record["version"], f"this fmoe_ext reads {_VERSION}: upgrade it")
    from transformers.activations import ACT2FN

    # What was replaced by NEEDS.
    for name, value in record["dense"].items():
        if name == "dtype":
            if value is not None and not isinstance(getattr(torch, str(value), None), torch.dtype):
                raise _damaged(where, "dense.dtype", value, "it must be a dtype of torch, or null")
        elif not isinstance(value, str) or value.removeprefix("gated-") not in ACT2FN:  # T5 says "gated-gelu"
            raise _damaged(where, f"dense.{name}", value, "it must be an activation of Transformers")
    # Each layer: its sizes, gate, activation and options.
    for i, entry in enumerate(record["layers"]):
        at = f"layers[{i}]"
        _check_keys(entry, _LAYER, where, at)
        for name in ("num_experts", "top_k", "d_model", "d_hidden"):
            if not 1 <= entry[name] < 2**63:  # what torch takes as a size
                raise _damaged(where, f"{at}.{name}", entry[name], "it must be at least 1, and below 2**63")
        if entry["gate"] is not None:
            _check_keys(entry["gate"], _GATE, where, f"{at}.gate")
            if entry["gate"]["name"] not in GATES:
                known = f"it must be one of {', '.join(GATES)}"
                raise _damaged(where, f"{at}.gate.name", entry["gate"]["name"], known)
        elif "gate" not in entry["missing"]:
            raise _damaged(where, f"{at}.gate", None, f"{at}.missing must say which gate it was")
        if entry["activation"] is not None and entry["activation"] not in ACTIVATIONS:
            known = f"it must be one of {', '.join(ACTIVATIONS)}"
            raise _damaged(where, f"{at}.activation", entry["activation"], known)
        for name, value in entry["options"].items():
            if name in _NEVER or name not in keywords_of(FMoETransformerMLP) or name in _LAYER:
                raise _damaged(
                    where, f"{at}.options.{name}", value, "no option of this name is saved: remove it"
                )
            if name in ("gate_bias", "renormalize", "shared_expert_gate") and not isinstance(value, bool):
                raise _damaged(where, f"{at}.options.{name}", value, "it must be true or false")
        for name, value in entry["missing"].items():
            if not isinstance(value, str):
                raise _damaged(where, f"{at}.missing.{name}", value, "it must be a text")
    return record


def _check_keys(part: Any, fields: Mapping[str, tuple[type, ...]], where: str, at: str) -> None:
    """Raise CheckpointError unless a part of the entry is an object of these keys, whose values have these types."""
    if not isinstance(part, dict):
        raise _damaged(where, at, part, f"it must be an object with {', '.join(fields)}")
    dot = f"{at}." if at else ""
    for name in part.keys() - fields.keys():
        raise _damaged(
            where, f"{dot}{name}", part[name], "this key is not known: a newer fmoe_ext may read it"
        )
    for name, types in fields.items():
        if name not in part:
            raise _damaged(where, f"{dot}{name}", "missing", f"it must be {_names(types)}")
        # True is an int to isinstance
        if not isinstance(part[name], types) or (isinstance(part[name], bool) and bool not in types):
            raise _damaged(where, f"{dot}{name}", part[name], f"it must be {_names(types)}")


def _names(types: tuple[type, ...]) -> str:
    return " or ".join(_JSON[kind] for kind in types)


def _damaged(where: str, key: str, value: Any, why: str) -> Exception:
    from fmoe_ext.checkpoint.errors import CheckpointError  # it brings torch.distributed.checkpoint

    text = reprlib.repr(value)
    return CheckpointError(
        f"{where}: {'.'.join(filter(None, (KEY, key)))} is {text}, but {why}. Take the folder as "
        "model.save_pretrained() wrote it"
    )


def _entry(kind: str, target: Target, moe: FMoETransformerMLP, options: Options) -> dict[str, Any]:
    """Describe one layer in values of JSON, with the keys of _LAYER; what JSON cannot hold goes to "missing"."""
    activation = moe.experts.activation
    kwargs = {name: value for name, value in options.moe_kwargs.items() if name not in _NOT_SAVED}
    saved = {name: value for name, value in kwargs.items() if _is_json(value)}
    # The gate: a name of GATES, or a functools.partial of one with keywords.
    gate: Any = options.gate
    gate_options = {}
    if isinstance(gate, functools.partial) and not gate.args:
        gate, gate_options = gate.func, gate.keywords
    gate_name = next(
        (known for known, maker in GATES.items() if maker is gate), "softmax" if gate is None else gate
    )
    has_name = isinstance(gate_name, str) and _is_json(gate_options)
    entry = {
        "kind": kind,
        "matched": options.match is not None,
        "path": target.path,
        "num_experts": moe.num_experts,
        "top_k": moe.top_k,
        "d_model": moe.d_model,
        "d_hidden": moe.d_hidden,
        "activation": activation_name(activation),
        "bias": moe.experts.htoh4.bias is not None,
        "gate": {"name": gate_name, "options": gate_options} if has_name else None,
        "options": {name: value for name, value in target.moe_kwargs.items() if name == "gate_bias"} | saved,
    }
    missing = {name: str(kwargs[name]) for name in kwargs.keys() - saved.keys()}
    if entry["activation"] is None and options.activation is not None:  # else the dense MLP has it
        missing["activation"] = str(activation)
    if entry["gate"] is None:
        missing["gate"] = str(options.gate)
    return entry | {"missing": missing}


def _is_json(value: Any) -> bool:
    """Return True if a value comes back from JSON as it was; a tuple does not."""
    try:
        return json.loads(json.dumps(value)) == value
    except (TypeError, ValueError):
        return False


def _mark(config: Any, prefix: str = "") -> dict[str, str]:
    """Replace the activations of a configuration, and of those inside it, by NEEDS -> {dotted name: what was there}."""
    from transformers.activations import ACT2FN

    found: dict[str, str] = {}
    for name, value in list(vars(config).items()):
        # hidden_act, activation_function and their like; T5's feed_forward_proj
        if isinstance(value, str) and (("act" in name and value in ACT2FN) or name == "feed_forward_proj"):
            found[prefix + name] = value
            setattr(config, name, NEEDS)
        elif hasattr(value, "to_json_string") and hasattr(value, "model_type"):  # a configuration inside it
            found |= _mark(value, f"{prefix}{name}.")
    return found
