"""The arguments of frozen_mlp and its backward from names, for tests that call the operators themselves."""

from types import MappingProxyType

from fmoe_ext.ops.arguments import FrozenMlp, FrozenMlpBackward

DEFAULTS = MappingProxyType(
    {
        **dict.fromkeys(("b1", "b2", "topk_weights", "w1_scale", "w1_zero", "w2_scale", "w2_zero")),
        **dict.fromkeys(("lora_a1", "lora_b1", "lora_a2", "lora_b2")),
        **dict.fromkeys(("lora_scale1", "lora_scale2"), 1.0),
        **dict.fromkeys(("w1_format", "w2_format"), 0),
        "w1_interleaved": False,
        "combine": True,
        "save": True,
    }
)


def packing_of(w1, w2):
    """Bytes, scales, zero points and formats of two Quantized weights."""
    found = {}
    for name, weight in (("w1", w1), ("w2", w2)):
        scale, zero, number, _ = weight.packing()
        found |= {name: weight.rows(), f"{name}_scale": scale, f"{name}_zero": zero, f"{name}_format": number}
    return {**found, "w1_interleaved": w1.interleaved}


def forward(**given):
    """FrozenMlp by name; what is left out has the value of DEFAULTS."""
    return FrozenMlp(**{**DEFAULTS, **given})


def backward(arguments, grad_y, kept, needs):
    """FrozenMlpBackward of a forward's arguments, the last three of its results, and which gradients are needed."""
    given = arguments._asdict() | dict(zip(("h", "u1", "u2"), kept, strict=True))
    given |= {"grad_y": grad_y, "needs": needs}
    return FrozenMlpBackward(*(given[name] for name in FrozenMlpBackward._fields))
