"""Read the folder of an adapter: which layout its expert tensors have, and the two factors of each expert.

`fmoe adapter` calls read_adapter(); check, convert and merge work on the Adapter that it returns, in one form for all
layouts. Each expert's change is scaling * b @ a, with a [r, in] and b [out, r], whatever the file looks like. Names
tell the form of E experts' tensors:

    flat      of PEFT's target_parameters: one lora_A [E * r, in] and one lora_B [out, E * r] for all experts; where two
              parameters of a module are adapted, PEFT wraps a wrapper: the inner one's names have ".base_layer"
    numbered  a module for each expert: lora_A [r, in] and lora_B [out, r], E times
    stacked   lora_A [E, r, in] and lora_B [E, out, r]

Names do not tell two things about flat tensors. PEFT before 0.19 turned some models' factors around, so that lora_A
does not read the input: widths or the version decide that (_orientation). And columns of lora_B lie by rank or by
expert: their values decide that (packing.py). What a file does not decide is "undecidable", and reading the factors is
an error that asks for it.
"""

import functools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import torch

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.files import inside, read_json
from fmoe_ext.checkpoint.safetensors_file import (
    OURS,
    StoredTensor,
    read_unmapped,
    verify_safetensors,
)
from fmoe_ext.finetune.adapters.options import MOST_WAYS, num_ways, refusals
from fmoe_ext.finetune.adapters.packing import EXPERT_MAJOR, MAX_TENSORS, RANK_MAJOR, Evidence, unpacked

_MOST_MATCHES = 10**7  # of patterns with the names of modules: a second or so
_MOST_WAYS_IN_ALL = (
    2**34
)  # of all patterns through all names: some minutes at worst, milliseconds in real adapters
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."  # of PEFT, before the model's own names
_LEAVES = r"w1|w2|w3|gate_proj|up_proj|down_proj"
_FLAT = re.compile(r"(?P<layer>.*\.experts)(?P<inner>(\.base_layer)*)\.lora_(?P<ab>[AB])\.weight")
# numbers of six digits at most: a file that names expert 10**9 must not make us count to it
_NUMBERED = re.compile(
    rf"(?P<layer>.*\.experts)\.(?P<e>\d{{1,6}})\.(?P<leaf>{_LEAVES})\.lora_(?P<ab>[AB])\.weight"
)
_STACKED = re.compile(rf"(?P<layer>.*\.experts)\.(?P<leaf>{_LEAVES}|gate_up_proj)\.lora_(?P<ab>[AB])\.weight")
_ROLE = MappingProxyType(
    {
        "w1": "gate",
        "w3": "up",
        "w2": "down",
        "gate_proj": "gate",
        "up_proj": "up",
        "down_proj": "down",
        "gate_up_proj": "gate_up",
    }
)
# of PEFT's target_parameters; "up" is for experts without a gate
PARAMETERS = MappingProxyType({"gate_up": "gate_up_proj", "up": "up_proj", "down": "down_proj"})
Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Factors:
    """One projection of all experts of a layer; read() -> (a [E, r, in], b [E, out, r])."""

    num_experts: int  # E
    rank: int  # r
    d_in: int
    d_out: int
    scaling: float  # of b @ a
    dtype: torch.dtype  # of the file
    read: Callable[[], Pair]  # raises CheckpointError where orientation or packing is undecidable


