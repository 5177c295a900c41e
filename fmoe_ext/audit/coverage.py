"""Find what a few equal texts do not show: lengths at which a model computes otherwise, operators out of order.

audit_rollout() (rollout.py) has a text pass each length that lengths_that_matter() finds, or names it: windows, chunks,
rotary positions. Rotary positions are asked: the registry of Transformers has a function for each type, which is given
shorter and longer texts until its frequencies change. Other lengths are read from fields of the configuration and
attributes of modules by name.

uncovered_operators() finds what a forward computes outside of what batch_invariant() covers. The mode replaces
functions of torch where Python calls them. What multiplies inside of one function (an LSTM, a Fourier transform, a
script of TorchScript) or is an operator called by its name (torch.ops.aten.mm) it does not see, and a few texts may
have equal bits by luck. So forwards run once more under two modes: a TorchDispatchMode sees each operator, and a
TorchFunctionMode knows the function that called it. Operators are in order if

* they move, choose or draw numbers, or torch was found to compute them alike for every shape (_ANY_SHAPE: layer_norm,
  cumsum, scatter_add);
* they compute each number by itself and alike at every place: each is tried twice on copies, in vectors and one by one;
* they are of _IN_VECTORS (gelu, silu, pow), and the mode filled their memory up to whole vectors (whole_vectors);
* they sum rows, and the mode gave them contiguous ones of one dimension, as long in each forward: a row of keys grows
  with the text, and zeros behind the others change the order of the sum. So do those that choose among numbers by
  their order: of equal ones, as repeated tokens have, they choose others in a longer row.

All others are named, unless every forward gave them the same sizes: products and softmax too, which under the mode are
operators of fmoe_ext. One that has the same sizes whatever the text, as the slopes of ALiBi have, computes the same
bits. What only some forwards call has no other size to compare with, and is named.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch as python_dispatch

from fmoe_ext.ops.in_order import EXACT_POWERS, REPLACEMENTS, whole_vectors

_LONGEST = 1 << 24  # tokens
# names of fields and attributes that hold a length, and parts of names that hold none
_OF_LENGTHS = re.compile(r"window|chunk|block_size|segment|dense_len|index_topk|compress")
_NO_LENGTHS = re.compile(r"layer|pattern|ind(ex|ic)es|blocks|types|dim")  # as max_window_layers
# Names of aten's operators, without the _ of those in place, whose bits do not depend on the shape. Elementwise ones
# (Tag.pointwise) need no entry: _is_alike_at_every_place() tries them.
_ANY_SHAPE = frozenset({
    "_embedding_bag", "_embedding_bag_forward_only", "_local_scalar_dense", "_prelu_kernel", "_to_copy",
    "_unique2", "_unsafe_index", "_unsafe_index_put", "_unsafe_masked_index", "_unsafe_view", "amax", "amin",
    "aminmax", "argmax", "argmin", "avg_pool1d", "bernoulli", "bucketize", "cat", "clone", "complex",
    "constant_pad_nd", "copy", "cummax", "cummin", "cumprod", "cumsum", "diagonal_scatter", "embedding",
    "exponential", "fill", "flip", "floor_divide", "gather", "hardswish", "hardtanh", "histc", "index",
    "index_add", "index_copy", "index_fill", "index_put", "index_select", "kthvalue", "lift_fresh",
    "log_sigmoid_forward", "logcumsumexp", "masked_fill", "masked_scatter", "masked_select", "max", "median",
    "min", "multinomial", "native_dropout", "native_group_norm", "native_layer_norm", "nll_loss_forward",
    "nonzero", "normal", "polar", "reflection_pad1d", "reflection_pad2d", "repeat", "repeat_interleave",
    "replicate_pad1d", "roll", "scatter", "scatter_add", "searchsorted", "select_scatter", "slice_scatter",
    "sort", "stack", "take", "topk", "transpose", "tril", "triu", "uniform", "unsafe_chunk", "unsafe_split",
    "unsafe_split_with_sizes", "view_as_complex", "view_as_real", "where", "zero",
})  # fmt: skip
# torch computes the elements after the last whole vector by another function
_IN_VECTORS = frozenset({
    "atan2", "atanh", "celu", "cosh", "elu", "exp2", "float_power", "gelu", "glu", "igamma", "ldexp", "logaddexp",
    "logaddexp2", "logit", "mish", "pow", "rsqrt", "selu", "sigmoid", "silu", "sinh", "softplus", "special_i0e",
})  # fmt: skip
# sums of rows
_OF_ROWS = frozenset({
    "_fused_rms_norm", "linalg_vector_norm", "mean", "norm", "rms_norm", "std", "std_mean", "sum", "var", "var_mean",
})  # fmt: skip
# choices among numbers by their order
_BY_ORDER = frozenset({"kthvalue", "median", "sort", "topk"})


def lengths_that_matter(model: nn.Module) -> dict[int, str]:
    """Return {length: what changes in longer texts}, of all lengths that can be found."""
    config: Any = model.config
    config = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    found: dict[int, list[str]] = {}
    for length, what in (*_of_rotary_positions(config), *_by_name(config.to_dict())):
        found.setdefault(length, []).append(what)
    for module in model.modules():
        for length, what in _by_name(vars(module)):
            found.setdefault(length, []).append(what)
    return {length: " and ".join(dict.fromkeys(found[length])) for length in sorted(found)}


def _by_name(fields: dict[str, Any]) -> Iterator[tuple[int, str]]:
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _by_name({str(key): v for key, v in value.items()})
        elif _OF_LENGTHS.search(name) and not _NO_LENGTHS.search(name):
            for length in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(length, int) and not isinstance(length, bool) and 1 < length <= _LONGEST:
                    yield length, name


def _of_rotary_positions(config: Any) -> Iterator[tuple[int, str]]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    of_layers = {
        name: value for name, value in rope.items() if isinstance(value, dict)
    }  # {type of layer: parameters}
    for layer_type, parameters in (of_layers or {"": rope}).items():
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        what = f"rope of type {kind}"
        function = ROPE_INIT_FUNCTIONS.get(str(kind))
        if function is None:
            if kind != "default":  # of another library
                usual = getattr(config, "max_position_embeddings", None) or _LONGEST
                yield int(parameters.get("original_max_position_embeddings") or usual), what
            continue
        options = {"layer_type": layer_type} if layer_type else {}

        def frequencies(length: int, function: Callable[..., Any] = function, options: Any = options) -> Any:
            return function(config, torch.device("cpu"), seq_len=length, **options)[0]

        if torch.equal(frequencies(1), frequencies(_LONGEST)):
            continue
        low, high = 1, _LONGEST
        while high - low > 1:
            middle = (low + high) // 2
            if torch.equal(frequencies(1), frequencies(middle)):
                low = middle
            else:
                high = middle
        yield low, what


@dataclass(frozen=True)
class Uncovered:
    """Operators of one function of torch that a module called, outside of what batch_invariant() covers."""

    module: str
    function: str
    operators: tuple[str, ...]  # as "aten.mm", in the order of their first calls

    def __str__(self) -> str:
        return f"{', '.join(self.operators)}, computed by {self.function} in {self.module}"


def uncovered_operators(model: nn.Module, forwards: Sequence[Callable[[], Any]]) -> list[Uncovered]:
    """Name the operators that batch_invariant(), which must be on, does not cover.

    forwards: run model with texts of several sizes; model is not changed but by its own forward.
    """
    names = {module: name or type(model).__name__ for name, module in model.named_modules()}
    running = [f"the code around {type(model).__name__}"]
    # of each forward {(module, function, operator): sizes and strides of what it was given and returned}
    found: list[dict[tuple[str, str, str], set[Any]]] = []
    # of each operator in order the lengths of its rows, in each forward that calls it
    lengths: dict[tuple[str, str, str], dict[int, set[int]]] = {}
    functions = _Functions()

    class Operators(python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            kwargs = kwargs or {}
            called = functions.called or func
            # before the operator runs, which may write into an argument or give it another size
            given = _tensors((args, kwargs))
            before = [(t.shape, t.stride()) for t in given]
            is_pointwise = torch.Tag.pointwise in _not_in_place(func).tags
            is_alike = not is_pointwise or _is_alike_at_every_place(func, args, kwargs)
            out = func(*args, **kwargs)
            results = _tensors((out, _written(func, args, kwargs)))
            by_name = isinstance(called, (type(torch.ops.aten.mm), type(torch.ops.aten.mm.default)))
            function = f"torch.ops.{called}" if by_name else getattr(called, "__name__", str(called))
            call = running[-1], function, f"{func.namespace}.{_base(func)}"
            if _is_in_order(func, called in REPLACEMENTS, args, kwargs, results) and is_alike:
                length = _row_length(func, args, kwargs)
                if length is not None:
                    lengths.setdefault(call, {}).setdefault(len(found), set()).add(length)
            else:
                sizes = *before, *((t.shape, t.stride()) for t in results)
                found[-1].setdefault(call, set()).add(sizes)
            return out

    def leave(*_: Any) -> None:
        running.pop()

    handles = [
        register_module_forward_pre_hook(lambda module, _: running.append(names.get(module, running[-1]))),
        register_module_forward_hook(leave, always_call=True),  # also after an error that a module catches
    ]
    try:
        for forward in forwards:
            found.append({})
            with functions, Operators():
                forward()
    finally:
        for handle in handles:
            handle.remove()
    operators: dict[tuple[str, str], list[str]] = {}
    for call in dict.fromkeys(chain(*found, lengths)):
        of_rows = lengths.get(call, {}).values()
        if any(a.get(call) != b.get(call) for a, b in pairwise(found)) or any(
            a != b for a, b in pairwise(of_rows)
        ):
            operators.setdefault(call[:2], []).append(call[2])
    return [Uncovered(*where, tuple(names)) for where, names in operators.items()]


class _Functions(TorchFunctionMode):
    """Remember the function of torch that runs: the outermost one, as this mode is off inside of it."""

    called: Any = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before, self.called = self.called, func
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.called = before


def _base(operator: Any) -> str:
    """Return "add" of aten::add_.Tensor."""
    name: str = operator.name().partition("::")[2].partition(".")[0]
    return name.rstrip("_")


def _tensors(values: Any) -> list[Tensor]:
    """Return the tensors in arguments or results."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (tuple, list)):
        return []
    return [t for value in values for t in _tensors(value)]


