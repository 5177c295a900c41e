"""A valid call of every operator: from sizes and a seed, and what may be broken in it.

CALLS is compared with the operators that are registered (test_every_operator_is_drawn), so that a new one is not
forgotten by the tests that walk it: test_fuzz_broken, test_fuzz_sizes and test_transforms.
"""

from types import MappingProxyType

import torch

from fmoe_ext import frozen, ops
from fmoe_ext.ops import exchange_rows
from tests.ops import frozen_arguments
from tests.ops.fuzz import choices, generator

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


OPTIONAL = ("topk_weights", "bias", "b1", "b2", "y", "main_dweight", "main_dw1", "main_dw2", "order")


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


def drop_choices(d):
    arguments = {"topk_idx": d.topk_idx, "num_experts": d.E, "capacity": 3}
    arguments |= {"topk_weights": d.floats(d.T, d.K), "uniform": d.floats(d.T).abs()}
    return Call(
        ops.drop_choices,
        arguments,
        sizes={"topk_weights": (0, 1), "uniform": (0,)},
        indices={"topk_idx": (-1, d.E)},
        values={"num_experts": BAD_COUNTS, "capacity": (-1, -(2**40))},
    )


def choose_experts(d):
    top_k = min(d.K, d.E)
    return Call(
        native._choose_experts,
        {
            "logits": d.floats(d.T, d.E),
            "top_k": max(top_k, 1),
            "normalize": True,
            "num_counted": min(top_k, 1),
        },
        values={"top_k": (0, -1, d.E + 1), "num_counted": (-1, d.E + 1)},
    )


def pad_routing(d):
    counts = torch.cat((d.sort.tokens_per_expert, torch.zeros(d.E % 2, dtype=torch.int64)))  # 2 ranks
    arguments = {**d.routing, "tokens_per_expert": counts, "num_ranks": 2, "max_rows": 3}
    has_all_rows = int(d.sort.offs[-1]) == d.T * d.K and max(counts.view(2, -1).sum(1)) <= 3
    return Call(
        exchange_rows.pad_routing,
        arguments,
        indices={"row_idx": (0, d.T * d.K)} if has_all_rows else {},  # the others are never read
        values={"num_ranks": (0, -1, 2**40), "max_rows": (0, -1, 2**40)},
    )


def columns_of_rows(d):
    counts = d.sort.tokens_per_expert.view(1, d.E)
    return Call(
        exchange_rows.columns_of_rows,
        {"counts": counts, "num_rows": int(counts.sum()), "max_rows": 0, "first": 0, "end": d.E},
        indices={"counts": (0, 2**31)},
        values={"num_rows": (-1, 2**40), "max_rows": (-1, 2**40), "first": (-1, 2**40), "end": (-1, 2**40)},
    )


def counts_to_send(d):
    arguments = {
        "counts": d.sort.tokens_per_expert,
        "header": torch.arange(5),
        "order": torch.arange(d.E).flip(0),
        "num_ranks": 1,
        "has_most": True,
    }
    return Call(
        exchange_rows.counts_to_send,
        arguments,
        indices={"order": (0, d.E)},
        values={"num_ranks": (0, -1, d.E + 1, 2**40)},
    )


def token_ways(d):
    arguments = {"topk_idx": d.topk_idx, "ways": torch.arange(d.E) % 2}
    return Call(exchange_rows.token_ways, arguments, indices={"topk_idx": (-1, d.E)})


