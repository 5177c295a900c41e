"""Run Megatron-core without a GPU: it allocates on "cuda" by name, and its attention has CUDA buffers.

train.py builds and trains inside megatron_on_cpu(), and gpt.py gives the layers CausalAttention.
"""

from contextlib import contextmanager, nullcontext
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode


class CausalAttention(nn.Module):
    """The core_attention of a layer specification, in plain PyTorch: three [s, b, heads, d] -> [s, b, heads * d].

    Keys and values may have fewer heads, each for a group of queries.
    """

    def __init__(self, config, layer_number, attn_mask_type, attention_type, **_):
        super().__init__()

    def forward(self, query, key, value, attention_mask=None, **_):
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return output.permute(2, 0, 1, 3).flatten(2)


class _CudaMeansCpu(TorchFunctionMode):
    """Inside, device="cuda" is the CPU, tensor.cuda() the tensor itself.

    And Megatron finds the type() of a parameter that it expects, float32.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and len(args) == 1:
            return result.replace("torch.", "torch.cuda.").replace("Double", "Float")
        return result


def _no_fork(tracker, name=None):
    return nullcontext()


@contextmanager
def megatron_on_cpu():
    """Inside, Megatron-core builds, trains and saves models on the CPU, with gloo process groups.

    Without its generator for each tensor-parallel rank: dropout is the same on all of them. Recomputation keeps the
    state of the CPU's generator alone.
    """
    cpu = torch.device("cpu")
    with (
        mock.patch("torch.cuda.current_device", lambda: cpu),
        mock.patch("torch.cuda.current_stream", torch.cpu.current_stream),
        mock.patch("torch.cuda.synchronize", lambda *_: None),
        mock.patch("megatron.core.tensor_parallel.random.CudaRNGStatesTracker.fork", _no_fork),
        mock.patch("megatron.core.tensor_parallel.random._get_cuda_rng_state", lambda **_: None),
        mock.patch("megatron.core.tensor_parallel.random._set_cuda_rng_state", lambda *_, **__: None),
        # 0.16 looks it up for moe_router_dtype, and has it with Transformer Engine only
        mock.patch("megatron.core.transformer.moe.moe_utils.te_general_gemm", None, create=True),
        _CudaMeansCpu(),
    ):
        yield
