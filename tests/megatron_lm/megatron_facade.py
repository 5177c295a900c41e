"""Our layer behind the names of Megatron-core's MoELayer, TopKRouter and token dispatcher, for Megatron's own tests.

A pytest plugin for a checkout of Megatron-LM; docs/megatron.md has the command, and the table of what passes.

Everything "on CUDA" is on the CPU, and NCCL is gloo.
"""

import dataclasses
import datetime
import os
import sys
import typing
from unittest import mock

import torch
import torch.distributed as dist
import typing_extensions
from megatron.core import parallel_state, utils
from megatron.core.transformer.moe import moe_layer, router
from on_cpu import megatron_on_cpu
from packaging.version import Version
from torch import nn

from fmoe_ext.dispatch import combine, dispatch
from fmoe_ext.megatron.core.gate import gate_arguments
from fmoe_ext.megatron.core.specs import MegatronCoreMoE
from fmoe_ext.megatron.core.table import MOE_FIELD, check_options
from fmoe_ext.routing import permute_rows, unpermute_rows
from fmoe_ext.step import begin

if not hasattr(typing, "override"):  # Megatron's training wants that of Python 3.12
    typing.override = typing_extensions.override
PATIENCE = datetime.timedelta(seconds=60)  # of a rank whose test failed on another one
ROUTER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class Router(router.Router):
    """TopKRouter: input [s, b, h] or [T, h] -> (probs [T, E], routing_map [T, E]), with our gate.

    Megatron's tests change the config of a router that exists, so the gate is made again where an option has changed.
    """

    def __init__(self, config, pg_collection=None, is_mtp_layer=False, layer=None, **_):
        nn.Module.__init__(self)
        layer = layer or MegatronCoreMoE(config, None, False, {}, pg_collection=pg_collection)
        self.config, self.topk, self.num_experts = config, config.moe_router_topk, config.num_moe_experts
        self.gate = layer.moe.gate
        self._layer = [layer]  # in a list: no module of this one
        self._made_from = options_of(config)

    weight = property(lambda self: self.gate.gate.weight)
    bias = property(lambda self: self.gate.gate.bias)
    expert_bias = property(lambda self: self.gate.expert_bias)
    local_tokens_per_expert = property(lambda self: self.gate.pending_load)

    tp_cp_group = property(lambda self: parallel_state.get_tensor_and_context_parallel_group())
    global_tokens_per_expert = property(lambda self: self.gate.running_load)
    reset_global_aux_loss_tracker = property(lambda self: self.gate.reset_global_aux_loss_tracker)

    def set_layer_number(self, layer_number):
        self._layer[0].layer_number = layer_number

    def refresh(self):
        """Make the gate again if the config has changed since."""
        options = options_of(self.config)
        if options == self._made_from:
            return
        check_options(self.config)
        self._made_from, old, layer = options, self.gate, self._layer[0]
        size = (layer.moe.d_model, layer.moe.num_expert, layer.moe.world_size, self.config.moe_router_topk)
        made = gate_arguments(self.config)["gate"](*size, gate_bias=old.gate.bias is not None)
        made.gate, made.ranks = old.gate, old.ranks
        self.gate = layer.moe.gate = made.train(old.training)

    def routing(self, *_):
        raise NotImplementedError("the gate chooses and weighs in one operator: call the router")

    def forward(self, input, padding_mask=None, input_ids=None, **_):
        self.refresh()
        layer = self._layer[0]
        layer.training = self.training
        by_sequence = layer._balances_sequences
        x = input.transpose(0, 1) if by_sequence else input
        valid = (
            None if padding_mask is None else ~(padding_mask.t() if by_sequence else padding_mask).flatten()
        )
        if by_sequence:
            self.gate.seq_len = input.shape[0]
        num_tokens = input.shape[:-1].numel() if valid is None else valid.sum()
        step = begin(layer.moe._forwards, None, x.flatten(0, -2), valid, None, None, self.training)
        with step:
            topk_idx, topk_weights = self.gate(step.x)
        probs, routing_map = spread_out(topk_idx, topk_weights, self.num_experts)
        probs = layer._with_gate_loss(probs, num_tokens)
        probs = probs.to(ROUTER_DTYPES.get(self.config.moe_router_dtype, input.dtype))
        both = [step.batch.put_back(t) for t in (probs, routing_map)]
        if by_sequence:
            both = [t.unflatten(0, x.shape[:2]).transpose(0, 1).flatten(0, 1) for t in both]
        return tuple(both)


def options_of(config):
    named = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if MOE_FIELD.search(f.name)}
    return {name: list(v) if isinstance(v, (list, tuple)) else v for name, v in named.items()}


def spread_out(topk_idx, topk_weights, num_experts):
    """Choices [T, K] and their weights as Megatron has them: probs and routing_map [T, E]."""
    kept = topk_idx >= 0
    columns = torch.where(kept, topk_idx, num_experts).long()
    probs = topk_weights.new_zeros(len(columns), num_experts + 1).scatter(1, columns, topk_weights)
    chosen = torch.zeros_like(probs, dtype=torch.bool).scatter(1, columns, kept)
    return probs[:, :-1], chosen[:, :-1]


