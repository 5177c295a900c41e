"""Forward-mode differentiation is refused by every differentiable operator; silence would be a derivative of zero."""

import pytest
import torch
from torch.autograd import forward_ad

from fmoe_ext import ops

OFFS, ROW_IDX = torch.tensor([1, 2], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
INVERSE = torch.tensor([[0], [1]], dtype=torch.int32)
CALLS = {
    "permute": lambda x: ops.permute(x, ROW_IDX, INVERSE),
    "unpermute": lambda x: ops.unpermute(x, ROW_IDX, INVERSE, None),
    "topk_gate": lambda x: ops.topk_gate(x, 1)[1],
    "grouped_gemm": lambda x: ops.grouped_gemm(x, torch.ones(2, 3, 4), OFFS),
    "expert_mlp": lambda x: ops.expert_mlp(
        x, ROW_IDX, INVERSE, OFFS, torch.ones(2, 3, 4), None, torch.ones(2, 4, 3), None
    ),
}


@pytest.mark.cpu("its tensors are made before the device is chosen")
@pytest.mark.parametrize("name", CALLS)
def test_refused(name):
    x = torch.randn(2, 4)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match=f"{name} has no forward-mode derivative"):
            CALLS[name](dual)
        assert torch.equal(CALLS[name](x), CALLS[name](dual.detach().clone()))
