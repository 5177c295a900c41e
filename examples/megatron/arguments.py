"""A model by Megatron's own arguments, those that its pretrain_gpt.py takes, as fields of its TransformerConfig.

Wheels of megatron-core until 0.16 bring no megatron.training. tests/megatron_lm/test_megatron_arguments.py compares
the fields with those of Megatron's own arguments.py where there is one.
"""

import ast
import dataclasses
import shlex
from pathlib import Path

import torch.nn.functional as F
from megatron.core.activations import quick_gelu, squared_relu
from megatron.core.transformer.transformer_config import TransformerConfig

MODELS = Path(__file__).resolve().parent / "models"
# What arguments.py makes of arguments that are no field's name.
SWITCHES = {
    "swiglu": {"gated_linear_unit": True, "activation_func": F.silu},
    "quick_geglu": {"gated_linear_unit": True, "activation_func": quick_gelu},
    "squared_relu": {"activation_func": squared_relu},
    "disable_bias_linear": {"add_bias_linear": False},
    "group_query_attention": {},
}
RENAMED = {"num_experts": "num_moe_experts", "norm_epsilon": "layernorm_epsilon"}
OF_THE_MODEL = (
    "position_embedding_type",
    "rotary_base",
    "rotary_percent",
)  # of GPTModel, no fields of the config


def names():
    """The models of the folder models/."""
    return sorted(path.stem for path in MODELS.glob("*.txt"))


def read(name):
    """The arguments of a file in models/, as pretrain_gpt.py would find them in its command line."""
    return shlex.split((MODELS / f"{name}.txt").read_text(), comments=True)


def fields_of(arguments):
    """The fields of the config and the options of GPTModel that Megatron's arguments stand for.

    Raises ValueError for an argument that is neither.
    """
    given = pairs(arguments)
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    fields, model = {}, {"share_embeddings_and_output_weights": True}
    for name, value in given.items():
        name = RENAMED.get(name, name)
        if name == "untie_embeddings_and_output_weights":
            model["share_embeddings_and_output_weights"] = False
        elif name in OF_THE_MODEL:
            model[name] = value
            fields |= {name: value} if name in known else {}
        elif name in SWITCHES:
            fields |= SWITCHES[name]
        elif name in known:
            fields[name] = value
        else:
            raise ValueError(
                f"--{name.replace('_', '-')} is no argument of a model that this Megatron-core knows"
            )
    return fields, model


def pairs(arguments):
    """{name: value} of --name value ...; True without a value, a list of several."""
    found, name = {}, None
    for text in arguments:
        if text.startswith("--"):
            name = text.removeprefix("--").replace("-", "_")
            found[name] = []
        elif name is None:
            raise ValueError(f"{text!r} stands before the first --name")
        else:
            found[name].append(value_of(text))
    return {
        name: True if not values else values[0] if len(values) == 1 else values
        for name, values in found.items()
    }


def value_of(text):
    """A number or a list as Python writes it, any other text as it is."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
