"""Describe a Hugging Face MoE model type as data (Family, Layout), for import, export and checkpoints.

A family says where the tensors of its MoE layers are, once as its files have them and once as Transformers' modules do
(Layout), and what config.json calls the facts of a layer:

    num_experts, d_hidden, top_k     of the experts
    shared, num_shared               hidden units of the shared experts; the same divided by d_hidden
    normalize, scale, num_groups, ...    options of gates and activations

What config.json cannot change is `fixed`, what our layers do not compute is `unsupported`. A family has code only for a
rule: which layers may be dense, special cases of its configuration. To add one, write a file with FAMILIES beside this.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.ops.activations import GATED_ACTIVATIONS, PLAIN_ACTIVATIONS

Values: TypeAlias = Mapping[str, Any]  # of config.json, or facts
Numbers: TypeAlias = tuple[int, ...]  # of decoder layers, from 0
PROJECTIONS = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
UP_DOWN = ("up_proj.weight", "down_proj.weight")  # of experts without a gate
GATE_UP_DOWN = ("gate_up_proj.weight", "down_proj.weight")
W1_W3_W2 = ("w1.weight", "w3.weight", "w2.weight")
SOFTMAX = ("NaiveGate", "SoftmaxGate")
CLAMPED = "clamped_swiglu"
LIMITED = "limited_swiglu"  # experts.GatedActivation(silu, limit)
SOFTCAPPED = "softcapped_swiglu"  # experts.SoftcappedSwiGLU
UNCLAMPED = tuple(name for name in GATED_ACTIVATIONS if name != CLAMPED)
UNGATED = PLAIN_ACTIVATIONS


@dataclass(frozen=True)
class Layout:
    """Names and shapes of an MoE layer's tensors; "" or None: the layout has no such tensor."""

    block: str = "mlp"  # name of the layer
    gate: str = "gate"  # name of its gate
    expert_bias: str = ""  # bias that is added to scores when experts are chosen (load balancing)
    bias_is_row: bool = False  # it is [1, E], not [E]
    no_bias: bool = False  # it has none; our gate's is left out if it is zero
    # [E, 2H, D] gate before up, [E, D, H]
    experts: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj")
    per_expert: tuple[str, str, str] | None = None  # gate, up, down of experts.<e> instead
    interleaved: bool = False  # [E, D, 2H], columns gate, up, gate, up, ..., and [E, H, D], biases (GPT-OSS)
    transposed: bool = False  # [E, D, 2H], gate before up, and [E, H, D]
    gated: bool = True  # False for experts of up [E, H, D] and down alone
    shared: str = ""  # prefix of the shared experts
    # of their weights: two if gate and up are one, or there is no gate
    shared_names: tuple[str, ...] = PROJECTIONS
    shared_gate: str = ""
    latent: tuple[str, str] | None = None  # projections to a narrower width before the experts, and back
    gate_scales: tuple[str, str] | None = None  # factors of NormedGate for its inputs and for its experts
    place: str = ""  # name of our layer in decoder layers that have router and experts themselves (Gemma 4)
    table: str = ""  # experts of each token of the vocabulary, in layers that have it in place of expert_bias

    @property
    def turned(self) -> bool:
        """True for experts [E, in, out]."""
        return self.interleaved or self.transposed


# Rules for Family.layers: what config.json says about which layers are MoE and which are dense


def every_layer(name: str, moe: Numbers, dense: Numbers) -> Values:
    """Say nothing, because all layers must be MoE; CheckpointError for others."""
    if dense:
        raise CheckpointError(
            f"every layer of {name} is MoE, but here layers {', '.join(map(str, dense))} are dense: fmoefy all"
        )
    return {}


def first_dense(name: str, moe: Numbers, dense: Numbers) -> Values:
    """Say the number of dense layers, which must come first; CheckpointError for others."""
    if dense != tuple(range(len(dense))):
        raise CheckpointError(f"{name} has its dense layers first, but here they are {dense}")
    return {"first_k_dense_replace": len(dense)}


def any_dense(name: str, moe: Numbers, dense: Numbers) -> Values:
    """List the dense layers, which may be anywhere."""
    return {"decoder_sparse_step": 1, "mlp_only_layers": list(dense)}


def as_configured(name: str, moe: Numbers, dense: Numbers) -> Values:
    """Say nothing: the family holds its own models alone, whose config.json describes the layers already."""
    return {}


def kinds_of_layers(name: str, moe: Numbers, dense: Numbers) -> Values:
    """List the kind of each layer."""
    return {"mlp_layer_types": ["sparse" if i in moe else "dense" for i in sorted((*moe, *dense))]}


def nothing_more(values: Values, facts: Values) -> Values:
    """Say nothing: the default of Family.extra."""
    return {}


@dataclass(frozen=True)
class Family:
    """One model type of Transformers."""

    name: str  # the model type
    # model types whose layers, apart from the MLPs, compute the same from the same configuration
    holds: tuple[str, ...]
    files: Layout  # the tensors in its safetensors files
    config: Mapping[str, str]  # {fact of a layer: its key in config.json}
    # the tensors in Transformers' modules; None: the same, with the experts stacked
    modules: Layout | None = None
    # our gates that compute what its router does; import_model() builds the last
    gates: tuple[str, ...] = SOFTMAX
    gate_bias: bool = False
    activations: tuple[str, ...] = UNCLAMPED
    activation_key: str = "hidden_act"  # of config.json; "" if it is always silu
    shared_activation: str = ""  # of the shared experts, if it is not that of the others
    fixed: Values = field(default_factory=dict)  # facts that config.json cannot change
    defaults: Values = field(default_factory=dict)  # {key that config.json may lack: its value}
    # {key of config.json: the only value that our layers compute}
    unsupported: Values = field(default_factory=dict)
    # What config.json says about the numbers of the MoE and of the dense layers
    layers: Callable[[str, Numbers, Numbers], Values] = every_layer
    # Further values of config.json, from the values of the model's own configuration and the facts
    extra: Callable[[Values, Values], Values] = nothing_more
    # The values of config.json, its special cases resolved; it may add the facts "gate" and "output_scale"
    read: Callable[[Values], Values] = lambda values: values
    fewest_shared: int = 1  # smallest number of shared experts
    norm: str = ""  # name of a norm at the end of the layer
    returns_scores: bool = False  # the MLP returns a pair; the decoder layer ignores the second part

    def variant(self, name: str, **changes: Any) -> "Family":
        """Return another model type whose MoE layers differ in these fields only; it holds its own type."""
        return replace(self, **{"name": name, "holds": (name,), **changes})

    @property
    def in_modules(self) -> Layout:
        """Return the layout of Transformers' modules."""
        if self.modules is not None:
            return self.modules
        return replace(self.files, block="mlp", per_expert=None)

    def facts_of(self, config: Values) -> dict[str, Any]:
        """Return {fact: value} from the values of config.json, and those that the family fixes."""
        # a key that is null counts as missing
        said = self.read({**self.defaults, **{k: v for k, v in config.items() if v is not None}})
        added = {name: said[name] for name in ("gate", "output_scale") if name in said}  # by read()
        return (
            added | {fact: said[key] for fact, key in self.config.items() if key in said} | dict(self.fixed)
        )
