"""RemoteExpert: one expert elsewhere as a module."""

from collections.abc import Sequence

import torch
from torch import nn

from fmoe_ext.remote import loop
from fmoe_ext.remote.client.batch import MARGIN, Batch, Call
from fmoe_ext.remote.client.client import Client
from fmoe_ext.remote.discovery import ExpertRecord
from fmoe_ext.remote.schema import Schema


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
