"""Adapters of every MoE architecture with options of PEFT: converted and merged as PEFT reads them, or refused."""

import copy
import dataclasses
import functools
import json
import re
import shutil
import typing
import warnings
from pathlib import Path

import pytest
import torch

from fmoe_ext.checkpoint import CheckpointError
from fmoe_ext.checkpoint.model_folder import ModelFolder
from fmoe_ext.finetune.adapters import cli, merge
from fmoe_ext.finetune.adapters.convert import READ_BY_PEFT, convert
from fmoe_ext.finetune.adapters.options import MOST_WAYS, NO_EFFECT, READ, num_ways, refusals
from fmoe_ext.finetune.adapters.reading import RANK_MAJOR, read_adapter
from tests.huggingface.huggingface_models import ARCHITECTURES, make_model
from tests.huggingface.moe_architectures import architectures, tiny_model

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
BOTH = ["experts.gate_up_proj", "experts.down_proj"]
# {what is adapted: options of LoraConfig}; ATTENTION and ROUTER stand for names of the architecture
ATTENTION, ROUTER = "attention", "router"
KINDS = {
    "experts": {"target_parameters": BOTH},
    "gate_up": {"target_parameters": BOTH[:1]},
    "down": {"target_parameters": BOTH[1:]},
    "attention": {"target_parameters": BOTH, "target_modules": ATTENTION},
    "router": {"target_parameters": [*BOTH, ROUTER]},
    "rslora": {"target_parameters": BOTH, "use_rslora": True},
    "rank_pattern": {"target_parameters": BOTH, "rank_pattern": {r".*experts\.down_proj": 3}},
    "alpha_pattern": {"target_parameters": BOTH, "alpha_pattern": {r".*experts\.down_proj": 7}},
    "bias": {"target_parameters": BOTH, "target_modules": ATTENTION, "bias": "lora_only"},
    "modules_to_save": {"target_parameters": BOTH, "modules_to_save": ["lm_head"]},
    "all-linear": {"target_parameters": BOTH, "target_modules": "all-linear"},
}
SHORT = {
    "Qwen3MoeForCausalLM": KINDS,
    "MixtralForCausalLM": ("experts", "gate_up", "rslora"),
    "GptOssForCausalLM": ("router",),
    "Gemma4ForCausalLM": ("experts", "gate_up"),
    "Qwen3_5MoeForCausalLM": ("attention",),
    "NemotronHForCausalLM": ("experts",),  # no gate
    "InklingForCausalLM": ("experts",),  # gate and up in turn in the files alone
    "AriaTextForCausalLM": ("experts",),  # stored [E, in, out]
    "Qwen3VLMoeForConditionalGeneration": ("experts",),
}


def make(architecture):
    """A small model in float64, the same at each call."""
    return copy.deepcopy(make_once(architecture))


@functools.lru_cache(maxsize=1)
def make_once(architecture):
    if architecture in ARCHITECTURES:
        return make_model(architecture, dtype=torch.float64)
    return tiny_model(architecture)


def names_of(model, kind):
    """Names of the attention's layers or of the router's weight in an architecture."""
    if kind == ATTENTION:
        linear = {path.rpartition(".")[2] for path, m in model.named_modules() if type(m) is torch.nn.Linear}
        return sorted(n for n in linear if n.startswith(("q_", "o_proj", "kv_")))
    found = {".".join(name.split(".")[-2:]) for name, p in model.named_parameters() if p.dim() == 2}
    return next(n for n in sorted(found) if n in ("gate.weight", "router.weight", "proj.weight", "wg.weight"))


def with_adapter(model, options):
    options = dict(options)
    if options.get("target_modules") == ATTENTION:
        options["target_modules"] = names_of(model, ATTENTION)
    up = "gate_up_proj" if any(hasattr(m, "gate_up_proj") for m in model.modules()) else "up_proj"
    options["target_parameters"] = [
        names_of(model, ROUTER) if name == ROUTER else name.replace("gate_up_proj", up)
        for name in options.get("target_parameters", ())
    ]
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=5, **options))
    generator = torch.Generator().manual_seed(2)
    for p in adapted.parameters():
        if p.requires_grad:
            p.data.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / 10)
    return adapted


def read_by_peft(architecture, folder):
    """Parameters after PEFT has loaded and merged an adapter."""
    model = make(architecture)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = peft.PeftModel.from_pretrained(model, folder)
    return dict(loaded.merge_and_unload().named_parameters())


def first_difference(found, expected):
    """The first name whose values differ; None if they are the same."""
    if found.keys() != expected.keys():
        return sorted(found.keys() ^ expected.keys())[0]
    for name, value in expected.items():
        # routers may be in float32
        narrower = min(found[name].dtype, value.dtype, key=lambda dtype: dtype.itemsize)
        tolerance = 1e-10 if narrower == torch.float64 else 1e-6
        if not torch.allclose(found[name].double(), value.double(), rtol=tolerance, atol=tolerance):
            return name
    return None


def is_same(found, expected):
    return first_difference(found, expected) is None


