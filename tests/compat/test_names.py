"""Every public name of FastMoE's modules, with its parameters, and install()."""

import importlib
import inspect
import os
import textwrap
from pathlib import Path

import pytest

import fmoe_ext
from tests.forked import run_python as run_forked

# What FastMoE's programs import: module: {name: parameters, or methods: parameters, or None for a value}.
NAMES = {
    "": ["FMoE", "FMoELinear", "FMoETransformerMLP", "DistributedGroupedDataParallel"],
    "balance": {
        "metrics": None,
        "reset_balance_profile": "balance_dict, num_layers, balance_strategy",
        "update_balance_profile": "balance_dict, gate_top_k_idx, _gate_score_top_k, gate_context, layer_idx, "
        "num_expert, balance_strategy",
    },
    "distributed": ["DistributedGroupedDataParallel"],
    "fastermoe.config": {"float_from_env": "key, default=-1", "switch_from_env": "key, default=False"},
    "fastermoe.expert_utils": {
        "get_expert_param_size": "e, idx",
        "get_expert_params": "e, out, idx",
        "stash_expert_params": "e, params, idx",
        "pop_expert_params": "e, idx",
        "collect_expert_grads": "e, grads, idx",
        "set_grads": "e, grads, idx",
    },
    "fastermoe.schedule": {
        "MoEForward.apply": "expert_fn, experts, inp, pos_s, pos_g, local_expert_count, global_expert_count, "
        "stored_models, fwd_batch_size, out_batch_size, num_expert, world_size",
        "policy_fn": None,
        "_fmoe_general_global_forward": "inp, gate, expert_fn, n_expert, world_size, experts=None, "
        "stored_models=None",
    },
    "fastermoe.shadow_policy": {
        "global_policy": "local_expert_count, _gec, num_expert, world_size, device",
        "no_shadow_policy": "_lec, _gec, num_expert, world_size, device",
        "get_shadow_policy": "d_model=None",
    },
    "functions": {
        "_moe_group": None,
        "ensure_comm": "t, comm",
        "get_moe_group": "",
        "count_by_gate": "gate, num_expert, world_size, require_pos=True",
        "prepare_forward": "gate, num_expert, world_size",
        "_local_scatter": "inp, pos",
        "_local_gather": "inp, pos, out_batch_size, maybe_overlap=True",
        "MOEScatter.forward": "ctx, inp, pos, local_expert_count, global_expert_count, fwd_batch_size, world_size",
        "MOEScatter.backward": "ctx, global_grad_in",
        "MOEGather.forward": "ctx, global_output_buf, pos, local_expert_count, global_expert_count, "
        "local_batch_size, world_size",
        "MOEGather.backward": "ctx, grad_out",
        "AllGather.forward": "ctx, inp, rank, world_size, group",
        "AllGather.backward": "ctx, grad_out",
        "Slice.forward": "ctx, inp, rank, world_size, group",
        "Slice.backward": "ctx, grad_out",
    },
    "gates": ["ZeroGate", "NaiveGate", "NoisyGate", "GShardGate", "SwitchGate", "DCGate", "SwipeGate"],
    "gates.base_gate": {
        "BaseGate": "num_expert, world_size",
        "BaseGate.set_loss": "self, loss",
        "BaseGate.get_loss": "self, clear=True",
        "BaseGate.has_loss": None,
    },
    "gates.dc_gate": {
        "DCGate": "d_model, num_expert, world_size, topk=2, capacity=(1.2, 2.4), random_routing=True, gate_bias=True"
    },
    "gates.faster_gate": {
        "nw_per_node": None,
        "FasterGate": "d_model, n_expert, world_size, node_rank, gate_bias=True",
        "gen_faster_gate": "rank",
    },
    "gates.gshard_gate": {
        "GShardGate": "d_model, num_expert, world_size, topk=2, capacity=(1.2, 2.4), random_routing=True, "
        "gate_bias=True"
    },
    "gates.naive_gate": {
        "NaiveGate": "d_model, num_expert, world_size, top_k=2, gate_bias=True",
        "NaiveGate.forward": "self, inp, return_all_scores=False",
    },
    "gates.noisy_gate": {
        "NoisyGate": "d_model, num_expert, world_size, top_k=2",
        "NoisyGate.reset_parameters": "self",
        "NoisyGate._gates_to_load": "self, gates",
        "NoisyGate._prob_in_top_k": "self, clean_values, noisy_values, noise_stddev, noisy_top_values",
        "NoisyGate.cv_squared": "self, x",
    },
    "gates.swipe_gate": {
        "SwipeGate": "d_model, num_expert, world_size, top_k=2, gate_bias=True",
        "SwipeGate.swipe_once": "self, idx, capacity, bias",
    },
    "gates.switch_gate": {
        "SwitchGate": "d_model, num_expert, world_size, topk=1, switch_eps=0.1, capacity=(1.2, 2.4), gate_bias=True"
    },
    "gates.utils": {"limit_by_capacity": "topk_idx, num_expert, world_size, capacity"},
    "gates.zero_gate": {"ZeroGate": "_1, num_expert, world_size, top_k=2"},
    "layers": {
        "mark_module_parallel_comm": "module, comm",
        "_fmoe_general_global_forward": "inp, gate, expert_fn, num_expert, world_size, **kwargs",
        "fmoe_faster_schedule": None,
        "FMoE": "num_expert=32, d_model=1024, world_size=1, mp_group=None, slice_group=None, moe_group=None, "
        "top_k=2, gate=NaiveGate, expert=None, gate_hook=None, mask=None, mask_dict=None, gate_bias=True",
        "FMoE.expert_fn": "self, inp, fwd_expert_count",
        "FMoE.expert_fn_single": "self, inp, fwd_expert_count, idx",
        "FMoE.mark_parallel_comm": "self, expert_dp_comm='none'",
    },
    "linear": {
        "MOELinear.apply": "global_input_buf, fwd_expert_count, weight, bias=None",
        "FMoELinear": "num_expert, in_feat, out_feat, bias=True, rank=0",
        "FMoELinear.forward": "self, inp, fwd_expert_count",
        "FMoELinear.reset_parameters": "self",
    },
    "megatron": [
        *("fmoefy", "MegatronMLP", "add_fmoe_args", "get_balance_profile", "generate_megatron_gate_hook")
    ],
    "megatron.balance": {
        "balance_dict": None,
        "num_layers": None,
        "reset_gate_hook": "_num_layers=None",
        "get_balance_profile": "",
        "generate_megatron_gate_hook": "layer_idx, num_expert_global",
        "add_balance_log": "model, writer, iteration",
    },
    "megatron.checkpoint": {
        "get_fmoe_checkpoint_name": "checkpoints_path, iteration, release=False, data_parallel_rank=-1",
        "save_checkpoint": "iteration, model, optimizer, lr_scheduler",
        "merge_state_dict": "state_dict_rank0, state_dict_local, fp16",
        "load_checkpoint": "model, optimizer, lr_scheduler, load_arg='load'",
    },
    "megatron.distributed": {
        "_groups": None,
        "_set_groups": "**kwargs",
        "get_moe_group": "",
        "_init": "",
        "DistributedDataParallel": "module, accumulate_allreduce_grads_in_fp32=False, "
        "use_contiguous_buffers_in_ddp=False",
    },
    "megatron.layers": {
        "_FakeMegatronMLP": "args, _",
        "_megatron_init_method": "self, rng, sigma",
        "_random_init_weight": "self, rng",
        "MegatronMLP": "args, layer_idx, gate=None",
        "fmoefy": "model, fmoe_num_experts=None, distributed_experts=True, hidden_hidden_size=None, top_k=None, "
        "gate=None, megatron_version=None",
    },
    "megatron.patch": {
        "patch_loss_func_v2_5": "loss_func",
        "patch_forward_step": "forward_step_func, Megatron_Version='v2.2'",
        "patch_model_provider": "model_provider, gate=None, Megatron_Version='v2.2'",
    },
    "megatron.utils": {"add_fmoe_args": "parser"},
    "transformer": {
        "_Expert": "num_expert, d_model, d_hidden, activation, rank=0",
        "FMoETransformerMLP": "num_expert=32, d_model=1024, d_hidden=4096, activation=ANY, expert_dp_comm='none', "
        "expert_rank=0, **kwargs",
    },
    "utils": {"get_torch_default_comm": "", "get_rank_0_in_comm": "comm"},
}
CASES = [(module, name) for module, names in NAMES.items() for name in names]


