import sys

import eager_megatron  # noqa: F401
import pytest
import torch
import torch.distributed as dist


@pytest.fixture(scope="module")
def one_megatron_rank(tmp_path_factory):
    """Megatron-core on the CPU, initialised for one rank."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import moe_utils
    from megatron_layouts import initialize
    from on_cpu import megatron_on_cpu

    store = tmp_path_factory.mktemp("megatron") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    with megatron_on_cpu(), pytest.MonkeyPatch.context() as patch:
        # Megatron's router reads the name, which 0.16 defines with Transformer Engine only.
        gemm = getattr(moe_utils, "te_general_gemm", None)
        patch.setattr(moe_utils, "te_general_gemm", gemm, raising=False)
        if hasattr(moe_utils.RandomSTE, "generator"):  # 0.15 draws random logits from one of its own
            patch.setattr(moe_utils.RandomSTE, "generator", torch.default_generator)
        initialize()
        yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def forget_megatrons_losses():
    """A backward outside of Megatron's schedules leaves a scale [], which they cannot overwrite with theirs [1]."""
    yield
    if moe_utils := sys.modules.get("megatron.core.transformer.moe.moe_utils"):
        moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale = None
        from megatron_layouts import forget_logged_losses

        forget_logged_losses()
