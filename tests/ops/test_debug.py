"""FMOE_DEBUG=1: what the CPU finds wrong with indices is found on CUDA as well."""

from types import SimpleNamespace

import pytest
import torch

from fmoe_ext import ops
from fmoe_ext.ops import debug
from fmoe_ext.testing import devices


def test_only_on_cuda_and_only_when_asked(monkeypatch):
    on_cuda, on_cpu = SimpleNamespace(is_cuda=True), SimpleNamespace(is_cuda=False)
    monkeypatch.delenv("FMOE_DEBUG", raising=False)
    assert not debug.wanted(on_cuda)
    monkeypatch.setenv("FMOE_DEBUG", "1")
    assert debug.wanted(on_cuda)
    assert not debug.wanted(on_cpu)
    monkeypatch.setenv("FMOE_DEBUG", "0")
    assert not debug.wanted(on_cuda)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


WILD = torch.tensor([[0, 3]])
GOOD_ROWS, BAD_ROWS = ints(0, 1), ints(0, 9)
X, W = torch.ones(2, 4), torch.ones(1, 4, 4)
CASES = {
    "count_tokens": (lambda on: ops.count_tokens(on(WILD), 3), r"topk_idx must be in \[-1, 3\).*is 3"),
    "sort_tokens": (lambda on: ops.sort_tokens(on(WILD), 3), r"topk_idx must be in \[-1, 3\).*is 3"),
    "apply_capacity": (
        lambda on: ops.apply_capacity(on(WILD), 4, on(torch.tensor([1, 1, -4, 1]))),
        "capacity must not be negative, but expert 2 has -4",
    ),
    "permute": (
        lambda on: ops.permute(on(X), on(BAD_ROWS), on(GOOD_ROWS[:, None])),
        "row_idx must be in .*, but element 1 is 9",
    ),
    "unpermute": (
        lambda on: ops.unpermute(on(X), on(GOOD_ROWS), on(BAD_ROWS[:, None]), on(torch.ones(2, 1))),
        "inverse must be in .*, but element 1 is 9",
    ),
    "grouped_gemm": (
        lambda on: ops.grouped_gemm(on(X), on(W), on(ints(3))),
        r"offs must not exceed the number of rows 2, but offs\[0\] is 3",
    ),
    "grouped_gemm, transposed": (
        lambda on: ops.grouped_gemm(on(X), on(W), on(ints(3)), transposed=True),
        r"offs must not exceed the number of rows 2, but offs\[0\] is 3",
    ),
    "expert_mlp": (
        lambda on: ops.expert_mlp(
            on(X), on(BAD_ROWS), on(GOOD_ROWS[:, None]), on(ints(2)), on(W), None, on(W), None, None, "relu"
        ),
        r"row_idx must be in \[0, 2\) before offs\[-1\] = 2, but row_idx\[1\] is 9",
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("device", devices())
def test_every_op_checks_before_it_runs(request, monkeypatch, device, name):
    if request.config.getoption("--device") == "emulated":
        pytest.skip("the emulated ops do not check indices, and here they are in the place of those that do")
    call, text = CASES[name]
    checked, check = [], debug.check

    def recorded(op, *args, **kwargs):
        checked.append(op)
        check(op, *args, **kwargs)

    monkeypatch.setenv("FMOE_DEBUG", "1")
    monkeypatch.setattr(debug, "check", recorded)
    if device == "cpu":  # whose ops check by themselves
        monkeypatch.setattr(debug, "wanted", lambda t: True)
    with pytest.raises(RuntimeError, match=text):
        call(lambda t: t.to(device))
    assert len(checked) == 1


ROWS, WEIGHT, OFFS = torch.ones(6, 4), torch.ones(1, 3, 5), ints(6)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((ROWS, WEIGHT, OFFS), r"weight must have shape .* size 4 in dimension 2, but got shape \[1, 3, 5\]"),
        ((ROWS, None, OFFS), "weight must be a tensor, but got None"),
        ((ROWS, WEIGHT.to("meta"), OFFS), "weight must be on cpu like x, but it is on meta"),
        ((ROWS[0], WEIGHT, OFFS), r"x must have shape \[R, D\], but got shape \[4\]"),
        ((ROWS[:5], WEIGHT[..., :4].half(), OFFS), r"weight must have the dtype of x \(Float\)"),
    ],
    ids=["size", "none", "device", "rank", "dtype"],
)
def test_debug_error_names_given_shapes(monkeypatch, args, text):
    monkeypatch.setattr(debug, "wanted", lambda t: True)
    with pytest.raises(RuntimeError, match=text):
        ops.grouped_gemm(*args)


def test_dtypes_that_autocast_makes_one_are_none_of_its_business():
    x, weight = ROWS.bfloat16(), torch.ones(1, 3, 4)
    debug.check(torch.ops.fmoe_ext.grouped_gemm, x, weight, OFFS, cut=(x, weight))