class TokenDispatcher:
    """dispatch_preprocess, token_dispatch, dispatch_postprocess and back, by dispatch() and combine()."""

    def __init__(self, layer):
        self.layer = layer

    def dispatch_preprocess(self, hidden_states, routing_map, probs):
        self.shape = hidden_states.shape
        order = routing_map.to(torch.int8).topk(self.layer.config.moe_router_topk, dim=1).indices
        topk_idx = torch.where(routing_map.gather(1, order), order, -1)
        x, self.topk_weights = hidden_states.reshape(-1, self.shape[-1]), probs.gather(1, order)
        self.topk_idx = topk_idx
        return x, probs

    def token_dispatch(self, hidden_states, probs):
        moe = self.layer.moe
        self.dispatched = dispatch(
            hidden_states, self.topk_idx, self.topk_weights, moe.num_experts, moe.expert_parallel
        )
        (self.chunk,) = self.dispatched.chunks
        self.here = self.chunk.receive()
        return self.here.x, self.here.topk_weights

    def dispatch_postprocess(self, hidden_states, probs):
        """The rows of all ranks of the expert-tensor-parallel group, each of which computes a part of each expert."""
        width, idx = self.layer.moe.width, self.here.topk_idx
        x, weights = hidden_states, probs
        if width is not None:
            most = width.most_rows(x)
            idx, x = width.gather(idx, most, padding=-1), width.gather(x, most)
            weights = width.gather(weights, most)
        rows, self.handle = permute_rows(x, idx, self.here.end - self.here.first)
        num_rows = int(self.handle.offs[-1])
        of_rows = weights.flatten()[self.handle.row_idx.long()] if weights.numel() else weights.flatten()
        return (
            rows[:num_rows],
            self.handle.offs.diff(prepend=self.handle.offs.new_zeros(1)),
            of_rows[:num_rows],
        )

    def combine_preprocess(self, rows):
        out = unpermute_rows(rows, self.handle)
        width = self.layer.moe.width
        return out if width is None else width.sum(out, len(self.here.x))

    def token_combine(self, hidden_states):
        self.chunk.give_back(hidden_states)
        return combine(self.dispatched)

    def combine_postprocess(self, hidden_states):
        return hidden_states.view(self.shape)


class Layer(MegatronCoreMoE):
    """MoELayer: the layer that moe_layer_spec() describes, with a router and a dispatcher."""

    def __init__(self, config, submodules=None, layer_number=None, pg_collection=None, **_):
        super().__init__(config, None, False, {}, pg_collection=pg_collection)
        self.layer_number = layer_number
        self.router = Router(config, layer=self)
        self.token_dispatcher = TokenDispatcher(self)
        self.num_local_experts = self.moe.num_expert

    experts = property(lambda self: self.moe.experts)

    def forward(self, hidden_states, padding_mask=None, **_):
        self.router.refresh()
        return super().forward(hidden_states, padding_mask)


def with_groups_kept(make, made):
    """new_group, which gives the same ranks the same group: 8 ranks of gloo need seconds for those of a test."""

    def new_group(ranks=None, timeout=None, backend=None, **_):
        key = tuple(range(dist.get_world_size()) if ranks is None else ranks)
        if key not in made:
            made[key] = make(ranks, timeout=PATIENCE)
        return made[key]

    return new_group


def pytest_configure(config):
    """Replace Megatron's classes wherever a module has them by name, and CUDA by the CPU."""
    for name, theirs, ours in (
        ("MoELayer", moe_layer.MoELayer, Layer),
        ("TopKRouter", router.TopKRouter, Router),
    ):
        for module in list(sys.modules.values()):
            if getattr(module, name, None) is theirs:
                setattr(module, name, ours)
    initialize = dist.init_process_group
    patches = {
        "torch.cuda.is_available": lambda: True,
        "torch.cuda.device_count": lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "torch.cuda.set_device": lambda *_: None,
        "torch.cuda.manual_seed": lambda *_: (
            None
        ),  # the CPU's generator is another one, the same on all ranks
        "torch.cuda.get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "torch.cuda.set_rng_state": lambda *_: None,
        "torch.distributed.init_process_group": lambda backend=None, **k: initialize(
            "gloo", timeout=PATIENCE, **k
        ),
    }
    if utils.get_te_version() is None:  # 0.16 compares it without Transformer Engine
        patches["megatron.core.utils.get_te_version"] = lambda: Version("0")
    make, destroy, made = dist.new_group, dist.destroy_process_group, {}

    def destroy_all(group=None):
        if group is None:
            made.clear()
            destroy()

    patches["torch.distributed.new_group"] = with_groups_kept(make, made)
    patches["torch.distributed.destroy_process_group"] = destroy_all
    for name, value in patches.items():
        mock.patch(name, value).start()
    config.on_cpu = megatron_on_cpu()  # kept: a generator that nobody holds ends
    config.on_cpu.__enter__()
