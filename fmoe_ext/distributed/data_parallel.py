"""DistributedGroupedDataParallel: data parallelism in which each parameter names the group that reduces its gradient.

A parameter names its group, the ranks that hold copies of it, by its tag, param.dp_comm. At the end of the file,
fully_shard_experts() is FSDP2 for the experts of a layer.

Buckets. Gradients of one tag and dtype travel together, because each message costs a latency. Buckets are filled in the
order in which a backward is expected to compute gradients, the last layer's first:
    layer 1   layer 2   layer 3        buckets in the order of their start
    p1 p2     p3 p4     p5 p6    ->    0: [p6 p5 p4]   1: [p3 p2 p1]
While backward runs, a hook of each parameter counts its bucket down. A complete bucket is started, but only after all
before it: so all ranks start the same reductions in the same order, whatever order their gradients come in. Buckets
that stay incomplete are reduced before the optimizer's step, or by allreduce_params().

Absent gradients. A parameter that got no gradient on this rank counts as zero; one that no rank had a gradient for
keeps None, which optimizers skip. To tell them apart, each message ends in one number per parameter, which is not
zero if any rank had its gradient:
    [ gradient of p6 | gradient of p5 | gradient of p4 | 1 1 0 ]

Scale (expert_grads="mean"). A gradient is multiplied by n / (size of dp_group) before its mean over n ranks, because
the loss of the job is the mean of the losses of dp_group, and the rows of an expert come from all of them.

Tags may change between steps: the next forward or reduction notices, makes the buckets anew, and refuses a change that
would leave a gradient at the scale of its old tag.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from fmoe_ext._sharded import is_dtensor
from fmoe_ext.distributed.groups import device_of, own_groups, tag_of
from fmoe_ext.ep.process_groups import check_same, find_group, gather_values
from fmoe_ext.ep.wrappers import check_mesh, warn_of_copies
from fmoe_ext.layers import FMoE
from fmoe_ext.linear import FMoELinear
from fmoe_ext.optimizer_steps import follow_optimizers, has_a_parameter_of
from fmoe_ext.spread import tag_adapters

_Factor: TypeAlias = Callable[[nn.Parameter, str], float]  # of a parameter's gradient under a tag


class _Handle(Protocol):
    def remove(self) -> None: ...


class _Bucket:
    """Parameters of one tag and dtype, whose gradients travel in one message.

    Without a group (tag "none") nothing travels, and the bucket only counts its gradients.
    """

    def __init__(self, params: list[nn.Parameter], group: dist.ProcessGroup | None) -> None:
        self.params = params
        self.group = group
        self.missing = set(params)  # those whose gradient has not come
        self._flat: torch.Tensor | None = None  # the message
        self._work: dist.Work | None = None  # its reduction

    @torch.no_grad()
    def start(self, divide: bool, fp32: bool) -> None:
        """Copy the gradients into a message and start its sum over the group.

        divide: divide by the group's size before the sum.
        """
        if self.group is None:
            return
        dtype = torch.float32 if fp32 else self.params[0].dtype
        device = self.params[0].device
        self._flat = torch.zeros(sum(self._sizes()), dtype=dtype, device=device)
        *grads, present = self._flat.split(self._sizes())
        for p, grad in zip(self.params, grads, strict=True):
            if p.grad is not None and p.grad.layout is not torch.strided:
                raise TypeError(
                    f"the gradient of a parameter of shape {list(p.shape)} is sparse, but "
                    "DistributedGroupedDataParallel reduces dense ones: create nn.Embedding with sparse=False"
                )
            if p.grad is not None:
                grad.copy_(p.grad.flatten())
        present.copy_(torch.tensor([float(p.grad is not None) for p in self.params], device="cpu"))
        if divide:
            self._flat /= dist.get_world_size(self.group)
        self._work = dist.all_reduce(self._flat, group=self.group, async_op=True)

    @torch.no_grad()
    def finish(self, divide: bool) -> None:
        """Wait for the sum and copy it back to the gradients; divide: divide by the group's size after it."""
        self.missing = set(self.params)
        if self._work is None or self._flat is None:
            return
        self._work.wait()
        if divide:
            self._flat /= dist.get_world_size(self.group)
        *grads, present = self._flat.split(self._sizes())
        for i, (p, grad) in enumerate(zip(self.params, grads, strict=True)):
            if p.grad is not None:
                p.grad.copy_(grad.view_as(p))
            # another rank had a gradient; this waits for the device, so that it is asked only where ours is absent
            elif present[i] != 0:
                p.grad = grad.view_as(p).to(p.dtype, copy=True)
        self._flat = self._work = None

    def _sizes(self) -> list[int]:
        return [p.numel() for p in self.params] + [len(self.params)]


