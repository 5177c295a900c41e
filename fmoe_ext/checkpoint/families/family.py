"""Facts about one Hugging Face MoE model type: plain data, read by import, export and checkpoints."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.ops.activations import GATED_ACTIVATIONS

Values: TypeAlias = Mapping[str, Any]
Numbers: TypeAlias = tuple[int, ...]
PROJECTIONS = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
UP_DOWN = ("up_proj.weight", "down_proj.weight")  # of experts without a gate
GATE_UP_DOWN = ("gate_up_proj.weight", "down_proj.weight")
W1_W3_W2 = ("w1.weight", "w3.weight", "w2.weight")
SOFTMAX = ("NaiveGate", "SoftmaxGate")
CLAMPED = "clamped_swiglu"
LIMITED = "limited_swiglu"  # experts.GatedActivation(silu, limit)
SOFTCAPPED = "softcapped_swiglu"  # experts.SoftcappedSwiGLU
UNCLAMPED = tuple(name for name in GATED_ACTIVATIONS if name != CLAMPED)
UNGATED = ("gelu", "gelu_tanh", "relu", "silu", "relu2")


@dataclass(frozen=True)
class Layout:
    """Names and shapes of an MoE layer's tensors; "" is what the layout has no place for.

    block: name of the layer. gate: name of its gate. expert_bias: bias of the choices; bias_is_row: it is [1, E].
    no_bias: there is none, so that one of zeros is left out.
    experts: gate before up [E, 2H, D] and down [E, D, H] of all experts. per_expert: gate, up, down of experts.<e>
    instead. interleaved: [E, D, 2H] with gate and up in turn and [E, H, D], with biases (GPT-OSS). transposed: [E, D,
    2H], gate before up, and [E, H, D]. gated: False for experts of up [E, H, D] and down alone.
    shared: prefix of the shared experts; shared_names: their weights, three, or two where gate and up are one or there
    is no gate. latent: projections before and behind the experts. gate_scales: factors of NormedGate for its inputs and
    for its experts. place: name of our layer where the tensors are those of a decoder layer with other parts. table:
    experts of each token of the vocabulary, in layers that have one instead of expert_bias.
    """

    block: str = "mlp"
    gate: str = "gate"
    expert_bias: str = ""
    bias_is_row: bool = False
    no_bias: bool = False
    experts: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj")
    per_expert: tuple[str, str, str] | None = None
    interleaved: bool = False
    transposed: bool = False
    gated: bool = True
    shared: str = ""
    shared_names: tuple[str, ...] = PROJECTIONS
    shared_gate: str = ""
    latent: tuple[str, str] | None = None
    gate_scales: tuple[str, str] | None = None
    place: str = ""
    table: str = ""

    @property
    def turned(self) -> bool:
        """True for experts [E, in, out]."""
        return self.interleaved or self.transposed


def every_layer(name: str, moe: Numbers, dense: Numbers) -> Values:
    """config.json of families whose layers are all MoE."""
    if dense:
        raise CheckpointError(
            f"every layer of {name} is MoE, but here layers {', '.join(map(str, dense))} are dense: fmoefy all"
        )
    return {}


def first_dense(name: str, moe: Numbers, dense: Numbers) -> Values:
    """config.json of families whose first layers may be dense."""
    if dense != tuple(range(len(dense))):
        raise CheckpointError(f"{name} has its dense layers first, but here they are {dense}")
    return {"first_k_dense_replace": len(dense)}


def any_dense(name: str, moe: Numbers, dense: Numbers) -> Values:
    """config.json of families any of whose layers may be dense."""
    return {"decoder_sparse_step": 1, "mlp_only_layers": list(dense)}


def as_configured(name: str, moe: Numbers, dense: Numbers) -> Values:
    """config.json of families that hold their own models alone, whose layers it describes already."""
    return {}


def kinds_of_layers(name: str, moe: Numbers, dense: Numbers) -> Values:
    """config.json of families that list the kind of each layer."""
    return {"mlp_layer_types": ["sparse" if i in moe else "dense" for i in sorted((*moe, *dense))]}


def nothing_more(values: Values, facts: Values) -> Values:
    return {}


def _as_it_is(values: Values) -> Values:
    return values


@dataclass(frozen=True)
class Family:
    """One model type of Transformers.

    name: the model type. holds: model types whose layers, MLPs aside, compute the same from the same configuration.
    files, modules: the tensors in its safetensors files, and in Transformers' modules (None: the same names, with the
    experts stacked). gates: our gates that compute what its router does; import_model builds the last, unless facts
    name another, and HashGate for a layer with a table. activation_key: key of config.json, "" where it is silu in any
    case. shared_activation: of the shared experts, where the others have another one.
    config: {fact of a layer: its key in config.json}. Facts are num_experts, d_hidden, top_k, shared (hidden units of
    the shared experts), num_shared (the same divided by d_hidden), and the options of gates and activations.
    fixed: facts that config.json cannot change. defaults: values of keys that config.json may lack.
    unsupported: {key of config.json: the only value that our layers compute}.
    layers: what config.json says about the numbers of the MoE and of the dense layers. extra: further values of
    config.json, from the values of the model's own configuration and the facts. read: the values of config.json, its
    special cases resolved; it may add "gate" and "output_scale". fewest_shared: smallest number of shared experts.
    norm: name of a norm at the end of the layer. returns_scores: the MLP returns a pair, of which the decoder layer
    ignores the second part.
    """

    name: str
    holds: tuple[str, ...]
    files: Layout
    config: Mapping[str, str]
    modules: Layout | None = None
    gates: tuple[str, ...] = SOFTMAX
    gate_bias: bool = False
    activations: tuple[str, ...] = UNCLAMPED
    activation_key: str = "hidden_act"
    shared_activation: str = ""
    fixed: Values = field(default_factory=dict)
    defaults: Values = field(default_factory=dict)
    unsupported: Values = field(default_factory=dict)
    layers: Callable[[str, Numbers, Numbers], Values] = every_layer
    extra: Callable[[Values, Values], Values] = nothing_more
    read: Callable[[Values], Values] = _as_it_is
    fewest_shared: int = 1
    norm: str = ""
    returns_scores: bool = False

    def variant(self, name: str, **changes: Any) -> "Family":
        """Another model type, whose MoE layers differ in the changes alone; it holds its own type."""
        return replace(self, **{"name": name, "holds": (name,), **changes})

    @property
    def in_modules(self) -> Layout:
        """The tensors in Transformers' modules."""
        if self.modules is not None:
            return self.modules
        return replace(self.files, block="mlp", per_expert=None)

    def facts_of(self, config: Values) -> dict[str, Any]:
        """{fact: value} that the values of config.json say, and those that the family fixes."""
        said = self.read({**self.defaults, **{k: v for k, v in config.items() if v is not None}})
        added = {name: said[name] for name in ("gate", "output_scale") if name in said}  # by read()
        return (
            added | {fact: said[key] for fact, key in self.config.items() if key in said} | dict(self.fixed)
        )