@dataclass
class Adapter:
    """An adapter in a folder.

    orientation and packing are "" where a form has none and "undecidable" where the file does not say it.
    """

    folder: Path
    config: dict[str, Any]  # adapter_config.json
    tensors: dict[str, StoredTensor]
    form: str = "none"  # or flat, numbered, stacked
    orientation: str = ""  # "out_in" (PEFT 0.19 and later) or "in_out" (earlier)
    packing: str = ""  # of the columns of lora_B
    evidence: Evidence | None = None
    layers: dict[str, dict[str, Factors]] = field(default_factory=dict)  # {module: {projection: ...}}
    others: dict[str, StoredTensor] = field(default_factory=dict)  # under the names of the file
    skipped: dict[int, str] = field(default_factory=dict)  # {number: module} of layers between adapted ones
    problems: list[str] = field(default_factory=list)  # what check() reports
    refused: list[str] = field(default_factory=list)  # why its factors are not all that changes the base

    def require_whole(self) -> None:
        """Raise CheckpointError for what convert and merge would leave out."""
        if self.refused:
            raise CheckpointError(f"{self.folder}: {self.refused[0]}")

    def require_decided(self) -> None:
        """Raise CheckpointError, with what to say, if the file does not show how its factors are read."""
        ways = {
            "orientation": "--orientation out_in or in_out",
            "packing": "--packing rank_major (PEFT) or expert_major (early unsloth)",
        }
        if asked := [name for name in ways if getattr(self, name) == "undecidable"]:
            raise CheckpointError(
                f"{self.folder} does not show its {' and '.join(asked)}: say it by "
                + " and ".join(ways[name] for name in asked)
            )

    @property
    def undecided(self) -> bool:
        """True if the factors cannot be read before the user has said more."""
        return "undecidable" in (self.orientation, self.packing)


def read_adapter(folder: Path, packing: str | None = None, orientation: str | None = None) -> Adapter:
    """Read the adapter in a folder. packing, orientation: what the caller knows, instead of what the file shows.

    Raises CheckpointError for what is no adapter or is damaged, and for pickles. What is not computed (DoRA, biases and
    other options) is in its `refused`.
    """
    # Find and check the files, before anything in them is believed: the folder may be a stranger's.
    folder = Path(folder)
    if not folder.exists():
        raise CheckpointError(f"{folder} does not exist")
    if not (folder / WEIGHTS).exists():
        raise CheckpointError(
            f"{folder} has no {WEIGHTS}: give PEFT's folder; pickles (.bin, .pt) are not read, save them as safetensors"
        )
    config = read_json(inside(folder, CONFIG))
    tensors, metadata = read_unmapped(inside(folder, WEIGHTS))
    for name in ("rank_pattern", "alpha_pattern"):  # each may be tried on the module of each tensor
        patterns = config.get(name)
        count = len(patterns) if isinstance(patterns, dict) else 0
        if count * len(tensors) > _MOST_MATCHES:
            raise CheckpointError(
                f"{folder}/{CONFIG}: {name} has {count} patterns for {len(tensors)} tensors, which is too many to try"
            )
    _check_config(folder, config, tensors)
    verify_safetensors(inside(folder, WEIGHTS))
    try:
        noted = json.loads(metadata.get(OURS, "{}")).get("packing")  # by convert(); its checksum covers it
    except (ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{folder}/{WEIGHTS} is damaged: its metadata {OURS!r} is no JSON object"
        ) from error
    noted = noted if noted in (RANK_MAJOR, EXPERT_MAJOR) else None
    # Read the tensors by their form.
    adapter = Adapter(folder, config, tensors, refused=list(refusals(config)))
    parts = _sorted_by_form(adapter)
    if parts["flat"]:
        _read_flat(adapter, parts["flat"], packing or noted, orientation)
    elif packing or orientation:
        raise CheckpointError(f"{folder}: --packing and --orientation are for flat tensors (experts.lora_A)")
    for layer, found in parts["numbered"].items():
        _read_numbered(adapter, layer, found)
    for layer, found in parts["stacked"].items():
        _read_stacked(adapter, layer, found)
    if not adapter.layers:
        adapter.problems.append("no adapter of an expert is in the file")
        return adapter
    # Note what is strange about the whole: layers that differ, and layers that are left out.
    shapes = {
        json.dumps({r: (f.num_experts, f.d_in, f.d_out) for r, f in sorted(p.items())})
        for p in adapter.layers.values()
    }
    if len(shapes) > 1:
        adapter.problems.append("layers differ in projections, experts or widths")
    numbered = {int(m[1]): m for layer in adapter.layers if (m := re.search(r"\.(\d{1,6})\.", layer))}
    if numbered:
        least = min(numbered)
        path, (begin, end) = numbered[least].string, numbered[least].span(1)
        between = (n for n in range(least, max(numbered)) if n not in numbered)
        adapter.skipped = {n: f"{path[:begin]}{n}{path[end:]}" for n in between}
    return adapter


