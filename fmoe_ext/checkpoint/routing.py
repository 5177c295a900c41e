"""Describe what a layer computes beside its weights, and compare it with checkpoints and with config.json.

Two models with the same tensors give different numbers if one divides the weights of the chosen experts by their sum
and the other does not. No tensor says which. So routing_of() collects the options of a gate and the activation of its
experts ("facts"):

    {"gate": "SoftmaxGate", "top_k": 2, "normalize": True, "activation": "swiglu"}

save() keeps them in the manifest and load() compares (check_routing). For Hugging Face's models config.json says them:
check_config() compares on loading, check_writable() and facts_of_layers() before writing. For a folder that is
converted routing_of_config() makes the facts, and needed_config() says what the config.json of the result must have.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.families import FAMILIES
from fmoe_ext.checkpoint.families.family import (
    CLAMPED,
    LIMITED,
    SOFTCAPPED,
    SOFTMAX,
    UNCLAMPED,
    Family,
    Numbers,
)
from fmoe_ext.checkpoint.model_state import ModelState
from fmoe_ext.experts import (
    ClampedSwiGLU,
    FusedExperts,
    GatedActivation,
    SharedExperts,
    SoftcappedSwiGLU,
    activation_name,
)
from fmoe_ext.layers import FMoE
from fmoe_ext.ops.activations import KINDS
from fmoe_ext.transformer import FMoETransformerMLP

# Methods that a subclass of FMoETransformerMLP overrides to compute something else
_METHODS = ("forward", "_run", "_choose", "_call_gate", "expert_fn")
# Attributes of gates that change what they compute
OPTIONS = (
    *("top_k", "normalize", "scale", "num_groups", "topk_groups", "group_best", "capacity_factor"),
    *("norm_eps", "biased", "rms_eps", "score", "capacity", "drop_policy", "max_experts"),
)
# What a gate computes unless its family says something else, in config or fixed
_USUAL = MappingProxyType(
    {
        **{"scale": 1, "num_groups": 1, "topk_groups": 1, "capacity_factor": None},
        **{"norm_eps": 0, "biased": "scores"},
        "score": "sqrtsoftplus",  # of HashGate: of the other gates that families have the class says it
    }
)
# {fact: its key in config.json} for models of no known family
_USUAL_CONFIG = MappingProxyType(
    {"top_k": "num_experts_per_tok", "normalize": "norm_topk_prob", "scale": "routed_scaling_factor"}
)
# {our name of an activation: name of its curve in config.json}
_HIDDEN_ACT = MappingProxyType(
    {
        kind.name: "gelu_pytorch_tanh" if kind.curve == "gelu_tanh" else kind.curve
        for kind in KINDS
        if kind.name != CLAMPED  # families that clamp say so in keys of their own
    }
)


def hidden_acts(family: Family) -> Mapping[str, str]:
    """Return {our name of an activation: name in config.json of a family}."""
    gated = family.in_modules.gated
    return {
        kind.name: _HIDDEN_ACT[kind.name]
        for kind in KINDS
        if kind.gated == gated and kind.name in _HIDDEN_ACT
    }


def routing_of(layer: FMoE) -> dict[str, Any]:
    """Return the facts of a layer: "gate" (its class), those of OPTIONS that it has, "activation" of the experts."""
    gate: nn.Module = layer.gate
    options = {name: getattr(gate, name) for name in OPTIONS if hasattr(gate, name)}
    if "score" not in vars(gate):
        options.pop("score", None)  # the class has it, which "gate" says
    if options.get("capacity_factor") is None:
        options.pop("drop_policy", None)  # nothing is dropped
    capacity = options.get("capacity")
    if isinstance(capacity, tuple | list) and all(isinstance(factor, int | float) for factor in capacity):
        options["capacity"] = list(capacity)  # as JSON gives it back
    elif capacity is not None:
        del options["capacity"]  # of a user's gate, which may note its last batch's there; ours are pairs
    plain = {k: v for k, v in options.items() if v is None or isinstance(v, (bool, int, float, str, list))}
    return {"gate": type(gate).__name__, **plain, **_activation_of(layer.experts)}


def _activation_of(experts: Any) -> dict[str, Any]:
    activation = getattr(experts, "activation", None)
    if activation == CLAMPED:
        activation = ClampedSwiGLU()
    if isinstance(activation, ClampedSwiGLU):
        return {"activation": CLAMPED, "swiglu_alpha": activation.alpha, "swiglu_limit": activation.limit}
    if isinstance(activation, SoftcappedSwiGLU):
        caps = {"gate_softcap": activation.gate_softcap, "up_softcap": activation.up_softcap}
        return {"activation": SOFTCAPPED, **caps}
    if activation is None:
        return {}
    is_silu = type(activation) is GatedActivation and activation_name(activation.activation) == "silu"
    if is_silu and activation.limit is not None and activation.offset == 0:
        return {"activation": LIMITED, "swiglu_limit": activation.limit}
    name = activation_name(activation) or getattr(activation, "__name__", type(activation).__name__)
    return {"activation": name}


def facts_of_layers(state: ModelState, family: Family) -> tuple[dict[str, Any], Numbers]:
    """Return (facts of all MoE layers, by the names of Family.config; numbers of these layers in the decoder).

    Raises CheckpointError for a model without our layers, and for layers that differ or that the family cannot hold.
    """
    if not state.layers:
        raise CheckpointError(
            "the model has no FMoETransformerMLP: fmoefy it, or import_model() a Transformers MoE model; a model of "
            "Transformers alone is saved by its save_pretrained"
        )
    numbers: dict[int, str] = {}
    for name, layer in state.layers.items():
        # each layer by itself, at one numbered place: config.json counts decoder layers
        _check_computes(name, layer, family)
        number = next((int(part) for part in name.split(".") if part.isdigit()), None)
        if number is None or number in numbers:
            raise CheckpointError(f"{name or '(root)'} is not the one MoE layer of a numbered decoder layer")
        numbers[number] = name
    # config.json has one value for all layers: they must agree
    (first, layer), *others = state.layers.items()
    facts = _facts(layer)
    for name, other in others:
        theirs = _facts(other)
        for fact in facts.keys() | theirs.keys():
            if fact == "gate" and family.in_modules.table:
                continue  # some of the layers have a table in place of a router
            if facts.get(fact) != theirs.get(fact):
                raise CheckpointError(
                    f"{first} has {fact}={facts.get(fact)} and {name} has {fact}={theirs.get(fact)}, but config.json "
                    "says one value for all layers"
                )
    return facts, tuple(sorted(numbers))


def _facts(layer: Any) -> dict[str, Any]:
    shared = layer.shared_experts
    routing = routing_of(layer)
    if routing.get("num_groups") == 1:
        routing.pop("group_best", None)  # means nothing without groups
    if routing.get("biased") == _USUAL["biased"]:
        del routing["biased"]  # which a gate with a table lacks
    routing.pop("score", None)  # which only a gate with a table has; check_writable() has compared it
    return {
        "num_experts": layer.num_experts,
        "d_hidden": layer.experts.h4toh.weight.shape[2],
        "shared": 0 if shared is None else shared.mlp.h4toh.weight.shape[2],
        "shared_expert_gate": shared is not None and shared.gate is not None,
        "latent_size": None if layer.latent is None else layer.latent.narrow.weight.shape[0],
        **routing,
    }


def _check_computes(name: str, layer: FMoE, family: Family) -> None:
    """Raise CheckpointError if a layer computes what a format's tensors and configuration cannot say."""
    where = name or "(root)"
    # Another class of layers or of experts may compute anything
    if not isinstance(layer, FMoETransformerMLP):
        raise CheckpointError(
            f"{where} is a {type(layer).__name__}, which no format has a place for: build an FMoETransformerMLP"
        )
    if type(layer.experts) is not FusedExperts:
        raise CheckpointError(
            f"{where} has experts of its own ({type(layer.experts).__name__}), no format has a place for "
            "them: FMoETransformerMLP's are two-layer MLPs"
        )
    for method in _METHODS:
        if getattr(type(layer), method) is not getattr(FMoETransformerMLP, method):
            raise CheckpointError(f"{where} ({type(layer).__name__}) has its own {method}()")
    if layer.mask is not None:
        raise CheckpointError(f"{where} has mask=: no format says which tokens go to no expert")
    if layer.latent is not None and not family.in_modules.latent:
        raise CheckpointError(f"{where} has latent_size=: no format has a place for its projections")
    shared = layer.shared_experts
    if shared is not None and type(shared) is not SharedExperts:
        raise CheckpointError(f"{where} has shared experts of its own ({type(shared).__name__})")
    if shared is not None and family.files.shared and not family.files.shared_gate and shared.gate:
        raise CheckpointError(f"{where} has gated shared experts, those of {family.name} have no gate")
    check_writable({name: routing_of(layer)}, name, family.name)
    if shared is not None:
        found, expected = _activation_of(shared.mlp), _activation_of(layer.experts)
        if found != ({"activation": family.shared_activation} if family.shared_activation else expected):
            raise CheckpointError(
                f"the shared experts of {where} have the activation {found}, but those of Hugging Face's {family.name} "
                f"have {family.shared_activation or expected}"
            )


