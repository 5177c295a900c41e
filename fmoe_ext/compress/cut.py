"""Cut experts out of a model's files, for prune.py; the bytes of what stays are copied, packed ones too.

Cut does so for a folder of Transformers. Which parameters depend on the number of experts differs by family, so the
model is made twice without values, once with fewer experts: where a parameter's two shapes differ, the one dimension
that differs counts experts. In the files such parameters are

    of one expert    tensors with its number in their names: left out, numbered anew, or averaged where experts merge
    stacks           a tensor for all experts of a layer, whose first dimension is cut
    of a router      cut in the dimension that differs; entries behind the experts (shared ones, choices of none) stay
    tables           of hash routing, whose entries are numbers of experts

Heads for the tokens after the next, which Transformers does not load, are cut by the same rules: their names end as
those of a layer do. GgufCut does the same for a GGUF file, whose names are few and fixed; types and metadata stay.
A tensor that depends on the number and is none of these is refused when a cut is made, before a text is read for hours.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import torch

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.expert_layers import MXFP4_STACKS, prefixes
from fmoe_ext.checkpoint.files import explained, inside, path_of_unfinished, read_json, write_json
from fmoe_ext.checkpoint.model_folder import FLOATS
from fmoe_ext.checkpoint.safetensors_file import StoredTensor
from fmoe_ext.checkpoint.shards import CONFIG, MAX_SHARD_BYTES, write_model_files
from fmoe_ext.checkpoint.weight_names import up_of
from fmoe_ext.model_files import FolderModel, GgufModel, experts_modules

Shares: TypeAlias = Mapping[int, Mapping[int, float]]  # {expert that stays: {expert: its share}}, of a layer

# Keys of config.json for the experts that a token chooses: their names have "experts" in them too (config_with)
TOP_K = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "moe_topk",
    "moe_k",
    "top_k_experts",
)
_TABLE = "tid2eid"  # of hash routing: experts of each token [vocabulary, K]
# Keys of config.json for a router's entries behind those of experts: shared ones (Inkling), choices of none (LongCat)
_BEHIND = ("n_shared_experts", "zero_expert_num")
# Names of experts' tensors in a folder: (path, number, rest), (path, rest)
_OF_ONE = re.compile(r"((?:.*\.)?experts)\.(\d+)\.(.+)")
_STACK = re.compile(r"((?:.*\.)?experts)\.(?!\d+\.)(.+)")
# Names in GGUF files
_GGUF_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_GGUF_STACKS = re.compile(r"ffn_(gate|up|down|gate_up)_exps\.(weight|bias)")
_GGUF_ROUTER = ("ffn_gate_inp.weight", "ffn_gate_inp.bias", "exp_probs_b.bias")


class Cut:
    """The tensors of a folder with fewer experts in each layer.

    model: the folder's, on any device. num_experts: of a layer; number: how many of them will stay.
    Raises CheckpointError for a folder in which something unknown depends on the number of experts.
    """

    def __init__(self, files: FolderModel, model: Any, num_experts: int, number: int) -> None:
        self.files, self.num_experts, self.number = files, num_experts, number
        self.base = base = files.base
        self.config = config_with(base.config, num_experts, number)
        # config.json, and others that list modules by name, as those that a quantization leaves in full precision
        for file in sorted(base.folder.glob("*config.json")):
            if re.search(r"experts\.\d+\.", json.dumps(read_json(inside(base.folder, file.name)))):
                raise CheckpointError(
                    f"{base.folder}: {file.name} names single experts, whose numbers would change"
                )
        # 1. The model before and after the cut, as shapes.
        given = model.config.to_dict()  # with defaults that config.json leaves out
        with torch.device("meta"):  # shapes alone
            whole, smaller = (
                type(model)._from_config(type(model.config).from_dict(config))
                for config in (given, config_with(given, num_experts, number))
            )
        self.layers = experts_modules(whole)
        sizes = {int(m.num_experts) for m in experts_modules(smaller).values()}
        if sizes != {number}:
            raise CheckpointError(f"{base.folder}: config.json does not say alone how many experts there are")
        self._shapes = {name: tuple(tensor.shape) for name, tensor in whole.state_dict().items()}
        after = {name: tuple(tensor.shape) for name, tensor in smaller.state_dict().items()}
        # 2. The dimension of each parameter that counts experts: the one in which the shapes differ, by as many.
        self._dims: dict[str, int] = {}
        for name, shape in self._shapes.items():
            new = after.get(name)
            if new == shape:
                continue
            changed = [d for d, size in enumerate(shape) if new and size != new[d]]
            fewer = num_experts - number
            if new is None or len(changed) != 1 or shape[changed[0]] - new[changed[0]] != fewer:
                raise CheckpointError(
                    f"{base.folder}: {name} is {list(shape)}, and {new and list(new)} with {number} experts, "
                    "which is not cut"
                )
            self._dims[name] = changed[0]
        tied = whole.all_tied_weights_keys
        if wrong := sorted(self._dims.keys() & {*tied, *tied.values()}):
            raise CheckpointError(
                f"{base.folder}: {wrong[0]} is tied to another weight, so that one cut changes both"
            )
        # 3. The names in the files of layers' experts: MXFP4 stacks (GPT-OSS), other stacks, single experts.
        self._whole, self._names = whole, files.names(whole)
        self._of_one: dict[str, tuple[str, int]] = {}  # {begin of one expert's names: (path, expert)}
        self._stacks: dict[str, str] = {}  # {name of a stack: path}
        self._routers: dict[str, tuple[str, str]] = {}  # {router's tensor in a head: (path, parameter)}
        for path, module in self.layers.items():
            packed = [
                f"{p}{s}_{k}" for p in prefixes(path) for s in MXFP4_STACKS for k in ("blocks", "scales")
            ]
            if found := [name for name in packed if name in base.tensors]:
                self._stacks |= dict.fromkeys(found, path)
                continue
            for leaf in (up_of(module), "down_proj"):
                weight = self._names.experts(f"{path}.{leaf}")
                if weight is None:
                    raise CheckpointError(f"{base.folder} has no tensors of experts for {path}")
                for e, names in enumerate(weight.names):
                    if not weight.is_stack and any(f".{e}." not in name for name in names):
                        # ERNIE 4.5 VL: in the files they have numbers behind those of the experts of text
                        raise CheckpointError(
                            f"{base.folder}: {path} has experts for images ({names[0]}), which no text is sent to, so "
                            "that nothing says which of them are needed: fmoe export makes such a model smaller"
                        )
                    if weight.is_stack:
                        self._stacks |= dict.fromkeys(names, path)
                    else:
                        self._of_one |= {name.removesuffix("weight"): (path, e) for name in names}
        # 4. Those of heads, which the model does not load.
        self.heads: set[str] = set()  # paths of the experts of heads
        self._find_heads()
        # 5. A trial that keeps the first experts: what nobody knows how to cut raises now, before a text is read.
        self.tensors({path: {e: {e: 1.0} for e in range(number)} for path in (*self.layers, *self.heads)})

    def write(self, work: Path, kept: Mapping[str, Shares]) -> Path:
        """Write the smaller model into a folder -> the folder. Shards of an earlier call stay as they are."""
        write_model_files(work, self.tensors(kept), MAX_SHARD_BYTES)
        self.files.copy_beside(work)
        write_json(work / CONFIG, self.config)
        return work

    def tensors(self, kept: Mapping[str, Shares]) -> dict[str, StoredTensor]:
        """Make the cut model's {name: tensor}, read when they are written.

        kept: {path of a layer's experts: {expert that stays: {expert merged into it: share}}}, in their new order.
        """
        # {path: {number of an expert before the cut: after it}}
        place = {path: {old: new for new, old in enumerate(shares)} for path, shares in kept.items()}
        # parameters that were cut: of experts all, since __init__ found their tensors; of routers as they come
        covered = {f"{path}.{leaf}" for path in kept for leaf in ("gate_up_proj", "up_proj", "down_proj")}
        # tensors of one expert; then stacks, routers of heads, other parameters that count experts, tables
        found = {}
        for name, stored in self.base.tensors.items():
            if of_one := self._expert_of(name):
                path, expert, before, after = of_one
                if expert in place[path]:
                    mix = kept[path][expert]
                    parts = {e: self.base.tensors[f"{before}{e}{after}"] for e in mix}
                    found[f"{before}{place[path][expert]}{after}"] = _merged(name, parts, mix)
                continue
            parameter = self._names.renamed.get(name, name)
            if name in self._stacks:
                stored = _mixed(stored, 0, kept[self._stacks[name]], ())
            elif name in self._routers:
                path, parameter = self._routers[name]
                stored = _mixed(stored, self._dims[parameter], kept[path], self._behind(parameter))
            elif parameter in self._dims:
                shares, dim = kept[self._layer_of(parameter)], self._dims[parameter]
                stored = _mixed(stored, dim, shares, self._behind(parameter))
                covered.add(parameter)
            elif parameter.endswith(f".{_TABLE}"):
                stored = _table(stored, [*kept[self._layer_of(parameter)]], self.num_experts)
            found[name] = stored
        missing = sorted(self._dims.keys() - covered)
        if missing:
            raise CheckpointError(
                f"{self.base.folder}: {missing[0]} depends on the number of experts, and it is not known how its "
                "tensors in the files do"
            )
        return found

    @property
    def has_tables(self) -> bool:
        """True if the model has tables of experts for tokens."""
        return any(name.endswith(f".{_TABLE}") for name in self._shapes)

    def _behind(self, parameter: str) -> range:
        """Find the entries of a router behind the experts: shared ones, or choices of no expert (_BEHIND)."""
        size = self._shapes[parameter][self._dims[parameter]]
        text = self.config.get("text_config")
        said = {part.get(key) for part in (self.config, text) if isinstance(part, dict) for key in _BEHIND}
        if size - self.num_experts not in {0, *said}:
            raise CheckpointError(
                f"{self.base.folder}: {parameter} has {size} entries for {self.num_experts} experts, which is not cut"
            )
        return range(self.num_experts, size)

    def matrices(self, path: str) -> Iterator[torch.Tensor]:
        """Read the weights [E, n] of the experts at a path, a projection at a time; CheckpointError for packed ones."""
        for tensors in self._projections(path):
            yield torch.cat([t.read().reshape(self.num_experts // len(tensors), -1) for t in tensors])

    def check_floats(self) -> None:
        """Raise CheckpointError for packed experts, which are not merged: their average would be rounded again."""
        for path in self.layers:
            self._projections(path)

    def _projections(self, path: str) -> Iterable[list[StoredTensor]]:
        """Find the tensors of each projection at a path, one stack or one of each expert; reads no values."""
        stacks = [name for name, of_path in self._stacks.items() if of_path == path]
        found: dict[str, list[StoredTensor]] = {name: [self.base.tensors[name]] for name in stacks}
        for stem, (of_path, e) in self._of_one.items():
            if of_path == path:
                stored = self.base.tensors.get(f"{stem}weight")
                if stored is None:
                    raise CheckpointError(f"{stem}weight is packed: prune without merging")
                found.setdefault(stem.rpartition(f".{e}.")[2], []).append(stored)
        for name, tensors in found.items():
            if any(tensor.dtype not in FLOATS for tensor in tensors):
                raise CheckpointError(
                    f"{self.base.folder}: experts at {path} are packed ({name}): prune without merging"
                )
        return found.values()

    def _expert_of(self, name: str) -> tuple[str, int, str, str] | None:
        """Split the name of one expert's tensor: (path, expert, text before its number, text after); None for others.

        A packed weight is several tensors (weight_packed, weight_scale, ...), so only the begin of a name is looked up.
        """
        stem = name
        while (stem := stem.rpartition(".")[0]) and f"{stem}." not in self._of_one:
            pass
        if not stem:
            return None
        path, expert = self._of_one[f"{stem}."]
        before, _, after = stem.rpartition(f".{expert}.")
        return path, expert, f"{before}.", f".{after}{name.removeprefix(stem)}"

    def _layer_of(self, parameter: str) -> str:
        """Find the path of the experts that a router's parameter belongs to: it shares the longest prefix with it."""
        return max(self.layers, key=lambda path: _common(path, parameter))

    def _find_heads(self) -> None:
        """Find the experts and routers of heads; CheckpointError for tensors whose relation to them is not known."""
        # tensors that no module loads: a packed weight is several, whose names begin as that of the weight
        plain = self._names.unloaded
        unloaded = {*plain, *(name.removesuffix(".weight") for name in plain if name.endswith(".weight"))}
        names = [
            name
            for name in self.base.tensors
            if name not in self._stacks and unloaded & {name, name.rpartition(".")[0]}
        ]
        # 1. Their experts: single ones, and stacks.
        experts: dict[str, set[int]] = {}
        for name in names:
            if match := _OF_ONE.fullmatch(name):
                path, e = match[1], int(match[2])
                experts.setdefault(path, set()).add(e)
                self._of_one[f"{path}.{e}.{match[3].rpartition('.')[0]}."] = path, e
            elif match := _STACK.fullmatch(name):
                experts.setdefault(match[1], set()).update(range(self.base.tensors[name].shape[0]))
                self._stacks[name] = match[1]
        for path, numbers in experts.items():
            # config.json has one number, for layers and heads
            if numbers != set(range(self.num_experts)):
                raise CheckpointError(
                    f"{self.base.folder}: {path} has {len(numbers)} experts, the model {self.num_experts} a layer, "
                    "which one number in config.json cannot replace"
                )
        self.heads = set(experts)
        # 2. Their routers: a name that ends as a layer's does behind its number. {that end: parameter of a layer}
        ends = {
            name.rpartition(f"layers.{number}.")[2]: parameter
            for name, parameter in self._names.renamed.items()
            if parameter in self._dims
            for number in re.findall(r"layers\.(\d+)\.", name)[-1:]
        }
        for name in names:
            if name in self._stacks or self._expert_of(name):
                continue
            parameter = next((p for end, p in ends.items() if f".{name}".endswith(f".{end}")), None)
            if parameter and self.heads:
                self._routers[name] = max(self.heads, key=lambda path: _common(path, name)), parameter
            elif name.endswith(_TABLE) or re.search(r"(?<!shared_)experts", name):
                raise CheckpointError(
                    f"{self.base.folder}: it is not known how {name}, which the model does not load, depends on the "
                    "number of experts"
                )

    def scores_of_heads(self) -> dict[str, torch.Tensor]:
        """Score the experts of heads by the product of the norms of their weights -> {path: [E] float64}.

        The model does not run heads, so that no text says which experts they need. One expert is read at a time.
        """
        if not self.heads:
            return {}
        norms: dict[str, dict[str, torch.Tensor]] = {path: {} for path in self.heads}
        for name, stored in self.files.of(self._whole).others(torch.float32).items():
            one, stack = _OF_ONE.fullmatch(name), _STACK.fullmatch(name)
            path = one[1] if one else stack[1] if stack else ""
            if path not in norms or len(stored.shape) < (2 if one else 3):  # a bias
                continue
            leaf = one[3] if one else name
            # [E]: norm of each expert's part of this projection
            of_leaf = norms[path].setdefault(
                leaf, torch.zeros(self.num_experts, dtype=torch.float64, device="cpu")
            )
            for e in [int(one[2])] if one else range(self.num_experts):
                of_leaf[e] = (stored.read() if one else stored.rows(e, e + 1)).double().norm()
        return {path: torch.stack([*of_path.values()]).prod(0) for path, of_path in norms.items()}


def _common(one: str, other: str) -> int:
    """Count the components with which both names begin; of equal names a larger number."""
    pairs = zip(one.split("."), other.split("."), strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(one))


def config_with(config: Mapping[str, Any], old: int, new: int) -> dict[str, Any]:
    """Copy config.json with another number of experts, in the configuration of the text model too.

    Raises CheckpointError if no key says how many experts there are.
    """
    found = copy.deepcopy(dict(config))
    changed = 0
    for part in (found, found.get("text_config")):
        if not isinstance(part, dict):
            continue
        for key, value in part.items():
            if "experts" in key and "shared" not in key and key not in TOP_K and value == old:
                part[key] = new
                changed += 1
    if not changed:
        raise CheckpointError(f"config.json has no number of experts that is {old}")
    return found


def _table(stored: StoredTensor, kept: Sequence[int], num_experts: int) -> StoredTensor:
    """Cut a table of experts [vocabulary, K] of hash routing.

    An expert that goes is replaced by the next that stays, in the old order and round about, and that the token lacks.
    """

    def read() -> torch.Tensor:
        place = {old: new for new, old in enumerate(kept)}
        table = stored.read()
        # -1 marks the experts that go: each token needs K different ones, so another takes the place
        rows = torch.tensor([place.get(e, -1) for e in range(num_experts)], device="cpu")[table.long()]
        for t, k in (rows < 0).nonzero().tolist():
            first = sum(e < int(table[t, k]) for e in kept)  # new number of the next one that stays
            others = set(rows[t].tolist())
            rows[t, k] = next(e for i in range(len(kept)) if (e := (first + i) % len(kept)) not in others)
        return rows.to(stored.dtype)

    return StoredTensor(stored.shape, stored.dtype, read)


def _merged(name: str, parts: Mapping[int, StoredTensor], shares: Mapping[int, float]) -> StoredTensor:
    """Average experts' tensors; a single one keeps its bytes. Raises CheckpointError for packed ones."""
    first = next(iter(parts.values()))
    if len(shares) == 1:
        return parts[next(iter(shares))]
    if any(part.dtype not in FLOATS for part in parts.values()):
        raise CheckpointError(f"{name} is packed: merging would round it again. Prune without merging")

    def read() -> torch.Tensor:
        total = sum(part.read().double() * shares[e] for e, part in parts.items() if e in shares)
        return torch.as_tensor(total, device="cpu").to(first.dtype)

    return StoredTensor(first.shape, first.dtype, read)


def _mixed(stored: StoredTensor, dim: int, shares: Shares, behind: Sequence[int]) -> StoredTensor:
    """Average entries along dim of a router's tensor, or of a stack of experts, by shares; those `behind` stay."""
    mixes = [*shares.values(), *({e: 1.0} for e in behind)]
    shape = (*stored.shape[:dim], len(mixes), *stored.shape[dim + 1 :])
    if stored.dtype not in FLOATS and any(len(mix) > 1 for mix in mixes):
        raise CheckpointError(f"a tensor {list(stored.shape)} of experts is packed: prune without merging")

    def parts() -> Iterator[torch.Tensor]:
        # along dimension 0 the file has each expert's bytes in one piece: one expert is read at a time
        whole = stored.read() if dim else None
        for mix in mixes:
            rows = {e: stored.rows(e, e + 1) if whole is None else whole.narrow(dim, e, 1) for e in mix}
            if len(mix) == 1:
                yield next(iter(rows.values()))
            else:
                total = sum(rows[e].double() * share for e, share in mix.items())
                yield torch.as_tensor(total, device="cpu").to(stored.dtype)

    whole = StoredTensor(shape, stored.dtype, lambda: torch.cat([*parts()], dim))
    return whole if dim else StoredTensor(shape, stored.dtype, whole.read, parts=parts)


class GgufCut:
    """The tensors of a GGUF file with fewer experts in each layer.

    paths: of the experts modules. Raises CheckpointError for a tensor that depends on their number in an unknown way.
    """

    def __init__(self, files: GgufModel, paths: Sequence[str], num_experts: int, number: int) -> None:
        self.files, self.num_experts, self.number = files, num_experts, number
        # {number of a layer: path of its experts}
        found = [re.search(r"\.layers\.(\d+)\.", f".{path}.") for path in paths]
        layers = {int(m[1]): path for m, path in zip(found, paths, strict=True) if m}
        # {tensor: path of the experts that its first dimension counts, which is the last in GGUF's order}
        self._paths: dict[str, str] = {}
        for tensor in files.file.tensors:
            match = _GGUF_LAYER.fullmatch(tensor.name)
            path = layers.get(int(match[1])) if match else None
            if match and path is None and "_exps." in match[2]:
                raise CheckpointError(f"{files.path}: {tensor.name} has experts of no layer of the model")
            if match is None or path is None:
                continue
            if not _GGUF_STACKS.fullmatch(match[2]) and match[2] not in _GGUF_ROUTER:
                if "exps" in match[2] or "exp_" in match[2]:  # shared experts are "shexp", which stay
                    raise CheckpointError(
                        f"{files.path}: it is not known how to cut experts from {tensor.name}"
                    )
                continue
            if int(tensor.shape[-1]) != num_experts:
                raise CheckpointError(
                    f"{files.path}: {tensor.name} has {int(tensor.shape[-1])} experts, but the model {num_experts}"
                )
            self._paths[tensor.name] = path

    def write(self, work: Path, kept: Mapping[str, Iterable[int]]) -> Path:
        """Write the smaller model into a folder, one file even of a split one, unless it is there -> the file.

        kept: {path of an experts module: its experts that stay, in that order}.
        """
        import gguf

        file, out = self.files.file, work / self.files.file.name
        beside = self.files.folder / CONFIG
        if beside.exists():
            write_json(work / CONFIG, config_with(read_json(beside), self.num_experts, self.number))
        if out.exists():
            return out
        num_bytes = sum(part.stat().st_size for part in self.files.weights)
        with explained(out, num_bytes), path_of_unfinished(out) as unfinished:
            writer = gguf.GGUFWriter(unfinished, file.architecture)
            writer.data_alignment = file.alignment
            try:
                # 1. Metadata, with the new number of experts.
                for name, field in file.fields.items():
                    is_count = name == f"{file.architecture}.expert_count"
                    value = self.number if is_count else field.contents()
                    # the writer makes the first by itself, and cannot write the second
                    if name == "general.architecture" or value == []:
                        continue
                    sub_type = field.types[-1] if len(field.types) > 1 else None
                    writer.add_key_value(name, value, field.types[0], sub_type)
                # 2. Names, shapes and sizes of all tensors; GGUF has them before the first bytes.
                for tensor in file.tensors:
                    shape, size = list(tensor.data.shape), int(tensor.n_bytes)
                    if tensor.name in self._paths:
                        shape[0], size = self.number, size // self.num_experts * self.number
                    writer.add_tensor_info(tensor.name, shape, tensor.data.dtype, size, tensor.tensor_type)
                writer.write_header_to_file()
                writer.write_kv_data_to_file()
                writer.write_ti_data_to_file()
                # 3. Their bytes, of the experts that stay.
                for tensor in file.tensors:
                    path = self._paths.get(tensor.name)
                    writer.write_tensor_data(tensor.data if path is None else tensor.data[list(kept[path])])
            finally:
                with suppress(OSError):  # of buffers that a full disk did not take
                    writer.close()
        return out
