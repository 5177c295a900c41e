"""Recipes and models that a user names or gives: sendable() makes what recipe_at() takes in every other process.

audit() (run.py) calls the first, each rank the second. find() and load_module() import what a name of the command line
says, for the doctor and audit_plan() too; load_model() loads the model of a rollout.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from errno import ENOENT
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fmoe_ext._cli import reason
from fmoe_ext.audit.cases import AuditError, Layout
from fmoe_ext.audit.recipe import NOT_A_TARGET, Batch, Recipe, spread_experts
from fmoe_ext.audit.shrink import shrunk_config, vocabulary_of

_NUM_SAMPLES, _SEQ_LEN = 12, 8  # of the batches that are made here
_LARGEST = 1 << 24  # parameters of a model that cannot be made small


@dataclass(frozen=True)
class _Copies:
    """build(layout) for a module that was given: a copy, with its FMoE layers' experts spread over ranks."""

    pickled: bytes

    def __call__(self, layout: Layout) -> nn.Module:
        return spread_experts(pickle.loads(self.pickled), layout)


@dataclass(frozen=True)
class FromConfig:
    """build(layout) for a model of Transformers: its class, with a small configuration."""

    model_class: Any
    config: Any

    def __call__(self, layout: Layout) -> nn.Module:
        return self.model_class(self.config)


@dataclass(frozen=True)
class RandomTokens:
    """batch(step) for a causal language model of Transformers."""

    vocabulary: int
    with_positions: bool = False  # which padding in front must not move

    def __call__(self, step: int) -> Batch:
        generator = torch.Generator("cpu").manual_seed(step)
        tokens = torch.randint(self.vocabulary, (_NUM_SAMPLES, _SEQ_LEN), generator=generator, device="cpu")
        labels = tokens.clone()
        labels[:, 0] = NOT_A_TARGET  # which padding in front would have to predict
        batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}
        if self.with_positions:
            batch["position_ids"] = torch.arange(_SEQ_LEN, device="cpu").repeat(_NUM_SAMPLES, 1)
        return batch


def loss_of_transformers(model: Any, batch: Batch) -> torch.Tensor:
    """Return the loss of a Transformers model, with the router's loss if the configuration turns it on."""
    return model(**batch).loss


def is_of_transformers(model: Any) -> bool:
    """Return True for a PreTrainedModel of Transformers."""
    return hasattr(getattr(model, "config", None), "to_dict") and hasattr(
        model, "gradient_checkpointing_enable"
    )


def recipe_at(source: str | Recipe) -> Recipe:
    """Return the recipe that "module:function" or "file.py:function" makes, or the one that was given."""
    if isinstance(source, Recipe):
        return source
    found = find(source)
    made = found if isinstance(found, Recipe) else found()
    if not isinstance(made, Recipe):
        raise AuditError(f"{source} must return a Recipe, but returned {type(made).__name__}")
    return made


