"""BaseGate: what gates have besides their choices: a balance loss, a tape for choices, and the ranks they count over.

* The balance loss is state of the module: the forward sets it, and a training loop that knows nothing of the layers
  between reads it once a step (losses.total_loss). A thread reads the loss of its own last forward; a compiled program,
  which cannot tell threads apart, has one for all of them.
* The tape. Where activation checkpointing repeats a forward, logits that differ in their last bit must not send a token
  to another expert, whose gradient would then lack it. So a gate asks choose(pick) for its choices: without a tape it
  gets pick(), which the step remembers; for the repetition the layer gives the gate a tape (recompute.Repeat) that
  plays them back. balance.RoutingReplay records and plays through the same place. Each thread has a tape of its own.
  topk() is choose() for gates that take the best logits; it weighs them in the same operator.
* Ranks, in the gates that have any: counts, losses and capacities are over the tokens of a group, by default of all
  ranks that share the experts.
"""

import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from fmoe_ext import ops
from fmoe_ext._fastmoe_names import Alias
from fmoe_ext.gates.scores import weights_of
from fmoe_ext.ops.outside_graphs import is_exporting
from fmoe_ext.recompute import current_thread, is_repeated
from fmoe_ext.step import is_counted, note_selected


class Ranks(Protocol):
    """Sums over the ranks whose tokens count together, for a gate's counts, losses and capacities; see OneRank."""

    @property
    def rank(self) -> int: ...
    def num_tokens(self, num_local_tokens: int) -> int: ...
    def first_token(self, num_local_tokens: int) -> int: ...
    def sum(self, x: torch.Tensor) -> torch.Tensor: ...
    def gather(self, x: torch.Tensor, same_size: bool = False) -> list[torch.Tensor]: ...
    def apply_capacity(
        self, topk_idx: torch.Tensor, num_experts: int, capacity: int | torch.Tensor
    ) -> torch.Tensor: ...


class OneRank:
    """Ranks for a gate whose tokens are all in this process."""

    rank: int = 0

    def num_tokens(self, num_local_tokens: int) -> int:
        """Count the tokens of all ranks."""
        return num_local_tokens

    def first_token(self, num_local_tokens: int) -> int:
        """Number this rank's first token among the tokens of all ranks."""
        return 0

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum x over the ranks, differentiable."""
        return x

    def gather(self, x: torch.Tensor, same_size: bool = False) -> list[torch.Tensor]:
        """Gather x of every rank, in the order of their ranks, not differentiable; dimension 0 may differ.

        same_size: it does not, so that no sizes are exchanged.
        """
        return [x]

    def apply_capacity(
        self, topk_idx: torch.Tensor, num_experts: int, capacity: int | torch.Tensor
    ) -> torch.Tensor:
        """Drop all but the first `capacity` choices of each expert over the ranks: topk_idx with -1 for the rest."""
        return ops.apply_capacity(topk_idx, num_experts, capacity)


@dataclass(slots=True)
class _Loss:
    """The balance loss of one thread's last forward of a gate."""

    loss: torch.Tensor | None
    lacks_gradient: bool  # a training forward that ran without gradients
    num_calls: int  # forwards with gradients since total_loss() read a loss
    of_graph: Any  # graph_loss at that time: another one now means that a compiled forward came later
    is_read: bool = False  # by total_loss(): the next forward has set no loss yet


class _Losses(threading.local):
    last: _Loss | None = None  # of this thread's last forward of a gate

    def __reduce__(self) -> tuple[type["_Losses"], tuple[()]]:
        return _Losses, ()  # a copy of the gate begins with none


