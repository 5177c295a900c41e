"""Answers to backward calls, kept for those whose first answer got lost on its way."""

from collections import OrderedDict

import torch


class ReplyCache:
    """The latest answers that fit in max_bytes, by expert and request id."""

    def __init__(self, max_bytes: int = 128 << 20):
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._answers: OrderedDict[tuple[str, str], tuple[torch.Tensor, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answers)

    def put(self, uid: str, request_id: str, tensors: tuple[torch.Tensor, ...]) -> None:
        self.drop(uid, request_id)
        self._answers[uid, request_id] = tensors
        self.num_bytes += _size(tensors)
        while self.num_bytes > self.max_bytes:
            self.drop(*next(iter(self._answers)))

    def get(self, uid: str, request_id: str) -> tuple[torch.Tensor, ...] | None:
        return self._answers.get((uid, request_id))

    def forget(self, uid: str) -> None:
        """Drops the answers of one expert."""
        for key in [key for key in self._answers if key[0] == uid]:
            self.drop(*key)

    def drop(self, uid: str, request_id: str) -> None:
        self.num_bytes -= _size(self._answers.pop((uid, request_id), ()))


def _size(tensors: tuple[torch.Tensor, ...]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)
