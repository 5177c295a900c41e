"""Calls of other projects' layers, against stand-ins with the signatures that their packages publish."""

import sys
import types

import pytest
import torch
import torch.nn.functional as F

from benchmarks import bench_gpu_layer, gpu_peers, gpu_timing, roofline

SHAPE = roofline.Shape("tiny", 32, 16, 4, 2)


def experts(x, token, expert, factors, w1, w2):
    """The reference of every stand-in: rows one after the other; w1 has gate rows before up rows."""
    gate, up = torch.einsum("rd,rfd->rf", x[token], w1[expert]).chunk(2, -1)
    y = torch.einsum("rh,rdh->rd", F.silu(gate) * up, w2[expert])
    return torch.zeros(x.size(0), w2.size(1), dtype=x.dtype).index_add(0, token, y * factors[:, None])


def by_choice(x, topk_idx, topk_weights, w1, w2):
    token = torch.arange(topk_idx.numel()) // topk_idx.size(1)
    return experts(x, token, topk_idx.flatten().long(), topk_weights.flatten().to(x.dtype), w1, w2)


class LigerFusedMoEFunction:  # liger_kernel 0.8.5
    def forward(ctx, x, gate_up_proj, down_proj, top_k_index, top_k_weights): ...

    @staticmethod
    def apply(x, gate_up_proj, down_proj, top_k_index, top_k_weights):
        assert top_k_index.dtype == torch.int32 and top_k_weights.dtype == torch.float32
        return by_choice(x, top_k_index, top_k_weights, gate_up_proj, down_proj)


class GLUMLP(torch.nn.Module):  # scattermoe
    def __init__(self, input_size, hidden_size, num_experts, top_k, activation=None):
        super().__init__()
        self.top_k = top_k
        self.experts, self.output_experts = torch.nn.Module(), torch.nn.Module()
        self.experts.weight = torch.nn.Parameter(torch.empty(num_experts, 2 * hidden_size, input_size))
        self.output_experts.weight = torch.nn.Parameter(torch.empty(num_experts, input_size, hidden_size))

    def forward(self, x, expert_p, expert_idxs):
        assert self.top_k == expert_idxs.size(1)
        up, gate = self.experts.weight.chunk(2, 1)
        return by_choice(x, expert_idxs, expert_p, torch.cat([gate, up], 1), self.output_experts.weight)


class Up:  # sonicmoe 0.1.2.post1
    # fmt: off
    def forward(ctx, x, w1, b1, expert_frequency_offset, total_expert_freq, K, x_gather_idx, s_scatter_idx,
                s_reverse_scatter_idx, num_activated_expert_per_token_offset,
                is_each_token_has_variable_activated_experts, activation_type, is_inference_mode_enabled,
                concat_layout=False): ...
    # fmt: on

    @staticmethod
    def apply(
        x, w1, b1, offsets, num_rows, K, gather, scatter, reverse, tokens, variable, act, inference, concat
    ):
        assert (b1, tokens, variable, act, inference, concat) == (None, None, False, "swiglu", False, False)
        expert = torch.searchsorted(
            offsets[1:].contiguous(), torch.arange(num_rows, dtype=torch.int32), right=True
        )
        h = torch.einsum("rd,fdr->rf", x[gather.long()], w1[:, :, expert])
        return F.silu(h[:, ::2]) * h[:, 1::2], h


class Down:
    # fmt: off
    def forward(ctx, a, h, w2, b2, topk_scores, expert_frequency_offset, T, K, x_gather_idx, s_scatter_idx,
                s_reverse_scatter_idx, num_activated_expert_per_token_offset, is_varlen_K, activation_type): ...
    # fmt: on

    @staticmethod
    def apply(a, h, w2, b2, scores, offsets, T, K, gather, scatter, reverse, tokens, variable, act):
        assert (b2, tokens, variable, act) == (None, None, False, "swiglu") and scores.shape == (T, K)
        expert = torch.searchsorted(
            offsets[1:].contiguous(), torch.arange(T * K, dtype=torch.int32), right=True
        )
        y = torch.einsum("rh,dhr->rd", a, w2[:, :, expert])
        return (y[reverse.long()].view(T, K, -1) * scores[..., None].to(y.dtype)).sum(1)


