"""Megatron-LM's own arguments.py, then the model that its pretrain_gpt.py builds with --spec, against its own MoE.

Wheels of megatron-core 0.17 and newer bring megatron.training; for 0.16, PYTHONPATH=<a checkout of Megatron-LM>.
docs/megatron.md has the commands.
"""

import sys
import typing

import pytest
import torch
import typing_extensions

pytest.importorskip("megatron.core", reason="pip install megatron-core")
import arguments as by_arguments
import megatron_layouts as layouts
from megatron_models import assert_equal_models, block_spec_of, model_of, on_cpu

pytestmark = pytest.mark.usefixtures("one_megatron_rank")

MINIMAL = f"""
    --seq-length {layouts.SEQ_LEN} --max-position-embeddings {layouts.SEQ_LEN} --vocab-size {layouts.VOCAB - 1}
    --micro-batch-size 4 --train-iters 1 --lr 1e-3 --tokenizer-type NullTokenizer --transformer-impl local
    --no-rope-fusion"""
COMMON = f"""
    --num-layers 3 --hidden-size {layouts.D} --num-attention-heads 2 --ffn-hidden-size 40 --disable-bias-linear
    --seq-length {layouts.SEQ_LEN} --max-position-embeddings {layouts.SEQ_LEN} --vocab-size {layouts.VOCAB - 1}
    --micro-batch-size 4 --global-batch-size 4 --train-iters 1 --lr 1e-3 --attention-dropout 0 --hidden-dropout 0
    --tokenizer-type NullTokenizer --transformer-impl local --use-cpu-initialization --no-bias-gelu-fusion
    --no-bias-swiglu-fusion --no-masked-softmax-fusion --no-persist-layer-norm --no-gradient-accumulation-fusion
    --no-bias-dropout-fusion --num-experts 8 --moe-ffn-hidden-size 20 --moe-aux-loss-coeff 0.01"""
RUNS = {
    "every layer": ("moe_spec layer_spec", "--moe-router-topk 2"),
    "expert tensor parallel size": (
        "moe_spec layer_spec",
        "--moe-router-topk 4 --expert-tensor-parallel-size 1",
    ),
    "dense first": (
        "moe_block_spec block_spec",
        "--moe-layer-freq [0,1,1] --moe-router-topk 3 --moe-router-score-function sigmoid --moe-router-dtype fp64 "
        "--moe-router-enable-expert-bias --moe-shared-expert-intermediate-size 20 --swiglu --normalization RMSNorm "
        "--recompute-granularity selective --recompute-modules shared_experts",
    ),
    "sequence loss in groups": (
        "moe_spec layer_spec",
        "--moe-router-topk 4 --moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-pre-softmax "
        "--moe-router-load-balancing-type seq_aux_loss --moe-z-loss-coeff 1e-3",
    ),
}


@pytest.fixture(scope="module")
def arguments():
    """megatron.training.arguments; 0.18 and newer want typing.override of Python 3.12."""
    if not hasattr(typing, "override"):
        typing.override = typing_extensions.override
    return pytest.importorskip(
        "megatron.training.arguments",
        reason="this megatron-core brings no megatron.training: docs/megatron.md says how to test with it",
    )


def validated(arguments, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    return arguments.validate_args(arguments.parse_args())


def parse(arguments, monkeypatch, options):
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *COMMON.split(), *options.split()])
    args = validated(arguments, monkeypatch)
    args.params_dtype = torch.float64  # for the comparison; there is no option for it
    return args


@pytest.mark.parametrize("name", by_arguments.names())
def test_example_reads_models_as_megatron_does(arguments, monkeypatch, name):
    """The fields that examples/megatron sets from models/*.txt are those of Megatron's own arguments.py."""
    given = by_arguments.read(name)
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *MINIMAL.split(), *given])
    args = validated(arguments, monkeypatch)
    config = arguments.core_transformer_config_from_args(args)
    fields, model = by_arguments.fields_of(given)
    assert len(fields) > 15
    for field, value in fields.items():
        assert getattr(config, field) == value, field
    untied = args.untie_embeddings_and_output_weights
    assert model.pop("share_embeddings_and_output_weights") == (not untied)
    assert model == {option: getattr(args, option) for option in model}


def provide(arguments, args):
    """Build a model as gpt_builder of pretrain_gpt.py does."""
    from megatron.core.transformer.spec_utils import import_module

    config = arguments.core_transformer_config_from_args(args)
    spec = block_spec_of(config) if args.spec is None else on_cpu(import_module(args.spec))
    return model_of(config, spec, position_embedding_type="rope")


@pytest.mark.parametrize("run", RUNS)
def test_spec_of_pretrain_gpt_equals_megatrons_own_layers(arguments, monkeypatch, run):
    spec, options = RUNS[run]
    theirs = provide(arguments, parse(arguments, monkeypatch, options))
    try:
        args = parse(arguments, monkeypatch, f"{options} --spec {spec}")
    except AssertionError as error:
        pytest.skip(f"this Megatron refuses it: {error}")
    monkeypatch.setattr("megatron.training.global_vars._GLOBAL_ARGS", args)
    monkeypatch.delitem(sys.modules, spec.split()[0], raising=False)
    layers = assert_equal_models(provide(arguments, args), theirs)
    assert len(layers) == (2 if run == "dense first" else 3)
