"""ExpertHost: hold a server's experts, compute batches with them, and update them. For the computing thread alone.

ComputeThread (service.py) gives it batches of Jobs, and each Job's done() an Answer or an error. A batch is cut into
*rounds*: in a round all rows of an expert have one shape, so that one call of the stack computes all. A backward steps
each expert once, for all gradients of the round together: an *update*, which gives the next version. Senders are
answered when `when_committed` calls back: at once, or with replicas when all members have the update. Replicas on equal
processors repeat an update and get the same bits.
"""

import functools
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from fmoe_ext.remote.expert_classes import (
    ExpertClass,
    Gradients,
    Part,
    Stack,
    find_schema,
    initial_state,
    make_stack,
)
from fmoe_ext.remote.schema import SchemaError
from fmoe_ext.remote.server.fair_queue import Job
from fmoe_ext.remote.server.ledger import Ledger, ReplyCache, Request, Update
from fmoe_ext.remote.server.options import STATE_NAMES, Training
from fmoe_ext.remote.wire import bytes_of

_DIGEST_EVERY = 50  # updates of a replicated expert: then followers compare their weights with the leader's


class ExpertMissing(Exception):
    """This server does not host the expert (any more)."""


class StaleGradient(Exception):
    """The expert has moved on too far since the forward that the gradient belongs to."""


@dataclass
class Hosted:
    """An expert that this server hosts."""

    uid: str
    place: int  # in the stack
    optimizer: torch.optim.Optimizer | None  # None: it is not trained
    ledger: Ledger = field(default_factory=Ledger)
    num_rows: int = 0  # of all forward calls
    num_refused: int = 0  # updates that were not finite
    grad_norm: float = 0.0  # of the last update

    @property
    def version(self) -> int:
        """The number of updates that the weights have had."""
        return self.ledger.version

    @property
    def num_requests(self) -> int:
        """Gradients applied since the expert began, each counted once."""
        return self.ledger.num_requests

    def step(
        self, views: dict[str, torch.Tensor], grads: dict[str, torch.Tensor], training: Training
    ) -> None:
        """Clip the gradient, set the learning rate and step. views: the parameters by name; grads: for some of them.

        SchemaError, the client's fault, and no step if the gradient is not finite.
        """
        # one norm over all parameters, as torch.nn.utils.clip_grad_norm_ has it
        norms = [torch.linalg.vector_norm(g.float()) for g in grads.values()]
        norm = torch.linalg.vector_norm(torch.stack(norms)).item() if norms else 0.0
        if not norm < float("inf"):  # NaN too
            text = f"the gradient of {self.uid}'s weights holds NaN or infinity: no update was made"
            raise SchemaError(text)
        self.grad_norm = norm
        limit = training.max_grad_norm
        scale = limit / norm if limit is not None and norm > limit else 1.0
        if self.optimizer is not None:
            params = dict(zip(views, self.optimizer.param_groups[0]["params"], strict=True))
            for name, grad in grads.items():
                params[name].grad = grad if scale == 1.0 else grad * scale
            self.optimizer.param_groups[0]["lr"] = training.lr_at(self.version)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)


@dataclass(frozen=True)
class Answer:
    """The answer to a job."""

    tensors: tuple[torch.Tensor, ...]
    version: int  # of the weights that gave them, or to which they led


Finish: TypeAlias = "Callable[[], None]"
Fail: TypeAlias = "Callable[[Exception], None]"
# of an update: (uid, version, finish, fail)
WhenCommitted: TypeAlias = "Callable[[str, int, Finish, Fail], None]"