def resolve(module, name):
    found = importlib.import_module("fmoe_ext.compat" + (f".{module}" if module else ""))
    for part in name.split("."):
        found = getattr(found, part)
    return found


def parameters(text):
    """Parameters of FastMoE's `def f(<text>)`, in order: [(name, kind, default or its name)]."""
    scope = {"NaiveGate": resolve("gates", "NaiveGate"), "ANY": ...}
    exec(f"def f({text}): pass", scope)
    return list(inspect.signature(scope["f"]).parameters.values())


@pytest.mark.parametrize(("module", "name"), CASES, ids=lambda value: value or "fmoe")
def test_name_and_parameters(module, name):
    try:
        found = resolve(module, name)
    except NotImplementedError as missing:
        pytest.skip(str(missing))
    expected = None if isinstance(NAMES[module], list) else NAMES[module][name]
    if expected is None:
        return
    ours = [p for p in inspect.signature(found).parameters.values() if p.kind is not p.KEYWORD_ONLY]
    theirs = parameters(expected)
    if ours and ours[0].name == "cls":
        ours = ours[1:]
    if len(ours) > len(theirs) and ours[-1].kind is inspect.Parameter.VAR_KEYWORD:
        ours = ours[:-1]  # options of fmoe_ext
    assert [(p.name, p.kind) for p in ours] == [(p.name, p.kind) for p in theirs]
    for our, their in zip(ours, theirs, strict=True):
        assert their.default is ... or our.default == their.default, our.name