def _written(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that an operator writes into, by its schema."""
    given = _named(operator, args, kwargs)
    arguments = operator._schema.arguments
    return [given.get(a.name) for a in arguments if a.alias_info is not None and a.alias_info.is_write]


def _named(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip((a.name for a in operator._schema.arguments), args, strict=False)), **kwargs}


def _not_in_place(operator: Any) -> Any:
    """Return add.Tensor of add_.Tensor: of many operators in place torch does not say that they are elementwise."""
    packet = getattr(torch.ops.aten, _base(operator), None) if operator.namespace == "aten" else None
    return getattr(packet, operator._overloadname, operator)


def _row_length(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Return how many numbers an operator sums, or chooses from by their order; None for others."""
    name, x = _base(operator), args[0] if args else None
    if operator.namespace != "aten" or not isinstance(x, Tensor) or not x.is_floating_point() or not x.dim():
        return None
    if name in _OF_ROWS:
        return x.shape[-1]
    given = _named(operator, args, kwargs)
    return x.shape[given.get("dim", -1)] if name in _BY_ORDER and not given.get("stable") else None


def _is_alike_at_every_place(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an operator of elements has the same bits in vectors as one by one, for these numbers.

    torch computes memory without gaps in vectors, but for the last few elements of each thread's part; with gaps, and
    those last ones, it computes one by one. Which element is one of them follows from the shape.
    """
    is_random = torch.Tag.nondeterministic_seeded in operator.tags
    if operator.namespace != "aten" or _base(operator) in _IN_VECTORS or is_random:
        return True  # these are judged by their names
    # copies of all tensors: an operator in place, or with out=, writes into them
    vectors, singles = (
        _tensors(operator(*_copied(args, spread), **_copied(kwargs, spread)))
        for spread in (_without_gaps, _with_gaps)
    )
    pairs = zip(vectors, singles, strict=True)
    return all(bool(((a == b) | (a.isnan() & b.isnan())).all()) for a, b in pairs)  # a NaN equals no NaN


def _copied(value: Any, spread: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_copied(each, spread) for each in value)
    if isinstance(value, dict):
        return {name: _copied(each, spread) for name, each in value.items()}
    return spread(value) if isinstance(value, Tensor) else value


def _without_gaps(x: Tensor) -> Tensor:
    whole = x.new_zeros(whole_vectors(max(1, x.numel())))  # no element is behind the last whole vector
    flat = whole[: x.numel()].view(x.shape)
    return flat.copy_(x)


def _with_gaps(x: Tensor) -> Tensor:
    return torch.stack((x, x), -1)[..., 0]


def _is_in_order(
    operator: Any, is_replaced: bool, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Tensor]
) -> bool:
    """Return whether the bits of results do not depend on the shapes; is_replaced: the mode has a function for it."""
    given = _tensors((args, kwargs))
    name = _base(operator)
    has_floats = any(t.is_floating_point() or t.is_complex() for t in results)
    if operator.namespace in ("fmoe_ext", "prim") or not has_floats:
        return True
    if name == "arange":  # torch rounds a multiple of a fraction otherwise in vectors
        return all(float(value).is_integer() for value in args if isinstance(value, (int, float)))
    if not given:
        return True
    if operator.namespace != "aten":
        return False
    if name == "pow" and isinstance(args[1], (int, float)) and args[1] in EXACT_POWERS:
        return True
    if (
        name in ("index_put", "_unsafe_index_put", "_index_put_impl") and True in args[3:]
    ):  # accumulate: in any order
        return False
    if name in ("div", "reciprocal") and any(x.is_complex() for x in given):
        return False  # rounded otherwise in vectors, for numbers that are rare
    if name == "scatter_reduce" and _named(operator, args, kwargs)["reduce"] in ("amax", "amin"):
        return True  # a maximum has no order
    if name == "index_add" and kwargs.get("alpha", 1) != 1:  # 16 bits are rounded otherwise in vectors
        return given[0].itemsize > 2
    if name == "rsqrt" and given[0].itemsize > 2:
        return True
    if name in _IN_VECTORS:
        whole = all(t.is_contiguous() and whole_vectors(t.numel()) == t.numel() for t in given)
        return is_replaced and whole
    if name in _OF_ROWS:
        x, sizes = given[0], [list(value) for value in args[1:] if isinstance(value, (tuple, list))]
        if name.endswith("rms_norm"):
            is_row = len(sizes[0]) == 1
        else:
            is_row = sizes in ([[-1]], [[x.dim() - 1]]) or (not sizes and x.dim() == 1)
        return is_replaced and is_row and x.is_contiguous()
    return (
        torch.Tag.pointwise in _not_in_place(operator).tags
        or _not_in_place(operator).is_view
        or name in _ANY_SHAPE
        or name.startswith("new_")
        or name.endswith("_like")
    )