class _Tags:
    """The tags that a module's trained parameters had when they were last read."""

    def __init__(
        self, module: nn.Module, groups: Mapping[str, dist.ProcessGroup], sharded: frozenset[str]
    ) -> None:
        # sharded: names of parameters that FSDP reduces; while it has them gathered they are no DTensors
        self._module, self._sharded = module, sharded
        self.params: dict[str, list[nn.Parameter]] = {}  # {tag: those that are trained}
        for name, p in self._trained():
            if tag_of(p) != "none" and tag_of(p) not in groups:
                raise ValueError(
                    f"parameter {name!r} is tagged {tag_of(p)!r}, for which there is no group: pass {tag_of(p)}_group="
                    f', or tag it "none" if it has no copies (groups: {", ".join(groups)})'
                )
            self.params.setdefault(tag_of(p), []).append(p)
        self._tags = {p: tag for tag, params in self.params.items() for p in params}

    def have_changed(self) -> bool:
        """Return whether a parameter has another tag, or is trained that was frozen or not there."""
        return any(tag_of(p) != self._tags.get(p) for _, p in self._trained())

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters that are trained and reduced here."""
        for name, p in self._module.named_parameters():
            if p.requires_grad and not is_dtensor(p) and name not in self._sharded:
                yield name, p

    def check_change(self, under_way: bool, factor: _Factor | None) -> None:
        """Raise RuntimeError if a changed tag would give a gradient that has come already a wrong scale.

        under_way: some gradients of this backward have come. factor: the scale of a gradient under a tag, if any.
        """
        for name, p in self._trained():
            old = self._tags.get(p)
            if p.grad is None or old == tag_of(p):
                continue
            # newly trained: no hook has scaled its gradient
            if old is None and factor is not None and factor(p, tag_of(p)) != 1:
                raise RuntimeError(
                    f"parameter {name!r} is trained since the last forward, and its gradient has come: call the "
                    "wrapper's forward, not that of the module inside, before the backward"
                )
            # tagged anew: its gradient has the scale of the old tag, or is in a message of it
            if old is not None and (
                under_way or (factor is not None and factor(p, old) != factor(p, tag_of(p)))
            ):
                raise RuntimeError(
                    f"parameter {name!r} was tagged {tag_of(p)!r} in place of {old!r} after its gradient had come: set "
                    "dp_comm before the forward, with gradients None"
                )

    def scale(self, factor: _Factor) -> list[_Handle]:
        """Register hooks that multiply each gradient by the factor of its parameter and tag."""
        return [
            p.register_hook(lambda grad, number=number: grad * number)
            for p, tag in self._tags.items()
            if (number := factor(p, tag)) != 1
        ]


class DistributedGroupedDataParallel(nn.Module):
    """Data parallelism in which each parameter names its group: the ranks that hold a copy of it.

    A parameter's tag is param.dp_comm, "dp" if it has none; one that an FMoE layer got later (an adapter of PEFT) has
    that of the layer's others. Tags "dp", "gate", "moe" and "world" mean the default group
    unless dp_group=, gate_group=, ... says otherwise; <tag>_group= defines further tags; "none" has no copies.
    A tag that has changed counts from the next forward or reduction on, as in FastMoE; so does a parameter that was
    frozen, or was not there.
    Parameters of DTensor type (FSDP2) are left to those who made them.
    Reductions have a group of their own for each group named, which all wrappers share: where several are reduced in
    one backward, all ranks reach them in one order, as with torch's DistributedDataParallel.

    With expert_grads="mean" every gradient is that of one process on the whole batch, the loss being the mean of the
    losses of the ranks in dp_group; "sum" is FastMoE's scale, in which experts with tag "none" are not averaged.

    auto_allreduce=True reduces gradients while backward runs, in buckets of bucket_mb, except inside no_sync(). The
    reduction ends with the last gradient; if a parameter got none, it ends with the step of the optimizer or with
    allreduce_params(), which must then be called before GradScaler.unscale_(). Otherwise call allreduce_params() after
    backward, as in FastMoE. A parameter without gradient on this rank counts as zero.

    broadcast_buffers=True sends the first rank's buffers to the others before the first forward in training after each
    reduction; what gates count in the microbatches of a step stays each rank's.
    share_overflow=True makes a non-finite gradient of one rank's experts seen by every rank's GradScaler: by all ranks
    that the groups of the parameters' tags reach from it.

    Example:

        >>> store = torch.distributed.HashStore()  # torchrun makes one; then init_process_group() needs no arguments
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> groups = fmoe_ext.distributed.init_groups(ep=1)
        >>> mlp = fmoe_ext.FMoETransformerMLP(4, 8, 16, moe_group=groups.ep, expert_dp_comm="moe")
        >>> model = DistributedGroupedDataParallel(mlp, auto_allreduce=True, **groups.data_parallel_kwargs())
        >>> model(torch.randn(10, 8)).sum().backward()
    """

    def __init__(
        self,
        module: nn.Module,
        auto_allreduce: bool = False,
        need_sync: bool = True,
        *,
        expert_grads: str = "mean",
        bucket_mb: float = 25,
        fp32_allreduce: bool = False,
        broadcast_buffers: bool = False,
        share_overflow: bool = False,
        **groups: dist.ProcessGroup | None,
    ) -> None:
        super().__init__()
        if expert_grads not in ("mean", "sum"):
            raise ValueError(f'expert_grads must be "mean" or "sum", but got {expert_grads!r}')
        # 1. Tag first what layers got after they were made, as adapters: from here on tags are read.
        for name, child in module.named_modules():
            if isinstance(child, FMoE):
                child.tag_new_parameters()
            tag_adapters(child)
            if isinstance(child, FMoELinear) and child.gradient_accumulation_fusion:
                raise ValueError(
                    f"{name} has gradient_accumulation_fusion=True, but DistributedGroupedDataParallel reduces "
                    "weight.grad, not weight.main_grad: use Megatron-core's DistributedDataParallel, or pass False"
                )
        # 2. Groups, buckets and hooks.
        self.module = module
        self.auto_allreduce = auto_allreduce
        self.broadcast_buffers = broadcast_buffers
        self.share_overflow = share_overflow
        self.fp32_allreduce = fp32_allreduce
        self.groups = own_groups(groups)
        self._max_bytes = bucket_mb * 2**20
        self._expert_grads = expert_grads
        self._sync = True  # False in no_sync()
        self._reduction_due = False  # there was a forward whose gradients are to be reduced
        self._accumulates = False  # there was a forward since the last reduction
        self._num_started = 0  # buckets on their way
        self._hooks: list[_Handle] = []
        self._sharded = frozenset(name for name, p in module.named_parameters() if is_dtensor(p))
        self._follow_tags()
        weakref.finalize(self, _remove_all, self._hooks)  # the module inside may outlive its wrapper
        # 3. All ranks of a group must have the same parameters, in one order, or a broadcast or reduction would hang.
        for tag, group in self.groups.items():
            check_same(
                f"parameters tagged {tag!r}",
                [
                    (name, list(p.shape), str(p.dtype), "trained" if p.requires_grad else "frozen")
                    for name, p in module.named_parameters()
                    if tag_of(p) == tag
                ],
                group,
            )
        # 4. All copies begin with the values of the group's first rank.
        if need_sync:
            for tag, group in self.groups.items():
                copies = [p for p in module.parameters() if tag_of(p) == tag and not is_dtensor(p)]
                self._broadcast([p.detach() for p in copies], group)
            self._broadcast(list(module.buffers()), self.groups["dp"])

        # 5. A state dict of the module inside, whose keys lack "module.", loads too.
        def accept_bare_keys(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
            own = [key for key in state_dict if key.startswith(prefix)]
            if not any(key.startswith(f"{prefix}module.") for key in own):
                for key in own:
                    state_dict[f"{prefix}module.{key.removeprefix(prefix)}"] = state_dict.pop(key)

        self.register_load_state_dict_pre_hook(accept_bare_keys)
        num_copies = dist.get_world_size(self.groups["gate"])
        warn_of_copies(module, num_copies, "the copies part")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.broadcast_buffers and self.training and not self._accumulates:
            self._broadcast(list(self.module.buffers()), self.groups["dp"])
        # buckets and hooks must be those of this forward's tags before its backward
        if self._tags.have_changed():
            self._retag()
        if self.training:
            self._reduction_due |= self._sync
            self._accumulates = True
        return self.module(*args, **kwargs)

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "DistributedGroupedDataParallel cannot be copied or pickled, its groups and hooks are this process's: copy "
            "or save its .module (AveragedModel(model.module), torch.save(model.module)), or its state_dict()"
        )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backwards inside the block only accumulate gradients; the next backward outside reduces the sum."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def allreduce_params(
        self, no_scale: bool = False, reduce_after: bool = False, fp32_allreduce: bool = False
    ) -> None:
        """Reduce all gradients, or end the reduction that has begun; FastMoE's allreduce_gradients.

        Gradients are divided by the size of their group before the sum, or after it (reduce_after), or not (no_scale);
        fp32_allreduce sums in float32. Buckets that a backward has started keep the way in which they were started.
        """
        if self._tags.have_changed():
            self._retag()
        # The hooks have started the first _num_started buckets; start the others, then wait for all.
        for bucket in self._buckets[self._num_started :]:
            bucket.start(not (no_scale or reduce_after), fp32_allreduce or self.fp32_allreduce)
        for i, bucket in enumerate(self._buckets):
            bucket.finish(reduce_after and not no_scale and i >= self._num_started)
        self._num_started = 0
        self._reduction_due = self._accumulates = False
        if not self.share_overflow:
            return
        # Experts' gradients are not reduced over all ranks, and those of shards not here: tell all of them whether any
        # rank's is not finite. With slices dp is not all ranks; dp and then the experts' group reach them (groups.py).
        grads = [p.grad for p in self.module.parameters() if p.grad is not None]
        grads = [grad.to_local() if is_dtensor(grad) else grad for grad in grads]
        grads = [grad for grad in grads if grad.numel() > 0]
        with torch.no_grad():
            # 0 * inf and 0 * nan are nan, and a sum over ranks keeps it
            poison = torch.zeros((), dtype=torch.float32, device=device_of(self.module))
            for grad in grads:
                poison += grad.sum(dtype=torch.promote_types(grad.dtype, torch.float32)) * 0
            tags = {"dp", *map(tag_of, self.module.parameters())}
            for group in dict.fromkeys(group for tag, group in self.groups.items() if tag in tags):
                dist.all_reduce(poison, group=group)
            # into each gradient, since each optimizer's GradScaler looks only at the gradients of that optimizer
            for grad in grads:
                grad[(0,) * grad.dim()].add_(poison)

    allreduce_gradients = allreduce_params

    def finish_reduction(self) -> None:
        """End a reduction that auto_allreduce has begun, if there is one; all ranks call it."""
        if self.auto_allreduce and self._reduction_due:
            self.allreduce_params()

    def _follow_tags(self) -> None:
        """Make buckets and hooks for the tags that the parameters have now."""
        self._tags = _Tags(self.module, self.groups, self._sharded)
        self.tagged = self._tags.params
        # 1. Buckets. "none" last: its buckets reduce nothing, and those before need not wait for its gradients.
        self._buckets: list[_Bucket] = []
        for tag, params in sorted(self.tagged.items(), key=lambda item: item[0] == "none"):
            # the last bucket of each dtype, and its bytes
            filling: dict[torch.dtype, tuple[list[nn.Parameter], int]] = {}
            lists: list[list[nn.Parameter]] = []
            for p in reversed(params):  # the last layer's gradients come first
                bucket, size = filling.get(p.dtype, ([], 0))
                num_bytes = p.numel() * p.element_size()
                if not bucket or size + num_bytes > self._max_bytes:
                    bucket, size = [], 0
                    lists.append(bucket)
                bucket.append(p)
                filling[p.dtype] = bucket, size + num_bytes
            self._buckets += [_Bucket(bucket, self.groups.get(tag)) for bucket in lists]
        # 2. Hooks that scale gradients.
        if self._expert_grads == "mean":
            self._hooks += self._tags.scale(self._factor)
        # 3. Hooks that count gradients down and start buckets; what stays is reduced before an optimizer steps.
        if not self.auto_allreduce:
            return
        this = weakref.ref(self)  # else the hooks of the parameters would keep the wrapper alive

        def gradient_came(p: nn.Parameter, number: int) -> None:
            module = this()
            if module is not None and module._sync:
                module._count(p, number)

        for number, each in enumerate(self._buckets):
            for p in each.params:
                hook = p.register_post_accumulate_grad_hook(lambda p, number=number: gradient_came(p, number))
                self._hooks.append(hook)
        follow_optimizers(self, _FinishBeforeSteps(self))

    def _retag(self) -> None:
        """Follow tags that have changed, as FastMoE does, unless gradients of another scale have come."""
        under_way = any(len(bucket.missing) < len(bucket.params) for bucket in self._buckets)
        self._tags.check_change(under_way, self._factor if self._expert_grads == "mean" else None)
        _remove_all(self._hooks)
        self._hooks.clear()
        self._follow_tags()

    def _factor(self, p: nn.Parameter, tag: str) -> float:
        """Return n / (size of dp_group), the scale of a gradient before its mean over the n ranks of its tag."""
        size = dist.get_world_size(self.groups[tag]) if tag in self.groups and tag != "none" else 1
        return size / dist.get_world_size(self.groups["dp"])

    @staticmethod
    @torch.no_grad()
    def _broadcast(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> None:
        """Overwrite the tensors with those of the group's first rank."""
        source = dist.get_process_group_ranks(group)[0]
        for tensor in tensors:
            whole = tensor.resolve_conj().contiguous()
            as_bytes = whole.view(-1).view(torch.uint8)  # no backend knows all dtypes
            dist.broadcast(as_bytes, source, group=group)
            tensor.copy_(whole)

    def _count(self, p: nn.Parameter, number: int) -> None:
        """Note that the gradient of p, in bucket `number`, has come; start the buckets that are complete."""
        # A gradient comes twice in one backward if reentrant checkpoints use a module twice.
        if number < self._num_started and self._buckets[number].group is not None:
            name = next(name for name, q in self.module.named_parameters() if q is p)
            raise RuntimeError(
                f"another gradient of parameter {name!r} came while its first was being reduced, and would be lost: it "
                "is used by several reentrant checkpoints, or in several backward passes, or the last backward raised. "
                "Use checkpoint(..., use_reentrant=False), auto_allreduce=False with allreduce_params() after the "
                "backward, or no_sync() around all backward passes but the last; after a backward that raised call "
                "allreduce_params() on all ranks, then zero_grad()"
            )
        self._reduction_due = True
        self._buckets[number].missing.discard(p)
        # Always in the order of the list, so that all ranks start the same reductions in the same order.
        while self._num_started < len(self._buckets) and not self._buckets[self._num_started].missing:
            self._buckets[self._num_started].start(True, self.fp32_allreduce)
            self._num_started += 1
        if self._num_started == len(self._buckets):
            self.allreduce_params()