def test_every_module_is_importable_by_both_names_after_install():
    modules = sorted(NAMES)
    result = run_python(
        f"""
        import importlib, sys
        import fmoe_ext.compat
        fmoe_ext.compat.install()
        for name in {modules}:
            path = "." + name if name else ""
            fmoe, ours = (importlib.import_module(root + path) for root in ("fmoe", "fmoe_ext.compat"))
            assert fmoe is ours, name
            parent, _, last = ("fmoe" + path).rpartition(".")
            assert not parent or getattr(sys.modules[parent], last) is ours, name
        import fmoe.gates.faster_gate as faster
        from fmoe.fastermoe import config
        print(faster.__name__, config.switch_from_env("UNSET", True))
        """
    )
    assert result.stdout == "fmoe_ext.compat.gates.faster_gate True\n", result.stderr


def run_python(code):
    environment = os.environ | {"PYTHONPATH": str(Path(fmoe_ext.__file__).parents[1])}
    return run_forked(textwrap.dedent(code), env=environment)


def test_unchanged_program_runs_after_install():
    result = run_python(
        """
        import fmoe_ext.compat
        fmoe_ext.compat.install()
        fmoe_ext.compat.install()

        import torch
        import fmoe
        from fmoe import FMoE, FMoETransformerMLP
        from fmoe.functions import MOEGather, MOEScatter, count_by_gate, ensure_comm, prepare_forward
        from fmoe.gates import GShardGate, NaiveGate
        from fmoe.gates.base_gate import BaseGate
        from fmoe.gates.utils import limit_by_capacity
        from fmoe.layers import _fmoe_general_global_forward, mark_module_parallel_comm
        from fmoe.linear import FMoELinear
        from fmoe.transformer import _Expert
        import fmoe.fastermoe.config, fmoe.megatron.layers

        class Adapter(FMoETransformerMLP):
            def __init__(self, d_model):
                super().__init__(num_expert=4, d_model=d_model, d_hidden=32, top_k=2, gate=GShardGate,
                                 activation=torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Dropout(0.1)))

        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), Adapter(16), torch.nn.Linear(16, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        x = torch.randn(64, 8)
        y = x[:, :1] * x[:, 1:2]
        losses = []
        for _ in range(60):
            loss = (model(x) - y).square().mean()
            losses.append(loss.item())
            (loss + 0.01 * model[1].gate.get_loss()).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert losses[-1] < 0.5 * losses[0], losses
        assert fmoe.FMoE is FMoE and issubclass(FMoE, fmoe_ext.FMoE)
        print("done", len(model[1].experts.htoh4.weight))
        """
    )
    assert result.stdout == "done 4\n", result.stderr


def test_install_refuses_another_fmoe():
    result = run_python(
        """
        import sys, types
        sys.modules["fmoe"] = types.ModuleType("fmoe")
        import fmoe_ext.compat
        try:
            fmoe_ext.compat.install()
        except RuntimeError as error:
            print(error)
        """
    )
    assert result.stdout.startswith("another fmoe is already imported, from None: call"), result.stderr
