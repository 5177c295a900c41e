"""Data parallelism beside expert parallelism: process groups, gradient reduction by group, gradient clipping."""

import weakref
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fmoe_ext.ep.exchange import check_same
from fmoe_ext.linear import FMoELinear


@dataclass(frozen=True)
class ParallelGroups:
    """The process groups of one rank; ranks are numbered (dp, ep, slice), slice fastest."""

    world: dist.ProcessGroup
    ep: (
        dist.ProcessGroup
    )  # experts are spread over these ranks: FMoE(world_size=ep size, moe_group=groups.ep)
    slice: dist.ProcessGroup  # these ranks have the same input: FMoE(slice_group=groups.slice)
    data: dist.ProcessGroup  # these ranks have different inputs and the same dense parameters
    experts: dist.ProcessGroup  # these ranks hold the same experts

    def data_parallel_kwargs(self):
        """Arguments of DistributedGroupedDataParallel, for experts that are tagged "moe"."""
        return {
            "dp_group": self.data,
            "gate_group": self.world,
            "moe_group": self.experts,
            "world_group": self.world,
        }


def init_groups(ep=None, dp=None, slice=1) -> ParallelGroups:
    """Splits the ranks of the job into dp x ep x slice and creates the groups of this layout; all ranks call it.

    ep ranks share the experts of a layer, dp such sets hold copies of them, slice ranks work on the same input.
    Of ep and dp one may be left out. Raises ValueError on every rank, naming the rank, where ranks disagree.
    """
    world_size = dist.get_world_size()
    check_same("init_groups(ep, dp, slice)", (ep, dp, slice), dist.group.WORLD)
    if ep is None:
        ep = world_size // ((dp or 1) * slice)
    if dp is None:
        dp = world_size // (ep * slice)
    if min(ep, dp, slice) < 1 or dp * ep * slice != world_size:
        raise ValueError(
            f"dp * ep * slice must be the number of ranks, {world_size}, but got {dp} * {ep} * {slice}"
        )
    ranks = torch.arange(world_size).reshape(dp, ep, slice)

    def my_group(rank_lists):
        for members in rank_lists.tolist():
            group = dist.new_group(members)
            if dist.get_rank() in members:
                mine = group
        return mine

    return ParallelGroups(
        world=dist.group.WORLD,
        ep=my_group(ranks.transpose(1, 2).reshape(-1, ep)),
        slice=my_group(ranks.reshape(-1, slice)),
        data=my_group(ranks.reshape(-1, slice).t()),
        experts=my_group(ranks.transpose(0, 1).reshape(ep, -1)),
    )


