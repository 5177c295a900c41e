"""Fewer bytes a number: bf16 halves float32, int8 with one scale a row quarters it."""

from collections.abc import Mapping

import torch

from fmoe_ext.remote.wire import DTYPES, Message, WireError, dtype_name

CODECS = ("none", "bf16", "int8")
_DTYPE, _SCALE = ":dtype", ":scale"


def check_codec(codec: str) -> str:
    if codec not in CODECS:
        raise ValueError(f"compression must be one of {', '.join(CODECS)}, but got {codec!r}")
    return codec


def compress(tensors: Mapping[str, torch.Tensor], codec: str, meta: Mapping[str, str]) -> Message:
    """A message with the floating tensors in fewer bits; what they were is noted in its metadata.

    int8: q = round(x / s) with s = max|row| / 127, a row being the last dimension.
    """
    check_codec(codec)
    packed: dict[str, torch.Tensor] = {}
    notes = dict(meta)
    for name, tensor in tensors.items():
        if codec == "none" or not tensor.is_floating_point() or tensor.dim() == 0:
            packed[name] = tensor
            continue
        notes[name + _DTYPE] = dtype_name(tensor.dtype)
        if codec == "bf16":
            packed[name] = tensor.to(torch.bfloat16)
        else:
            packed[name], packed[name + _SCALE] = _to_int8(tensor)
    return Message(packed, notes)


def decompress(message: Message) -> dict[str, torch.Tensor]:
    """The tensors of a message as they were before compress(), up to rounding. WireError for scales that do not fit."""
    return {
        name: _restore(name, tensor, message)
        for name, tensor in message.tensors.items()
        if not name.endswith(_SCALE)
    }


def _restore(name: str, tensor: torch.Tensor, message: Message) -> torch.Tensor:
    was = message.meta.get(name + _DTYPE)
    if was is None:
        return tensor
    dtype = DTYPES.get(was)
    if dtype is None or not dtype.is_floating_point:
        raise WireError(f"tensor {name!r} was compressed from {was!r}, which is no floating dtype")
    if tensor.dtype is torch.int8:
        scale = message.tensors.get(name + _SCALE)
        if scale is None or scale.shape != (*tensor.shape[:-1], 1) or not scale.is_floating_point():
            raise WireError(f"tensor {name!r} is int8 {list(tensor.shape)}, but has no scale for each row")
        return (tensor.to(scale.dtype) * scale).to(dtype)
    return tensor.to(dtype)


def _to_int8(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    if wide.numel() == 0:
        return wide.to(torch.int8), wide.new_zeros((*wide.shape[:-1], 1))
    scale = wide.abs().amax(-1, keepdim=True) / 127
    return (wide / torch.where(scale == 0, 1, scale)).round().to(torch.int8), scale


class ErrorFeedback:
    """Adds to each message of gradients what rounding took from the ones before, summed over their rows.

    Rows are other tokens in every batch, so what carries over is the sum of their errors [D]: the sum of all messages
    (a bias's gradient) stays within the error of one message of the truth, however many are sent
    (Seide et al. 2014; Karimireddy et al. 2019 for vectors).
    """

    def __init__(self, codec: str):
        self.codec = check_codec(codec)
        self._owed: dict[str, torch.Tensor] = {}

    def compress(self, tensors: Mapping[str, torch.Tensor], meta: Mapping[str, str]) -> Message:
        """compress() of tensors plus what is owed; what this message rounds away is owed from now on."""
        if self.codec == "none":
            return compress(tensors, self.codec, meta)
        asked = {name: self._with_owed(name, tensor) for name, tensor in tensors.items()}
        message = compress(asked, self.codec, meta)
        for name, sent in decompress(message).items():
            if asked[name].is_floating_point() and asked[name].numel() and asked[name].dim() > 1:
                self._owed[name] = _sum_rows(asked[name] - sent)
        return message

    def _with_owed(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        owed = self._owed.get(name)
        if owed is None or tensor.dim() < 2 or owed.shape[0] != tensor.shape[-1] or not tensor.numel():
            return tensor
        num_rows = tensor.numel() // tensor.shape[-1]
        return tensor + (owed / num_rows).to(tensor.dtype)


def _sum_rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1]).sum(0, dtype=torch.promote_types(x.dtype, torch.float32))
