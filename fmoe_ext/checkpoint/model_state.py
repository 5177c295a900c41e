"""Name the tensors that a rank has of a model so that the names do not depend on the parallel layout: ModelState.

Experts are numbered over all ranks:

    fused experts      rows of one tensor, experts.htoh4.weight [E, H, D], of which this rank has some
    separate experts   a number in the name: experts.<e>.weight

Wrappers (DDP, torch.compile) leave no trace in names, and experts that were moved between ranks are saved in the order
of their numbers. saving.py and optimizer_state.py work with these names alone.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.distributed import DistributedGroupedDataParallel
from fmoe_ext.ep.expert_parallel import ExpertParallel, move_rows
from fmoe_ext.ep.process_groups import find_group
from fmoe_ext.layers import FMoE

# Names of the tensors of an FMoETransformerMLP
W1, B1, W2, B2 = ("experts.htoh4.weight", "experts.htoh4.bias", "experts.h4toh.weight", "experts.h4toh.bias")
SHARED = "shared_experts.mlp."
SHARED_GATE = "shared_experts.gate.weight"
LATENT = ("latent.narrow.weight", "latent.widen.weight")
GATE_SCALES = ("gate.input_scale", "gate.expert_scale")
EXPERT_BIAS = "gate.expert_bias"
TABLE = "gate.expert_of_id"
# Choices that SigmoidGate has not counted yet: a buffer of training, which no format of other programs has
PENDING_LOAD = "gate.pending_load"

_WRAPPERS = (DistributedGroupedDataParallel, DistributedDataParallel, nn.DataParallel)
# Megatron-core's own names: of each expert, of all stacked [E, *], or of all side by side (weight1, weight2)
MEGATRON_EXPERTS = re.compile(
    r"(?:(?P<layer>.*?)\.)?experts\."
    r"(?:local_experts\.(?P<index>\d+)\.|(?P<stacked>experts\.))?"
    r"(?:linear_fc[12]\.(?:weight|bias)(?P<number>\d*)|weight[12])"
)
EXPERT_NAME = re.compile(r"(?:(?P<layer>.*)\.)?experts\.(?:(?P<index>\d+)\.)?(?P<rest>.+)")


class ModelState:
    """A model's state on this rank, under names that are the same in every layout."""

    model: nn.Module  # inside all wrappers
    tensors: dict[str, torch.Tensor]  # {name: parameter or buffer of this rank}
    layers: dict[str, FMoE]  # {name: layer}

    def __init__(self, model: nn.Module):
        while (inner := _inside(model)) is not None:
            model = getattr(model, inner)
        self.model = model
        # Wrappers of inner modules put "module." into names: (long, short) pairs, the innermost first
        wrapped = [
            (f"{name}.{_inside(module)}.", f"{name}.")
            for name, module in model.named_modules(remove_duplicate=False)
            if _inside(module) is not None
        ][::-1]

        def name_of(name: str) -> str:
            for long, short in wrapped:
                if f"{name}.".startswith(long):
                    name = (short + f"{name}."[len(long) :])[:-1]
            return name

        modules = model.named_modules(remove_duplicate=False)
        self.layers = {name_of(name): module for name, module in modules if isinstance(module, FMoE)}
        for name, layer in self.layers.items():
            if not layer.expert_kind.has_whole_experts:
                raise CheckpointError(
                    f"{name}: other ranks have parts of its experts (expert tensor parallelism): save with Megatron's "
                    "dist_checkpointing, and load that with --expert-tensor-parallel-size 1"
                )
        self.tensors = {}
        self._names: dict[int, str] = {}  # {id(tensor): its first name}; tied tensors have several
        self._buffers: dict[str, str] = {}  # {name: key in state_dict()}
        self._keys: dict[str, str] = {}  # {name: key in state_dict()}
        # {name: layer} of fused experts whose rows this rank has a part of
        self._layer_of_rows: dict[str, FMoE] = {}
        # by group and device type: kept, because each new mesh makes a new process group
        self._meshes: dict[tuple[Any, str], DeviceMesh] = {}
        for key, value in model.state_dict(keep_vars=True).items():
            self._add(key, name_of(key), value)

    def _add(self, key: str, name: str, value: Any) -> None:
        # The innermost FMoE that has this tensor, and the rest of the name
        components = name.split(".")
        begins = (".".join(components[:end]) for end in reversed(range(len(components))))
        own = next((begin for begin in begins if begin in self.layers), None)
        layer = None if own is None else self.layers[own]
        rest = name.removeprefix(f"{own}.") if own else name
        if layer is not None and rest == "expert_placement":
            return  # says where experts live now; they are saved in the order of their numbers
        if value is None and name.endswith("_extra_state"):
            return  # Megatron-core's linear layers have get_extra_state(), which returns None
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"the model's state {name!r} is a {type(value).__name__}, only tensors are saved"
            )
        if kind := packed_kind(value):
            raise CheckpointError(
                f"the model's state {name!r} is a {kind}, whose values are not in one tensor: load and save the model "
                "before it is quantized, put weight.dequantize() in its place, or use torch.save(model.state_dict())"
            )
        # Experts on several ranks: a number over all ranks in the name, or rows of a whole
        if layer is not None and layer.expert_parallel is not None and rest.startswith("experts."):
            if isinstance(value, DTensor):
                _check_sharded(name, value, layer.expert_parallel)
            # separate experts: name.experts.<number on this rank>.* -> <number over all ranks>
            if isinstance(layer.experts, nn.ModuleList):
                _, index, tail = rest.split(".", 2)  # experts.<index on this rank>.<tail>
                place = layer.expert_parallel.rank * layer.num_local_experts + int(index)
                number = layer.expert_parallel.experts_in_place[place]  # experts may have moved
                name = f"{name.removesuffix(rest)}experts.{number}.{tail}"
            elif value.dim() == 0 or value.shape[0] != layer.num_local_experts:
                raise CheckpointError(
                    f"{name!r} has shape {list(value.shape)}, but dimension 0 of fused experts is the number of "
                    f"experts of this rank, {layer.num_local_experts}"
                )
            else:
                self._layer_of_rows[name] = layer
        self.tensors[name] = value
        self._keys[name] = key
        self._names.setdefault(id(value), name)
        if not isinstance(value, nn.Parameter):
            self._buffers[name] = key

    def check_can_be_filled(self) -> None:
        """Raise CheckpointError for tensors that are not the model's own memory: to fill them would change nothing."""
        meta = [name for name, value in self.tensors.items() if value.is_meta]
        if meta:
            raise CheckpointError(
                f"{meta[0]!r} and {len(meta) - 1} other tensors of the model are on the meta device, which has no "
                "memory: model.to_empty(device=...) first"
            )
        # Ask twice. Parameters are the same memory both times; copies are not, while the first ones are alive
        again = self.model.state_dict(keep_vars=True)
        copies = []
        for name, value in self.tensors.items():
            # compare addresses
            first, second = (
                (t.to_local() if isinstance(t, DTensor) else t).untyped_storage().data_ptr()
                for t in (value, again[self._keys[name]])
            )
            if first != second and value.numel():
                copies.append(name)
        if copies:
            raise CheckpointError(
                f"state_dict() of {type(self.model).__name__} returns copies of {copies[0]!r} and "
                f"{len(copies) - 1} other tensors, so that what is loaded would not reach the model. "
                "FullyShardedDataParallel (FSDP1) and hooks of state_dict() do so: load before the model is wrapped, "
                "or use fully_shard (FSDP2)"
            )

    def name_of(self, param: torch.Tensor) -> str:
        try:
            return self._names[id(param)]
        except KeyError:
            raise CheckpointError(
                f"the optimizer has a parameter of shape {list(param.shape)} that is not one of the model"
            ) from None

    def is_buffer(self, name: str) -> bool:
        return name in self._buffers

    def give_dtype(self, name: str, dtype: torch.dtype) -> None:
        """Give a buffer another dtype: gates keep float32 buffers, which model.bfloat16() may have cast."""
        module, _, attribute = self._buffers[name].rpartition(".")
        self.tensors[name] = self.tensors[name].to(dtype)
        setattr(self.model.get_submodule(module), attribute, self.tensors[name])

    def global_shape(self, name: str) -> tuple[int, ...]:
        layer, value = self._layer_of_rows.get(name), self.tensors[name]
        return tuple(value.shape) if layer is None else (layer.num_experts, *value.shape[1:])

    def local_rows(self, name: str) -> tuple[int, int] | None:
        """Return (first, end) of the rows [E, *] that this rank has; None for a tensor that it has whole."""
        layer = self._layer_of_rows.get(name)
        if layer is None:
            return None
        assert layer.expert_parallel is not None
        first = layer.expert_parallel.rank * layer.num_local_experts
        return first, first + layer.num_local_experts

    def is_part(self) -> bool:
        """True if this rank has a part of the model only."""
        spread = any(layer.expert_parallel is not None for layer in self.layers.values())
        return spread or any(isinstance(value, DTensor) for value in self.tensors.values())

    def in_order(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return rows like those of parameter `name`, in the order of the experts. Collective if experts had moved."""
        layer = self._layer_of_rows.get(name)
        if layer is None or layer.expert_placement is None:
            return tensor
        if isinstance(tensor, DTensor):
            raise CheckpointError(
                f"{name!r} is sharded (DTensor), and its experts were moved between ranks: move them back before "
                "fully_shard_experts(), planning.placement.move_experts(layer, range(num_experts))"
            )
        parallel = layer.expert_parallel
        assert parallel is not None
        tensor = tensor.detach().clone()
        move_rows(tensor, parallel.experts_in_place, list(range(parallel.num_experts)), parallel)
        return tensor

    def as_part(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return rows, in the order of experts, as this rank's part of a DTensor [E, *]; other tensors as they are."""
        layer = self._layer_of_rows.get(name)
        if layer is None:
            return tensor.detach()
        assert layer.expert_parallel is not None  # as of every layer in _layer_of_rows
        tensor = tensor.detach()
        parallel = layer.expert_parallel
        # fully_shard_experts(): ranks with the same experts share out their rows. A mesh [expert-parallel, sharing]
        if isinstance(tensor, DTensor):
            groups = [find_group(parallel.group), tensor.device_mesh.get_group()]
            table = torch.tensor(parallel.sharing_ranks, device="cpu")
            mesh = DeviceMesh.from_group(groups, tensor.device.type, table, mesh_dim_names=("ep", "experts"))
            shape = torch.Size((parallel.num_experts, *tensor.shape[1:]))
            placements = [Shard(0), Shard(0)]
            return DTensor.from_local(
                tensor.to_local(), mesh, placements, run_check=False, shape=shape, stride=tensor.stride()
            )
        key = parallel.group, tensor.device.type
        if key not in self._meshes:
            self._meshes[key] = DeviceMesh.from_group(find_group(key[0]), key[1])
        return DTensor.from_local(tensor, self._meshes[key], [Shard(0)], run_check=False)

    def put_in_order(self) -> None:
        """Tell every layer that its experts are now in the order of their numbers, after they were loaded so."""
        for layer in self.layers.values():
            if layer.expert_placement is not None:
                layer.place_experts(range(layer.num_experts))


def _check_sharded(name: str, value: DTensor, parallel: ExpertParallel) -> None:
    """Raise CheckpointError for sharded experts whose rows among all [E, *] are not known."""
    if parallel.sharing_ranks is None:
        raise CheckpointError(
            f"expert parameter {name!r} is sharded (DTensor) in addition to ep: only what "
            "fmoe_ext.distributed.fully_shard_experts(layer, mesh) has sharded can be saved or loaded"
        )
    if tuple(value.placements) != (Shard(0),):
        raise CheckpointError(
            f"expert parameter {name!r} is sharded as {value.placements}, only experts that are sharded by expert, "
            "(Shard(0),), can be saved or loaded: call fully_shard_experts without shard_placement_fn"
        )


def describe_layers(shapes: Mapping[str, Sequence[int]]) -> dict[str, dict[str, int]]:
    """Find layers in {name: shape} -> {layer: {"num_experts", "d_model", "d_hidden"}}; widths for fused MLPs only."""
    layers: dict[str, dict[str, int]] = {}
    for name, shape in shapes.items():
        # EXPERT_NAME matches Megatron's names, too: they are looked at first
        match = EXPERT_NAME.fullmatch(name)
        if match is None or not shape:
            continue
        if (of_megatron := MEGATRON_EXPERTS.fullmatch(name)) is not None:
            begin = f"{of_megatron['layer']}." if of_megatron["layer"] else ""
            if router := shapes.get(f"{begin}router.weight"):
                count = router[0]
            elif number := of_megatron["index"] or of_megatron["number"]:
                count = int(number) + 1
            else:  # nothing says how many experts lie side by side
                count = shape[0] if of_megatron["stacked"] else 0
            layer = layers.setdefault(of_megatron["layer"] or "", {"num_experts": 0})
            layer["num_experts"] = max(layer["num_experts"], count)
            continue
        layer = layers.setdefault(match["layer"] or "", {"num_experts": 0})
        count = shape[0] if match["index"] is None else int(match["index"]) + 1
        layer["num_experts"] = max(layer["num_experts"], count)
        if match["rest"] == "h4toh.weight" and len(shape) == 3:
            layer["d_model"], layer["d_hidden"] = shape[1], shape[2]
    return layers


def _inside(module: nn.Module) -> str | None:
    """Return the attribute of a wrapper that is its module (DDP, torch.compile); None for other modules."""
    if isinstance(module, _WRAPPERS):
        return "module"
    return "_orig_mod" if hasattr(module, "_orig_mod") else None


def packed_kind(tensor: torch.Tensor) -> str | None:
    """Return the class of a tensor that stands for several (torchao's quantized ones); None for others and shards."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    is_packed = type(local) not in (torch.Tensor, nn.Parameter) and hasattr(local, "__tensor_flatten__")
    return type(local).__name__ if is_packed else None