def metadata(topk_indices, E, frequency, offsets, gather, scatter, reverse):
    assert topk_indices.dtype == torch.int32
    choices = topk_indices.flatten().long()
    order = torch.argsort(choices, stable=True)
    frequency.copy_(torch.bincount(choices, minlength=E))
    offsets.copy_(F.pad(frequency.cumsum(0), (1, 0)))
    gather.copy_(order // topk_indices.size(1))
    scatter.copy_(order)
    reverse[order] = torch.arange(order.numel(), dtype=torch.int32)


class GroupedLinear(torch.nn.Module):  # transformer_engine 2.20.2
    def __init__(self, num_gemms, in_features, out_features, bias=True, params_dtype=None, device="cuda"):
        super().__init__()
        assert not bias
        for e in range(num_gemms):
            weight = torch.empty(out_features, in_features, dtype=params_dtype, device=device)
            self.register_parameter(f"weight{e}", torch.nn.Parameter(weight))

    def forward(self, inp, m_splits, is_first_microbatch=None):
        parts = inp.split(m_splits)
        return torch.cat([part @ getattr(self, f"weight{e}").mT for e, part in enumerate(parts)])


MODULES = {
    "liger_kernel.ops.fused_moe": {"LigerFusedMoEFunction": LigerFusedMoEFunction},
    "scattermoe.mlp": {"GLUMLP": GLUMLP},
    "sonicmoe.functional": {
        "_UpProjection": Up,
        "_DownProjection": Down,
        "TC_topk_router_metadata_triton": metadata,
    },
    "sonicmoe.enums": {"ActivationType": types.SimpleNamespace(SWIGLU="swiglu")},
    "quack.gemm_interface": {"gemm_tuned": types.SimpleNamespace(configs=[])},
    "transformer_engine.pytorch": {"GroupedLinear": GroupedLinear},
    "deep_gemm": {},
}


@pytest.fixture
def installed(monkeypatch):
    for name, content in MODULES.items():
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            module = types.ModuleType(".".join(parts[:i]))
            module.__path__ = []
            monkeypatch.setitem(sys.modules, module.__name__, module)
        vars(module).update(content)


@pytest.mark.parametrize("routing", bench_gpu_layer.ROUTINGS)
def test_every_peer_computes_the_layer_and_its_gradients(installed, routing):
    device = gpu_timing.Device("cpu")
    (inputs, *_), w1, w2 = bench_gpu_layer.make_inputs(device, SHAPE, 24, torch.bfloat16, 1, routing)
    grad = torch.randn_like(inputs[0])
    layers, missing = gpu_peers.implementations(True, w1, w2, tuning=True, compiled=False)
    assert missing == {"DeepGEMM": "Incompatible: it has no products of bfloat16"}
    assert list(layers)[:2] == ["fmoe_ext", gpu_peers.RECORD] and len(layers) == 9
    ours = bench_gpu_layer.results_of(layers["fmoe_ext"], inputs, grad)
    for name, layer in layers.items():
        theirs = bench_gpu_layer.results_of(layer, inputs, grad)
        assert [t.shape for t in theirs] == [t.shape for t in ours], name
        assert bench_gpu_layer.largest_difference(ours, theirs) < 0.03, name


def test_quack_keeps_four_tiles(installed, monkeypatch):
    tiles = [(m, n, turn) for m in (128, 256) for n in (128, 192, 256) for turn in (False, True)]
    configs = [
        types.SimpleNamespace(kwargs={"config": types.SimpleNamespace(
            tile_m=m, tile_n=n, pingpong=turn, cluster_m=cluster, swap_ab=swap, device_capacity=9
        )})
        for m, n, turn in tiles
        for cluster in (1, 2)
        for swap in (False, True)
    ]  # fmt: skip
    tuner = types.SimpleNamespace(configs=configs)
    monkeypatch.setattr(sys.modules["quack.gemm_interface"], "gemm_tuned", tuner)
    gpu_peers.restrict_quack()
    kept = [config.kwargs["config"] for config in tuner.configs]
    assert {(c.tile_m, c.tile_n, c.pingpong) for c in kept} == set(gpu_peers.QUACK_TILES) and len(kept) == 1
    assert all(c.cluster_m == 2 and not c.swap_ab for c in kept)


def test_peer_with_another_signature_is_left_out(installed, monkeypatch):
    class Newer:
        def forward(ctx, x, top_k_index, top_k_weights, gate_up_proj, down_proj): ...

    monkeypatch.setattr(sys.modules["liger_kernel.ops.fused_moe"], "LigerFusedMoEFunction", Newer)
    w1, w2 = torch.randn(4, 32, 32), torch.randn(4, 32, 16)
    _, missing = gpu_peers.implementations(True, w1, w2, tuning=True, compiled=False)
    assert (
        "takes (x, top_k_index, top_k_weights, gate_up_proj, down_proj), not (x, gate_up_proj"
        in missing["Liger"]
    )


def test_zipf_choices_are_skewed():
    generator = torch.Generator().manual_seed(1)
    for routing, share in (
        ("random", 1 / 16),
        ("zipf", 0.296),
    ):  # the first's share of one choice: 1 / sum(1 / n)
        logits = bench_gpu_layer.choice_logits(20000, 16, routing, generator, "cpu")
        first = (logits.argmax(1) == 0).double().mean().item()
        assert first == pytest.approx(share, abs=0.01), routing


@pytest.mark.slow
def test_compiled_pipeline_is_the_peer_of_record():
    """The steps as torch.compile makes them give what the steps themselves give."""
    device = gpu_timing.Device("cpu")
    (inputs, *_), w1, w2 = bench_gpu_layer.make_inputs(device, SHAPE, 24, torch.bfloat16, 2)
    grad = torch.randn_like(inputs[0])
    plain, compiled = (gpu_peers.compiled_pipeline(True, c)(w1, w2) for c in (False, True))
    expected, found = (bench_gpu_layer.results_of(layer, inputs, grad) for layer in (plain, compiled))
    assert bench_gpu_layer.largest_difference(expected, found) < 1e-2