def _check_config(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> None:
    """Raise CheckpointError for another kind of adapter, and for values of a type that PEFT does not write."""
    if config.get("peft_type") != "LORA":
        raise CheckpointError(
            f"{folder}/{CONFIG} says peft_type={config.get('peft_type')!r}, expected 'LORA'"
        )
    # Lists of names, which are compared with the tensors' names.
    for name, kinds in (
        ("target_parameters", (list,)),
        ("target_modules", (list, str)),
        ("auto_mapping", (dict,)),
    ):
        value = config.get(name)
        names = value if isinstance(value, list) else []
        if not isinstance(value, (type(None), *kinds)) or not all(isinstance(n, str) for n in names):
            raise CheckpointError(
                f"{folder}/{CONFIG}: {name} is {str(value)[:60]!r}, which is no list of names"
            )
    # Numbers, of the config and by patterns: they are divided by, and patterns are evaluated.
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not _is_number(rank, int) or not _is_number(alpha, (int, float)):
        raise CheckpointError(
            f"{folder}/{CONFIG}: r={rank!r} and lora_alpha={alpha!r} must be positive numbers"
        )
    for name, kind in (("rank_pattern", int), ("alpha_pattern", (int, float))):
        patterns = config.get(name) or {}
        if not isinstance(patterns, dict) or not all(_is_number(value, kind) for value in patterns.values()):
            raise CheckpointError(f"{folder}/{CONFIG}: {name} must map patterns to positive numbers")
        # patterns are matched against names of modules, which are shorter than the names of their tensors
        longest = max((len(key.removeprefix(PREFIX)) for key in tensors), default=0)
        ways = {key: num_ways(key, longest) for key in patterns}
        for key in patterns:
            if ways[key] > MOST_WAYS:
                raise CheckpointError(
                    f"{folder}/{CONFIG}: {name} has a pattern that is not evaluated on names of {longest} characters, "
                    f"for it may take very long: {key[:80]!r}"
                )
        if sum(ways.values()) * len(tensors) > _MOST_WAYS_IN_ALL:
            raise CheckpointError(
                f"{folder}/{CONFIG}: the {len(patterns)} patterns of {name} may take very long for {len(tensors)} "
                "tensors: write them with fewer of .*, .+ and \\d+"
            )


def _is_number(value: object, kind: Any) -> bool:
    """Return True for a positive, finite number of a kind; True is an int to isinstance."""
    return isinstance(value, kind) and not isinstance(value, bool) and 0 < value < math.inf


# re's own cache keeps 512 patterns, and each may be tried on the module of each tensor
@functools.lru_cache(2**16)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"(.*\.)?({pattern})$")


def _from_pattern(config: Mapping[str, Any], name: str, module: str) -> Any:
    """Return the "rank" or "alpha" of a module: of the first pattern that matches its end, as PEFT does."""
    default = config["r"] if name == "rank" else config["lora_alpha"]
    for pattern, value in (config.get(f"{name}_pattern") or {}).items():
        try:
            if _compiled(pattern).match(module):
                return value
        except re.error as error:
            raise CheckpointError(f"{CONFIG}: {pattern[:80]!r} is no pattern: {error}") from error
    return default


def name_for_patterns(config: Mapping[str, Any], module: str) -> str:
    """Return the name of a linear layer that PEFT compares with patterns: its weight's, if target_parameters has it."""
    weight = f".{module}.weight"
    targets = config.get("target_parameters") or ()
    return weight[1:] if any(weight.endswith(f".{target}") for target in targets) else module


def scaling_of(config: Mapping[str, Any], module: str, rank: int) -> float:
    """Return the factor of b @ a for a module: alpha / rank, or alpha / sqrt(rank) with rsLoRA."""
    alpha = _from_pattern(config, "alpha", module)
    return float(alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank)