class BaseGate(nn.Module):
    """Base class of gates: the experts of this rank and of all ranks, and the balance loss of the last forward.

    num_local_experts and num_experts are num_expert and tot_expert in FastMoE, whose names work too.
    The loss is state of the module until the next forward or get_loss(): the last of several forwards wins, a copy
    (deepcopy, pickle, a DataParallel replica, torch.export) does not carry it. Each thread reads the loss of its own
    last forward; a thread that never called the gate reads the last one of all. torch.utils.checkpoint sets it a
    second time when the backward runs the forward again; with use_reentrant=True it has no gradient outside, and
    get_loss() raises.

    Example:

        >>> class FirstExpert(BaseGate):
        ...     top_k = 1
        ...     def forward(self, x):  # -> experts [T, K] and their weights
        ...         return torch.zeros(len(x), 1, dtype=torch.int64), torch.ones(len(x), 1)
        >>> gate = FirstExpert(num_expert=4, world_size=1)
        >>> mlp = fmoe_ext.FMoETransformerMLP(num_experts=4, d_model=8, d_hidden=16, gate=gate, top_k=1)
        >>> mlp(torch.randn(3, 8)).sum().backward()
        >>> mlp.experts.htoh4.weight.grad.abs().sum((1, 2)) > 0
        tensor([ True, False, False, False])
    """

    @property
    def weight_sum(self) -> float:
        """Return the sum of every token's topk_weights, unless weights_vary."""
        return 1.0

    @property
    def weights_vary(self) -> str | None:
        """Say why a token's topk_weights may have another sum than weight_sum; None where they cannot."""
        return "its weights are not known; if they always have one sum, give it the attribute total_weight"

    @property
    def depends_on_batch(self) -> str | None:
        """Say why a token's choices or weights depend on the other tokens, and what to do; None where they do not."""
        return None

    num_expert, tot_expert = Alias("num_local_experts"), Alias("num_experts")

    def __init__(self, num_expert: int, world_size: int) -> None:
        super().__init__()
        if num_expert < 1 or world_size < 1:
            raise ValueError(
                f"num_expert and world_size must be at least 1, but got {num_expert} and {world_size}"
            )
        self.num_local_experts = num_expert
        self.world_size = world_size
        self.num_experts = num_expert * world_size
        # A compiled program cannot tell threads apart. Its losses are state of the gate, one for all of them.
        self.graph_loss: torch.Tensor | None = None
        self.graph_loss_is_read = self._graph_loss_lacks_gradient = False
        self._losses = _Losses()
        self._last_loss: _Loss | None = None  # of all threads
        self.warned: set[str] = set()  # of what, once a gate: "calls", "no balance", "copies", "adapters"
        self._tapes: dict[int, Any] = {}  # {thread: tape}

    @property
    def ranks(self) -> Ranks:
        """Return the ranks whose tokens count together; in a block of accumulation.py, its sums around them."""
        ranks = self._ranks
        if type(ranks) is OneRank:
            return ranks
        # gates.accumulation puts its sums here for one thread; other threads compute as without them
        of_thread = getattr(ranks, "of_thread", None)
        return ranks if of_thread is None else of_thread()

    @ranks.setter
    def ranks(self, value: Ranks) -> None:
        self._ranks = value

    def forward(self, x: Any) -> Any:
        raise NotImplementedError(
            f"{type(self).__name__} must define forward(inp) -> (topk_idx, topk_weights)"
        )

    def check_top_k(self, top_k: int) -> None:
        """Raise ValueError unless a token can choose top_k experts."""
        if not 1 <= top_k <= self.num_experts:
            raise ValueError(f"top_k must be between 1 and the {self.num_experts} experts, but got {top_k}")

    def set_loss(self, loss: torch.Tensor | None, *, constant: bool = False) -> None:
        """Keep the balance loss of this forward, None for none; constant: it would have no gradient in any case."""
        lacks_gradient = self.training and not constant and not torch.is_grad_enabled()
        if torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting():
            if is_exporting():  # an exported program has no state of the module to set
                return
            # reads nothing: a graph is compiled again for each value that it reads
            self.graph_loss, self.graph_loss_is_read = loss, False
            self._graph_loss_lacks_gradient = lacks_gradient
            return
        num_calls = 0
        if loss is not None and loss.requires_grad and self.training and is_counted():
            before = self._losses.last
            num_calls = 1 if before is None or before.is_read else before.num_calls + 1
        last = _Loss(loss, lacks_gradient, num_calls, self.graph_loss)
        self._losses.last = self.__dict__["_last_loss"] = last  # a module's attribute takes long to set

    @property
    def _loss_of_thread(self) -> _Loss | None:
        """Return the loss that this thread reads; None where a compiled program left it."""
        if torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting():
            return None
        own = self._losses.last or self._last_loss
        # a compiled forward came after this thread's last eager one
        is_newer = self.graph_loss is not None and (own is None or own.of_graph is not self.graph_loss)
        return None if is_newer else own

    @property
    def loss(self) -> torch.Tensor | None:
        """Return the balance loss of this thread's last forward, None without one."""
        own = self._loss_of_thread
        return self.graph_loss if own is None else own.loss

    @loss.setter
    def loss(self, value: torch.Tensor | None) -> None:
        self.set_loss(value)

    @property
    def loss_is_read(self) -> bool:
        """Return whether total_loss() has read this loss; it then takes it for an earlier forward's."""
        own = self._loss_of_thread
        return self.graph_loss_is_read if own is None else own.is_read

    def note_read(self) -> int:
        """Set loss_is_read -> the number of forwards with gradients since it was set last."""
        own = self._loss_of_thread
        if own is None:
            self.graph_loss_is_read = True
            return 0
        own.is_read = True
        return own.num_calls

    def get_loss(self, clear: bool = True) -> torch.Tensor | None:
        """Return the balance loss of the last forward, or None; clear=True forgets it and frees its graph.

        Raises RuntimeError, where gradients are on, for the loss of a training forward that ran without them.
        """
        own = self._loss_of_thread  # None: a compiled program left the loss
        loss = self.graph_loss if own is None else own.loss
        lacks_gradient = self._graph_loss_lacks_gradient if own is None else own.lacks_gradient
        if clear:
            if own is None:
                self.graph_loss = None
            elif self._losses.last is None:  # another thread's, which keeps it
                self._last_loss = None
            else:
                own.loss = None
        # Not under no_grad, where a caller looks at the value, and not for a gate that does not train.
        if (
            loss is not None
            and lacks_gradient
            and torch.is_grad_enabled()
            and any(p.requires_grad for p in self.parameters())
        ):
            raise RuntimeError(
                f"the balance loss of {type(self).__name__} has no gradient, so that training would not balance: its "
                "forward ran under torch.no_grad(), as torch.utils.checkpoint(..., use_reentrant=True) runs it. Pass "
                "use_reentrant=False (Transformers: gradient_checkpointing_kwargs={'use_reentrant': False}), or add "
                "the loss inside the checkpointed function; to look at its value, call get_loss() under no_grad too"
            )
        return loss

    @property
    def has_loss(self) -> bool:
        """Return whether there is a balance loss for get_loss()."""
        return self.loss is not None

    @property
    def balances(self) -> bool:
        """Return whether a loss, a bias or the construction evens out the load of the experts."""
        return True

    @property
    def moves_bias(self) -> bool:
        """Return whether a bias of the choices moves by the load that this rank's gate has counted."""
        return False

    def warn_of_copies(self, num_copies: int, consequence: str, name: str = "gate") -> None:
        """Warn once if a bias moves by the load of fewer ranks than the num_copies that hold copies of this gate."""
        num_ranks = getattr(getattr(self, "ranks", None), "size", 1)
        if not self.moves_bias or num_ranks >= num_copies or "copies" in self.warned:
            return
        self.warned.add("copies")
        warnings.warn(
            f"the bias of {name!r} ({type(self).__name__}) moves by the tokens of {num_ranks} of the {num_copies} "
            f"ranks that hold copies of it: {consequence}. Give the layer gate_group=, the group of all of them "
            "(torch.distributed.group.WORLD, groups.world of init_groups())",
            stacklevel=4,
        )

    def check_spread(self, size: int) -> None:
        """Raise ValueError if this gate, made for one process, cannot choose for experts on size ranks."""

    @property
    def tape(self) -> Any:
        """Return this thread's tape: RoutingReplay's while it records or plays, FMoE's while it repeats a forward.

        None without one.
        """
        return tape_of_thread(self._tapes) if self._tapes else None

    @tape.setter
    def tape(self, value: Any) -> None:
        put_tape(self._tapes, value)

    @property
    def weighs_while_choosing(self) -> bool:
        """Return whether topk() is one operator: no choices are replayed to it."""
        tape = self.tape if self._tapes else None
        return tape is None or getattr(tape, "only_listens", False)

    def topk(
        self,
        logits: torch.Tensor,
        top_k: int,
        score: str = "softmax",
        normalize: bool = True,
        scale: float = 1.0,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose by ops.topk_gate; while choices are played back, take those, weighed by the present logits."""
        if self.weighs_while_choosing:
            topk_idx, topk_weights = ops.topk_gate(logits, top_k, score, normalize, scale=scale, **options)
            return self.choose(lambda: topk_idx), topk_weights
        tape = self.tape
        # the first forward chose and weighed in one operator: its repetition must keep the same tensors
        if getattr(tape, "is_fused", False):
            chosen = tape.choose(None)
            return ops.topk_gate_again(logits, chosen, score, normalize, scale=scale, **options)
        topk_idx = self.choose(
            lambda: ops.topk_gate(logits.detach(), top_k, score, normalize, scale=scale, **options)[0]
        )
        return topk_idx, weights_of(logits, topk_idx, score, normalize, scale)

    def choose(self, pick: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return pick(), the choices of this forward; while choices are played back, those."""
        tape = self.tape if self._tapes else None
        selected = pick() if tape is None else tape.choose(pick)
        note_selected(selected)
        return selected

    def __getstate__(self) -> dict[str, Any]:
        # a copy does not share what was warned of: each gate warns for itself
        return {**self.__dict__, "warned": set(self.warned), **_without_forwards()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "ranks" in state:  # a pickle of an earlier version, which has no state of forwards either
            state = {**state, "_ranks": state["ranks"]}
        super().__setstate__({"warned": set(), **_without_forwards(), **state})


def _without_forwards() -> dict[str, Any]:
    """Return a gate's state of forwards, as before the first one."""
    return {"graph_loss": None, "_last_loss": None, "_losses": _Losses(), "_tapes": {}}


def put_tape(tapes: dict[int, Any], tape: Any) -> None:
    """Give this thread's forwards a tape, None for none."""
    if tape is None:
        tapes.pop(current_thread(), None)
    else:
        tapes[current_thread()] = tape


def tape_of_thread(tapes: dict[int, Any]) -> Any:
    """Find the tape of this thread's forwards, None without one; in a compiled program any thread's.

    Autograd repeats the forwards of a GPU on a thread of its own, which Python did not start: it plays the only tape.
    """
    if torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting():
        return next(iter(tapes.values()), None)
    tape = tapes.get(current_thread())
    if tape is None and len(tapes) == 1 and is_repeated():
        of_python = {thread.ident for thread in threading.enumerate()}
        return None if threading.get_ident() in of_python else next(iter(tapes.values()), None)
    return tape


def gates_of(module: nn.Module) -> list[BaseGate]:
    """List the gates of a model, in the order of its modules."""
    return [m for m in module.modules() if isinstance(m, BaseGate)]
