"""Replace the MoE blocks of a Transformers model by our layer, with the same weights: import_model().

    read      Transformers loads the folder, once it is checked (_read); a model in memory is taken as it is
    convert   our layer is built on the meta device, and the block's own tensors become its parameters (_converted):
              no weight is drawn at random, and only shared experts and layers of GPT-OSS are copied
    hook      what a family computes around its experts (a norm, a factor, scores beside the output, ids of tokens)
              is a hook on our layer, so the decoder layer calls ours as it called its own
    save      save_pretrained() writes the format that the model came from, load_state_dict() takes it

Hooks are functions and classes at the top level of this module, because a model that has them must be copied and
pickled.
"""

from __future__ import annotations

import functools
import os
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmoe_ext import gates
from fmoe_ext._require import require
from fmoe_ext.checkpoint import CheckpointError
from fmoe_ext.checkpoint.card import write_card
from fmoe_ext.checkpoint.expert_layers import decode
from fmoe_ext.checkpoint.families import FAMILIES, NOT_USED, REFUSED
from fmoe_ext.checkpoint.families.family import CLAMPED, LIMITED, SOFTCAPPED, Family
from fmoe_ext.checkpoint.files import inside
from fmoe_ext.checkpoint.huggingface import find_layer, from_huggingface, is_huggingface
from fmoe_ext.checkpoint.model_folder import (
    ModelFolder,
    errors_of_transformers,
    local_path,
    model_class,
    read_config,
)
from fmoe_ext.checkpoint.model_state import (
    B1,
    EXPERT_BIAS,
    LATENT,
    PENDING_LOAD,
    SHARED,
    SHARED_GATE,
    TABLE,
    W1,
    W2,
)
from fmoe_ext.checkpoint.routing import OPTIONS, activation_of_config, hidden_acts
from fmoe_ext.checkpoint.safetensors_file import StoredTensor, read_safetensors, zeros
from fmoe_ext.checkpoint.saving import gathered
from fmoe_ext.checkpoint.shards import num_bytes_of, replacing
from fmoe_ext.checkpoint.unloaded import heads_in
from fmoe_ext.checkpoint.weight_names import WeightNames, as_in_modules
from fmoe_ext.experts import ClampedSwiGLU, GatedActivation, SharedExperts, SoftcappedSwiGLU
from fmoe_ext.formats.heads import HEADS, TrainedHeads, WithHeads
from fmoe_ext.formats.writing import HAD_ROUTER_LOGITS, UNLOADED, plan_export, write_files
from fmoe_ext.huggingface.saving import MAX_SHARD_SIZE, card_of, replace_save_pretrained
from fmoe_ext.huggingface.training import check_weight
from fmoe_ext.models.padding import heed_attention_masks
from fmoe_ext.tokens import current_batch, enter, leave, with_ids
from fmoe_ext.transformer import FMoETransformerMLP


def _read(source: Any, options: dict[str, Any]) -> tuple[Any, Path]:
    """Let Transformers read a model, after its files were checked -> (model, folder with its weights).

    Raises CheckpointError for files that fail the checks, and for parameters that the files do not have.
    """
    transformers = require("transformers", "import_model()")
    from safetensors import SafetensorError

    if options.get("force_download"):
        raise CheckpointError(
            "import_model() downloads nothing: leave force_download out, and run `hf download`"
        )
    options["local_files_only"] = True
    # local_path() takes both: from_pretrained() ignores them where it is given a folder
    of_hub = {name: options.pop(name) for name in ("revision", "cache_dir") if name in options}
    # with one of these the weights are not where local_path() would look for them
    others = options.get("subfolder") or options.get("gguf_file")
    folder = local_path(source, () if others else None, **of_hub)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder" if folder.exists() else f"{folder} does not exist")
    # Nothing outside of the folder is read, and no tensor is made that no file has
    place = folder
    for part in Path(options.get("subfolder") or "").parts:
        place = inside(place, part)
    if options.get("gguf_file") is not None:
        inside(place, options["gguf_file"])
    files = ModelFolder(place)
    files.check()
    config = options.get("config")
    if config is None and "gguf_file" not in options:
        # the number of tensors bounds the number of layers that config.json may ask for
        counts = [len(read_safetensors(file)[0]) for file in files.paths]
        config = read_config(place, sum(counts) if counts else None)
    with errors_of_transformers(folder, "model"):
        try:
            # config= may be a path, which Transformers reads itself
            is_known = config is not None and not isinstance(config, (str, os.PathLike))
            read = (model_class(config) if is_known else transformers.AutoModelForCausalLM).from_pretrained
            model, found = read(folder, **options, output_loading_info=True)
        except SafetensorError as error:
            raise CheckpointError(f"{folder}: a safetensors file is truncated or damaged: {error}") from error
    model.name_or_path = model.config.name_or_path = str(Path(source))  # as Transformers, given the name
    if missing := sorted(found["missing_keys"]):
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise CheckpointError(
            f"{source} lacks {', '.join(missing[:3])}{more}, which Transformers would draw at random"
        )
    return model, place