def sendable(what: Any, **parts: Any) -> str | Recipe:
    """Make of what audit() was given something that recipe_at() takes in other processes.

    parts: fields of the Recipe, for a builder or a model. Raises AuditError for what cannot be pickled.
    """
    if isinstance(what, str):
        if parts:
            raise AuditError(f"{what!r} makes a whole recipe: {', '.join(parts)} belong into it")
        return what
    if isinstance(what, Recipe):
        if parts:
            raise AuditError(f"a recipe is given: {', '.join(parts)} belong into it")
        recipe = what
    elif isinstance(what, nn.Module) and is_of_transformers(what):
        small = shrunk_config(what.config, type(what))
        # sizes of a vision tower and of the text model depend on each other, in another way in each model
        inner = [name for name in getattr(small, "sub_configs", ()) if getattr(small, name, None)]
        with torch.device("meta"):
            size = sum(p.numel() for p in type(what)(small).parameters()) if inner else 0
        if size > _LARGEST:
            raise AuditError(
                f"{type(what).__name__} would be trained with {size:,} parameters, because the parts of "
                f"its configuration ({', '.join(inner)}) are not made small: give a model of at most {_LARGEST:,}"
            )
        defaults: dict[str, Any] = {
            "build": FromConfig(type(what), small),
            "loss": loss_of_transformers,
            "leave_out": {
                "ep": "Transformers' own experts are on one rank; fmoefy spreads them",
                "left": "in float64 their eager attention has no number for a row that is masked whole",
            },
        }
        if "batch" not in parts:
            vocabulary = vocabulary_of(small, "give batch=, batch(step) -> dict of tensors")
            with_positions = "position_ids" in inspect.signature(what.forward).parameters
            defaults["batch"] = RandomTokens(vocabulary, with_positions)
        recipe = Recipe(**(defaults | parts))
    elif isinstance(what, nn.Module):
        try:
            copies = _Copies(pickle.dumps(what))
        except Exception as error:
            raise AuditError(
                f"{type(what).__name__} cannot be sent to other processes ({error}): give a function that builds it"
            ) from error
        recipe = Recipe(**({"build": copies} | parts))
    elif callable(what):
        missing = [name for name in ("batch", "loss") if name not in parts]
        if missing:
            raise AuditError(
                f"a function that builds a model needs {' and '.join(missing)} as well, "
                "batch(step) -> dict of tensors, loss(model, batch) -> mean loss; or give a Recipe"
            )
        recipe = Recipe(build=what, **parts)
    else:
        raise AuditError(
            "audit() takes a Recipe, a function layout -> model, a model, or 'module:function', "
            f"but got a {type(what).__name__}"
        )
    for name, part in vars(recipe).items():
        try:
            pickle.dumps(part)
        except Exception as error:
            raise AuditError(
                f"{name} cannot be sent to other processes ({error}): functions of a module can, lambdas and inner "
                "functions cannot"
            ) from error
    return recipe


def load_model(source: str, text: str | None) -> tuple[Any, torch.Tensor | None]:
    """Load (model, tokens [1, L] of text or None): a folder of Transformers, or what "module:function" returns."""
    if ":" in source:
        if text is not None:
            raise AuditError(
                f"--text is for the tokenizer of a folder: let {source} return (model, tokens) instead"
            )
        made = find(source)()
        return made if isinstance(made, tuple) else (made, None)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from fmoe_ext.checkpoint.errors import CheckpointError
    from fmoe_ext.checkpoint.model_folder import local_path

    try:
        folder = local_path(source)
        if not folder.is_dir():
            raise AuditError(f"{source} is no folder of a model of Transformers and no module:function")
        options = {"local_files_only": True, "trust_remote_code": False}
        model, tokens = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **options), None
        if text is not None:
            tokens = AutoTokenizer.from_pretrained(folder, **options)(text, return_tensors="pt").input_ids
    except (CheckpointError, OSError, ValueError) as error:
        raise AuditError(f"{source} cannot be loaded: {error}") from error
    return model, tokens


def find(place: str) -> Callable[[], Any]:
    """Import the object that "package.module:name" or "path/file.py:name" names."""
    module_name, colon, name = place.rpartition(":")
    if not colon or not module_name or not name:
        raise AuditError(f"give module:function or file.py:function, but got {place!r}")
    try:
        return getattr(load_module(module_name), name)
    except AttributeError as error:
        raise AuditError(f"{module_name} has no {name!r}") from error


def load_module(name: str) -> Any:
    """Import "package.module" or "path/file.py"; AuditError if that fails."""
    path = Path(name).resolve()
    if not name.endswith(".py"):
        folder = ""
    elif path.exists():
        folder = str(path.parent)  # its neighbours, as `python file.py` would find them
    else:
        raise AuditError(reason(FileNotFoundError(ENOENT, os.strerror(ENOENT), name)))
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        if not name.endswith(".py"):
            return importlib.import_module(name)
        # a second copy would have classes of its own, which do not unpickle as the first's
        if (imported := sys.modules.get(path.stem)) is not None:
            file = getattr(imported, "__file__", None)
            if file is None or Path(file).resolve() != path:
                raise AuditError(
                    f"{name} cannot be imported: {file or 'a built-in module'} is imported already as "
                    f"{path.stem!r}. Give the file another name"
                )
            return imported
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[path.stem]
            raise
        return module
    except FileNotFoundError as error:
        raise AuditError(reason(error)) from error
    except (ImportError, OSError) as error:
        raise AuditError(f"{name} cannot be imported: {error}") from error
