"""Read the text that experts are measured on, as token ids in sequences of one length: for merge, prune and export."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.model_folder import local_path

_FEWEST_TOKENS = 16  # for each expert of a layer: fewer say little


def read_tokens(file: Path) -> Tensor:
    """Read ids [N] int64 of a NumPy file (.npy) or of a JSON list; CheckpointError for anything else."""
    # RecursionError: of JSON that nests too deep
    try:
        content = (
            np.load(file, allow_pickle=False) if file.suffix == ".npy" else json.loads(file.read_bytes())
        )
        values = np.asarray(content)
    except FileNotFoundError:
        raise CheckpointError(f"{file} does not exist") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is no NumPy file and no JSON list of token ids: {error}") from error
    if values.ndim != 1 or not np.issubdtype(values.dtype, np.integer):
        raise CheckpointError(
            f"{file} must have token ids in one row of integers, but has {values.dtype} {values.shape}"
        )
    return torch.from_numpy(values.astype(np.int64))


def tokenize(file: Path, model: str | Path) -> Tensor:
    """Tokenize a UTF-8 file by the tokenizer of a folder or name -> ids [N] int64; CheckpointError if unreadable."""
    from transformers import AutoTokenizer

    try:
        text = file.read_bytes().decode()
    except FileNotFoundError:
        raise CheckpointError(f"{file} does not exist") from None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file} is no UTF-8 text: {error}") from error
    folder = local_path(model, ())
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # each kind of tokenizer has errors of its own
        raise CheckpointError(
            f"{folder} has no tokenizer that Transformers reads ({type(error).__name__}): give --tokens, a file of "
            "ids, or --tokenizer, another folder"
        ) from error
    ids: Any = tokenizer(text, return_attention_mask=False, verbose=False)["input_ids"]
    if text and not ids:  # Transformers makes a tokenizer without words where a folder has no files of one
        raise CheckpointError(
            f"the tokenizer of {folder} finds no token in {file}: give --tokens, a file of ids, or --tokenizer, "
            "another folder"
        )
    return torch.tensor(ids, dtype=torch.int64, device="cpu")


def sequences(
    tokens: Tensor, seq_len: int, held_out: float, num_experts: int, vocabulary: int
) -> tuple[Tensor, Tensor]:
    """Cut ids [N] into sequences [n, seq_len] to measure on and, behind them, [m, seq_len] to test on.

    m is the share held_out of all sequences, rounded up; tokens behind the last whole sequence are dropped.
    Raises CheckpointError for other shapes, foreign ids, and fewer than _FEWEST_TOKENS for each expert.
    """
    if not 0 <= held_out < 1:
        raise CheckpointError(f"held_out must be from 0 to below 1, but got {held_out}")
    if seq_len < 2:
        raise CheckpointError(f"sequences must have at least 2 tokens, but got seq_len={seq_len}")
    if tokens.dim() != 1 or tokens.dtype != torch.int64:
        raise CheckpointError(f"tokens must be ids [N] int64, but got {tokens.dtype} {list(tokens.shape)}")
    if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
        raise CheckpointError(
            f"the text has token {int(tokens.max()) if int(tokens.min()) >= 0 else int(tokens.min())}, but the model a "
            f"vocabulary of {vocabulary}"
        )
    # the end of the text is for the test
    whole = tokens[: tokens.numel() // seq_len * seq_len].view(-1, seq_len)
    num_test = math.ceil(len(whole) * held_out)
    measured, fewest = (len(whole) - num_test) * seq_len, _FEWEST_TOKENS * num_experts
    if measured < fewest:
        raise CheckpointError(
            f"the text has {tokens.numel():,} tokens, of which {measured:,} in whole sequences of {seq_len} are left "
            f"to measure: at least {fewest:,} say something about so many experts"
        )
    return whole[: len(whole) - num_test], whole[len(whole) - num_test :]