def experts_of_rows(d):
    way, first = exchange_rows.token_ways(d.topk_idx, torch.arange(d.E) % 2)
    arguments = {"topk_idx": d.topk_idx, "way": way, "local": torch.arange(d.E) // 2}
    arguments |= {"row_idx": ops.sort_tokens(first, 2).row_idx, "wide": False}
    return Call(
        exchange_rows.experts_of_rows,
        arguments,
        sizes={"way": (0, 1)},
        indices={"row_idx": (-1, d.T * d.K)},
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
        without_gradients(native.unpermute_backward),
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


def balance_loss(d):
    counts = ops.count_tokens(choices((d.T, d.K, d.E), 0), d.E)
    return Call(
        ops.balance_loss,
        {"logits": d.floats(d.T, d.E), "counts": counts, "score": "softmax"},
        sizes={"logits": (1,), "counts": (0,)},
        values={"score": ("", "relu", "softmax ")},
    )


def balance_loss_backward(d):
    arguments = balance_loss(d).arguments
    return Call(
        without_gradients(native.balance_loss_backward),
        {"grad": d.floats(), **arguments, "score": 1},
        sizes={"logits": (1,), "counts": (0,)},
        values={"score": (-1, 2)},
    )


def topk_gate_backward(d):
    K = min(d.K, d.E) or 1
    logits = d.floats(d.T, d.E)
    topk_idx, topk_weights = ops.topk_gate(logits, K)
    arguments = {"grad_weights": d.floats(d.T, K), "logits": logits, "topk_idx": topk_idx}
    arguments |= {"topk_weights": topk_weights, "score": 0, "normalize": True, "scale": 1.0}
    return Call(
        without_gradients(native.topk_gate_backward),
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
        without_gradients(native.grouped_gemm_backward),
        {**arguments, "main_dweight": torch.zeros(d.E, d.H, d.D)},
        sizes={
            "grad_y": (0, 1), "x": (0, 1), "weight": (0, 1, 2), "offs": (0,), "main_dweight": (0, 1, 2),
        },
        indices={"offs": (0, d.T * d.K + 1)},
        values={"needs": ([], [True] * 4), **decreasing_offs(d)},
    )  # fmt: skip


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
    mains = {"main_dw1": torch.zeros(d.E, d.H, d.D), "main_dw2": torch.zeros(d.E, d.D, d.H)}
    return Call(
        without_gradients(native.expert_mlp_backward),
        arguments | mains,
        sizes={
            **MLP_SIZES,
            "grad_y": (0, 1),
            "h": (0, 1),
            "main_dw1": (0, 1, 2),
            "main_dw2": (0, 1, 2),
        },
        indices=mlp_indices(d),
        values={"activation": (-1, len(ops.ACTIVATIONS), 2**40), "needs": ([True] * 5,)},
    )


def frozen_mlp_packed(d):
    arguments = {"x": d.floats(d.T, 32), **d.routing, "offs": d.sort.offs}
    arguments |= {"w1": torch.zeros(d.E, d.H, 16, dtype=torch.uint8), "b1": d.floats(d.E, d.H)}
    arguments |= {"w2": d.floats(d.E, 32, d.H), "b2": d.floats(d.E, 32)}
    arguments |= {"topk_weights": d.floats(d.T, d.K), "activation": 0, "w1_format": 1}
    arguments |= {"w1_scale": torch.zeros(d.E, d.H, 1, dtype=torch.uint8)}
    names = tuple(arguments)
    return Call(
        lambda *values: native.frozen_mlp(*frozen_arguments.forward(**dict(zip(names, values, strict=True)))),
        arguments,
        sizes={**MLP_SIZES, "b1": (0, 1), "w1_scale": (0, 1, 2)},
        indices=mlp_indices(d),
        values={"w1_format": (-1, len(frozen.FORMATS) + 1, 2**40)},
    )


def frozen_gemm(d):
    d = Draw((d.T, d.K, d.E + 1, d.D, d.H), 0)  # a single expert needs no offs
    arguments = {"x": d.floats(d.T * d.K, 32), "weight": torch.zeros(d.E, d.H, 16, dtype=torch.uint8)}
    arguments |= {"offs": d.sort.offs, "bias": d.floats(d.E, d.H)}
    arguments |= {"weight_scale": torch.zeros(d.E, d.H, 1, dtype=torch.uint8), "weight_zero": None}
    arguments |= {"weight_format": 1, "weight_interleaved": False, "transposed": False}
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


def clamped_glu(d):
    arguments = {"h": d.floats(d.T, 2 * d.D), "alpha": 1.0, "limit": 2.0, "offset": 0.0}
    arguments |= {"interleaved": True, "clamps_activated": False}
    return Call(native.clamped_glu, arguments, values={"limit": (-1.0, float("nan"))})


def matmul_in_order(d):
    arguments = {"a": d.floats(d.E, d.T, d.D), "b": d.floats(d.E, d.D, d.H)}
    return Call(native._matmul_in_order, arguments, sizes={"a": (0, 2), "b": (0, 1)})


def softmax_in_order(d):
    return Call(native._softmax_in_order, {"x": d.floats(d.T, d.D), "log": False})


def newton_schulz(d):
    arguments = {"x": d.floats(d.E, d.D, d.H) / 8, "a": 2.0, "b": -1.5, "c": 0.5, "steps": d.K}
    return Call(native.newton_schulz, arguments, values={"steps": (-1, 1001, 2**31, 2**62)})


def expert_mlp_backward_inputs(d):
    call = expert_mlp_backward(d)
    return Call(
        without_gradients(native.expert_mlp_backward_inputs),
        {name: value for name, value in call.arguments.items() if not name.startswith("main_")},
        sizes={"grad_y": (0, 1), "h": (0, 1)},
        indices=call.indices,
        values=call.values,
    )


def expert_mlp_backward_weights(d):
    given = expert_mlp_backward(d).arguments
    read = ("grad_y", "x", "row_idx", "inverse", "offs", "w1", "w2", "topk_weights")
    arguments = {name: given[name] for name in read}
    arguments |= {"dh": d.floats(d.T * d.K, d.H), "scaled_a": d.floats(d.T * d.K, d.H)}
    arguments |= {"activation": 0, "combine": True, "needs": [True] * 6}
    mains = {"main_dw1": torch.zeros(d.E, d.H, d.D), "main_dw2": torch.zeros(d.E, d.D, d.H)}
    return Call(
        without_gradients(native.expert_mlp_backward_weights),
        arguments | mains,
        sizes={"grad_y": (0, 1), "dh": (0, 1), "scaled_a": (0, 1), "main_dw1": (0, 1, 2)},
        indices=mlp_indices(d),
        values={"activation": (-1, len(ops.ACTIVATIONS), 2**40), "needs": ([True] * 5,)},
    )


def frozen_mlp_backward(d):
    forward = frozen_mlp_packed(d).arguments
    arguments = {**forward, "grad_y": d.floats(d.T, 32), "h": d.floats(d.T * d.K, d.H)}
    names = tuple(arguments)

    def call(*values):
        given = dict(zip(names, values, strict=True))
        kept = [given.pop("h"), d.floats(d.T * d.K, 0), d.floats(d.T * d.K, 0)]
        grad_y = given.pop("grad_y")
        needs = [True, False, False, False, False, True]
        arguments = frozen_arguments.backward(frozen_arguments.forward(**given), grad_y, kept, needs)
        return native.frozen_mlp_backward(*arguments)

    return Call(without_gradients(call), arguments, sizes={"grad_y": (0, 1), "h": (0, 1)})


def in_turn(d):
    return Call(
        lambda x, after: native.in_turn([x], after), {"x": d.floats(d.T, d.D), "after": d.floats(d.H)}
    )


def balanced_shares(d):
    return Call(native.balanced_shares, {"logits": d.floats(d.T, d.E)})


def topk_gate_again(d):
    logits = d.floats(d.T, d.E)
    # the last token's choices are those that it would make now, the others are reversed
    chosen = ops.topk_gate(logits, d.K)[0]
    chosen = torch.cat([chosen[:-1].flip(1), chosen[-1:]])
    return Call(
        lambda logits, chosen: ops.topk_gate_again(logits, chosen)[1], {"logits": logits, "chosen": chosen}
    )


def without_gradients(op):
    """Operators of backwards are called as autograd calls them; raw is the operator itself."""

    def call(*arguments):
        with torch.no_grad():
            return op(*arguments)

    call.raw = op
    return call


CALLS = MappingProxyType(  # by name of the operator; where it has a public function, that is called
    {
        "apply_capacity": apply_capacity,
        "balance_loss": balance_loss,
        "balance_loss_backward": balance_loss_backward,
        "balanced_shares": balanced_shares,
        "clamped_glu": clamped_glu,
        "clamped_glu_backward": clamped_glu_backward,
        "count_tokens": count_tokens,
        "drop_choices": drop_choices,
        "expert_mlp": expert_mlp,
        "expert_mlp_backward": expert_mlp_backward,
        "expert_mlp_backward_inputs": expert_mlp_backward_inputs,
        "expert_mlp_backward_weights": expert_mlp_backward_weights,
        "frozen_gemm": frozen_gemm,
        "frozen_mlp": frozen_mlp_packed,
        "frozen_mlp_backward": frozen_mlp_backward,
        "grouped_gemm": grouped_gemm,
        "grouped_gemm_backward": grouped_gemm_backward,
        "in_turn": in_turn,
        "newton_schulz": newton_schulz,
        "permute": permute,
        "sort_tokens": sort_tokens,
        "topk_gate": topk_gate,
        "topk_gate_backward": topk_gate_backward,
        "unpermute": unpermute,
        "unpermute_backward": unpermute_backward,
        "_choose_experts": choose_experts,
        "_columns_of_rows": columns_of_rows,
        "_counts_to_send": counts_to_send,
        "_experts_of_rows": experts_of_rows,
        "_matmul_in_order": matmul_in_order,
        "_pad_routing": pad_routing,
        "_softmax_in_order": softmax_in_order,
        "_token_ways": token_ways,
    }
)


def group_of_one():
    """The name of the group of this process alone; the test has made it."""
    return torch.distributed.group.WORLD.group_name


# Operators over ranks, called on a group of one: under transforms they are as the others.
OF_RANKS = MappingProxyType(
    {
        "balanced_shares_over_ranks": lambda d: Call(
            lambda x: native.balanced_shares_over_ranks(x, group_of_one()), {"x": d.floats(d.T, d.E)}
        ),
        "exchange_rows": lambda d: Call(
            lambda x: native.exchange_rows([x], None, d.T, d.T, group_of_one()), {"x": d.floats(d.T, d.D)}
        ),
        "fetch_experts": lambda d: Call(
            lambda w: native.fetch_experts([w], [0, d.E - 1], d.E, group_of_one()), {"w": d.floats(d.E, d.D)}
        ),
        "gather_equal": lambda d: Call(
            lambda x: native.gather_equal(x, 1, group_of_one()), {"x": d.floats(d.T, d.D)}
        ),
        "gather_sized": lambda d: Call(
            lambda x: native.gather_sized(x, [d.T], group_of_one()), {"x": d.floats(d.T, d.D)}
        ),
        "global_exchange": lambda d: Call(
            lambda x: native.global_exchange(x, [d.T], [d.T], group_of_one()), {"x": d.floats(d.T, d.D)}
        ),
        "reduce_experts": lambda d: Call(
            lambda w: native.reduce_experts([w], range(d.E), d.E, group_of_one()), {"w": d.floats(d.E, d.D)}
        ),
        "sum_over_ranks": lambda d: Call(
            lambda x: native.sum_over_ranks(x, 1.0, group_of_one()), {"x": d.floats(d.T, d.D)}
        ),
    }
)
# Of integers and of no tensors, so that there is nothing to transform
WITHOUT_FLOATS = (
    "agree_on_rows", "exchange_counts", "of_this_thread", "thread_of", "build_info", "_cpu_isa", "_cpu_isa_refused",
    "_release_memory", "_set_batch_invariant", "_set_cpu_isa", "_set_thread_batch_invariant", "_tf32_allowed",
)  # fmt: skip
NOT_DRAWN = MappingProxyType(  # why; the prefix of a name stands for all of them
    {
        **dict.fromkeys(
            ("agree_on_rows", "balanced_shares_over_ranks", "exchange_counts", "exchange_rows", "fetch_experts",
             "gather_equal", "gather_sized", "global_exchange", "reduce_experts", "sum_over_ranks"),
            "Python above torch.distributed: tests/distributed",
        ),
        **dict.fromkeys(
            ("build_info", "_cpu_isa", "_cpu_isa_refused", "_release_memory", "_set_batch_invariant", "_set_cpu_isa",
             "_set_thread_batch_invariant"),
            "no tensors: test_batch_invariant.py, test_cpu.py",
        ),
        **dict.fromkeys(
            ("_decode_packed", "_torch_grouped_mm", "_tf32_allowed"), "of the CUDA kernels: tests/emulator"
        ),
        "of_this_thread": "a copy, or an error on another thread: test_valid_tokens.py",
        "thread_of": "reads nothing of its tensor: compiled/test_tokens_compiled.py",
    }
)  # fmt: skip