def sweep(architecture, folder, kinds):
    """{(kind, direction): what became of it}, each compared with what PEFT merges after it has made the adapter."""
    outcomes = {}
    make(architecture).save_pretrained(folder / "base")
    for kind, options in kinds.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                adapted = with_adapter(make(architecture), options)
                adapted.save_pretrained(folder / kind)
        except (ValueError, StopIteration, NotImplementedError) as error:  # of PEFT
            outcomes[kind, "made"] = f"PEFT: {error}"
            continue
        expected = dict(adapted.merge_and_unload().named_parameters())
        is_read = is_same(read_by_peft(architecture, folder / kind), expected)
        for to in (*READ_BY_PEFT, "merge", "per-expert and back"):
            out = folder / f"{kind} {to}"
            if to != "merge" and not is_read:
                outcomes[kind, to] = "PEFT does not read what it wrote"
                continue
            try:
                adapter, base = read_adapter(folder / kind, RANK_MAJOR), ModelFolder(folder / "base")
                if to == "merge":
                    merge.merge(adapter, base, out)
                    merged = getattr(transformers, architecture).from_pretrained(out, dtype=torch.float64)
                    found = dict(merged.named_parameters())
                elif to == "per-expert and back":
                    convert(adapter, "per-expert", folder / "there", base, check=False)
                    convert(read_adapter(folder / "there"), "peft-0.19", out, base)
                else:
                    convert(adapter, to, out, base)
                if to != "merge":
                    found = read_by_peft(architecture, out)
            except CheckpointError as error:
                outcomes[kind, to] = str(error).replace(str(folder), "")
                continue
            finally:
                shutil.rmtree(folder / "there", ignore_errors=True)
            name = first_difference(found, expected)
            outcomes[kind, to] = "equal" if name is None else f"WRONG {name}"
    return outcomes


def wrong(outcomes):
    return {where: text for where, text in outcomes.items() if text.startswith("WRONG")}


@pytest.mark.parametrize("architecture", SHORT)
def test_adapter_is_equal_for_peft_or_refused(architecture, tmp_path):
    outcomes = sweep(architecture, tmp_path, {kind: KINDS[kind] for kind in SHORT[architecture]})
    assert wrong(outcomes) == {}
    equal = [where for where, text in outcomes.items() if text == "equal"]
    assert len(equal) >= 0.6 * len(outcomes), outcomes
    assert architecture != "Qwen3MoeForCausalLM" or ("experts", "per-expert") in equal


def test_adapters_of_shared_experts_are_not_merged(tmp_path):
    """Encoder and decoder of DiffusionGemma share experts: the change of one would be lost."""
    outcomes = sweep("DiffusionGemmaForBlockDiffusion", tmp_path, {"gate_up": KINDS["gate_up"]})
    assert wrong(outcomes) == {}
    assert "share model.decoder.layers.0.experts.gate_up_proj" in outcomes["gate_up", "merge"]


@pytest.mark.parametrize("pattern", [r"gate\.weight", r".*\.gate"])
def test_pattern_is_compared_with_the_parameter_that_is_adapted(pattern, tmp_path):
    """PEFT gives a router of target_parameters the lora_alpha of its weight's name, not of its module's."""
    options = {"target_parameters": [*BOTH, ROUTER], "alpha_pattern": {pattern: 7}}
    outcomes = sweep("Qwen3MoeForCausalLM", tmp_path, {"router": options})
    assert outcomes["router", "merge"] == outcomes["router", "peft-0.19"] == "equal"
    assert ("has one rank" in outcomes["router", "vllm"]) == ("weight" in pattern)


def sweep_all(folder, kinds):
    found = {}
    for architecture in every_moe():
        found[architecture] = sweep(architecture, folder / architecture, kinds)
        assert wrong(found[architecture]) == {}, architecture
        shutil.rmtree(folder / architecture)
    return found


@pytest.mark.slow
def test_every_architecture_is_equal_for_peft_or_refused(tmp_path):
    """Compare the table of docs/adapters.md where it is of the installed versions; ten minutes."""
    text = table(sweep_all(tmp_path, KINDS))
    page = Path(__file__).parents[2].joinpath("docs/adapters.md").read_text()
    versions = f"PEFT {peft.__version__} and Transformers {transformers.__version__}"
    assert versions not in page or text in page, f"paste into docs/adapters.md:\n{text}"


def table(found):
    """Architectures on which each direction of each kind of adapter is equal, of those on which PEFT makes it."""
    directions = (*READ_BY_PEFT, "merge", "per-expert and back")
    lines = [f"| adapter | {' | '.join(directions)} |", f"|---|{'---|' * len(directions)}"]
    for kind in KINDS:
        made = [outcomes for outcomes in found.values() if (kind, "made") not in outcomes]
        equal = [sum(outcomes[kind, to] == "equal" for outcomes in made) for to in directions]
        lines.append(f"| {kind} | {' | '.join(f'{count} of {len(made)}' for count in equal)} |")
    return "\n".join(lines)