def _sorted_by_form(adapter: Adapter) -> dict[str, dict[str, dict[Any, StoredTensor]]]:
    """Sort the tensors by their names -> {form: {module of experts: {key in it: tensor}}}.

    Keys: (depth, "A" or "B") of flat, (expert, role, "A" or "B") of numbered, (role, "A" or "B") of stacked ones. The
    other tensors go to adapter.others.
    """
    forms: dict[str, dict[str, dict[Any, StoredTensor]]] = {"flat": {}, "numbered": {}, "stacked": {}}
    for key, tensor in adapter.tensors.items():
        name = key.removeprefix(PREFIX)
        if match := _NUMBERED.fullmatch(name):
            part = forms["numbered"].setdefault(match["layer"], {})
            part[int(match["e"]), _ROLE[match["leaf"]], match["ab"]] = tensor
        elif (match := _STACKED.fullmatch(name)) and len(tensor.shape) == 3:
            forms["stacked"].setdefault(match["layer"], {})[_ROLE[match["leaf"]], match["ab"]] = tensor
        elif match := _FLAT.fullmatch(name):
            depth = len(match["inner"]) // len(".base_layer")  # wrappers around this one
            forms["flat"].setdefault(match["layer"], {})[depth, match["ab"]] = tensor
        else:
            adapter.others[key] = tensor
            # DoRA, adapters of embeddings, and forms of experts that are not known
            if ".experts." in name or "lora_magnitude" in name or "lora_embedding" in name:
                adapter.refused.append(f"{key} is of no known layout")
    used = [form for form, found in forms.items() if found]
    if len(used) > 1:
        raise CheckpointError(f"{adapter.folder}: the expert tensors have several layouts: {', '.join(used)}")
    adapter.form = used[0] if used else "none"
    return forms


def _both(adapter: Adapter, where: str, found: Mapping[Any, StoredTensor], key: tuple[Any, ...]) -> Any:
    """Return lora_A and lora_B under a key; CheckpointError unless both are there, in one dtype of floats."""
    a, b = found.get((*key, "A")), found.get((*key, "B"))
    if a is None or b is None:
        raise CheckpointError(f"{adapter.folder}: {where} lacks lora_{'A' if a is None else 'B'}")
    if a.dtype != b.dtype or not a.dtype.is_floating_point or a.dtype.itemsize < 2:
        raise CheckpointError(f"{adapter.folder}: {where} has the dtypes {a.dtype} and {b.dtype}")
    return a, b