def check_writable(routing: Mapping[str, Mapping[str, Any]], prefix: str, layout: str) -> None:
    """Raise CheckpointError if a Hugging Face layer would compute other numbers from the same tensors.

    routing: {layer: facts}; a layer that it lacks is not checked.
    """
    where = prefix.removesuffix(".")
    options = routing.get(where)
    if options is None:
        return
    family = FAMILIES.get(layout)  # None: the usual router, of a layout that several have
    # Expected are the usual values of what config.json cannot say, and those that the family fixes
    said = family.config if family else _USUAL_CONFIG.keys() - {"scale"}
    expected = {name: value for name, value in _USUAL.items() if name not in said}
    expected |= family.fixed if family else {}
    if options.get("topk_groups") == options.get("num_groups"):
        expected.pop("group_best", None)  # no group is left out
    # Then its class
    gates = family.gates if family else SOFTMAX
    wrong = next((name for name, value in expected.items() if options.get(name, value) != value), None)
    what = None if wrong is None else f"{wrong}={options[wrong]}, expected {expected[wrong]}"
    if options.get("gate") not in gates:
        what = f"{options.get('gate')}, expected one of {', '.join(gates)}"
    if what is not None:
        raise CheckpointError(
            f"the gate of {where or '(root)'} has {what}: a Hugging Face {layout} layer would "
            "compute other numbers from the same tensors"
        )
    # Then the experts
    activation = options.get("activation")
    activations = family.activations if family else UNCLAMPED
    if activation is not None and activation not in activations:
        raise CheckpointError(
            f"the experts of {where or '(root)'} have the activation {activation}, but those of "
            f"Hugging Face's {layout} have {' or '.join(activations)}"
        )