def every_moe():
    """Classes of the installed Transformers whose experts are stacked, and that build small."""
    found = {name for name in ARCHITECTURES if name.endswith("ForCausalLM")}
    for name in architectures():
        try:
            model = tiny_model(name)
        except Exception:  # of a class's own, for sizes that it does not expect
            continue
        found |= {name} if any(hasattr(module, "is_transposed") for module in model.modules()) else set()
    return sorted(found)


def saved(folder, **options):
    """An adapter of a small Mixtral with some options of LoraConfig -> (read, its base)."""
    model = make_model("MixtralForCausalLM", dtype=torch.float64)
    model.save_pretrained(folder / "base")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"], **options))
    for name, p in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1, generator=torch.Generator().manual_seed(1))
    adapted.save_pretrained(folder / "adapter")
    return read_adapter(folder / "adapter"), ModelFolder(folder / "base")


def initial_values():
    (field,) = (f for f in dataclasses.fields(peft.LoraConfig) if f.name == "init_lora_weights")
    return [value for part in typing.get_args(field.type) for value in typing.get_args(part)]


@pytest.mark.parametrize("value", [True, False, *initial_values(), "pissa_niter_4", "lora_ga", "of tomorrow"])
def test_init_lora_weights_is_merged_as_peft_does_or_refused(value, tmp_path):
    """PEFT's file holds factors; with some values the base was changed before the training, which it does not hold."""
    made = value if value in (True, False, "gaussian", "olora", "orthogonal", "mica", "pissa") else True
    saved(tmp_path, init_lora_weights=made)
    path = tmp_path / "adapter/adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"init_lora_weights": value}))
    adapter, base = read_adapter(tmp_path / "adapter"), ModelFolder(tmp_path / "base")
    if value not in (True, False, "gaussian", "eva", "orthogonal", "mica"):
        with pytest.raises(
            CheckpointError, match=f"init_lora_weights='{re.escape(value)}' changed the base's weights"
        ):
            merge.merge(adapter, base, tmp_path / "merged")
        return
    merge.merge(adapter, base, tmp_path / "merged")
    merged = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)
    expected = read_by_peft("MixtralForCausalLM", tmp_path / "adapter")
    assert is_same(dict(merged.named_parameters()), expected)


@pytest.mark.parametrize("field", dataclasses.fields(peft.LoraConfig), ids=lambda field: field.name)
def test_every_option_of_lora_is_read_or_without_effect_or_refused(field):
    assert not list(refusals({field.name: getattr(peft.LoraConfig(), field.name)})), "its default is refused"
    known = field.name in READ | NO_EFFECT
    text = list(refusals({field.name: "another value"}))
    assert known != any(field.name in sentence for sentence in text) or field.name == "init_lora_weights"


def test_option_of_tomorrow_is_refused_by_name():
    (pissa,), (loftq,) = (list(refusals({"init_lora_weights": name})) for name in ("pissa_niter_4", "loftq"))
    assert pissa.endswith("save it again with path_initial_model_for_weight_conversion")
    assert loftq.endswith("merge it by PEFT's merge_and_unload() into the model that was trained")
    assert list(refusals({"use_tomorrow": True})) == ["use_tomorrow=True is not supported"]


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        ({"modules_to_save": ["lm_head"]}, 0, "note: 1 tensors are of modules that are saved whole"),
        ({"bias": "lora_only"}, 1, "problem: bias='lora_only' is not supported"),
        ({"use_dora": True}, 1, "problem: use_dora=True is not supported"),
        ({"target_modules": "all-linear"}, 0, "problem: none"),
    ],
    ids=["modules_to_save", "bias", "DoRA", "all-linear"],
)
def test_check_reports_what_merge_refuses(options, status, said, tmp_path, capsys):
    model = make_model("MixtralForCausalLM", dtype=torch.float64)
    model.save_pretrained(tmp_path / "base")
    if "use_dora" in options:
        options = {"target_modules": ["q_proj"], **options}
    else:
        options = {"target_parameters": BOTH, "target_modules": ["q_proj"], **options}
    with_adapter(model, options).save_pretrained(tmp_path / "adapter")
    arguments = ["check", str(tmp_path / "adapter"), "--base", str(tmp_path / "base")]
    if "target_parameters" in options:
        arguments += ["--packing", RANK_MAJOR]
    assert cli.main(arguments) == status
    assert said in capsys.readouterr().out


def test_pattern_of_many_layers_is_evaluated_and_one_that_explodes_is_not():
    layers = "|".join(map(str, range(60)))
    assert num_ways(rf"model\.layers\.({layers})\.mlp\..*(gate|up|down)_proj", 80) <= MOST_WAYS
    assert num_ways(r".*\.experts\..*down_proj", 80) <= MOST_WAYS
    assert num_ways("w2", 7) == 8  # (.*\.)? ends at one of seven places, or is not there
    assert num_ways("(ab|..)" * 50 + "z", 80) > MOST_WAYS
    assert num_ways(".*.*.*.*z", 64) > MOST_WAYS
    assert num_ways(".*.*z", 64) <= MOST_WAYS < num_ways(".*.*z", 1000)
    assert num_ways("(a*)*b", 1) == num_ways("a" * 501, 1) == float("inf")
