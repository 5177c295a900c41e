"""LoRA on experts: fuse(model) computes PEFT's adapters beside the frozen weights."""

from typing import TypeVar

from torch import nn

Model = TypeVar("Model", bound=nn.Module)


def fuse(model: Model, quantize: str | None = None) -> Model:
    """Compute the adapters that PEFT put on expert weights as two thin products beside the frozen ones -> the model.

    model: with LoRA adapters by LoraConfig(target_parameters=[...]) on the experts of a Transformers model under
    experts_implementation="fmoe" (huggingface.use), or on an FMoE layer's htoh4.weight and h4toh.weight.
    Losses, gradients, names, files and PEFT's own functions (disable_adapter, merge_and_unload, save_pretrained) stay.
    PEFT alone adds scale * B @ A of all experts to the weight at every forward, and keeps the gradient of the sum.
    Call it again after an adapter was added; otherwise that changes nothing.
    quantize: "mxfp4", "int4" or "q4_k", the format of a stream()'s experts: the forward computes with W + scale * B @ A
    rounded to the values that the packed W can take, and gradients reach A and B as if it had not been rounded. Then
    `fmoe adapter merge --to packed --rounding nearest` writes a model that has the logits of that forward.
    Raises ImportError without PEFT 0.19 or newer, ValueError if PEFT has no adapter on experts that fmoe_ext computes,
    if adapters that are trained have an option of LoraConfig that PEFT leaves out for target_parameters, and for
    experts in another format than quantize.
    Equivalent to: model, to rounding; with quantize, the model of the merged and packed weights.

    Example:

        >>> from peft import LoraConfig, get_peft_model
        >>> mlp = fmoe_ext.FMoETransformerMLP(num_experts=2, d_model=8, d_hidden=16)
        >>> x, config = torch.randn(5, 8), LoraConfig(r=2, target_parameters=["experts.htoh4.weight"])
        >>> expected = mlp(x)
        >>> model = fuse(get_peft_model(mlp, config))  # B begins as zeros
        >>> torch.allclose(model(x), expected, atol=1e-6)
        True
    """
    # not at the top: PEFT is optional, and slow to import
    from fmoe_ext._require import require

    require("peft", "lora.fuse()")
    from fmoe_ext.finetune.peft_lora import fuse_adapters

    fuse_adapters(model, quantize)
    return model
