"""Write a model with our MoE layers as a folder that plain Transformers loads, or as a GGUF file: export().

    plan_export   Choose the format's family, make its configuration, and build its model on the meta device. Its
                  tensors must be ours by name and shape: what the format cannot hold shows here, before anything is
                  written. check_export() stops here.
    gathered      Bring the experts of all ranks to the first one (checkpoint/saving.py).
    write_files   Convert and write, one tensor at a time.

A format "holds" model types whose layers, MLPs aside, compute the same: Mixtral holds Llama and Mistral.
"""

import copy
import re
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fmoe_ext.checkpoint import CheckpointError, from_huggingface, to_huggingface
from fmoe_ext.checkpoint.card import write_card
from fmoe_ext.checkpoint.errors import together
from fmoe_ext.checkpoint.families import FAMILIES, formats_for
from fmoe_ext.checkpoint.families.family import Family, Numbers, as_configured
from fmoe_ext.checkpoint.model_folder import local_path, usual_dtype
from fmoe_ext.checkpoint.model_state import ModelState
from fmoe_ext.checkpoint.routing import facts_of_layers, hidden_acts
from fmoe_ext.checkpoint.safetensors_file import StoredTensor
from fmoe_ext.checkpoint.saving import Whole, gathered
from fmoe_ext.checkpoint.shards import MAX_SHARD_BYTES, check_is_free, new_folder, write_model_files
from fmoe_ext.checkpoint.unloaded import heads_in, without_heads, worded
from fmoe_ext.checkpoint.weight_names import as_in_modules, as_written
from fmoe_ext.formats.heads import HEADS, TrainedHeads
from fmoe_ext.gguf import architecture_for
from fmoe_ext.gguf.vocabulary import read_vocabulary
from fmoe_ext.gguf.writing import check_writable, write_gguf
from fmoe_ext.huggingface.record import take_record
from fmoe_ext.huggingface.saving import card_of, describe