def _read_flat(
    adapter: Adapter,
    layers: Mapping[str, Mapping[Any, StoredTensor]],
    packing: str | None,
    orientation: str | None,
) -> None:
    """Read flat tensors: decide orientation and packing once for the whole file, then give each layer its Factors."""
    found = {layer: _flat_pairs(adapter, layer, parts) for layer, parts in layers.items()}
    # Orientation: a layer that shows nothing follows those that do.
    votes = {_orientation(adapter, layer, pairs) for layer, pairs in found.items()} - {"undecidable"}
    if len(votes) > 1:
        raise CheckpointError(
            f"{adapter.folder}: some layers are as PEFT 0.19 writes them, others as earlier ones"
        )
    adapter.orientation = orientation or (votes.pop() if votes else "undecidable")
    # Packing: by the values of MAX_TENSORS tensors at most, spread over the layers.
    evidence = Evidence()
    candidates = [(b, rank) for pairs in found.values() for _, b, rank in pairs.values()]
    if packing is None:
        for b, rank in candidates[:: -(-len(candidates) // MAX_TENSORS)]:
            evidence.add(b, rank)
    adapter.evidence, adapter.packing = evidence, packing or evidence.verdict()
    swapped, by_expert = adapter.orientation == "in_out", adapter.packing == EXPERT_MAJOR
    for layer, pairs in found.items():
        adapter.layers[layer] = {
            role: _flat_factors(adapter, layer, role, pair, swapped, by_expert)
            for role, pair in pairs.items()
        }


def _flat_pairs(adapter: Adapter, layer: str, parts: Mapping[Any, StoredTensor]) -> dict[str, Any]:
    """Find {projection: (lora_A, lora_B, rank)} of a layer."""
    depths = {depth for depth, _ in parts}
    names = [str(n).rpartition(".")[2] for n in adapter.config.get("target_parameters") or ()]
    known = [n for n in PARAMETERS.values() if n in names]
    # two wrappers: down_proj's is the outer one; one wrapper: target_parameters say which weight it is
    if depths == {0, 1}:
        roles = {1: "up_proj" if known == ["up_proj", "down_proj"] else "gate_up_proj", 0: "down_proj"}
    elif depths == {0} and len(known) == 1:
        roles = {0: known[0]}
    else:
        raise CheckpointError(
            f"{adapter.folder}: {layer} has {len(depths)} adapted parameters and target_parameters are {names[:4]}: "
            "expected gate_up_proj (up_proj without a gate), down_proj or both"
        )
    # lora_A [E * r, in] and lora_B [out, E * r]: the rank, of the config, divides what they share
    pairs = {}
    for depth, leaf in roles.items():
        a, b = _both(adapter, f"{layer} ({leaf})", parts, (depth,))
        rank = _from_pattern(adapter.config, "rank", f"{layer}.{leaf}")
        if (
            len(a.shape) != 2
            or len(b.shape) != 2
            or a.shape[0] != b.shape[1]
            or not a.shape[0]
            or a.shape[0] % rank
        ):
            raise CheckpointError(
                f"{adapter.folder}: {layer} ({leaf}) has lora_A {list(a.shape)} and lora_B {list(b.shape)}, expected "
                f"[E * {rank}, *] and [*, E * {rank}]"
            )
        pairs[_ROLE[leaf]] = a, b, rank
    return pairs


def _orientation(adapter: Adapter, layer: str, pairs: Mapping[str, Any]) -> str:
    """Return "out_in" where lora_A reads the input of the projection, "in_out" where lora_B does; or "undecidable"."""
    widths = {role: (a.shape[1], b.shape[0]) for role, (a, b, _) in pairs.items()}
    # Both projections: gate_up is d -> 2 H and down H -> d, which fits one way only.
    if widths.keys() == {"gate_up", "down"}:
        (a1, b1), (a2, b2) = widths["gate_up"], widths["down"]
        if a1 == b2 and b1 == 2 * a2:
            return "out_in"
        if b1 == a2 and a1 == 2 * b2:
            return "in_out"
        raise CheckpointError(
            f"{adapter.folder}: {layer}: gate_up {a1, b1} and down {a2, b2} (lora_A, lora_B) do not fit"
        )
    version = str(adapter.config.get("peft_version") or "")
    numbers = tuple(int(part) for part in re.findall(r"\d{1,4}", version)[:2])
    # One projection, or up and down without a gate, which fit both ways: an adapter of the attention beside it reads
    # the model's width, which tells d from H.
    block = layer.split(".mlp.")[0].split(".block_sparse_moe.")[0]
    beside = (adapter.others.get(f"{PREFIX}{block}.self_attn.{n}_proj.lora_A.weight") for n in "qkv")
    d_model = next(
        (tensor.shape[1] for tensor in beside if tensor is not None and len(tensor.shape) == 2), None
    )
    role, (a, b) = next(iter(widths.items()))
    if d_model is not None and a != b and d_model in (a, b):
        return "out_in" if (a == d_model) == (role != "down") else "in_out"
    # Else the version: earlier ones turn some models' parameters and not others', so that only a later one is proof.
    return "out_in" if numbers >= (0, 19) else "undecidable"


def _flat_factors(
    adapter: Adapter, layer: str, role: str, pair: Any, swapped: bool, by_expert: bool
) -> Factors:
    a, b, rank = pair
    num_experts = a.shape[0] // rank

    def read() -> Pair:
        adapter.require_decided()
        first = a.read().reshape(num_experts, rank, -1)  # [E, r, *]
        second = unpacked(b.read(), num_experts, rank, EXPERT_MAJOR if by_expert else RANK_MAJOR)  # [E, *, r]
        return (second.transpose(1, 2), first.transpose(1, 2)) if swapped else (first, second)

    d_in, d_out = (b.shape[0], a.shape[1]) if swapped else (a.shape[1], b.shape[0])
    scaling = scaling_of(adapter.config, f"{layer}.{PARAMETERS[role]}", rank)
    return Factors(num_experts, rank, d_in, d_out, scaling, a.dtype, read)


def _read_numbered(adapter: Adapter, layer: str, found: Mapping[Any, StoredTensor]) -> None:
    """Read a module for each expert; CheckpointError unless experts have the same projections, ranks and scaling."""
    num_experts = 1 + max(e for e, _, _ in found)
    roles = {role for _, role, _ in found}
    missing = [(e, r) for e in range(num_experts) for r in sorted(roles) if (e, r, "A") not in found]
    if missing:
        raise CheckpointError(
            f"{adapter.folder}: {layer} lacks {len(missing)} of {num_experts * len(roles)} adapters, as that of "
            f"{missing[0][1]} of expert {missing[0][0]}"
        )
    # One Factors for each projection, which stacks the experts when it is read.
    for role in sorted(roles):
        pairs = [_both(adapter, f"{layer}.{e} ({role})", found, (e, role)) for e in range(num_experts)]
        shapes = {(a.shape, b.shape, a.dtype) for a, b in pairs}
        ((a_shape, b_shape, dtype), *differ) = shapes
        is_pair = len(a_shape) == len(b_shape) == 2 and 0 < a_shape[0] == b_shape[1]
        if differ or not is_pair:
            raise CheckpointError(
                f"{adapter.folder}: the experts of {layer} ({role}) differ in rank or shape, or have none"
            )
        scaling = _shared_scaling(
            adapter, layer, role, [f"{layer}.{e}" for e in range(num_experts)], a_shape[0]
        )

        def read(pairs: Any = pairs) -> Pair:
            return torch.stack([a.read() for a, _ in pairs]), torch.stack([b.read() for _, b in pairs])

        adapter.layers.setdefault(layer, {})[role] = Factors(
            num_experts, a_shape[0], a_shape[1], b_shape[0], scaling, dtype, read
        )


def _shared_scaling(adapter: Adapter, layer: str, role: str, parents: Sequence[str], rank: int) -> float:
    """Return the scaling of the modules of one projection, children of `parents`; CheckpointError if they differ."""
    # rank and lora_alpha may be of each module, by patterns of its name
    leaves = [leaf for leaf, its_role in _ROLE.items() if its_role == role]
    modules = [
        name
        for name in (f"{parent}.{leaf}" for parent in parents for leaf in leaves)
        if {f"{PREFIX}{name}.lora_A.weight", f"{name}.lora_A.weight"} & adapter.tensors.keys()
    ]
    scalings = {scaling_of(adapter.config, module, rank) for module in modules}
    if len(scalings) != 1:
        raise CheckpointError(f"{adapter.folder}: the experts of {layer} ({role}) differ in lora_alpha")
    # the scaling is by the rank of the tensors, which training had: another one in the config is a problem
    said = {_from_pattern(adapter.config, "rank", module) for module in modules}
    if said != {rank}:
        adapter.problems.append(
            f"{layer}: {role} has rank {rank}, but {CONFIG} says {', '.join(map(str, sorted(said)))}"
        )
    return scalings.pop()


def _read_stacked(adapter: Adapter, layer: str, found: Mapping[Any, StoredTensor]) -> None:
    """Read a [E or 1, r, in] and b [E or 1, out, r]; 1 means that all experts share it."""
    num_experts = max(tensor.shape[0] for tensor in found.values())
    for role in sorted({role for role, _ in found}):
        a, b = _both(adapter, f"{layer} ({role})", found, (role,))
        fits = 0 < a.shape[1] == b.shape[2] and {a.shape[0], b.shape[0]} <= {1, num_experts}
        if not (fits and num_experts):
            raise CheckpointError(
                f"{adapter.folder}: {layer} ({role}) has lora_A {list(a.shape)} and lora_B {list(b.shape)}, expected "
                f"[{num_experts}, r, in] and [{num_experts}, out, r]"
            )

        def read(a: StoredTensor = a, b: StoredTensor = b) -> Pair:
            return a.read().expand(num_experts, -1, -1), b.read().expand(num_experts, -1, -1)

        scaling = _shared_scaling(adapter, layer, role, [layer], a.shape[1])
        adapter.layers.setdefault(layer, {})[role] = Factors(
            num_experts, a.shape[1], a.shape[2], b.shape[1], scaling, a.dtype, read
        )