def _folder_of(model: Any) -> Path | None:
    """Find the folder that a model in memory says it was read from; None if it is not there, or has another model."""
    with suppress(CheckpointError, OSError):
        folder = local_path(model.name_or_path, ()) if getattr(model, "name_or_path", "") else None
        if folder and ModelFolder(folder).config.get("model_type") == model.config.model_type:
            return folder
    return None


def _unloaded(model: Any, place: Path) -> dict[str, Tensor]:
    """Read the tensors of a folder that the model does not have: heads for the tokens after the next, and others.

    Packed ones are decoded, as Transformers decodes the model's own. {} for a folder without safetensors.
    """
    base = ModelFolder(place)
    if not base.paths or not all(file.exists() for file in base.paths):
        return {}
    said = base.config.get("text_config") or base.config
    depth = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    if base.quantization:
        if not heads_in(WeightNames(base, model, base.tensors).unloaded, model.config):
            return {}
        # else the scales of the model's own weights would pass for tensors that it does not have
        decode(base)
    names = WeightNames(base, model, base.tensors).unloaded
    if names and said.get("num_hidden_layers", depth) != depth:
        # the caller asked for another depth: what is left are whole layers, and heads would get their numbers
        warnings.warn(
            f"{place} has {said['num_hidden_layers']} layers, the model {depth}: {len(names)} tensors are left out",
            stacklevel=3,
        )
        return {}
    return {name: base.tensors[name].read() for name in names}


