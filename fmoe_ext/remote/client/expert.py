"""RemoteExpert, one expert as a module; RemoteExperts, many as those of a layer; Directory, which finds them."""

from collections.abc import Sequence

import torch
from torch import nn

from fmoe_ext.gates import BaseGate
from fmoe_ext.remote import loop
from fmoe_ext.remote.client.batch import MARGIN, Batch, Call
from fmoe_ext.remote.client.client import Client, Settings
from fmoe_ext.remote.discovery import Discovery, ExpertRecord, is_uid
from fmoe_ext.remote.schema import Schema
from fmoe_ext.remote.security import Credentials


class RemoteExpert(nn.Module):
    """An expert on another machine: forward and backward go there, its weights are trained there.

    uid: its name. where: "host:port", several of them (replicas, the one that takes gradients first), a record of
    discovery, or None to ask the client's discovery. client: shared by many experts; it holds the deadlines.
    Calls raise SchemaError before anything is sent, RemoteError (CallTimeout, ExpertGone, Busy, Refused) after.
    It has no parameters here.
    """

    def __init__(
        self,
        uid: str,
        where: str | Sequence[str] | ExpertRecord | None = None,
        client: Client | None = None,
    ):
        super().__init__()
        self.client = client or Client()
        self.handle = self.client.handle(uid, where)

    @property
    def uid(self) -> str:
        """The expert's name."""
        return self.handle.uid

    def forward(
        self, *inputs: torch.Tensor, **keywords: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """inputs as the expert's schema says, a batch in dimension 0 -> its output, one row for each row.

        An expert with several outputs returns a tuple.
        """
        settings = self.client.settings
        if keywords or self.handle.schema is None or self.handle.schema.keywords:
            inputs = self.schema().arrange(inputs, keywords, self.uid)
        call = Call(self.handle, inputs)
        (y,) = Batch(self.client, [call], settings.forward_timeout, settings.backward_timeout).run()
        assert y is not None and self.handle.schema is not None
        return self.handle.schema.split(y)

    def schema(self) -> Schema:
        """The expert's inputs and outputs, fetched once."""
        timeout = self.client.settings.info_timeout
        return loop.run(self.client.learn(self.handle, timeout), timeout + MARGIN)

    def extra_repr(self) -> str:
        where = self.handle.record.endpoints if self.handle.record else "by discovery"
        return f"{self.uid!r}, {where}"


class RemoteExperts(nn.Module):
    """Experts for layer.experts of an FMoE(expert=None, num_expert=len(experts), ...): modules or RemoteExperts.

    forward(rows [R, D] sorted by expert, tokens_per_expert [E]) -> [R, D]: one call a remote expert, all of a
    client in parallel, while the local ones compute. An expert that does not answer in time gives zero rows, takes no
    gradient, and is gone for a while (is_gone); with LiveGate no token goes to it then.
    """

    def __init__(self, experts: Sequence[nn.Module], client: Client | None = None):
        super().__init__()
        self.members = nn.ModuleList(experts)
        remote = [expert.client for expert in experts if isinstance(expert, RemoteExpert)]
        self.client = client or (remote[0] if remote else Client())
        self.last_failed: dict[str, str] = {}  # uid: why, in the last forward

    def forward(self, rows: torch.Tensor, tokens_per_expert: torch.Tensor) -> torch.Tensor:
        counts = torch.as_tensor(tokens_per_expert).tolist()
        parts = rows[: sum(counts)].split(counts)  # rows of dropped choices lie behind
        calls = {
            n: Call(expert.handle, (parts[n],))
            for n, expert in enumerate(self.members)
            if isinstance(expert, RemoteExpert) and parts[n].shape[0]
        }
        outputs = self._call(calls)
        for n, expert in enumerate(self.members):
            if not isinstance(expert, RemoteExpert):
                outputs[n] = expert(parts[n])
        results = [outputs.get(n) for n in range(len(parts))]
        return torch.cat(
            [torch.zeros_like(x) if y is None else y for x, y in zip(parts, results, strict=True)]
        )

    def _call(self, calls: dict[int, Call]) -> dict[int, torch.Tensor | None]:
        if not calls:
            return {}
        settings = self.client.settings
        timeouts = settings.forward_timeout, settings.backward_timeout
        batch = Batch(self.client, list(calls.values()), *timeouts, tolerant=True)
        fitting = batch.refuse_misfits(batch.run(), [call.inputs[0] for call in batch.calls])
        outputs = dict(zip(calls, fitting, strict=True))
        failures = zip(batch.calls, batch.failed, strict=True)
        self.last_failed = {call.handle.uid: str(error) for call, error in failures if error is not None}
        return outputs

    def is_gone(self) -> torch.Tensor:
        """[E] bool: the experts that did not answer lately."""
        return torch.tensor(
            [isinstance(expert, RemoteExpert) and expert.handle.is_gone for expert in self.members]
        )


class LiveGate(nn.Module):
    """Any gate, without the experts that are gone: their choices become -1 (dropped).

    With FMoE(renormalize=True) the token's other experts take over their weight.
    """

    def __init__(self, gate: BaseGate, experts: RemoteExperts):
        super().__init__()
        self.gate = gate
        self._experts = (experts,)  # not a submodule: the layer has them already

    def forward(self, inp: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        topk_idx, topk_weights = self.gate(inp)
        gone = self._experts[0].is_gone().to(topk_idx.device)
        dropped = gone[topk_idx.clamp(min=0)] & (topk_idx >= 0)
        return topk_idx.masked_fill(dropped, -1), topk_weights

    def get_loss(self, clear: bool = True) -> torch.Tensor | None:
        """The wrapped gate's."""
        loss: torch.Tensor | None = self.gate.get_loss(clear)
        return loss

    @property
    def has_loss(self) -> bool:
        """The wrapped gate's."""
        return bool(self.gate.has_loss)


class Directory:
    """Finds experts through any Discovery; every call has a deadline in seconds."""

    def __init__(
        self,
        discovery: Discovery,
        settings: Settings | None = None,
        credentials: Credentials | None = None,
    ):
        self.discovery = discovery
        self.client = Client(discovery, settings, credentials)

    def get_experts(self, uids: Sequence[str], timeout: float = 5.0) -> list[RemoteExpert | None]:
        """The experts of these uids, None where there is none; DiscoveryError if nobody answers in time."""
        names = [uid for uid in dict.fromkeys(uids) if is_uid(uid)]
        records = loop.run(self.discovery.get(names, timeout=timeout), timeout + MARGIN)
        found = {record.uid: record for record in records if record is not None}
        return [RemoteExpert(uid, found[uid], self.client) if uid in found else None for uid in uids]

    def declare_experts(
        self, uids: Sequence[str], endpoint: str, ttl: float = 30.0, timeout: float = 5.0
    ) -> frozenset[str]:
        """Claims uids for an endpoint -> those that are now its."""
        return loop.run(self.discovery.declare(list(uids), endpoint, ttl, timeout=timeout), timeout + MARGIN)

    def shutdown(self, timeout: float = 5.0) -> None:
        """Frees sockets; what was declared stays until it expires."""
        loop.run(self.client.close(), timeout)
        loop.run(self.discovery.close(), timeout)
