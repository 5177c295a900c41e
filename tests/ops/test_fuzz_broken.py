"""Every operator with one broken argument: one RuntimeError that names it and says what it must be, never a crash."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fmoe_ext import ops
from tests.ops.fuzz import EXAMPLES, assert_raises, seeds
from tests.ops.operators import CALLS, Draw

pytestmark = pytest.mark.usefixtures("one_thread")

ON_CPUS_ALONE = (
    "clamped_glu_backward",
    "_choose_experts",
    "_pad_routing",
    "_counts_to_send",
    "_columns_of_rows",
    "_token_ways",
    "_experts_of_rows",
    "_matmul_in_order",
    "_softmax_in_order",
)
# in which every fault must be named; the others are drawn by test_fuzz_sizes
OPERATORS = tuple(
    CALLS[name]
    for name in (
        *ON_CPUS_ALONE,
        "count_tokens",
        "sort_tokens",
        "apply_capacity",
        "drop_choices",
        "permute",
        "unpermute",
        "unpermute_backward",
        "topk_gate",
        "topk_gate_backward",
        "grouped_gemm",
        "grouped_gemm_backward",
        "expert_mlp",
        "expert_mlp_backward",
        "frozen_mlp",
        "frozen_gemm",
    )
)


def is_dropped(call, name, fault):
    """True if the fault is an index that a GPU takes for a dropped choice; FMOE_DEBUG=1 checks the functions of ops."""
    is_value = fault in ("too small", "too large") or (name in call.indices and fault[0] == "value")
    return is_value and call.arguments[name].is_cuda and call.function not in vars(ops).values()


def _marked(operator):
    if operator in map(CALLS.get, ON_CPUS_ALONE):
        marks = [pytest.mark.cpu("it has no other kernel")]
    elif operator in (CALLS["frozen_mlp"], CALLS["frozen_gemm"]):
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
