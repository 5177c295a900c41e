"""The arguments of frozen_mlp and its backward from names, for tests that call the operators themselves."""

from types import MappingProxyType

from fmoe_ext.ops.arguments import ENTRIES, FrozenMlp, FrozenMlpBackward, by_name

DEFAULTS = MappingProxyType(
    {
        **dict.fromkeys(("b1", "b2", "topk_weights", *ENTRIES["packing"])),
        **dict.fromkeys(("lora_a1", "lora_b1", "lora_a2", "lora_b2")),
        **dict.fromkeys(ENTRIES["lora_scales"], 1.0),
        **dict.fromkeys(("w1_format", "w1_interleaved", "w2_format"), 0),
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
    """FrozenMlp of entries by name; what is left out has the value of DEFAULTS."""
    return _in_lists(FrozenMlp, given)


def backward(arguments, grad_y, kept, needs):
    """FrozenMlpBackward of a forward's arguments, the last three of its results, and which gradients are needed."""
    given = by_name(arguments._asdict())
    return _in_lists(FrozenMlpBackward, {**given, "grad_y": grad_y, **_kept(kept), "needs": needs})


def _kept(kept):
    return dict(zip(ENTRIES["kept"], kept, strict=True))


def _in_lists(kind, given):
    values = {**DEFAULTS, **given}

    def value(field):
        return [values[name] for name in ENTRIES[field]] if field in ENTRIES else values[field]

    return kind(*(value(field) for field in kind._fields))
