"""Report on an adapter, for `fmoe adapter check`: layout, ranks, what is zero, missing or does not fit, sizes.

logits(), for --model, compares a base with a merged model.
"""

import importlib.util
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from fmoe_ext.checkpoint.base_experts import BaseExperts
from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.model_folder import ModelFolder, errors_of_transformers, model_class
from fmoe_ext.finetune.adapters.delta import compare, delta
from fmoe_ext.finetune.adapters.reading import Adapter

# {(form, orientation, packing) of the tensors: the programs that write them so}
_WRITERS = MappingProxyType(
    {
        ("flat", "out_in", "rank_major"): "PEFT from 0.19, vLLM's stacked names",
        ("flat", "in_out", "rank_major"): "PEFT before 0.19",
        ("flat", "out_in", "expert_major"): "unsloth before its repair, on PEFT from 0.19",
        ("flat", "in_out", "expert_major"): "unsloth before its repair, on PEFT before 0.19",
        ("numbered", "", ""): "a module an expert: PEFT on nn.Linear experts, vLLM, SGLang",
        ("stacked", "", ""): "3-d tensors: SGLang, Megatron-Bridge",
    }
)


def check(adapter: Adapter, base: ModelFolder | None = None) -> dict[str, Any]:
    """Report on an adapter, as JSON: layout, evidence, rows (one for each projection of each layer), problems.

    base: adds what does not fit and, for each expert, the norm of its delta over its weight's.
    """
    problems = [*adapter.problems, *adapter.refused]
    notes = []
    if saved := [name for name in adapter.others if ".lora_" not in name]:
        notes.append(
            f"{len(saved)} tensors are of modules that are saved whole, as {saved[0]}: merge refuses them"
        )
    for name in ("orientation", "packing"):
        if getattr(adapter, name) == "undecidable":
            problems.append(f"the file does not show its {name}: say it by --{name}")
    # Does it fit the base? Sizes are computed only if it does. Layers between adapted ones may have no experts.
    of_base, skipped = None, [*adapter.skipped]
    if base is not None:
        try:
            of_base = BaseExperts(base)
            wrong = compare(adapter, of_base)
            skipped = [number for number, layer in adapter.skipped.items() if of_base.at(layer)]
        except CheckpointError as error:
            wrong = [str(error)]
        problems += wrong
        of_base = None if wrong else of_base
    if skipped:
        problems.append(f"no experts are adapted in layers {skipped[:8]}, between others that are")
    # A row for each projection of each layer; its values only if it is known how they are read.
    rows: list[dict[str, Any]] = []
    for layer, parts in adapter.layers.items():
        for role, factors in parts.items():
            row: dict[str, Any] = {"layer": layer, "projection": role, "experts": factors.num_experts}
            row |= {
                "rank": factors.rank,
                "in": factors.d_in,
                "out": factors.d_out,
                "scaling": factors.scaling,
            }
            rows.append(row)
            if adapter.undecided:
                continue
            a, b = factors.read()
            if not (a.isfinite().all() and b.isfinite().all()):
                problems.append(f"{layer}: {role} has values that are not finite")
            row["idle_experts"] = [e for e in range(factors.num_experts) if not (a[e].any() and b[e].any())]
            if len(row["idle_experts"]) == factors.num_experts:
                problems.append(f"{layer}: {role} is all zero, it changes nothing")
    evidence, key = adapter.evidence, (adapter.form, adapter.orientation, adapter.packing)
    report = {
        "adapter": str(adapter.folder),
        "base_model": adapter.config.get("base_model_name_or_path"),
        "peft_version": adapter.config.get("peft_version"),
        "form": adapter.form,
        "orientation": adapter.orientation,
        "packing": adapter.packing,
        "packing_scores": evidence.standard_scores() if evidence else {},
        "written_by": _WRITERS.get(key, "undecidable" if adapter.undecided else "none"),
        "other_tensors": len(adapter.others),
        "rows": rows,
        "problems": problems,
        "notes": notes,
    }
    if of_base is not None and not adapter.undecided:
        # Sizes: {layer: {role in the base: [norm of the change / norm of the weight, for each expert]}}
        sizes: dict[str, dict[str, list[float]]] = {}
        for layer, parts in adapter.layers.items():
            experts = of_base.at(layer)
            if experts is None:
                continue
            loaded = {role: (factors, factors.read()) for role, factors in parts.items()}
            for role, names in experts.names.items():
                shares = []
                for e, name in enumerate(names):
                    tensor = of_base.base.tensors[name]
                    weight = tensor.rows(e, e + 1)[0] if experts.is_stack else tensor.read()
                    change = delta(loaded, experts, role, e)
                    norm = weight.float().norm().item()
                    shares.append(0.0 if change is None or not norm else change.norm().item() / norm)
                sizes.setdefault(layer, {})[role] = shares
        report["delta"] = sizes
    return report


def logits(base: ModelFolder, merged: Path) -> dict[str, float]:
    """Compare the logits of a base and a merged model on 32 random tokens, in float32.

    Returns the largest difference, its share of the base's largest logit (left out if all of these are zero), and the
    share of tokens whose most likely next token changed.
    """
    if importlib.util.find_spec("transformers") is None:
        raise CheckpointError("--model needs transformers: pip install transformers")
    base.check()
    config = base.make_config()
    text = config.get_text_config(decoder=True)
    vocabulary = getattr(text, "vocab_size", None)
    if not isinstance(vocabulary, int) or vocabulary < 2:
        raise CheckpointError(
            f"{base.folder}/config.json needs an integer vocab_size of at least 2, but has {vocabulary!r}"
        )
    generator = torch.Generator("cpu").manual_seed(0)
    ids = torch.randint(vocabulary, (1, 32), generator=generator, device="cpu")
    found = []
    for folder in (base.folder, merged):
        with errors_of_transformers(folder, "model"), torch.no_grad():
            options = {"local_files_only": True, "trust_remote_code": False}  # the folder may be a stranger's
            model = model_class(config).from_pretrained(folder, dtype=torch.float32, **options).eval()
            found.append(model(input_ids=ids.to(model.device)).logits.float())
        del model  # one of the two is in memory at a time
    without, adapted = found
    difference, largest = (adapted - without).abs().max().item(), without.abs().max().item()
    shares = {"share_of_largest_logit": difference / largest} if largest else {}
    changed = (adapted.argmax(-1) != without.argmax(-1)).float().mean().item()
    return {"largest_difference": difference, **shares, "changed_first_choices": changed}
