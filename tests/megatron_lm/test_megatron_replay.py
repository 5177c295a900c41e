"""Megatron's RouterReplay with our layer: it records the choices and gives them, in its order of tokens."""

import pytest
import torch

pytest.importorskip(
    "megatron.core.transformer.moe.router_replay", reason="pip install megatron-core, 0.16 or newer"
)
import megatron_layouts as layouts
from megatron.core.transformer.moe import router_replay as replay
from megatron_pair import HONOURED, B, E, S, assert_equal_numbers, config_of, fill, ours_of, step, theirs_of

pytestmark = pytest.mark.usefixtures("one_megatron_rank")


@pytest.fixture(autouse=True)
def own_instances():
    replay.RouterReplay.clear_global_router_replay_instances()
    yield
    replay.RouterReplay.clear_global_router_replay_instances()


REPLAYED = {
    "softmax": {},
    "groups, pre-softmax": HONOURED["groups pre-softmax"],
    "sigmoid with bias": HONOURED["expert bias and aux loss"],
    "sequence loss": HONOURED["sequence loss"] | {"moe_aux_loss_coeff": 0.25},
    "capacity": HONOURED["capacity and loss"],
}
# as PADDED of test_megatron_options.py; capacities count padding in Megatron
PADDED_REPLAY = ("softmax", "groups, pre-softmax", "sequence loss")


@pytest.mark.parametrize(
    "case, padded", [*((case, False) for case in REPLAYED), *((case, True) for case in PADDED_REPLAY)]
)
def test_router_replay_of_megatron(case, padded):
    """Its RouterReplay records the same choices of both layers, and gives others to both; gradients too."""
    config = config_of(moe_enable_routing_replay=True, **REPLAYED[case])
    ours, theirs = ours_of(config), theirs_of(config)
    fill(ours, theirs)
    mine, other = replay.RouterReplay.global_router_replay_instances
    padding = (torch.arange(S) >= 8).expand(B, S) if padded else None
    for instance in (mine, other):
        instance.set_router_replay_action(replay.RouterReplayAction.RECORD)
    step(ours, padding), step(theirs, padding)
    recorded = [instance.get_recorded_indices().view(S, B, -1).sort(-1).values for instance in (mine, other)]
    real = slice(None) if padding is None else ~padding.t()
    assert torch.equal(recorded[0][real], recorded[1][real])
    played = (other.get_recorded_indices() + 1) % E  # choices that no gate makes by itself
    for instance in (mine, other):
        instance.set_target_indices(played)
        instance.set_router_replay_action(replay.RouterReplayAction.REPLAY_FORWARD)
    assert_equal_numbers(ours, theirs, padding)
    assert ours.moe.gate.tape is None


def test_router_replay_and_recomputation():
    """The repeated forward has the choices of the first one, and takes its entry of the list for the backward."""
    options = {"moe_enable_routing_replay": True, "moe_aux_loss_coeff": 0.3}
    whole, again = ours_of(config_of(**options)), ours_of(config_of(**options))
    again.load_state_dict(whole.state_dict())
    for instance in replay.RouterReplay.global_router_replay_instances:
        instance.set_router_replay_action(replay.RouterReplayAction.REPLAY_FORWARD)
    with pytest.raises(ValueError, match="no choices for this layer: call RouterReplay"):
        whole(torch.zeros(S, B, layouts.D, dtype=torch.float64))
    played = torch.randint(E, (S * B, 1), generator=torch.Generator().manual_seed(2))
    played = torch.cat([played, (played + 1) % E], 1)
    for instance in replay.RouterReplay.global_router_replay_instances:
        instance.set_target_indices(played)
    x = torch.randn(S, B, layouts.D, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(whole(x)[0].square().sum(), x)
    output = torch.utils.checkpoint.checkpoint(lambda x: again(x)[0], x, use_reentrant=False)
    last = replay.RouterReplay.global_router_replay_instances[1]
    last.set_router_replay_action(replay.RouterReplayAction.REPLAY_BACKWARD)
    (grad,) = torch.autograd.grad(output.square().sum(), x)
    torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-13)
    assert last.replay_backward_list == []
