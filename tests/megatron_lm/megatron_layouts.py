"""One GPT of Megatron-core in any layout of processes: parameters and gradients by their global names and places."""

import sys

import torch
import torch.distributed as dist
from torch import nn

VOCAB, SEQ_LEN, D, LAYERS, EXPERTS = 32, 6, 16, 4, 4
MICROBATCHES, MICROBATCH = 4, 4  # of all data-parallel ranks together


class SequenceParallelNorm(nn.LayerNorm):
    """PyTorch's norm, marked as Megatron wants it where tensor-parallel ranks have different tokens."""

    def __init__(self, config, hidden_size, eps=1e-5):
        super().__init__(hidden_size, eps)
        for p in self.parameters():
            p.sequence_parallel = config.sequence_parallel


def initialize(tp=1, pp=1, vpp=None, ep=1, etp=1):
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )


def destroy():
    """Let go of the groups of initialize(), of which each has a thread that wakes a hundred times a second."""
    if parallel_state := sys.modules.get("megatron.core.parallel_state"):
        parallel_state.destroy_model_parallel()


def forget_logged_losses():
    """Empty Megatron's log of losses, which is as long as the first model of the process has layers."""
    from megatron.core.transformer.moe import moe_utils

    if hasattr(moe_utils, "get_moe_metrics_tracker"):  # 0.18 and newer
        moe_utils.get_moe_metrics_tracker().metrics.clear()
    else:
        moe_utils.get_moe_layer_wise_logging_tracker().clear()


def config_of(tp=1, pp=1, vpp=None, ep=1, etp=1, dtype=torch.float64, **options):
    from gpt import make_config
    from megatron.core.distributed import finalize_model_grads

    return make_config(
        **{"num_layers": LAYERS, "hidden_size": D, "num_attention_heads": 2, "ffn_hidden_size": 2 * D}
        | options,
        dtype=dtype,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        finalize_model_grads_func=finalize_model_grads,
    )


def shards(chunks):
    """{global name of a parameter: (the parameter here, its global shape, the slices of it that are here)}."""
    found = {}
    for chunk in chunks:
        for half, sharded in _without_factories(chunk.sharded_state_dict().values()):
            if not hasattr(sharded, "prepend_axis_num"):
                continue  # extra state
            layer = sharded.prepend_axis_num  # axes in front say which layer it is
            starts_and_sizes = zip(sharded.global_offset[layer:], sharded.local_shape, strict=True)
            places = tuple(slice(start, start + size) for start, size in starts_and_sizes)
            name = f"{sharded.key} {list(sharded.global_offset[:layer])}{half}"
            found[name] = sharded.data, sharded.global_shape[layer:], places
    return found


def _without_factories(values):
    """("", shard) of each; of a gated activation's weights over ranks (" half 0", gate), (" half 1", up)."""
    for value in values:
        if not hasattr(value, "build_fn"):
            yield "", value
            continue
        parts = value.build()
        halved = next(d for d, size in enumerate(value.data.shape) if parts[0].data.shape[d] != size)
        grads = getattr(value.data, "main_grad", value.data).chunk(2, halved)
        for i, (part, grad) in enumerate(zip(parts, grads, strict=True)):
            part.data.main_grad = grad
            yield f" half {i}", part


def whole_name(name):
    return name.split(" half ")[0]


@torch.no_grad()
def fill(chunks):
    """Values that depend on the global name of a parameter only."""
    for name, (p, shape, places) in shards(chunks).items():
        generator = torch.Generator().manual_seed(int.from_bytes(whole_name(name).encode(), "little") % 2**32)
        full = torch.randn(shape, generator=generator, dtype=torch.float64) / 3
        p.copy_(full[places])


def microbatches(step):
    """This rank's (inputs, targets) of a step: its share of the sequences of every microbatch."""
    from megatron.core import parallel_state

    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCAB, (MICROBATCHES, MICROBATCH, SEQ_LEN + 1), generator=generator)
    group = parallel_state.get_data_parallel_group()
    mine = [part.tensor_split(group.size())[group.rank()] for part in tokens]
    return [(part[:, :-1], part[:, 1:]) for part in mine]


def mean_loss(losses):
    """Of all microbatches and ranks; from the last stage to all."""

    loss = torch.stack(losses).mean() if losses else torch.zeros((), dtype=torch.float64)
    total = torch.stack((loss.double(), torch.tensor(float(bool(losses)), dtype=torch.float64)))
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def gradients(chunks):
    return {
        name: (p.main_grad.clone(), places)
        for name, (p, _, places) in shards(chunks).items()
        if p.requires_grad or whole_name(name) != name
    }


class Training:
    """The model in a layout of processes, with Megatron's DistributedDataParallel and optimizer, filled by fill().

    build(config) makes the model chunks; layout: sizes and fields of the config; ddp: fields of its config.
    """

    def __init__(
        self, layout, build, dtype=torch.float64, distributed_optimizer=False, ddp=None, **optimizer
    ):
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        forget_logged_losses()
        initialize(**{key: layout[key] for key in layout if key in ("tp", "pp", "vpp", "ep", "etp")})
        self.config = config_of(**layout, dtype=dtype)
        self.modules = build(self.config)
        fill(self.modules)
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=distributed_optimizer, **(ddp or {}))
        self.chunks = [DistributedDataParallel(self.config, ddp, module) for module in self.modules]
        options = OptimizerConfig(
            **{"clip_grad": 0.0} | optimizer, use_distributed_optimizer=distributed_optimizer
        )
        self.optimizer = get_megatron_optimizer(options, self.chunks)

    def forward_backward(self, step):
        """The loss of the step, over all processes; gradients are in main_grad afterwards."""
        from gpt import forward_backward

        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        return mean_loss(forward_backward(self.chunks, microbatches(step), SEQ_LEN))

    def run(self, steps):
        """The losses of some steps."""
        losses = []
        for step in steps:
            losses.append(self.forward_backward(step))
            self.optimizer.step()
        return losses
