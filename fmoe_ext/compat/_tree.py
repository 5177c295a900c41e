"""FastMoE's modules that have no file here: {module of fmoe: (module of fmoe_ext.compat, its names)}."""

from types import MappingProxyType

TREE = MappingProxyType(
    {
        "balance": ("megatron.balance", "metrics reset_balance_profile update_balance_profile"),
        "distributed": ("layers", "DistributedGroupedDataParallel"),
        "linear": ("layers", "FMoELinear MOELinear draw_as_fastmoe"),
        "transformer": ("layers", "FMoETransformerMLP _Expert"),
        "utils": ("layers", "get_torch_default_comm get_rank_0_in_comm"),
        "gates": ("_gates", "ZeroGate NaiveGate NoisyGate GShardGate SwitchGate DCGate SwipeGate"),
        "gates.base_gate": ("_gates", "BaseGate"),
        "gates.dc_gate": ("_gates", "DCGate"),
        "gates.faster_gate": ("_gates", "FasterGate gen_faster_gate nw_per_node"),
        "gates.gshard_gate": ("_gates", "GShardGate"),
        "gates.naive_gate": ("_gates", "NaiveGate"),
        "gates.noisy_gate": ("_gates", "NoisyGate"),
        "gates.swipe_gate": ("_gates", "SwipeGate"),
        "gates.switch_gate": ("_gates", "SwitchGate"),
        "gates.utils": ("_gates", "limit_by_capacity"),
        "gates.zero_gate": ("_gates", "ZeroGate"),
        "fastermoe": ("_fastermoe", ""),
        "fastermoe.config": ("_fastermoe", "float_from_env switch_from_env"),
        "fastermoe.expert_utils": (
            "_fastermoe",
            "get_expert_param_size get_expert_params stash_expert_params pop_expert_params collect_expert_grads "
            "set_grads",
        ),
        "fastermoe.schedule": ("_fastermoe", "MoEForward policy_fn _fmoe_general_global_forward"),
        "fastermoe.shadow_policy": ("_fastermoe", "global_policy no_shadow_policy get_shadow_policy"),
    }
)