class DistributedGroupedDataParallel(nn.Module):
    """Data parallelism in which each parameter has a group of its own: the ranks that hold a copy of it.

    A parameter's tag is param.dp_comm, "dp" if it has none. Tags "dp", "gate", "moe" and "world" mean the default group
    unless dp_group=, gate_group=, ... says otherwise; <tag>_group= defines further tags; "none" has no copies.
    Parameters of DTensor type (FSDP2) are left to those who made them.

    With expert_grads="mean" every gradient is that of one process on the whole batch, the loss being the mean of the
    losses of the ranks in dp_group; "sum" is FastMoE's scale, in which experts with tag "none" are not averaged.

    auto_allreduce=True reduces gradients while backward runs, in buckets of bucket_mb, except inside no_sync(). The
    reduction ends with the last gradient; if a parameter got none, it ends with the step of the optimizer or with
    allreduce_params(), which must then be called before GradScaler.unscale_(). Otherwise call allreduce_params() after
    backward, as in FastMoE. A parameter without gradient on this rank counts as zero here.

    broadcast_buffers=True sends the first rank's buffers to the others before each forward in training.
    share_overflow=True makes a non-finite gradient of one rank's experts seen by every rank's GradScaler.
    """

    def __init__(
        self,
        module,
        auto_allreduce=False,
        need_sync=True,
        *,
        expert_grads="mean",
        bucket_mb=25,
        fp32_allreduce=False,
        broadcast_buffers=False,
        share_overflow=False,
        **groups,
    ):
        super().__init__()
        if expert_grads not in ("mean", "sum"):
            raise ValueError(f'expert_grads must be "mean" or "sum", but got {expert_grads!r}')
        for name, child in module.named_modules():
            if isinstance(child, FMoELinear) and child.gradient_accumulation_fusion:
                raise ValueError(
                    f"{name} has gradient_accumulation_fusion=True, but DistributedGroupedDataParallel reduces "
                    "weight.grad, not weight.main_grad: use Megatron-core's DistributedDataParallel, or pass False"
                )
        self.module = module
        self.auto_allreduce = auto_allreduce
        self.broadcast_buffers = broadcast_buffers
        self.share_overflow = share_overflow
        self.fp32_allreduce = fp32_allreduce
        self._groups = _own_groups(groups)
        self._tagged = self._params_by_tag()
        self._buckets = [
            bucket
            for tag, params in sorted(self._tagged.items(), key=lambda item: item[0] == "none")
            for bucket in _make_buckets(params, self._groups.get(tag), bucket_mb * 2**20)
        ]
        self._sync = True
        self._reduction_due = False
        self._num_started = 0
        self._hooks = []
        weakref.finalize(self, _remove_all, self._hooks)
        for tag, group in self._groups.items():
            params = [
                (name, list(p.shape), str(p.dtype)) for name, p in module.named_parameters() if _tag(p) == tag
            ]
            check_same(f"parameters tagged {tag!r}", params, group)
        if need_sync:
            self._sync_params()
        if expert_grads == "mean":
            self._scale_to_job_mean()
        if auto_allreduce:
            self._reduce_during_backward()
        self.register_load_state_dict_pre_hook(_accept_bare_keys)

    def forward(self, *args, **kwargs):
        if self.broadcast_buffers and self.training and self._sync:
            self._broadcast(list(self.module.buffers()), self._groups["dp"])
        if self.training and self._sync:
            self._reduction_due = True
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self):
        """Inside, backward only accumulates; the next backward outside reduces the sum."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def allreduce_params(self, no_scale=False, reduce_after=False, fp32_allreduce=False):
        """Ends the reduction of all gradients, or does it now; FastMoE's allreduce_gradients.

        Gradients are divided by the size of their group before the sum, or after it (reduce_after), or not (no_scale);
        fp32_allreduce sums in float32.
        """
        for bucket in self._buckets[self._num_started :]:
            bucket.start(not (no_scale or reduce_after), fp32_allreduce or self.fp32_allreduce)
        for i, bucket in enumerate(self._buckets):
            bucket.finish(reduce_after and not no_scale and i >= self._num_started)
        self._num_started = 0
        self._reduction_due = False
        if self.share_overflow:
            self._poison_on_overflow()

    allreduce_gradients = allreduce_params

    def _params_by_tag(self):
        tagged = {}
        for name, p in self.module.named_parameters():
            if not p.requires_grad or isinstance(p, DTensor):
                continue
            if _tag(p) != "none" and _tag(p) not in self._groups:
                raise ValueError(
                    f"parameter {name!r} is tagged {p.dp_comm!r}, for which there is no group: pass {p.dp_comm}_group="
                    f', or tag it "none" if it has no copies (groups: {", ".join(self._groups)})'
                )
            tagged.setdefault(_tag(p), []).append(p)
        return tagged

    def _sync_params(self):
        for tag, group in self._groups.items():
            params = [
                p.detach() for p in self.module.parameters() if _tag(p) == tag and not isinstance(p, DTensor)
            ]
            self._broadcast(params, group)
        self._broadcast(list(self.module.buffers()), self._groups["dp"])

    @staticmethod
    @torch.no_grad()
    def _broadcast(tensors, group):
        source = dist.get_process_group_ranks(group)[0]
        for tensor in tensors:
            whole = tensor.contiguous()
            dist.broadcast(whole, source, group=group)
            tensor.copy_(whole)

    def _scale_to_job_mean(self):
        """The mean over a group of n ranks, of gradients times n / (size of dp_group), is the gradient of the job."""
        for tag, params in self._tagged.items():
            size = 1 if tag == "none" else dist.get_world_size(self._groups[tag])
            factor = size / dist.get_world_size(self._groups["dp"])
            if factor != 1:
                for p in params:
                    self._hooks.append(p.register_hook(lambda grad, factor=factor: grad * factor))

    def _reduce_during_backward(self):
        this = weakref.ref(self)

        def gradient_came(bucket):
            module = this()
            if module is not None and module._sync:
                bucket.num_missing -= 1
                module._start_full_buckets()

        for bucket in self._buckets:
            for p in bucket.params:
                hook = p.register_post_accumulate_grad_hook(lambda _, bucket=bucket: gradient_came(bucket))
                self._hooks.append(hook)

        ours = {id(p) for p in self.parameters()}

        def before_step(optimizer, *_):
            module = this()
            stepped = (id(p) for group in optimizer.param_groups for p in group["params"])
            if module is not None and module._reduction_due and not ours.isdisjoint(stepped):
                module.allreduce_params()

        self._hooks.append(register_optimizer_step_pre_hook(before_step))

    def _start_full_buckets(self):
        # Always in the order of the list, so that all ranks start the same reductions in the same order.
        while self._num_started < len(self._buckets) and self._buckets[self._num_started].num_missing <= 0:
            self._buckets[self._num_started].start(True, self.fp32_allreduce)
            self._num_started += 1
        if self._num_started == len(self._buckets):
            self.allreduce_params()

    @torch.no_grad()
    def _poison_on_overflow(self):
        grads = [p.grad for params in self._tagged.values() for p in params if p.grad is not None]
        if not grads:
            return
        # 0 * inf and 0 * nan are nan, and a sum over ranks keeps it
        poison = torch.stack([grad.sum().float() * 0 for grad in grads]).sum()
        dist.all_reduce(poison, group=self._groups["dp"])
        grads[0].add_(poison.to(grads[0].dtype))


def clip_grad_norm_(module, max_norm, norm_type=2.0):
    """Scales the gradients of a DistributedGroupedDataParallel so that their norm over the job is at most max_norm.

    Each parameter counts once, on however many ranks it has copies or shards (DTensor; every rank of dp_group has
    some). Call it on all ranks, after the reduction.
    Returns the norm before scaling. Equivalent, in one process: torch.nn.utils.clip_grad_norm_.
    """
    if not isinstance(module, DistributedGroupedDataParallel):
        raise TypeError(f"module must be a DistributedGroupedDataParallel, but got {type(module).__name__}")
    norm_type = float(norm_type)
    dp_group = module._groups["dp"]
    dp_ranks = set(dist.get_process_group_ranks(dp_group))
    params = [(tag, p) for tag, params in module._tagged.items() for p in params if p.grad is not None]
    sharded = [p for p in module.parameters() if isinstance(p, DTensor) and p.grad is not None]
    everything = [p.grad for _, p in params] + [p.grad.to_local() for p in sharded]
    if not everything:
        return torch.tensor(0.0)
    accumulate = torch.float64 if any(g.dtype == torch.float64 for g in everything) else torch.float32
    total = torch.zeros((), dtype=accumulate, device=everything[0].device)
    counted = [(p.grad, _num_copies(module, tag, dp_ranks)) for tag, p in params]
    counted += [(p.grad, len(dp_ranks)) for p in sharded]  # the norm of the whole, on each rank
    for grad, copies in counted:
        norm = torch.linalg.vector_norm(grad, norm_type, dtype=accumulate)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if norm_type == float("inf"):
            total = torch.maximum(total, norm)
        else:
            total += norm.pow(norm_type) / copies
    if norm_type == float("inf"):
        dist.all_reduce(total, dist.ReduceOp.MAX, group=dp_group)
    else:
        dist.all_reduce(total, group=dp_group)
        total = total.pow(1 / norm_type)
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for grad in everything:
        grad.mul_(scale.to(grad.dtype))
    return total


def _num_copies(module, tag, dp_ranks):
    return 1 if tag == "none" else len(dp_ranks & set(dist.get_process_group_ranks(module._groups[tag])))


class _Bucket:
    """Parameters of one tag and dtype, whose gradients travel in one message.

    Behind the gradients the message has one number for each: how many ranks had it (times some scale).
    Without a group nothing travels, and the bucket only knows when its gradients have come.
    """

    def __init__(self, params, group):
        self.params = params
        self.group = group
        self.num_missing = len(params)
        self._flat = self._work = None

    @torch.no_grad()
    def start(self, divide, fp32):
        if self.group is None:
            return
        dtype = torch.float32 if fp32 else self.params[0].dtype
        device = self.params[0].device
        self._flat = torch.zeros(sum(self._sizes()), dtype=dtype, device=device)
        *grads, present = self._flat.split(self._sizes())
        for p, grad in zip(self.params, grads, strict=True):
            if p.grad is not None:
                grad.copy_(p.grad.flatten())
        present.copy_(torch.tensor([float(p.grad is not None) for p in self.params]))
        if divide:
            self._flat /= dist.get_world_size(self.group)
        self._work = dist.all_reduce(self._flat, group=self.group, async_op=True)

    @torch.no_grad()
    def finish(self, divide):
        self.num_missing = len(self.params)
        if self.group is None:
            return
        self._work.wait()
        if divide:
            self._flat /= dist.get_world_size(self.group)
        *grads, present = self._flat.split(self._sizes())
        for i, (p, grad) in enumerate(zip(self.params, grads, strict=True)):
            if p.grad is not None:
                p.grad.copy_(grad.view_as(p))
            elif present[i] != 0:
                p.grad = grad.view_as(p).to(p.dtype, copy=True)
        self._flat = self._work = None

    def _sizes(self):
        return [p.numel() for p in self.params] + [len(self.params)]


def _make_buckets(params, group, max_bytes):
    """Buckets of at most max_bytes by dtype, in the order in which backward is expected to fill them."""
    buckets, open_buckets = [], {}
    for p in reversed(params):
        bucket, size = open_buckets.get(p.dtype, (None, 0))
        if bucket is None or size + p.numel() * p.element_size() > max_bytes:
            bucket, size = [], 0
            buckets.append(bucket)
        bucket.append(p)
        open_buckets[p.dtype] = bucket, size + p.numel() * p.element_size()
    return [_Bucket(bucket, group) for bucket in buckets]


def _own_groups(groups):
    """{tag: group}, each a group of our own: reductions must not queue with other users' collectives."""
    named = dict.fromkeys(("dp", "gate", "moe", "world"), dist.group.WORLD)
    for key, group in groups.items():
        if not key.endswith("_group"):
            raise TypeError(f"unexpected argument {key!r}: groups are passed as <tag>_group=")
        named[key.removesuffix("_group")] = group or dist.group.WORLD
    own = {}
    for group in named.values():
        if group not in own:
            own[group] = dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=True)
    return {tag: own[group] for tag, group in named.items()}


def _remove_all(hooks):
    for hook in hooks:
        hook.remove()


def _tag(param):
    return getattr(param, "dp_comm", "dp")


def _accept_bare_keys(module, state_dict, prefix, *_):
    """Lets the state dict of the bare module load: its keys lack "module."."""
    own = [key for key in state_dict if key.startswith(prefix)]
    if not any(key.startswith(f"{prefix}module.") for key in own):
        for key in own:
            state_dict[f"{prefix}module.{key.removeprefix(prefix)}"] = state_dict.pop(key)
