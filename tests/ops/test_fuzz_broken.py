"""Every operator with one broken argument: one RuntimeError that names it and says what it must be, never a crash."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fmoe_ext import frozen, ops
from tests.ops import frozen_arguments
from tests.ops.fuzz import EXAMPLES, assert_raises, choices, generator, seeds

pytestmark = pytest.mark.usefixtures("one_thread")
native = torch.ops.fmoe_ext


class Call:
    """A valid call: function(*arguments.values()), and what may be broken in it, as (argument, fault) pairs."""

    def __init__(self, function, arguments, *, sizes=None, indices=None, values=None, any_dtype=()):
        self.function, self.arguments = function, arguments
        self.indices = indices or {}  # {tensor: (least, end)} of its elements
        self.values = values or {}  # {argument: values that it must not have}
        tensors = [name for name, t in arguments.items() if isinstance(t, torch.Tensor)]
        self.faults = [(name, "rank") for name in tensors]
        self.faults += [(name, "dtype") for name in tensors if name not in any_dtype]
        self.faults += [(name, ("size", d)) for name, dims in (sizes or {}).items() for d in dims]
        if len(tensors) > 1:  # otherwise no kernel would be found, or that for meta tensors
            self.faults += [(name, "device") for name in tensors]
            self.faults += [(name, "None") for name in tensors if name not in OPTIONAL]
        self.faults += [(name, side) for name in self.indices for side in ("too small", "too large")]
        self.faults += [(name, ("value", i)) for name, bad in self.values.items() for i in range(len(bad))]

    def broken(self, name, fault, position):
        """The arguments with that fault; None where an empty tensor cannot have it."""
        value = self.arguments[name]
        if fault == "rank":
            value = value.unsqueeze(0)
        elif fault == "dtype":
            value = value.to(torch.complex64 if value.is_floating_point() else torch.float32)
        elif fault == "device":
            value = value.to("meta")
        elif fault == "None":
            value = None
        elif fault[0] == "size":
            shape = list(value.shape)
            shape[fault[1]] += 1 + position % 3
            value = value.new_zeros(shape)
        elif fault[0] == "value":
            value = self.values[name][fault[1]]
        elif value.numel() == 0:
            return None
        else:
            least, end = self.indices[name]
            value = value.clone()
            value.view(-1)[position % value.numel()] = (
                end + position % 3 if fault == "too large" else least - 1 - position % 3
            )
        return {**self.arguments, name: value}


OPTIONAL = ("topk_weights", "bias", "b1", "b2", "y", "main_dw1", "main_dw2")


class Draw:
    """Sizes and random tensors of one example."""

    def __init__(self, size, seed):
        self.T, self.K, self.E, self.D, self.H = size
        self.random = generator(seed)
        self.topk_idx = choices((self.T, self.K, self.E), seed)
        self.sort = ops.sort_tokens(self.topk_idx, self.E)

    def floats(self, *shape):
        return torch.randn(shape, generator=self.random)

    @property
    def routing(self):
        return {"row_idx": self.sort.row_idx, "inverse": self.sort.inverse}


BAD_COUNTS = (0, -3, 2**31)


def count_tokens(d):
    arguments = {"topk_idx": d.topk_idx, "num_experts": d.E}
    return Call(
        ops.count_tokens, arguments, indices={"topk_idx": (-1, d.E)}, values={"num_experts": BAD_COUNTS}
    )


def sort_tokens(d):
    arguments = {"topk_idx": d.topk_idx, "num_experts": d.E}
    return Call(
        ops.sort_tokens, arguments, indices={"topk_idx": (-1, d.E)}, values={"num_experts": BAD_COUNTS}
    )


def apply_capacity(d):
    arguments = {"topk_idx": d.topk_idx, "num_experts": d.E, "capacity": torch.full((d.E,), 3)}
    return Call(
        ops.apply_capacity,
        arguments,
        sizes={"capacity": (0,)},
        indices={"topk_idx": (-1, d.E)},
        values={"num_experts": (0, -3), "capacity": (-1, 1.5, torch.full((d.E,), -2))},
    )


def permute(d):
    arguments = {"x": d.floats(d.T, d.D), **d.routing}
    return Call(
        ops.permute,
        arguments,
        sizes={"x": (0,), "inverse": (0,)},
        indices={"row_idx": (-1, d.T * d.K)},
        any_dtype=("x",),
    )


def unpermute(d):
    arguments = {"y": d.floats(d.T * d.K, d.D), **d.routing, "topk_weights": d.floats(d.T, d.K)}
    return Call(
        ops.unpermute,
        arguments,
        sizes={"y": (0,), "row_idx": (0,), "inverse": (0, 1), "topk_weights": (0, 1)},
        indices={"inverse": (-1, d.T * d.K)},
    )


def unpermute_backward(d):
    arguments = {"grad_out": d.floats(d.T, d.D), "y": d.floats(d.T * d.K, d.D), **d.routing}
    arguments["topk_weights"] = d.floats(d.T, d.K)
    return Call(
        native.unpermute_backward,
        arguments,
        sizes={"grad_out": (0, 1), "y": (0, 1), "row_idx": (0,), "inverse": (0, 1), "topk_weights": (0, 1)},
        indices={"row_idx": (-1, d.T * d.K)},
    )


def topk_gate(d):
    E = d.E
    arguments = {"logits": d.floats(d.T, E), "top_k": min(d.K, E) or 1, "score": "softmax", "normalize": True}
    arguments |= {"bias": d.floats(E), "num_groups": 1, "topk_groups": 1}
    return Call(
        ops.topk_gate,
        arguments,
        sizes={"logits": (1,), "bias": (0,)},
        values={
            "top_k": (0, -1, E + 1, 2**40),
            "score": ("", "relu", "softmax "),
            "num_groups": (0, -1, E + 1, 2**40),
            "topk_groups": (0, -1, 2, 2**40),
        },
    )


def topk_gate_backward(d):
    K = min(d.K, d.E) or 1
    logits = d.floats(d.T, d.E)
    topk_idx, topk_weights = ops.topk_gate(logits, K)
    arguments = {"grad_weights": d.floats(d.T, K), "logits": logits, "topk_idx": topk_idx}
    arguments |= {"topk_weights": topk_weights, "score": 0, "normalize": True, "scale": 1.0}
    return Call(
        native.topk_gate_backward,
        arguments,
        sizes={"grad_weights": (0, 1), "logits": (0,), "topk_idx": (0, 1), "topk_weights": (0, 1)},
        indices={"topk_idx": (0, d.E)},
        values={"score": (-1, 2)},
    )


def decreasing_offs(d):
    """Values that offs must not have, where there are enough rows and experts for them."""
    return {"offs": (torch.tensor([1, 0] + [0] * (d.E - 2)).int(),)} if d.E > 1 and d.T * d.K > 0 else {}


def gemm_arguments(d):
    return {"x": d.floats(d.T * d.K, d.D), "weight": d.floats(d.E, d.H, d.D), "offs": d.sort.offs}


def grouped_gemm(d):
    return Call(
        ops.grouped_gemm,
        {**gemm_arguments(d), "bias": d.floats(d.E, d.H)},
        sizes={"x": (1,), "weight": (0, 1, 2), "offs": (0,), "bias": (0, 1)},
        indices={"offs": (0, d.T * d.K + 1)},
        values=decreasing_offs(d),
    )


def grouped_gemm_backward(d):
    arguments = {"grad_y": d.floats(d.T * d.K, d.H), **gemm_arguments(d), "needs": [True] * 3}
    return Call(
        native.grouped_gemm_backward,
        arguments,
        sizes={"grad_y": (0, 1), "x": (0, 1), "weight": (0, 1, 2), "offs": (0,)},
        indices={"offs": (0, d.T * d.K + 1)},
        values={"needs": ([], [True] * 4), **decreasing_offs(d)},
    )


def grouped_gemm_backward_accumulate(d):
    call = grouped_gemm_backward(d)
    return Call(
        native.grouped_gemm_backward_accumulate,
        call.arguments | {"main_dweight": torch.zeros(d.E, d.H, d.D)},
        sizes={"grad_y": (0, 1), "x": (0, 1), "offs": (0,), "main_dweight": (0, 1, 2)},
        indices=call.indices,
        values=call.values,
    )


MLP_SIZES = {
    "x": (0, 1),
    "row_idx": (0,),
    "inverse": (0, 1),
    "offs": (0,),
    "w1": (0, 1, 2),
    "w2": (0, 1, 2),
    "b2": (0, 1),
    "topk_weights": (0, 1),
}


def mlp_indices(d):
    num_rows = int(d.sort.offs[-1])
    indices = {"inverse": (-1, num_rows), "offs": (0, d.T * d.K + 1)}
    # the tail of row_idx is never read
    return indices | ({"row_idx": (0, d.T * d.K)} if num_rows == d.T * d.K else {})


def expert_mlp(d):
    arguments = {"x": d.floats(d.T, d.D), **d.routing, "offs": d.sort.offs}
    arguments |= {"w1": d.floats(d.E, d.H, d.D), "b1": d.floats(d.E, d.H)}
    arguments |= {"w2": d.floats(d.E, d.D, d.H), "b2": d.floats(d.E, d.D)}
    arguments |= {"topk_weights": d.floats(d.T, d.K), "activation": "gelu"}
    return Call(
        ops.expert_mlp,
        arguments,
        sizes={**MLP_SIZES, "b1": (0, 1)},
        indices=mlp_indices(d),
        values={"activation": ("", "tanh", "gelu "), **decreasing_offs(d)},
    )


def expert_mlp_backward(d):
    arguments = {"grad_y": d.floats(d.T, d.D), "x": d.floats(d.T, d.D), **d.routing, "offs": d.sort.offs}
    arguments |= {"w1": d.floats(d.E, d.H, d.D), "w2": d.floats(d.E, d.D, d.H), "b2": d.floats(d.E, d.D)}
    arguments |= {"topk_weights": d.floats(d.T, d.K), "h": d.floats(d.T * d.K, d.H)}
    arguments |= {"activation": 0, "combine": True, "needs": [True] * 6}
    return Call(
        native.expert_mlp_backward,
        arguments,
        sizes={**MLP_SIZES, "grad_y": (0, 1), "h": (0, 1)},
        indices=mlp_indices(d),
        values={"activation": (-1, len(ops.ACTIVATIONS), 2**40), "needs": ([True] * 5,)},
    )


def expert_mlp_backward_accumulate(d):
    call = expert_mlp_backward(d)
    mains = {"main_dw1": torch.zeros(d.E, d.H, d.D), "main_dw2": torch.zeros(d.E, d.D, d.H)}
    return Call(
        native.expert_mlp_backward_accumulate,
        call.arguments | mains,
        sizes={"grad_y": (0, 1), "h": (0, 1), "main_dw1": (0, 1, 2), "main_dw2": (0, 1, 2)},
        indices=call.indices,
        values=call.values,
    )


def frozen_mlp_packed(d):
    arguments = {"x": d.floats(d.T, 32), **d.routing, "offs": d.sort.offs}
    arguments |= {"w1": torch.zeros(d.E, d.H, 16, dtype=torch.uint8), "b1": d.floats(d.E, d.H)}
    arguments |= {"w2": d.floats(d.E, 32, d.H), "b2": d.floats(d.E, 32)}
    arguments |= {"topk_weights": d.floats(d.T, d.K), "activation": 0, "w1_format": 1}
    arguments |= {"w1_scale": torch.zeros(d.E, d.H, 1, dtype=torch.uint8)}
    names = tuple(arguments)
    call = Call(
        lambda *values: native.frozen_mlp(*frozen_arguments.forward(**dict(zip(names, values, strict=True)))),
        arguments,
        sizes={**MLP_SIZES, "b1": (0, 1), "w1_scale": (0, 1, 2)},
        indices=mlp_indices(d),
        values={"w1_format": (-1, len(frozen.FORMATS) + 1, 2**40)},
    )
    in_a_list = ("row_idx", "inverse", "offs")  # torch refuses None there, but names the list
    call.faults = [(name, fault) for name, fault in call.faults if fault != "None" or name not in in_a_list]
    return call


def frozen_gemm(d):
    d = Draw((d.T, d.K, d.E + 1, d.D, d.H), 0)  # a single expert needs no offs
    arguments = {"x": d.floats(d.T * d.K, 32), "weight": torch.zeros(d.E, d.H, 16, dtype=torch.uint8)}
    arguments |= {"offs": d.sort.offs, "bias": d.floats(d.E, d.H)}
    arguments |= {"weight_scale": torch.zeros(d.E, d.H, 1, dtype=torch.uint8), "weight_zero": None}
    arguments |= {"weight_format": 1}
    return Call(
        native.frozen_gemm,
        arguments,
        sizes={"x": (1,), "weight": (0, 1, 2), "offs": (0,), "bias": (0, 1), "weight_scale": (0, 1, 2)},
        indices={"offs": (0, d.T * d.K + 1)},
        values={"weight_format": (-1, len(frozen.FORMATS) + 1, 2**40), **decreasing_offs(d)},
    )


def clamped_glu_backward(d):
    arguments = {"grad": d.floats(d.T, d.D), "h": d.floats(d.T, 2 * d.D)}
    arguments |= {"alpha": 1.0, "limit": 2.0, "offset": 0.0, "interleaved": True, "clamps_activated": False}
    sizes = {"grad": (0, 1), "h": (0, 1)}
    return Call(native.clamped_glu_backward, arguments, sizes=sizes, values={"limit": (-1.0, float("nan"))})


OPERATORS = (
    clamped_glu_backward,
    count_tokens,
    sort_tokens,
    apply_capacity,
    permute,
    unpermute,
    unpermute_backward,
    topk_gate,
    topk_gate_backward,
    grouped_gemm,
    grouped_gemm_backward,
    grouped_gemm_backward_accumulate,
    expert_mlp,
    expert_mlp_backward,
    expert_mlp_backward_accumulate,
    frozen_mlp_packed,
    frozen_gemm,
)


def is_dropped(call, name, fault):
    """True if the fault is an index that a GPU takes for a dropped choice; FMOE_DEBUG=1 checks the functions of ops."""
    is_value = fault in ("too small", "too large") or (name in call.indices and fault[0] == "value")
    return is_value and call.arguments[name].is_cuda and call.function not in vars(ops).values()


def _marked(operator):
    if operator is clamped_glu_backward:
        marks = [pytest.mark.cpu("it has no other kernel")]
    elif operator in (frozen_mlp_packed, frozen_gemm):
        marks = [pytest.mark.cpu("on CUDA a composition names the arguments of its parts")]
    else:
        marks = []
    return pytest.param(operator, marks=marks, id=operator.__name__)


@pytest.mark.bad_indices
@pytest.mark.parametrize("operator", map(_marked, OPERATORS))
def test_broken_argument(operator):
    @settings(EXAMPLES, max_examples=EXAMPLES.max_examples // 4)
    @given(
        st.tuples(
            st.integers(0, 12), st.integers(0, 4), st.integers(1, 6), st.integers(0, 9), st.integers(0, 9)
        ),
        seeds,
        st.integers(0, 1000),
    )
    def check(size, seed, position):
        call = operator(Draw(size, seed))
        call.function(*call.arguments.values())
        for name, fault in call.faults:
            check_fault(call, name, fault, position)

    check()


def check_fault(call, name, fault, position):
    arguments = call.broken(name, fault, position)
    if arguments is None:
        return
    if is_dropped(call, name, fault):
        call.function(*arguments.values())
        torch.cuda.synchronize()
        return
    # of two sizes or devices that differ either may be the one that is named
    names = list(arguments) if fault == "device" or fault[0] == "size" else [name]
    assert_raises(names, lambda: call.function(*arguments.values()))