def import_model(source: Any, *, mtp_loss: float | None = None, **options: Any) -> Any:
    """Make the MoE layers of a Transformers model FMoETransformerMLPs with the same weights -> the model.

    source: a folder, or the name of a repository in the cache of the Hugging Face hub, for from_pretrained(source,
    **options) of the class that its configuration names, which downloads nothing; or a model, which is changed in
    place. Model types: those of checkpoint/families, which docs/formats.md lists. The parameters stay the model's own
    tensors; copied, a layer at a time, are shared experts, whose gate and up are joined, and GPT-OSS's layers, whose
    layout is another. norm_topk_prob, scaling factors, groups and biases are honoured. Gates compute in float32 or
    wider, where some of Transformers' round.

    model.save_pretrained() writes the format that the model came from, as export() does, with the tensors of its folder
    that Transformers does not load, as they were: heads for the tokens after the next. The gates have the balance
    loss: add weight * fmoe_ext.gates.total_loss(model); router logits are no output any more.
    mtp_loss: train these heads too, as model.mtp: in train() the loss of a forward with labels has this weight times
    theirs added, and they are saved as they are then (formats/heads.py). DeepSeek-V3 took 0.3, and 0.1 in the end.
    Raises CheckpointError for other models, for files that are truncated, damaged or outside of the folder, for
    tensors that are missing and for a folder of a PEFT adapter.
    Equivalent to: AutoModelForCausalLM.from_pretrained(source, **options), to the rounding of its gates.

    Example:

        >>> from transformers import MixtralConfig, MixtralForCausalLM
        >>> config = MixtralConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        ...     num_attention_heads=2, num_key_value_heads=2, num_local_experts=4)
        >>> model = import_model(MixtralForCausalLM(config))
        >>> isinstance(model.model.layers[0].mlp, fmoe_ext.FMoETransformerMLP)
        True
    """
    if mtp_loss is not None:
        check_weight(mtp_loss, "mtp_loss")
    model: Any = source
    folder: Path | None
    if not isinstance(source, nn.Module):
        model, folder = _read(source, options)
    elif options:
        raise TypeError(f"{', '.join(options)}: options are for a folder or a name, but got a model")
    else:
        folder = _folder_of(model)
    values = model.config.get_text_config().to_dict()
    family = _family_of(values)
    facts = family.facts_of(values)
    activation = _activation(family, values, facts)
    # Find the blocks: modules whose experts have the family's first weight
    up = family.in_modules.experts[0].rpartition(".")[2]
    blocks = [
        (name, module)
        for name, module in model.named_modules()
        if hasattr(getattr(module, "experts", None), up)
    ]
    place = family.in_modules.place
    if not blocks:
        raise CheckpointError(f"{type(model).__name__} has no MoE layer that is not ours already")
    # Before the blocks are replaced: names in the files are matched with the parameters of Transformers' modules
    unloaded = {} if folder is None else _unloaded(model, folder)
    trained = None
    if mtp_loss is not None:
        trained = TrainedHeads(model, unloaded, mtp_loss)
        unloaded = {name: value for name, value in unloaded.items() if name not in trained.shapes}
    setattr(model, UNLOADED, unloaded)
    # Replace them
    for name, block in blocks:
        layer = _converted(name, block, family, facts, activation)
        if place:
            # The decoder layer calls choices, weights = router(h), then experts(x, choices, weights). Ours routes
            # itself: the router's place hands on h, and the hook gives x and h to our layer
            setattr(block, place, layer)
            setattr(block, family.in_modules.gate.partition(".")[0], _GateInput())
            layer.register_forward_pre_hook(_with_gate_input, with_kwargs=True)
        else:
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, layer)
    # What the whole model has to do otherwise from now on
    if trained is not None:
        setattr(model, HEADS, trained)
        WithHeads().register(model)
    heed_attention_masks(model)
    config = model.config.get_text_config()
    if getattr(config, "output_router_logits", False):
        weight = getattr(config, "router_aux_loss_coef", "weight")
        warnings.warn(
            f"output_router_logits is off now: add {weight} * fmoe_ext.gates.total_loss(model) to "
            "the loss in its place",
            stacklevel=2,
        )
        config.output_router_logits = False
        setattr(model, HAD_ROUTER_LOGITS, True)  # what is saved says so again
    # gates of ours keep no router logits: refuse a forward that asks for them
    for part in {model, getattr(model, "base_model", model)}:  # the part that computes the hidden states, too
        part.register_forward_pre_hook(_refuse_router_logits, with_kwargs=True)
    model.register_load_state_dict_pre_hook(_take_format)
    replace_save_pretrained(model, _save_imported)
    return model


def _family_of(config: dict[str, Any]) -> Family:
    """Return the family of a configuration; CheckpointError if it is not known, or our layers compute otherwise."""
    family = FAMILIES.get(config["model_type"])
    if family is None:
        kind = config["model_type"]
        why = f"a model type that is not known: import_model() knows {', '.join(FAMILIES)}"
        if kind in REFUSED:
            why = f"for {REFUSED[kind]}"
        way_out = "huggingface.use(model) computes its experts and leaves the rest to Transformers"
        way_out = (
            "Transformers alone computes it" if kind in NOT_USED else f"{way_out}, save_pretrained included"
        )
        raise CheckpointError(f"{kind} is not imported, {why}. {way_out}")
    for key, value in family.unsupported.items():
        if config.get(key, value) != value:
            raise CheckpointError(
                f"config.{key}={config[key]} is what our layers do not compute: set it to {value}"
            )
    return family


def _refuse_router_logits(model: Any, _: Any, kwargs: dict[str, Any]) -> None:
    asked = kwargs.get("output_router_logits")
    if asked or (asked is None and getattr(model.config, "output_router_logits", False)):
        raise ValueError(
            f"output_router_logits=True: the gates of an imported {type(model).__name__} keep no router logits. Leave "
            "it out and add weight * fmoe_ext.gates.total_loss(model) to the loss; balance.watch(model) has the loads"
        )