def needed_config(routing: Mapping[str, Mapping[str, Any]], layout: str) -> dict[str, Any]:
    """Return the values that config.json needs for layers that were converted to a layout."""
    config: dict[str, Any] = {}
    family = FAMILIES.get(layout)
    keys = family.config if family else _USUAL_CONFIG
    act_key = family.activation_key if family else "hidden_act"
    for options in routing.values():
        config |= {key: options[name] for name, key in keys.items() if name in options}
        act = _HIDDEN_ACT.get(options.get("activation", ""))
        # hidden_act of these models is silu anyway; other keys have other defaults
        if act is not None and act_key and (act_key, act) != ("hidden_act", "silu"):
            config[act_key] = act
    return config


def routing_of_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that config.json says about the MoE layers, like routing_of(); {} for unknown model types."""
    family, said = _family_and_values(config)
    if family is None:
        return {}
    facts = family.facts_of(said)
    options = {name: facts[name] for name in (*OPTIONS, "output_scale") if name in facts}
    return {
        "gate": facts.get("gate", family.gates[-1]),
        **options,
        "activation": activation_of_config(family, said),
    }


def _family_and_values(config: Mapping[str, Any]) -> tuple[Family | None, dict[str, Any]]:
    inner = config.get("text_config", config)
    said = dict(inner) if isinstance(inner, Mapping) else {}
    return FAMILIES.get(str(said.get("model_type"))), said


def activation_of_config(family: Family, said: Mapping[str, Any]) -> str:
    """Return our name of the experts' activation, or config.json's if we have no such activation. said: its values."""
    # These families have one activation whatever config.json says
    if family.activations in ((CLAMPED,), (LIMITED,), (SOFTCAPPED,)):
        return family.activations[0]
    ours = {theirs: name for name, theirs in hidden_acts(family).items()}
    act = said.get(family.activation_key)
    act = str(
        family.defaults.get(family.activation_key, "silu") if act is None else act
    )  # null counts as missing
    return ours.get(act, act)


def check_config(config: Mapping[str, Any], layers: Iterable[tuple[str, FMoE]]) -> None:
    """Raise CheckpointError if an option that both a layer and config.json have differs, or the activation.

    Classes of gates are compared for families alone whose config.json names them (Family.read).
    """
    family, said = _family_and_values(config)
    activation = routing_of_config(config).get("activation")
    keys = family.config if family else _USUAL_CONFIG
    facts = family.facts_of(said) if family else {name: said.get(key) for name, key in keys.items()}
    if family:  # of a gate with a table
        facts.setdefault("score", _USUAL["score"])
    scale = facts.pop("output_scale", 1)
    for name, layer in layers:
        where, options = name or "(root)", routing_of(layer)
        if getattr(layer, "output_scale", 1) != scale:
            raise CheckpointError(
                f"config.json of the model multiplies the output of {where} by {scale}: read it with import_model()"
            )
        if activation is not None and options.get("activation", activation) != activation:
            raise CheckpointError(
                f"the experts of {where} have the activation {options['activation']}, but by config.json of "
                f"the model they have {activation}: the outputs would differ. Build the layer with that activation, or "
                "change config.json"
            )
        # a fact that either side does not say is not compared
        for option, value in facts.items():
            if value is None or option not in options or options[option] == value:
                continue
            says = f"every {said.get('model_type')} has {option}={value}"
            if option in keys:
                says = f"config.json of the model says {keys[option]}={value}"
            whose = f"the gate of {where}"
            build = f"the gate with functools.partial({options['gate']}, {option}={value})"
            if option == "gate":  # Family.read made it from config.json
                says = f"by config.json of the model it has gate={value}"
            if option in ("gate", "top_k"):
                whose, build = f"layer {where}", f"the layer with {option}={value}"
            elif option in _activation_of(layer.experts):
                whose, build = f"the activation of {where}", "the layer with that activation"
            raise CheckpointError(
                f"{whose} has {option}={options[option]}, but {says}: the outputs would differ. Build {build}, or "
                "change config.json"
            )


def check_routing(
    routing: Mapping[str, Mapping[str, Any]], layers: Iterable[tuple[str, FMoE]], source: str
) -> None:
    """Raise CheckpointError, which lists the differences, if gates or experts compute something else than was saved.

    routing: Manifest.routing, {layer: facts}. source: where it is from, for the error.
    """
    differences = []
    for name, layer in layers:
        saved, ours = routing.get(name, {}), routing_of(layer)
        differing = [option for option in saved if option in ours and ours[option] != saved[option]]
        if "gate" in differing:  # another class of gate has other options anyway
            differing = [option for option in differing if option in ("gate", "activation")]
        differences += [
            f"{name or '(root)'} has {option}={ours[option]}, but {source} was saved with {option}={saved[option]}"
            for option in differing
        ]
    if differences:
        raise CheckpointError(
            f"{'; '.join(differences)}: the outputs would differ. Build the model as it was saved; to go on with other "
            "options on purpose, change them after loading (layer.gate.top_k = 1), or take the weights alone: "
            "`fmoe checkpoint merge` and model.load_state_dict(safetensors.torch.load_file(FILE))"
        )
