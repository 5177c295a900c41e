"""Megatron-core with experts, in layouts of gloo processes, against one process."""

import sys
from pathlib import Path

import pytest
import torch

from fmoe_ext.gates import SoftmaxGate

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "integrations"))
import megatron_layouts as layouts

pytest.importorskip("megatron.core", reason="pip install megatron-core")
STEPS = 3


def run_layout(truth, steps, layout, distributed_optimizer, dtype):
    """Losses of each step and, without truth, the gradients of the first step; with it, compares those."""
    from on_cpu import megatron_on_cpu

    with megatron_on_cpu():
        return _run_layout(truth, steps, layout, distributed_optimizer, dtype)


def _run_layout(truth, steps, layout, distributed_optimizer, dtype):
    from gpt import forward_backward, make_chunks
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from fmoe_ext.integrations.megatron_core import moe_layer_spec

    options = dict(layout)
    tolerance = options.pop("tolerance", 1e-12)
    layouts.initialize(**{key: options[key] for key in options if key in ("tp", "pp", "vpp", "ep")})
    config = layouts.config_of(**options, dtype=dtype, moe_aux_loss_coeff=0.05)
    mlp = moe_layer_spec(layouts.EXPERTS, d_hidden=24, top_k=2, gate=SoftmaxGate)
    chunks = make_chunks(config, layouts.VOCAB, layouts.SEQ_LEN, mlp=mlp)
    layouts.fill(chunks)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=distributed_optimizer)
    chunks = [DistributedDataParallel(config, ddp, chunk) for chunk in chunks]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam" if distributed_optimizer else "sgd",
            lr=0.01 if distributed_optimizer else 0.3,
            sgd_momentum=0.5,
            clip_grad=0.0,  # Megatron clips float32 gradients only
            use_distributed_optimizer=distributed_optimizer,
        ),
        chunks,
    )
    losses, norms, first = [], [], {}
    for step in range(steps):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        losses.append(
            layouts.mean_loss(forward_backward(chunks, layouts.microbatches(step), layouts.SEQ_LEN))
        )
        if step == 0 and not distributed_optimizer:
            first = layouts.gradients([chunk.module for chunk in chunks])
        optimizer.step()
        norms.append(float(optimizer.get_grad_norm()))
    if truth is None:
        return losses, norms, {name: grad for name, (grad, _) in first.items()}
    scale = max(grad.abs().max() for grad in truth.values())
    for name, (grad, places) in first.items():
        error = (grad - truth[name][places]).abs().max() / scale
        assert error <= tolerance, f"gradient of {name} is off by {error:.1e}"
    return losses, norms, None


LAYOUTS = {
    "dp4": (4, {}),
    "ep2": (2, {"ep": 2}),
    "ep4": (4, {"ep": 4}),
    "dp2 ep2": (4, {"ep": 2}),
    "pp2": (2, {"pp": 2}),
    "pp2 ep2": (4, {"pp": 2, "ep": 2}),
    # Batched, Megatron's messages to the next and to the previous stage, here one rank, could not be told apart.
    "pp2 interleaved": (2, {"pp": 2, "vpp": 2, "batch_p2p_comm": False}),
    "tp2": (2, {"tp": 2}),
    "tp2 ep4": (4, {"tp": 2, "ep": 4}),
}


@pytest.fixture(scope="module")
def one_process(pool):
    return pool.run(run_layout, None, STEPS, {}, False, torch.float64, world_size=1, timeout=300)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_one_process(pool, one_process, layout):
    num_ranks, sizes = LAYOUTS[layout]
    losses, norms, truth = one_process
    results = pool.run(
        run_layout, truth, STEPS, sizes, False, torch.float64, world_size=num_ranks, timeout=300
    )
    for rank_losses, rank_norms, _ in results:
        assert rank_losses == pytest.approx(losses, rel=1e-12)
        assert rank_norms == pytest.approx(norms, rel=1e-6)  # Megatron adds them up in float32
    assert len(set(losses)) == STEPS