def _take_format(model: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Let load_state_dict take what save_pretrained wrote, as a Trainer does that resumes."""
    own = model.state_dict().keys()
    # save_pretrained() has copied these from the folder; no module has them
    for name in getattr(model, UNLOADED, ()):
        state_dict.pop(name, None)
    heads: TrainedHeads | None = getattr(model, HEADS, None)
    trained = {}
    # Heads that train are parameters of model.mtp under other names; take them out before the rest is converted
    if prefix == "" and heads is not None and heads.shapes.keys() <= state_dict.keys():
        values = {name: state_dict.pop(name) for name in heads.shapes}
        trained = {f"{HEADS}.heads.{name}": v for name, v in heads.of_files(values).items()}
    if prefix == "" and not state_dict.keys() <= own:
        found = as_in_modules(model, state_dict)
        if is_huggingface(found):
            converted = from_huggingface(found, own)
            state_dict.clear()
            state_dict |= converted
    state_dict |= trained


def _converted(
    name: str, block: nn.Module, family: Family, facts: dict[str, Any], activation: Any
) -> nn.Module:
    """Make our layer from a block's tensors, on its device and in its mode (training or not)."""
    gate = family.in_modules.gate
    # keep_vars: the parameters themselves, which become ours
    values = {key: value for key, value in block.state_dict(keep_vars=True).items()}
    if family.in_modules.place:  # the block has other parts
        parts = tuple(f"{part.partition('.')[0]}." for part in (gate, *family.in_modules.experts))
        values = {key: value for key, value in values.items() if key.startswith(parts)}
    # not detached: what is read of them requires a gradient if one of them does
    stored = {
        key: StoredTensor(value.shape, value.dtype, functools.partial(values.__getitem__, key))
        for key, value in values.items()
    }
    found = find_layer(stored, "", gate)
    # Every tensor is taken or refused: one left over is a part of the block that ours does not compute
    kept = {key for key in values if family.norm and key.startswith(f"{family.norm}.")}
    if found is None or found[1] != values.keys() - kept:
        left = values.keys() - kept - (set() if found is None else found[1])
        raise CheckpointError(
            f"{name} ({type(block).__name__}) has tensors that are not known: {sorted(left)}"
        )
    tensors = found[0]
    # The gate, with what ours has and the model lacks
    options = {key: facts[key] for key in OPTIONS if key in facts and key != "top_k"}
    options["gate_bias"] = family.gate_bias
    kind = getattr(gates, facts.get("gate", family.gates[-1]))
    num_experts, d_model = tensors["gate.gate.weight"].shape
    if TABLE in tensors:
        kind = gates.HashGate
        options["vocab_size"] = tensors[TABLE].shape[0]
    elif issubclass(kind, gates.SigmoidGate) and EXPERT_BIAS not in tensors:
        tensors[EXPERT_BIAS] = zeros((num_experts,), torch.float32)
        tensors[PENDING_LOAD] = zeros((num_experts,), torch.int64)
        options["bias_update_speed"] = 0  # a bias that the model lacks stays zero, or it could not be saved
    # The layer, without memory
    shared = tensors.get(f"{SHARED}h4toh.weight")  # [1, D, H]
    has_gate = SHARED_GATE in tensors
    with torch.device("meta"):
        layer = FMoETransformerMLP(
            num_experts,
            d_model,
            tensors[W2].shape[2],
            activation=activation,
            bias=B1 in tensors,
            gate=functools.partial(kind, **options),
            top_k=facts["top_k"],
            shared_expert_hidden=None if shared is None else shared.shape[2],
            shared_expert_gate=has_gate,
            latent_size=tensors[W1].shape[2] if LATENT[0] in tensors else None,
        )
        if shared is not None and family.shared_activation:
            width = shared.shape[2]
            layer.shared_experts = SharedExperts(d_model, width, family.shared_activation, False, has_gate)
    # The block's tensors as its parameters and buffers
    device = values[f"{gate}.weight"].device
    with torch.enable_grad():
        read = {key: tensor.read() for key, tensor in tensors.items()}
    for key, value in read.items():
        path, _, attribute = key.rpartition(".")
        module = layer.get_submodule(path)
        trains, value = value.requires_grad, value.detach()
        if attribute in module._parameters:
            value = nn.Parameter(value, requires_grad=trains)  # what was frozen stays so
        setattr(module, attribute, value.to(device))
    layer.mark_parallel_comm("dp")
    # What the family computes around the experts
    if family.norm:
        setattr(layer, family.norm, getattr(block, family.norm))
    if "output_scale" in facts:
        layer.output_scale = facts["output_scale"]
    if family.norm or "output_scale" in facts or family.returns_scores:
        layer.register_forward_hook(_Behind(family.norm, facts.get("output_scale"), family.returns_scores))
    if family.in_modules.table:
        ids = _TokenIds()
        layer.register_forward_pre_hook(ids.before, with_kwargs=True)
        layer.register_forward_hook(ids.after, always_call=True)  # a forward that raises ends its batch, too
    return layer.train(block.training)


class _Behind:
    """A forward hook for what a family computes after its experts: a norm, a factor, a pair with scores."""

    def __init__(self, norm: str, scale: float | None, is_pair: bool) -> None:
        self.norm = norm  # name of the norm in our layer, "" without
        self.scale = scale  # a factor of the output
        self.is_pair = is_pair  # the decoder layer expects router's scores too, which it drops

    def __call__(self, layer: nn.Module, args: Any, out: Tensor) -> Any:
        if self.norm:
            out = getattr(layer, self.norm)(out)
        if self.scale is not None:
            out = out * self.scale
        return (out, None) if self.is_pair else out


class _TokenIds:
    """Forward hooks that open token_ids() around a layer that its model calls with input_ids."""

    def __init__(self) -> None:
        # what was current outside of each forward that has not ended: a copy of the model begins without
        self._open: list[Any] = []

    def __deepcopy__(self, _: Any) -> _TokenIds:
        return _TokenIds()

    def __reduce__(self) -> tuple[type[_TokenIds], tuple[()]]:
        return _TokenIds, ()

    def before(self, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        ids = kwargs.pop("input_ids", None)
        self._open.append(None if ids is None else enter(with_ids(current_batch(), ids)))
        return args, kwargs

    def after(self, *_: Any) -> None:
        outer = self._open.pop()
        if outer is not None:
            leave(outer)


class _GateInput(nn.Module):
    """Stands where the router was, and hands its input on to the experts."""

    def forward(self, x: Tensor) -> tuple[None, Tensor, None]:
        return None, x, None


def _with_gate_input(layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    x, _, gate_inp = args
    return (x,), {**kwargs, "gate_inp": gate_inp}


def _activation(family: Family, config: dict[str, Any], facts: dict[str, Any]) -> Any:
    name = activation_of_config(family, config)
    if name == CLAMPED:
        return ClampedSwiGLU(facts["swiglu_alpha"], facts["swiglu_limit"])
    if name == LIMITED:
        return GatedActivation(F.silu, facts["swiglu_limit"])
    if name == SOFTCAPPED:
        return SoftcappedSwiGLU(facts["gate_softcap"], facts["up_softcap"])
    known = hidden_acts(family)
    if name not in known or name not in family.activations:
        raise CheckpointError(
            f"config.{family.activation_key}={name!r}, expected one of {', '.join(known.values())}"
        )
    return name


@torch.no_grad()
def _save_imported(
    model: Any,
    save_directory: str | Path,
    is_main_process: bool = True,
    state_dict: dict[str, Any] | None = None,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    **options: Any,
) -> None:
    """Write an imported model in the format that it came from, over what an earlier call wrote: its save_pretrained().

    state_dict: the model's own, as the Trainer passes it. is_main_process, max_shard_size, safe_serialization: as in
    Transformers. Raises CheckpointError for its other arguments, which are not honoured.
    """
    wanted = [name for name, value in options.items() if value and name != "safe_serialization"]
    if wanted:
        raise CheckpointError(
            f"save_pretrained of an imported model takes no {', '.join(wanted)}: save first, then use "
            "Transformers on the folder"
        )
    own = model.state_dict()
    for name, value in (state_dict or {}).items():
        # by address: the Trainer passes the model's own tensors, and other values would be lost without a word
        if name not in own or own[name].data_ptr() != value.data_ptr():
            raise CheckpointError(
                f"state_dict= has {name!r}, which is not the model's own: load it into the model first"
            )
    plan = plan_export(model, model.config.model_type)
    max_shard_bytes = num_bytes_of(max_shard_size)
    with gathered(Path(save_directory), plan.state) as whole:
        if whole is not None and is_main_process:
            with replacing(Path(save_directory)) as unfinished:
                write_files(plan, whole, unfinished, max_shard_bytes)
                title = Path(save_directory).name
                card = card_of(model, plan.config, title, f'model.save_pretrained("{title}")')
                write_card(unfinished, card, kept=Path(save_directory))