class _FinishBeforeSteps:
    """End the reduction before an optimizer steps with its gradients."""

    def __init__(self, module: DistributedGroupedDataParallel) -> None:
        self._module = weakref.ref(module)

    def before(self, optimizer: Optimizer) -> None:
        module = self._module()
        if module is not None and has_a_parameter_of(optimizer, module.parameters()):
            module.finish_reduction()

    after_closure = before

    def after(self, optimizer: Optimizer) -> None:
        pass


def _remove_all(hooks: list[_Handle]) -> None:
    for hook in hooks:
        hook.remove()


def fully_shard_experts(layer: FMoE, mesh: DeviceMesh, **options: Any) -> None:
    """Apply torch's fully_shard to a layer's experts, with the gradient of one process on the whole batch.

    mesh: one-dimensional, the ranks that hold the same experts: DeviceMesh.from_group(init_groups(...).experts, "cpu").
    options: of fully_shard. All ranks of the layer call it, before DistributedGroupedDataParallel, which then leaves
    these parameters alone and takes the gate and all else. fully_shard alone divides gradients by the size of mesh, but
    the rows of these experts come from the whole job, whose loss is the mean over all of its ranks. checkpoint.save()
    and load() take experts that are sharded so, into and from any layout.
    Raises ValueError for a mesh of more dimensions, or of ranks that hold different experts.
    Equivalent to: fully_shard(layer.experts, mesh=mesh).set_gradient_divide_factor(ranks with different tokens).

    >>> store = torch.distributed.HashStore()  # one rank here; torchrun's several say init_process_group("gloo")
    >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> layer = fmoe_ext.FMoETransformerMLP(4, d_model=8, d_hidden=16)
    >>> fully_shard_experts(layer, torch.distributed.init_device_mesh("cpu", (1,)))
    >>> [type(p).__name__ for p in layer.experts.parameters()]
    ['DTensor', 'DTensor', 'DTensor', 'DTensor']
    >>> torch.distributed.destroy_process_group()
    """
    from torch.distributed.fsdp import fully_shard  # slow to import: about a second

    if mesh.ndim != 1:
        raise ValueError(
            f"mesh must have one dimension, the ranks with the same experts, but has {mesh.ndim}"
        )
    check_mesh(layer, mesh.mesh.tolist())
    sharded = fully_shard(layer.experts, mesh=mesh, **options)
    ep_size, parallel = 1, layer.expert_parallel
    if parallel is not None:
        ep_size = parallel.size
        parallel.sharing_ranks = gather_values(mesh.mesh.tolist(), find_group(parallel.group))
    # the ranks with different tokens: ranks of one slice group have the same ones
    sharded.set_gradient_divide_factor(mesh.size() * ep_size / layer.slice_size)
    shards = list(sharded.parameters())
    last = [p.requires_grad for p in shards]

    def honour_requires_grad(experts: Any, args: Any) -> None:
        # A parameter exists twice, as a shard and gathered, each with its own requires_grad; the one set last counts.
        # torch leaves parameters gathered after a forward that no backward follows, as with frozen experts, and does
        # not read requires_grad of either kind again: what the user set since then would be lost, and with it
        # gradients (pytorch#186998).
        nonlocal shards, last
        now = list(experts.parameters())
        wanted = [p.requires_grad for p in now]
        if all(map(is_dtensor, now)):
            shards = now
        elif wanted != (of_shards := [p.requires_grad for p in shards]):
            # the kind that differs from the last forward was set since
            wanted = of_shards if wanted == last else wanted
            experts.reshard()  # frees the gathered ones: now parameters() are the shards
            for p, flag in zip(experts.parameters(), wanted, strict=True):
                p.requires_grad_(flag)
        last = wanted

    sharded.register_forward_pre_hook(honour_requires_grad, prepend=True)  # before torch's own, which gathers
