"""llama.cpp itself, by the C functions inside the package xllamacpp, whose own interface needs a vocabulary."""

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from ctypes import c_bool, c_byte, c_char_p, c_float, c_int8, c_int32, c_uint32, c_void_p
from pathlib import Path
from typing import Any

import torch
import xllamacpp
from torch import Tensor

F32, F16 = 0, 1  # ggml_type


class ModelParams(ctypes.Structure):
    """llama_model_params, passed on as llama.cpp made it: its size is all that matters, and may be more."""

    _fields_ = [("values", c_byte * 512)]


class ContextParams(ctypes.Structure):
    """The beginning of llama_context_params."""

    _fields_ = [
        *((name, c_uint32) for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq")),
        *((name, c_uint32) for name in ("n_outputs_max", "n_outputs_max_per_seq")),
        *((name, c_int32) for name in ("n_threads", "n_threads_batch", "ctx_type", "rope_scaling_type")),
        *((name, c_int32) for name in ("pooling_type", "attention_type", "flash_attn_type")),
        *((name, c_float) for name in ("rope_freq_base", "rope_freq_scale", "yarn_ext_factor")),
        *((name, c_float) for name in ("yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow")),
        *(("yarn_orig_ctx", c_uint32), ("defrag_thold", c_float), ("cb_eval", c_void_p)),
        *(
            ("cb_eval_user_data", c_void_p),
            ("type_k", c_int32),
            ("type_v", c_int32),
            ("values", c_byte * 512),
        ),
    ]


class Batch(ctypes.Structure):
    """llama_batch."""

    _fields_ = [
        *(("n_tokens", c_int32), ("token", ctypes.POINTER(c_int32)), ("embd", c_void_p)),
        *(("pos", ctypes.POINTER(c_int32)), ("n_seq_id", ctypes.POINTER(c_int32))),
        *(("seq_id", ctypes.POINTER(ctypes.POINTER(c_int32))), ("logits", ctypes.POINTER(c_int8))),
    ]


SIGNATURES = {
    "llama_log_set": (None, [c_void_p, c_void_p]),
    "llama_model_default_params": (ModelParams, []),
    "llama_context_default_params": (ContextParams, []),
    "llama_model_load_from_file": (c_void_p, [c_char_p, ModelParams]),
    "llama_init_from_model": (c_void_p, [c_void_p, ContextParams]),
    "llama_model_get_vocab": (c_void_p, [c_void_p]),
    "llama_vocab_n_tokens": (c_int32, [c_void_p]),
    "llama_tokenize": (
        c_int32,
        [c_void_p, c_char_p, c_int32, ctypes.POINTER(c_int32), c_int32, c_bool, c_bool],
    ),
    "llama_token_to_piece": (c_int32, [c_void_p, c_int32, c_char_p, c_int32, c_int32, c_bool]),
    "llama_vocab_is_eog": (c_bool, [c_void_p, c_int32]),
    "llama_batch_init": (Batch, [c_int32, c_int32, c_int32]),
    "llama_decode": (c_int32, [c_void_p, Batch]),
    "llama_get_logits_ith": (ctypes.POINTER(c_float), [c_void_p, c_int32]),
    "llama_batch_free": (None, [Batch]),
    "llama_free": (None, [c_void_p]),
    "llama_model_free": (None, [c_void_p]),
}
LOG = ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)


def logits(path: Path, tokens: Sequence[int], cache: int = F32) -> Tensor:
    """float64 [tokens, vocabulary]: what llama.cpp computes for a prompt, with keys and values kept as a ggml_type."""
    library = _library()
    with _context(library, path, len(tokens), cache) as (model, context):
        batch = library.llama_batch_init(len(tokens), 0, 1)
        try:
            _fill(batch, tokens)
            assert library.llama_decode(context, batch) == 0
            count = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
            rows = [library.llama_get_logits_ith(context, i)[:count] for i in range(len(tokens))]
            return torch.tensor(rows, dtype=torch.float64)
        finally:
            library.llama_batch_free(batch)


class Vocabulary(contextlib.AbstractContextManager["Vocabulary"]):
    """The tokenizer of a file, as llama.cpp computes it."""

    def __init__(self, path: Path) -> None:
        self.library = _library()
        with contextlib.ExitStack() as stack:
            model = stack.enter_context(_model(self.library, path))
            self.vocab = self.library.llama_model_get_vocab(model)
            self.opened = stack.pop_all()

    def __exit__(self, *error: object) -> None:
        self.opened.close()

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Ids of a text, tokens of special names in it found; special: with what is put around it."""
        raw = text.encode()
        found = (c_int32 * (len(raw) + 8))()
        count = self.library.llama_tokenize(self.vocab, raw, len(raw), found, len(found), special, True)
        assert count >= 0
        return found[:count]

    def piece(self, token: int) -> bytes:
        """The bytes of one token."""
        buffer = ctypes.create_string_buffer(1024)
        count = self.library.llama_token_to_piece(self.vocab, token, buffer, 1024, 0, True)
        assert count >= 0
        return buffer.raw[:count]

    def ends(self, token: int) -> bool:
        """True if an answer ends at a token."""
        return bool(self.library.llama_vocab_is_eog(self.vocab, token))


def _library() -> Any:
    library = ctypes.CDLL(xllamacpp.xllamacpp.__file__)
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


@contextlib.contextmanager
def _model(library: Any, path: Path) -> Iterator[int]:
    said: list[str] = []
    log = LOG(lambda level, text, data: said.append(text.decode(errors="replace")))
    library.llama_log_set(log, None)
    model = None
    try:
        model = library.llama_model_load_from_file(str(path).encode(), library.llama_model_default_params())
        assert model, f"llama.cpp refuses {path}: {''.join(said[-3:])}"
        yield model
    finally:
        if model:
            library.llama_model_free(model)
        library.llama_log_set(None, None)


@contextlib.contextmanager
def _context(library: Any, path: Path, n_ctx: int, cache: int) -> Iterator[tuple[int, int]]:
    with _model(library, path) as model:
        context = library.llama_init_from_model(model, _parameters(library, n_ctx, cache))
        assert context, "llama.cpp makes no context"
        try:
            yield model, context
        finally:
            library.llama_free(context)


def _parameters(library: Any, n_ctx: int, cache: int) -> ContextParams:
    params: ContextParams = library.llama_context_default_params()
    known = params.n_ctx, params.n_batch, params.yarn_beta_fast, params.type_k, params.type_v
    assert known == (512, 2048, -1, F16, F16), (
        f"{known}: write ContextParams as this version's llama.h has it"
    )
    params.n_ctx, params.n_threads, params.n_threads_batch = n_ctx, 1, 1
    params.type_k = params.type_v = cache
    params.flash_attn_type = 0  # which multiplies in 16 bits whatever the cache is
    return params


def _fill(batch: Batch, tokens: Sequence[int]) -> None:
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.logits[i] = token, i, 1
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
