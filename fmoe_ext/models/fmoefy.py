"""fmoefy: one line turns the MLPs of a Transformer into MoE layers.

    find      a model kind names the MLPs, each a Target with the weights that could be read (target.py, recognize.py)
    select    layers= keeps some of them
    build     an FMoETransformerMLP for each, filled from its MLP or at random (build.py)
    replace   the layers take the MLPs' places, attention masks become padding (padding.py), the report is written

All that may fail happens before the first layer of a model is replaced.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from torch import nn
from typing_extensions import Unpack

from fmoe_ext._sharded import is_dtensor
from fmoe_ext.distributed import DistributedGroupedDataParallel
from fmoe_ext.experts import activation_name
from fmoe_ext.layers import FMoE, ParallelLayout, keywords_of
from fmoe_ext.models import plain
from fmoe_ext.models.build import build
from fmoe_ext.models.padding import heed_attention_masks
from fmoe_ext.models.recognize import is_linear
from fmoe_ext.models.target import Options, Target
from fmoe_ext.transformer import FMoETransformerMLP, MLPOptions

# (library, the model kind for it: see target.py). Asked in this order, each once its library has been imported.
LIBRARIES = (
    ("megatron", "fmoe_ext.megatron.core"),
    ("megatron", "fmoe_ext.compat.megatron.find"),
    (
        "fmoe_ext.compat.megatron",
        "fmoe_ext.compat.megatron.find",
    ),  # its names serve stand-ins of Megatron too
    ("transformers", "fmoe_ext.huggingface.dense"),
)
_INITS = ("random", "upcycle")
_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel, DistributedGroupedDataParallel)


@dataclass(frozen=True)
class Replaced:
    """One MLP that fmoefy replaced."""

    path: str  # dotted, in the model
    d_model: int
    dense_d_hidden: int | None  # hidden units of the MLP, None if it could not be read
    d_hidden: int  # hidden units of an expert
    activation: str
    num_experts: int  # of all ranks
    top_k: int
    gate: str  # its class
    notes: tuple[str, ...]  # what is different from the MLP

    def __repr__(self) -> str:
        dense = "" if self.dense_d_hidden is None else f" (dense: {self.dense_d_hidden})"
        text = (
            f"{self.path}: {self.top_k} of {self.num_experts} experts of {self.d_model} x {self.d_hidden}{dense}, "
            f"{self.activation}, {self.gate}"
        )
        return "; ".join((text, *self.notes))


@dataclass(frozen=True)
class Report:
    """The report of fmoefy, model.fmoe_report. Numbers of parameters include the experts of all ranks."""

    kind: str  # KIND of the model kind
    init: str
    replaced: tuple[Replaced, ...]
    num_ranks: int  # that share the experts of a layer
    parameters_before: int
    parameters_after: int
    parameters_active: int  # those that one token uses, every choice being another expert
    left: tuple[str, ...] = ()  # what looked like an MLP and stays dense, as "path (class): reason"
    ways_out: str = ""  # the formats in which a Transformers model can be written

    def __repr__(self) -> str:
        head = (
            f"fmoefy ({self.kind}, init={self.init!r}): {len(self.replaced)} MLPs became MoE layers on "
            f"{self.num_ranks} rank(s); parameters {self.parameters_before:,} -> {self.parameters_after:,}, "
            f"{self.parameters_active:,} of them active"
        )
        left = (f"left dense: {why}" for why in self.left)
        return "\n  ".join((head, *map(repr, self.replaced), *left, *filter(None, (self.ways_out,))))


ModelT = TypeVar("ModelT")


class MoEOptions(MLPOptions, total=False):
    """Keywords that fmoefy passes to FMoETransformerMLP."""

    bias: bool
    expert_dp_comm: str
    expert_rank: int
    gradient_accumulation_fusion: bool
    latent_size: int | None
    parallel: ParallelLayout | None
    shared_expert_gate: bool
    shared_expert_hidden: int | None


def fmoefy(
    model: ModelT,
    num_experts: int | None = None,
    distributed_experts: bool = True,
    hidden_hidden_size: int | None = None,
    top_k: int | None = None,
    gate: Any = None,
    megatron_version: str | None = None,
    *,
    num_local_experts: int | None = None,
    layers: Any = None,
    init: str = "random",
    split: int = 1,
    noise: float = 0.0,
    activation: str | Callable[..., Any] | None = None,
    match: Any = None,
    d_model: int | None = None,
    load_dense: Any = None,
    **moe_kwargs: Unpack[MoEOptions],
) -> ModelT:
    """Replace the MLPs of a Transformer, in place, by FMoETransformerMLPs -> the model, with model.fmoe_report.

    model: a dense Hugging Face model, a model with nn.TransformerEncoderLayer or nn.TransformerDecoderLayer, or any
    other with match=; a list of models gives a list, a tuple a tuple. Do it before wrapping the model for data
    parallelism and before making the optimizer.

    num_experts: experts of all ranks. num_local_experts: experts of each rank, instead of num_experts.
    distributed_experts: True: the ranks of the process group, if there is one, share the experts, a part each. Wrap the
      model in fmoe_ext.distributed.DistributedGroupedDataParallel then; DistributedDataParallel would average different
      experts. moe_group=, world_size= choose other ranks than the default group's. False: every rank has all experts,
      as the Trainer and accelerate need it in several processes, because they use DistributedDataParallel.
    hidden_hidden_size: hidden units of an expert. None: those of the MLP divided by top_k, or by split.
    top_k: None is 2 (1 of one expert), or split. gate: class, function or name of fmoe_ext.gates.GATES; None is
      SoftmaxGate. Where they are None, Megatron's own arguments for them count first.
    layers: which of the MLPs, in the order of the model: a number (negative from the end), a slice, a range or other
      iterable of numbers, or a function of the number. None: all.
    match: replaces the search: a class, a pattern of dotted paths ("*.ffn") or a function (path, module). It points
      at TransformerEncoderLayers, at MLPs, or, with init="random", at any module from one tensor [..., d_model] to
      another, whose d_model=, hidden_hidden_size= and activation= are then given.
    activation: None takes that of the MLP. torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Dropout(p)) keeps a dropout
      between the two linear layers, which the report says is left out otherwise; dropout behind the MLP is kept.
    init "random": normal, with the standard deviation of the MLP's own weights, biases 0; with one seed the same model
      on any number of ranks.
    init "upcycle": the model's first output is that of the dense one. The experts are copies of its MLP (Komatsuzaki
      et al. 2022, "Sparse Upcycling"). With split=G an expert is one of G equal slices of its hidden units, and every
      token gets whole sets of them: top_k is a multiple of G (He et al. 2024, "Upcycling Large Language Models into
      Mixture of Experts", virtual groups). Equal experts become different because the gate, random at first, sends
      them different tokens; noise=s also adds normal noise of s times the weights' standard deviation to each expert,
      and the first output is no longer exactly the dense one.
      The weights have to be there before: Megatron loads its checkpoints after the model is built, and copies of
      random numbers are no upcycling. load_dense: a state dict of the dense model, or a function that loads it into
      the given model, for instance by megatron.core.dist_checkpointing; done before its MLPs are read.
    megatron_version: for Megatron-LM, found out if None. moe_kwargs: other arguments of FMoETransformerMLP.

    Transformers models tell their layers which tokens attention_mask leaves out: these reach no gate, expert or loss.

    The balance loss stays with the gates: add weight * fmoe_ext.gates.total_loss(model) to the loss, or have it added
    under Trainer, TRL, accelerate and Lightning: fmoe_ext.huggingface.training.add_balance_loss.
    A Transformers model is saved by save_pretrained and loaded by fmoe_ext.huggingface.from_pretrained; to
    load another saved state dict, fmoefy a model of the dense configuration first.
    Raises ValueError, and leaves the model as it was (with load_dense loaded), where nothing is found (listing what was
    looked for), for a model that has MoE layers already (unless match= points elsewhere), for layers that it does not
    have, and for init="upcycle" with a gate whose weights have no constant sum. Of a list, the models before this one
    are replaced.
    Equivalent to: layer.mlp = FMoETransformerMLP(num_experts=num_experts, d_model=d_model, ...) for every layer.

    Example:

        >>> model = torch.nn.TransformerEncoderLayer(d_model=8, nhead=2, dim_feedforward=16, dropout=0.0)
        >>> x = torch.randn(5, 1, 8)
        >>> dense = model(x)
        >>> model = fmoefy(model, num_experts=4, top_k=2, hidden_hidden_size=16, init="upcycle")
        >>> torch.allclose(model(x), dense, atol=1e-6)
        True
    """
    options = Options(
        num_experts=num_experts,
        num_local_experts=num_local_experts,
        distributed_experts=distributed_experts,
        hidden_hidden_size=hidden_hidden_size,
        top_k=top_k,
        gate=gate,
        megatron_version=megatron_version,
        layers=layers,
        match=match,
        init=init,
        split=split,
        noise=noise,
        activation=activation,
        d_model=d_model,
        load_dense=load_dense,
        moe_kwargs=moe_kwargs,
    )
    _check(options)
    result: Any = model
    if isinstance(model, (list, tuple)):
        result = type(model)([_replace(chunk, options) for chunk in model])
    else:
        result = _replace(result, options)
    return cast(ModelT, result)


def _check(options: Options) -> None:
    """Raise TypeError or ValueError for arguments that do not fit each other, before a model changes."""
    known = {*inspect.signature(fmoefy).parameters, *keywords_of(FMoETransformerMLP)} - {"num_expert"}
    for name in options.moe_kwargs:  # a misspelt keyword, with the nearest name
        if name not in known:
            of_rank = name in ("num_expert", "fmoe_num_experts")  # FastMoE's names
            near = ["num_local_experts"] if of_rank else difflib.get_close_matches(name, sorted(known), 1)
            hint = (
                f": did you mean {near[0]}=?" if near else "; other arguments are those of FMoETransformerMLP"
            )
            raise TypeError(f"fmoefy takes no argument {name}={hint}")
    if options.init not in _INITS:
        raise ValueError(f"init must be one of {_INITS}, but got {options.init!r}")
    if options.split < 1:
        raise ValueError(f"split must be at least 1, but got {options.split}")
    if options.noise < 0:
        raise ValueError(f"noise must not be negative, but got {options.noise}")
    if options.init != "upcycle" and (options.split != 1 or options.noise):
        raise ValueError('split and noise are for init="upcycle"')
    if options.load_dense is not None and options.init != "upcycle":
        raise ValueError(f'load_dense is for init="upcycle", but init is {options.init!r}')
    if not options.distributed_experts and options.moe_kwargs.keys() & {"moe_group", "world_size"}:
        raise ValueError("moe_group and world_size are for distributed_experts=True, but it is False")


def _replace(model: nn.Module, options: Options) -> nn.Module:
    for path, module in model.named_modules():
        if isinstance(module, _WRAPPERS):
            raise ValueError(f"fmoefy the model first, then wrap it in {type(module).__name__}")
        if isinstance(module, FMoE) and options.match is None:
            raise ValueError(
                f"the model has MoE layers already, the first at {path!r}: layers= of one call says which MLPs to "
                "replace, match= points at others"
            )
    # weights must be there whole: not on the meta device, not sharded by FSDP
    for name, p in model.named_parameters():
        if p.is_meta or is_dtensor(p):
            what = "on the meta device: load the model" if p.is_meta else "sharded: fmoefy the model"
            raise ValueError(f"fmoefy reads and copies weights, but {name} is {what} first")
    if callable(options.load_dense):
        options.load_dense(model)
    elif options.load_dense is not None:
        model.load_state_dict(options.load_dense)
    kind, targets, left = _find(model, options)
    return replace(model, kind, _select(targets, options.layers), options, left)


def replace(
    model: Any, kind: str, targets: Sequence[Target], options: Options, left: Sequence[str] = ()
) -> Any:
    """Build the layers of these targets and put them in their places -> the model, with model.fmoe_report."""
    parameters_before = _count(model)
    layers = [build(target, options, len(targets)) for target in targets]
    modules = [target.wrap(layer) for target, layer in zip(targets, layers, strict=True)]
    for target, module in zip(targets, modules, strict=True):  # from here on nothing fails
        dense = getattr(target.parent, target.attribute)
        module.train(dense.training)
        # a model may refer to one MLP at several places, a block even by two names, of which named_children() lists one
        places = [(m, name) for m in model.modules() for name, child in m._modules.items() if child is dense]
        for parent, name in places:
            setattr(parent, name, module)
        target.finish()
    heed_attention_masks(model)
    # a kind may add a sentence, whatever kind the model is: how it can be saved, for one
    ways_out = "".join(
        room.after_replacing(model, kind, targets, layers, options)
        for room in _rooms()
        if hasattr(room, "after_replacing")
    )
    # parameters of all ranks, and of the experts that one token does not use
    after = _count(model) + sum((moe.world_size - 1) * _count(moe.experts) for moe in layers)
    idle = sum(
        (moe.num_experts - moe.top_k) * (_count(moe.experts) // moe.num_local_experts) for moe in layers
    )
    model.fmoe_report = Report(
        kind=kind,
        init=options.init,
        replaced=tuple(map(_describe, targets, layers)),
        num_ranks=max((moe.world_size for moe in layers), default=1),
        parameters_before=parameters_before,
        parameters_after=after,
        parameters_active=after - idle,
        left=tuple(left),
        ways_out=ways_out,
    )
    return model


def _rooms() -> list[Any]:
    """Import the model kinds of LIBRARIES whose library this process has imported, each once."""
    rooms = dict.fromkeys(room for library, room in LIBRARIES if library in sys.modules)
    return [importlib.import_module(room) for room in rooms]


def find_targets(model: nn.Module, options: Options) -> tuple[str, list[Target]]:
    """Find the MLPs of a model -> (name of the model kind, targets); ValueError, with what was looked for, if none."""
    return _find(model, options)[:2]


def _find(model: nn.Module, options: Options) -> tuple[str, list[Target], list[str]]:
    """Find the MLPs -> (kind, targets, what looks like an MLP and cannot be read, as "path (class): reason")."""
    # match= points at modules, whatever library they are of
    kinds = [*_rooms(), plain] if options.match is None else [plain]
    for kind in kinds:
        distinct: dict[int, Target] = {}  # a module that the model refers to at two places is one target
        for target in kind.find(model, options):
            distinct.setdefault(id(getattr(target.parent, target.attribute)), target)
        targets = [target for target in distinct.values() if not _is_left(target)]
        left = []
        for target in filter(_is_left, distinct.values()):
            module = getattr(target.parent, target.attribute)
            name = type(target.parent if is_linear(module) else module).__name__
            left.append(f"{target.path} ({name}) looks like an MLP, but {target.dense.why_unreadable}")
        if targets:
            if left:
                warnings.warn(f"{len(left)} MLPs stay dense (fmoe_report.left): {left[0]}", stacklevel=4)
            return kind.KIND, targets, left
        if left:
            raise ValueError(
                f"fmoefy found no MLP that it can read in {type(model).__name__}; {'; '.join(left[:3])}"
            )
    if options.match is not None:
        raise ValueError(f"match={options.match!r} points at no module of {type(model).__name__}")
    looked_for = "\n".join(f"* {kind.KIND}: {kind.LOOKED_FOR}" for kind in kinds)
    raise ValueError(
        f"{type(model).__name__} has no MLP that fmoefy knows. Say where those of a model of your own are, for example "
        'match="*.mlp"; for one of Megatron-LM v2.2 to v3.0.2 import fmoe_ext.megatron first. It looked for\n'
        f"{looked_for}"
    )


def _is_left(target: Target) -> bool:
    """Return True for a candidate that stays dense: its weights cannot be read. An unknown activation can be given."""
    return target.is_candidate and bool(target.dense.why_unreadable) and target.dense.w2 is None


def _select(targets: list[Target], layers: Any) -> list[Target]:
    """Return the targets that layers= asks for."""
    if layers is None:
        return targets
    # with pipeline parallelism numbers are those of the whole model: this process may have none of the layers asked for
    numbers = [i if target.layer_index is None else target.layer_index for i, target in enumerate(targets)]
    total = targets[0].num_layers or len(targets)
    everywhere = range(total)
    if callable(layers):
        wanted = {i for i in everywhere if layers(i)}
    elif isinstance(layers, slice):
        wanted = set(everywhere[layers])
    else:
        asked = [layers] if isinstance(layers, int) else list(layers)
        for i in asked:
            if not isinstance(i, int) or not -total <= i < total:
                raise ValueError(f"layers= must be in [-{total}, {total}), the MLPs found, but has {i!r}")
        wanted = {i % total for i in asked}
    if not wanted:
        raise ValueError(f"layers={layers!r} leaves none of the {total} MLPs")
    return [target for number, target in zip(numbers, targets, strict=True) if number in wanted]


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _describe(target: Target, layer: FMoETransformerMLP) -> Replaced:
    activation = layer.experts.activation
    return Replaced(
        path=target.path,
        d_model=layer.d_model,
        dense_d_hidden=target.dense.d_hidden,
        d_hidden=layer.d_hidden,
        activation=activation_name(activation) or str(activation),
        num_experts=layer.num_experts,
        top_k=layer.top_k,
        gate=type(layer.gate).__name__,
        notes=target.notes,
    )
