"""Checkpoints of Megatron-core with our experts: save in one layout of processes, load in another."""

import functools
import multiprocessing
from unittest import mock

import megatron_layouts as layouts
import pytest
import torch
from on_cpu import megatron_on_cpu

pytest.importorskip("megatron.core", reason="pip install megatron-core")
from test_megatron import ETP2_EP2, TIMEOUT, build_moe


def train_and_save(path, layout, in_background=False, **moe_kwargs):
    """Two steps with the experts on ranks, a checkpoint, two more steps -> parameters at the checkpoint, losses.

    in_background: Megatron's --async-save, which writes while the two steps go on.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    # Megatron's writer starts processes, which those of the pool may not.
    multiprocessing.current_process()._config["daemon"] = False
    with megatron_on_cpu():
        training = with_adam(layout, **moe_kwargs)
        training.run(range(2))
        parameters = layouts.shards(training.modules)
        parameters = {name: (p.detach().clone(), *place) for name, (p, *place) in parameters.items()}
        request = dist_checkpointing.save(
            whole_state(training, is_loading=False), path, async_sharded_save=in_background
        )
        queue = AsyncCallsQueue()
        if in_background:
            queue.schedule_async_request(request)
        losses = training.run(range(2, 4))
        queue.maybe_finalize_async_calls(blocking=True)
        queue.close()
        return parameters, losses


def with_adam(layout, **moe_kwargs):
    return layouts.Training(layout, functools.partial(build_moe, **moe_kwargs), optimizer="adam", lr=0.01)


def whole_state(training, is_loading):
    model = training.modules[0].sharded_state_dict()
    return {"model": model, "optimizer": training.optimizer.sharded_state_dict(model, is_loading=is_loading)}


def load_and_train(path, layout, expected, **moe_kwargs):
    from megatron.core import dist_checkpointing

    with megatron_on_cpu():
        training = with_adam(layout, **moe_kwargs)
        state = dist_checkpointing.load(whole_state(training, is_loading=True), path)
        training.modules[0].load_state_dict(state["model"])
        training.optimizer.load_state_dict(state["optimizer"])
        for name, (p, _, places) in layouts.shards(training.modules).items():
            assert torch.equal(p, expected[layouts.whole_name(name)][places]), name
        return training.run(range(2, 4))


MOVES = {
    "ep": (4, {"ep": 4}, ((4, {"ep": 2}), (2, {"ep": 2}), (1, {})), {}),
    "async": (2, {"ep": 2}, ((1, {}),), {}),
    "etp": (4, ETP2_EP2, ((1, {}), (2, {"tp": 2, "etp": 2}), (2, {"ep": 2})), {"activation": "swiglu"}),
}


@pytest.mark.long
@pytest.mark.parametrize("move", MOVES)
def test_checkpoint_moves_to_another_layout(pool, tmp_path, move):
    num_ranks, layout, others, options = MOVES[move]
    save, load = (functools.partial(f, **options) for f in (train_and_save, load_and_train))
    save = functools.partial(save, in_background=move == "async")
    saved = pool.run(save, str(tmp_path), layout, world_size=num_ranks, timeout=TIMEOUT)
    losses, expected = saved[0][1], {}
    for parameters, _ in saved:
        for name, (shard, shape, places) in parameters.items():
            expected.setdefault(layouts.whole_name(name), shard.new_empty(shape))[places] = shard
    for num_ranks, layout in others:
        arguments = str(tmp_path), layout, expected
        resumed = pool.run(load, *arguments, world_size=num_ranks, timeout=TIMEOUT)
        for rank_losses in resumed:
            assert rank_losses == pytest.approx(losses, rel=1e-12)


def keep_the_step(method):
    """Of Megatron's optimizer: it asks the saved states of a parameter for PyTorch's "step", kept elsewhere (0.16)."""

    @functools.wraps(method)
    def set_states(optimizer, model_param, tensors):
        known = optimizer._get_main_param_and_optimizer_states(model_param)
        return method(optimizer, model_param, known | tensors)

    return set_states


def give_each_its_step(optimizer):
    """Megatron 0.16 loads PyTorch's "step" as one tensor of all parameters, which a step would then count N times."""
    for chained in optimizer.chained_optimizers:
        for state in chained.optimizer.state.values():
            state["step"] = state["step"].clone()


def with_distributed_optimizer(layout):
    """Training in float32, which Megatron's distributed optimizer wants: its states lie on ranks in parts."""
    return layouts.Training(layout, build_moe, torch.float32, True, optimizer="adam", lr=0.01)


RESHARDABLE = {"distrib_optim_sharding_type": "fully_reshardable"}


def optimizer_and_model(training, is_loading):
    model = training.modules[0].sharded_state_dict()
    optimizer = training.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=RESHARDABLE)
    return {"model": model, "optimizer": optimizer}


def load_and_save(source, target, layout, steps=0):
    """Load a checkpoint, unless it is None, train some steps, save another -> the losses of the next two steps."""
    from megatron.core import dist_checkpointing
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    name = "_set_main_param_and_optimizer_states"
    multiprocessing.current_process()._config["daemon"] = False
    kept = mock.patch.object(DistributedOptimizer, name, keep_the_step(getattr(DistributedOptimizer, name)))
    with megatron_on_cpu(), kept:
        training = with_distributed_optimizer(layout)
        if source is not None:
            training.run(
                range(1)
            )  # without Apex, Megatron's optimizer has no states to load into before a step
            state = dist_checkpointing.load(optimizer_and_model(training, is_loading=True), source)
            training.modules[0].load_state_dict(state["model"])
            training.optimizer.load_state_dict(state["optimizer"])
            give_each_its_step(training.optimizer)
        training.run(range(steps))
        dist_checkpointing.save(optimizer_and_model(training, is_loading=False), target)
        return training.run(range(2, 4))


def tensors_of(folder):
    """{name: the whole tensor} of a checkpoint, optimizer states included."""
    from megatron.core import dist_checkpointing

    plain = dist_checkpointing.load_plain_tensors(folder)
    return {name: value for name, value in plain.items() if isinstance(value, torch.Tensor)}


@pytest.mark.long
def test_round_trip_with_the_distributed_optimizer_is_bitwise(pool, tmp_path):
    """Two ranks of experts, then four, then one process: every weight and every state of Adam is the same."""
    folders, losses = [None], []
    for name, ranks in (("two", 2), ("four", 4), ("one", 1)):
        folders.append(str(tmp_path / name))
        (tmp_path / name).mkdir()
        steps = 0 if folders[-2] else 2
        arguments = folders[-2], folders[-1], {"ep": ranks}, steps
        losses.append(pool.run(load_and_save, *arguments, world_size=ranks, timeout=TIMEOUT)[0])
    saved = pool.run(tensors_of, folders[1], world_size=1, timeout=TIMEOUT)[0]
    experts = [name for name in saved if "experts" in name]
    assert any("exp_avg_sq" in name for name in experts), sorted(saved)
    for folder in folders[2:]:
        tensors = pool.run(tensors_of, folder, world_size=1, timeout=TIMEOUT)[0]
        assert tensors.keys() == saved.keys()
        for name, tensor in saved.items():
            assert torch.equal(tensors[name], tensor), (folder, name)
    for later in losses[1:]:
        assert later == pytest.approx(losses[0], rel=1e-5)