class ExpertHost:
    """Hosts experts of one class and width."""

    def __init__(
        self,
        expert_class: ExpertClass,
        hidden_dim: int,
        training: Training | None = None,
        device: str = "cpu",
        seed: int = 0,
        stack: Stack | None = None,
    ):
        self.expert_class, self.hidden_dim, self.seed = expert_class, hidden_dim, seed
        self.training = training or Training()
        # raises here if the optimizer is unknown, not at the first expert
        self.training.make_optimizer([torch.zeros(1, device="cpu")])
        self.experts: dict[str, Hosted] = {}
        # calls finish() once the update may be answered, or fail(); without replicas that is at once
        self.when_committed: WhenCommitted = lambda uid, version, finish, fail: finish()
        self.is_replicated = False  # set before the first expert: steps need a leader
        self.may_step: Callable[[str], None] = lambda uid: None  # raises to refuse a gradient
        self.schema = find_schema(expert_class, hidden_dim)
        self._stack = stack or make_stack(expert_class, hidden_dim, torch.device(device))
        self._num_places = 0
        self._free: list[int] = []  # places of the stack
        self._replies = ReplyCache()

    # ---------------------------------------------------------------- which experts

    def add(self, uids: Sequence[str]) -> None:
        """Host experts with the weights that they start from: a function of class, width, seed and uid."""
        new = [uid for uid in uids if uid not in self.experts]
        if (missing := len(new) - len(self._free)) > 0:
            first, self._num_places = self._num_places, self._num_places + missing
            self._stack.resize(self._num_places)
            self._free += range(first, self._num_places)
            # resize() has moved all parameters: each expert gets an optimizer on the new views, with its old state
            for expert in self.experts.values():
                if (old := expert.optimizer) is not None:
                    expert.optimizer = self.training.make_optimizer(self._stack.views(expert.place).values())
                    assert expert.optimizer is not None
                    expert.optimizer.load_state_dict(old.state_dict())
        for uid in new:
            place = self._free.pop(0)
            views = self._stack.views(place)
            own = views | self._stack.buffers(place)
            for name, value in initial_state(self.expert_class, self.hidden_dim, uid, self.seed).items():
                own[name].copy_(value)
            ledger = Ledger(self.is_replicated, functools.partial(self._replies.drop, uid))
            optimizer = self.training.make_optimizer(views.values())
            self.experts[uid] = Hosted(uid, place, optimizer, ledger)

    def remove(self, uid: str) -> None:
        self._free.append(self.find(uid).place)
        self._replies.forget(uid)
        del self.experts[uid]

    def find(self, uid: str) -> Hosted:
        expert = self.experts.get(uid)
        if expert is None:
            raise ExpertMissing(f"this server does not host {uid}")
        return expert

    def parameters(self, uid: str) -> dict[str, torch.Tensor]:
        """Return the parameters of an expert by name; they share memory with those that compute."""
        return self._stack.views(self.find(uid).place)

    def buffers(self, uid: str) -> dict[str, torch.Tensor]:
        """Return the persistent buffers of an expert by name; they belong to its state."""
        return self._stack.buffers(self.find(uid).place)

    def state_bytes(self, uid: str) -> int:
        """Return the bytes that read_state() copies, without request ids: weights, buffers, moments."""
        own, buffers = self.parameters(uid).values(), self.buffers(uid).values()
        moments = sum(name != "step" for name in STATE_NAMES[self.training.optimizer])
        return (1 + moments) * sum(x.nbytes for x in own) + sum(x.nbytes for x in buffers)

    def digest(self, uid: str) -> str:
        """Return a hash of the weights, 16 hexadecimal digits: replicas compare it."""
        total = hashlib.blake2b(digest_size=8)
        for p in self.parameters(uid).values():
            total.update(bytes_of(p))
        return total.hexdigest()

    # ---------------------------------------------------------------- batches

    def run(self, batch: Sequence[Job]) -> None:
        """Answer every job of a batch. A round that fails is run again job by job, so that only the bad ones fail."""
        work = self._backward if batch[0].is_backward else self._forward
        # (by uid: the shapes of a row; jobs); a job joins the first round where its expert has its shapes, or none yet
        rounds: list[tuple[dict[str, list[torch.Size]], list[Job]]] = []
        for job in batch:
            shapes = [x.shape[1:] for x in job.inputs]
            for seen, jobs in rounds:
                if seen.setdefault(job.uid, shapes) == shapes:
                    jobs.append(job)
                    break
            else:
                rounds.append(({job.uid: shapes}, [job]))
        for _, jobs in rounds:
            try:
                work(jobs)
            except Exception as error:
                if len(jobs) == 1:
                    jobs[0].done(error)
                else:
                    for job in jobs:
                        self.run([job])

    def apply(self, update: Update) -> None:
        """Repeat an update that another replica made; ValueError if it is not the next one."""
        expert = self.find(update.uid)
        if update.end.version != expert.version + 1:
            text = f"{update.uid} is at version {expert.version}, update {update.end.version} is not the next"
            raise ValueError(text)
        jobs = [Job(update.uid, r.inputs, lambda _: None, r.grad, r.request_id) for r in update.requests]
        (grads,) = self._stack.backward([_part(expert, jobs)])
        expert.step(self._stack.views(expert.place), grads.parameters, self.training)
        expert.ledger.note_applied(update)
        self._remember(expert, update, grads)

    def _by_expert(self, jobs: Sequence[Job]) -> list[tuple[Hosted, list[Job]]]:
        """Group jobs by expert, in the order of the stack's places, which a grouped stack needs."""
        groups: dict[str, list[Job]] = {}
        for job in jobs:
            groups.setdefault(job.uid, []).append(job)
        return sorted(((self.find(uid), group) for uid, group in groups.items()), key=lambda g: g[0].place)

    def _forward(self, jobs: Sequence[Job]) -> None:
        by_expert = self._by_expert(jobs)
        outputs = self._stack.forward([_part(expert, group) for expert, group in by_expert])
        for (expert, group), rows in zip(by_expert, outputs, strict=True):
            expert.num_rows += rows.shape[0]
            for job, y in zip(group, rows.split([job.num_rows for job in group]), strict=True):
                job.done(Answer((y,), expert.version))

    def _backward(self, jobs: Sequence[Job]) -> None:
        # 1. leave out what needs no step: refused, applied before, or twice in this batch
        first: dict[tuple[str, str], Job] = {}
        fresh = []
        for job in jobs:
            if self._answer_without_update(job):
                continue
            known = first.setdefault((job.uid, job.request_id), job) if job.request_id else job
            if known is job:
                fresh.append(job)
            else:  # the same request twice in this batch: the second one gets the answer of the first
                known.done = functools.partial(_tell, (known.done, job.done))
        # 2. the gradients of all experts in one product, then a step of each
        by_expert = self._by_expert(fresh)
        if not by_expert:
            return
        gradients = self._stack.backward([_part(expert, group) for expert, group in by_expert])
        for (expert, group), grads in zip(by_expert, gradients, strict=True):
            self._update(expert, group, grads)

    def _update(self, expert: Hosted, group: Sequence[Job], grads: Gradients) -> None:
        """Make one step of one expert for all gradients that came together, and answer once it is committed."""
        ledger, tell = expert.ledger, functools.partial(_tell, [job.done for job in group])
        try:
            with ledger.lock:  # or the lead could be lost between the step and its entry in the log
                ledger.check_open(expert.uid)
                expert.step(self._stack.views(expert.place), grads.parameters, self.training)
                requests = [Request(j.request_id, j.inputs, j.grad) for j in group if j.grad is not None]
                has_digest = ledger.is_replicated and (ledger.version + 1) % _DIGEST_EVERY == 0
                digest = self.digest(expert.uid) if has_digest else ""
                update = ledger.append(expert.uid, requests, digest)
        except SchemaError as error:
            if len(group) > 1:  # each alone shows which gradient is not finite
                for job in group:
                    self.run([job])
            else:
                expert.num_refused += 1
                group[0].done(error)
            return
        except Exception as error:  # NotLeader, or unforeseen: run() would step the others of the round again
            tell(error)
            return
        answers = self._remember(expert, update, grads)

        def finish() -> None:
            for job, answer in zip(group, answers, strict=True):
                job.done(answer)

        self.when_committed(expert.uid, update.end.version, finish, tell)

    def _answer_without_update(self, job: Job) -> bool:
        """Answer a gradient that was applied before, or is refused; False if it is new and has to be applied."""
        try:
            expert = self.find(job.uid)
            self.may_step(job.uid)
            version = expert.ledger.applied.get(job.request_id) if job.request_id else None
            behind = 0 if job.seen_version is None else expert.version - job.seen_version
            bound = self.training.max_staleness
            if version is None and bound is not None and behind > bound:
                text = f"{job.uid} has made {behind} updates since the forward of this gradient; "
                text += f"max_staleness allows {bound}"
                raise StaleGradient(text)
        except Exception as error:
            job.done(error)
            return True
        if version is None:
            return False
        tensors = self._replies.get(expert.uid, job.request_id)
        if tensors is None:  # no longer kept: computed anew with the present weights, without an update
            (grads,) = self._stack.backward([_part(expert, [job])])
            tensors = _given(grads.inputs)
        answer = Answer(tensors, version)
        self.when_committed(job.uid, version, lambda: job.done(answer), job.done)
        return True

    def _remember(self, expert: Hosted, update: Update, grads: Gradients) -> list[Answer]:
        """Return the answer to each request of an update, and keep it in case the request comes again."""
        sizes = [request.grad.shape[0] for request in update.requests]
        given = [d.split(sizes) for d in _given(grads.inputs)]
        answers = []
        for n, request in enumerate(update.requests):
            tensors = tuple(parts[n] for parts in given)  # () for integer inputs
            answers.append(Answer(tensors, update.end.version))
            if request.request_id:
                self._replies.put(expert.uid, request.request_id, tensors)
        return answers


def _tell(several: Sequence[Callable[[object], None]], result: object) -> None:
    for done in several:
        done(result)


def _part(expert: Hosted, jobs: Sequence[Job]) -> Part:
    """Return one Part with the rows of all jobs of an expert, in their order."""
    if len(jobs) == 1:
        return Part(expert.place, jobs[0].inputs, jobs[0].grad)
    inputs = tuple(torch.cat(parts) for parts in zip(*(job.inputs for job in jobs), strict=True))
    grads = [job.grad for job in jobs if job.grad is not None]
    return Part(expert.place, inputs, torch.cat(grads) if grads else None)


def _given(tensors: Iterable[torch.Tensor | None]) -> tuple[torch.Tensor, ...]:
    return tuple(x for x in tensors if x is not None)