_GGUF = "gguf"
_TOKENIZER_FILES = (
    *("token*", "vocab*", "merges.txt"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template*"),
)
# Attributes that import_model() sets on a model
HAD_ROUTER_LOGITS = "had_router_logits"
UNLOADED = "unloaded_tensors"  # {name: tensor} of its folder that Transformers does not load
# Keys that a new configuration does not take from the model's
_NOT_COPIED = ("architectures", "model_type", "transformers_version", "_name_or_path", "quantization_config")


@torch.no_grad()
def export(
    model: nn.Module,
    folder: str | Path,
    format: str,
    *,
    tokenizer: Any = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    process_group: dist.ProcessGroup | None = None,
) -> Path:
    """Write a Transformers model with FMoETransformerMLPs as a model of Transformers' own -> the folder.

    model: what fmoefy or import_model() made. folder: a new or empty one; it gets config.json, generation_config.json,
    the tokenizer's files, a model card, safetensors of max_shard_bytes (more if a layer is larger), in the dtypes of
    the model; config.json names the one of most weights, to which from_pretrained() casts the others.
    format: a model type of Transformers, as "mixtral" or "qwen3_moe"; docs/formats.md lists them and says which models
    each can hold. "gguf": folder/model.gguf for llama.cpp, whose servers want a tokenizer in it.
    tokenizer: one of Transformers, or a folder that has its files, or the name of one in the hub's cache.

    All ranks that share the experts call it; the first one writes. What is for training alone (losses, jitter, the
    speed of the bias, parallel layouts) is not in the files. Raises CheckpointError, on every rank and before anything
    is written, for what the format cannot say: another model, gate, activation, bias, scale, capacity.
    Equivalent to: AutoModelForCausalLM.from_pretrained(folder) has the logits of model.

    Example:

        >>> from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM
        >>> config = MixtralConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        ...     num_attention_heads=2, num_key_value_heads=2, num_local_experts=4)
        >>> model = fmoe_ext.import_model(MixtralForCausalLM(config))
        >>> folder = export(model, "mixtral", format="mixtral")
        >>> type(AutoModelForCausalLM.from_pretrained(folder)).__name__
        'MixtralForCausalLM'
    """
    folder = Path(folder)
    # Everything that can be refused is refused here
    with together(f"export to {folder}", process_group):
        check_is_free(folder)
        has_files = tokenizer is not None and not hasattr(tokenizer, "save_pretrained")
        if format != _GGUF and has_files and not tokenizer_files(tokenizer):
            raise CheckpointError(f"{tokenizer} has no files of a tokenizer ({', '.join(_TOKENIZER_FILES)})")
        plan = plan_export(model, format)
        vocabulary = None
        if format == _GGUF and tokenizer is not None:
            stops = getattr(getattr(plan.state.model, "generation_config", None), "eos_token_id", None)
            stops = [stops] if isinstance(stops, int) else stops or ()  # ids at which an answer ends
            vocabulary = read_vocabulary(tokenizer, plan.config, stops)
        elif format == _GGUF:
            warnings.warn(
                "model.gguf has no vocabulary, so servers of llama.cpp refuse it: "
                'export(model, folder, "gguf", tokenizer=the tokenizer or its folder)',
                stacklevel=3,  # export() is wrapped by no_grad
            )
    # The first rank writes, a tensor at a time, into a folder that gets its name when it is whole
    with gathered(folder, plan.state, process_group) as whole:
        if whole is not None:
            with new_folder(folder) as unfinished:
                if format == _GGUF:
                    own, others = plan.parts(whole)
                    heads, num_heads = heads_in_gguf(others, plan.target)
                    tensors = to_huggingface(own, plan.family.in_modules) | heads
                    write_gguf(
                        unfinished / "model.gguf", tensors, plan.config, vocabulary, num_heads=num_heads
                    )
                else:
                    write_files(plan, whole, unfinished, max_shard_bytes)
                    if has_files:
                        for file in tokenizer_files(tokenizer):
                            shutil.copy(file, unfinished / file.name)
                    elif tokenizer is not None:
                        tokenizer.save_pretrained(unfinished)
                command = f'fmoe_ext.export(model, "{folder.name}", "{format}")'
                write_card(unfinished, card_of(plan.state.model, plan.config, folder.name, command, format))
    return folder


@dataclass(frozen=True)
class Plan:
    """An export that was found possible: what to write; no tensor is read yet."""

    state: ModelState  # of Transformers' model with our layers
    family: Family  # the format
    target: Any  # Transformers' model of the format, on the meta device
    left_out: frozenset[str]  # names of tied tensors, which the files have once
    unloaded: Mapping[str, Tensor]  # of the model's folder, which Transformers does not load: heads
    heads: TrainedHeads | None  # those of them that train; their values in `unloaded` are on the meta device

    @property
    def config(self) -> Any:
        return self.target.config

    def parts(self, whole: Whole) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
        """Split the tensors -> (those of Transformers' model, heads and others that it does not load)."""
        others = {name: StoredTensor.of(value) for name, value in self.unloaded.items()}
        if self.heads is None:
            return whole.tensors, others
        trained = self.heads.in_files(whole.tensors, self.state.model)
        others |= {name: tensor for name, tensor in trained.items() if name in others}
        own = {name: t for name, t in whole.tensors.items() if not name.startswith(f"{HEADS}.")}
        return own, others

    def convert(self, whole: Whole) -> dict[str, StoredTensor]:
        """Return {name: tensor} as the format's files have them."""
        own, others = self.parts(whole)
        tensors = {name: tensor for name, tensor in own.items() if name not in self.left_out}
        return as_written(self.target, to_huggingface(tensors, self.family.in_modules)) | others


def write_files(plan: Plan, whole: Whole, folder: Path, max_shard_bytes: int) -> None:
    """Write the tensors and the configurations into an existing folder."""
    write_model_files(folder, plan.convert(whole), max_shard_bytes)
    plan.config.save_pretrained(folder)
    generation = getattr(plan.state.model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(folder)


def heads_in_gguf(heads: Mapping[str, Any], model: Any) -> tuple[dict[str, StoredTensor], int]:
    """Name heads for the tokens after the next like the model's layers in memory -> (tensors, number of heads).

    heads: {name in the files: tensor} of layers behind the last one. model: on the meta device.
    """
    if not heads:
        return {}, 0
    family = FAMILIES[model.config.get_text_config().model_type]
    named = from_huggingface(as_in_modules(model, heads))
    found = {name: StoredTensor.of(t) for name, t in to_huggingface(named, family.in_modules).items()}
    return found, len({match[1] for match in map(re.compile(r".*?layers\.(\d+)\.").match, found) if match})


def check_export(model: nn.Module, format: str) -> None:
    """Raise CheckpointError, before the model is trained, where export(model, folder, format) would.

    Gates, activations and biases decide it, not the values of weights; biases must be zero to be left out.
    """
    plan_export(model, format)


def plan_export(model: nn.Module, format: str) -> Plan:
    """Plan an export; CheckpointError for what the format cannot say.

    The model of the format is built on the meta device and its tensors are compared with ours by name and shape: a part
    of the model that the format lacks shows here, whatever the configurations say.
    """
    state = ModelState(model)
    ours: Any = state.model
    if not hasattr(getattr(ours, "config", None), "to_dict"):
        raise CheckpointError(
            f"{type(ours).__name__} is no model of Transformers, which these formats are for: "
            "fmoe_ext.checkpoint.export_safetensors writes any model"
        )
    values: dict[str, Any] = ours.config.to_dict()
    # of a fmoefied model: what is left are the values of the dense model that it was
    take_record(values, f"{type(ours).__name__}.config")
    # The format's family. GGUF is written by way of the first format that llama.cpp has a graph for
    is_gguf = format == _GGUF
    if is_gguf:
        source = values["model_type"]
        format = next((name for name in formats_for(source) if architecture_for(name)), source)
    text = values if format in FAMILIES else None
    if text is None and ours.config.model_type == format:
        # A model of more parts, as one that sees images, is written as itself: its language model has the experts
        inner = ours.config.get_text_config().to_dict()
        text = inner if inner["model_type"] in FAMILIES else None
    if text is None:
        raise CheckpointError(
            f"format must be one of {', '.join(FAMILIES)}, gguf, or the model's own type, but got {format!r}"
        )
    # Its configuration for our layers
    family = FAMILIES[format if text is values else text["model_type"]]
    facts, moe = facts_of_layers(state, family)
    config = _make_config(family, text, facts, moe)
    # Heads and other tensors of the folder: they fit the model's own format alone
    unloaded: dict[str, Tensor] = dict(getattr(ours, UNLOADED, {}))
    trained: TrainedHeads | None = getattr(ours, HEADS, None)
    if trained is not None:
        unloaded |= {name: torch.empty(shape, device="meta") for name, shape in trained.shapes.items()}
    placed: Mapping[str, Tensor] = unloaded if values["model_type"] == format else {}
    if is_gguf:
        architecture = architecture_for(format)
        names = heads_in(placed, config) if architecture and architecture.writes_heads else []
        placed = {name: placed[name] for name in names}
    if lost := unloaded.keys() - placed.keys():
        warnings.warn(
            f"{_GGUF if is_gguf else format} has no place for {len(lost)} tensors of the folder that Transformers does "
            f"not load, {worded(lost, ours.config)}: they are left out",
            stacklevel=3,
        )
    # Put the language model's configuration into that of the larger model
    if text is not values:
        language, config = config, copy.deepcopy(ours.config)
        if hasattr(config, "quantization_config"):  # the tensors are written in floats
            del config.quantization_config
        inner_config = config.get_text_config()
        for name, value in language.to_dict().items():
            if name not in _NOT_COPIED:
                setattr(inner_config, name, value)
    # Compare with the format's model
    shapes = {
        name: StoredTensor(state.global_shape(name), value.dtype, value.detach)
        for name, value in state.tensors.items()
        if trained is None or not name.startswith(f"{HEADS}.")
    }
    describe(config, ours, usual_dtype(shapes.values()))
    if getattr(ours, HAD_ROUTER_LOGITS, False):  # import_model() has switched them off
        config.get_text_config().output_router_logits = True
    if is_gguf or not heads_in(placed, config):  # GGUF's writer counts heads itself
        without_heads(config)
    # Of tied tensors the files have one: the name that the model gives first
    tied: frozenset[str] = frozenset()
    if getattr(config, "tie_word_embeddings", False):
        tied = frozenset(name for name in shapes if state.name_of(state.tensors[name]) != name)
    target = _target(to_huggingface(shapes, family.in_modules), config, ours, tied)
    if is_gguf:
        check_writable(target.config)
    return Plan(state, family, target, tied, placed, trained)


def _make_config(family: Family, values: dict[str, Any], facts: dict[str, Any], moe_layers: Numbers) -> Any:
    """Make a format's configuration for a model -> Transformers' configuration.

    values: the model's own, as its config.json has them. facts, moe_layers: of its MoE layers (facts_of_layers()).
    Raises CheckpointError for models whose attention, norms or embeddings the format does not compute.
    """
    from transformers import AutoConfig

    source = values["model_type"]
    if source not in family.holds:
        way_out = ", ".join(formats_for(source)) or (
            "none of the formats: its save_pretrained writes a folder for "
            "fmoe_ext.huggingface.from_pretrained"
        )
        raise CheckpointError(
            f"{family.name} holds models of {', '.join(family.holds)}, but this one is {source}: its attention, norms "
            f"or embeddings are others. For {source} there is {way_out}"
        )
    # The width of shared experts, as the family says it
    if "num_shared" in family.config:
        # these families say how many shared experts of an expert's width there are, not their total width
        number, rest = divmod(facts["shared"], facts["d_hidden"])
        if rest or number < family.fewest_shared:
            raise CheckpointError(
                f"{family.name} has shared experts, in all a multiple of an expert's width, {facts['d_hidden']}, but "
                f"here shared_expert_hidden is {facts['shared'] or None}"
            )
        facts = facts | {"num_shared": number}
    # Copy the values that the format knows, too; head_dim: some formats take it and have no default for it
    known = values
    if source != family.name:
        known = {**AutoConfig.for_model(family.name).to_dict(), "head_dim": None}
    copied = {k: v for k, v in values.items() if k in known and k not in _NOT_COPIED}
    # Then say what the MoE layers are
    moe = {key: facts[fact] for fact, key in family.config.items() if fact in facts}
    # Nemotron-H has a list of its layers' kinds instead of their number
    num_layers = values.get("num_hidden_layers") or len(values["layers_block_type"])
    dense = tuple(i for i in range(num_layers) if i not in moe_layers)
    moe |= {**family.layers(family.name, moe_layers, dense), **family.extra(values, facts)}
    # One activation for experts and dense MLPs
    theirs = hidden_acts(family).get(facts.get("activation", ""))
    if theirs is not None and family.activation_key:
        moe[family.activation_key] = theirs
        if dense and family.layers is not as_configured and values.get("hidden_act") != theirs:
            raise CheckpointError(
                f"the dense MLPs of layers {dense} have hidden_act={values.get('hidden_act')!r} and the experts "
                f"{theirs!r}, but config.json says one for both"
            )
    return AutoConfig.for_model(family.name, **copied | moe)


def _target(tensors: Mapping[str, StoredTensor], config: Any, model: Any, tied: frozenset[str]) -> Any:
    """Build the model of a configuration; CheckpointError unless it has tensors of just these names and shapes."""
    import transformers

    kind = type(model)
    if type(config) is not type(model.config):  # LlamaForCausalLM -> MixtralForCausalLM
        before, after = (type(c).__name__.removesuffix("Config") for c in (model.config, config))
        wanted = after + kind.__name__.removeprefix(before)
        found = getattr(transformers, wanted, None) if kind.__name__.startswith(before) else None
        if found is None:
            raise CheckpointError(f"Transformers has no {wanted}, which a {kind.__name__} would become")
        kind = found
    # Build it without memory; config.json names the class
    config.architectures = [kind.__name__]
    with torch.device("meta"):
        target = kind(config)
    # Names and shapes must be the same on both sides: a part that one of them lacks is computed by one of them only
    expected = {name: tuple(value.shape) for name, value in target.state_dict().items() if name not in tied}
    shapes = {name: tensor.shape for name, tensor in tensors.items() if name not in tied}
    problems = [f"it has no {name}" for name in expected.keys() - shapes.keys()]
    problems += [f"{name} has no place" for name in shapes.keys() - expected.keys()]
    problems += [
        f"{name} is {list(shape)}, expected {list(expected[name])}"
        for name, shape in shapes.items()
        if name in expected and shape != expected[name]
    ]
    if problems:
        raise CheckpointError(
            f"{config.architectures[0]} cannot hold this {type(model).__name__}: {'; '.join(sorted(problems)[:5])}"
            f"{f'; {len(problems) - 5} more' if len(problems) > 5 else ''}"
        )
    return target


def tokenizer_files(tokenizer: str | Path) -> list[Path]:
    """Find the files of a tokenizer in a folder, or under a name in the hub's cache."""
    folder = local_path(tokenizer, ())
    return sorted({file for pattern in _TOKENIZER_FILES for file in folder.glob(pattern) if file.is_file()})
