"""Train heads for the tokens after the next (MTP) with their model: import_model(folder, mtp_loss=weight).

The model predicts token i + 1 at position i. Head k of n predicts token i + k + 1 there, from the hidden state of head
k - 1 (of the model, for the first head) and the embedding of token i + k, by a block like the model's own and the
model's own output layer:

    h'_i = eh_proj [enorm Emb(t[i+k]); hnorm h_i]      2 d_model -> d_model
    h_i  = post_norm block(h')_i                       causal over the positions
    loss = weight / n * sum over k of the mean over i of -log softmax(lm_head h_i)[t[i+k+1]]

as in DeepSeek-V3, section 2.2: https://arxiv.org/abs/2412.19437. The modules are those with which Transformers drafts
in generate(use_mtp=True), MtpModel, whose forward samples tokens. So TrainedHeads.loss() calls its layers, and
WithHeads adds the loss to the model's by hooks. import_model() makes both; export() and save_pretrained() write the
heads as the files had them (in_files()).
"""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmoe_ext import huggingface
from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.expert_layers import InFiles
from fmoe_ext.checkpoint.safetensors_file import StoredTensor
from fmoe_ext.checkpoint.unloaded import heads_in
from fmoe_ext.checkpoint.weight_names import WeightNames, up_of
from fmoe_ext.model_files import experts_modules

HEADS = "mtp"  # attribute of a model whose heads train
# Ends of names: copies of the model's embeddings and output layer that some files keep in each head
_EMBEDDINGS, _OUTPUT = "embed_tokens.weight", "shared_head.head.weight"
_IGNORED_LABEL = -100


class TrainedHeads(nn.Module):
    """Heads of an imported model, its attribute `mtp`: in train() `weight` times their loss is added to the model's.

    `last_loss` is the heads' loss in the last forward, without the weight.
    """

    last_loss: Tensor | None = None

    def __init__(self, model: Any, tensors: Mapping[str, Tensor], weight: float) -> None:
        """tensors: {name in the files: value} that the model does not load. Raises CheckpointError without heads."""
        super().__init__()
        # Refuse what is not known to work, with the way out
        kind = type(model).__name__
        names = heads_in(tensors, model.config)
        if not names:
            raise CheckpointError(
                f"mtp_loss={weight}: the files of this {kind} have no heads for later tokens, or the folder that it "
                "was read from is gone: give import_model the folder, or leave mtp_loss out to train the model alone"
            )
        try:
            from transformers.modeling_layers import MtpModel
        except ImportError as error:
            raise CheckpointError(
                f"mtp_loss={weight} needs a Transformers with modules for heads, such as 5.20 ({error}): "
                "pip install -U transformers, or leave mtp_loss out: the heads are then saved as they were"
            ) from error
        count = getattr(model.config.get_text_config(), "num_mtp_layers", None)
        if not count:
            raise CheckpointError(
                f"mtp_loss={weight}: Transformers has no modules for the heads of {kind}, nor generate(use_mtp=True). "
                "Leave mtp_loss out: the heads are then saved as they were"
            )
        devices = {str(parameter.device) for parameter in model.parameters()}
        if len(devices) > 1 or "meta" in devices:
            raise CheckpointError(
                f"mtp_loss={weight}: heads train with a model on one device, but this {kind} is on "
                f"{', '.join(sorted(devices))}. Leave device_map out, or mtp_loss: the heads are then saved as they "
                "were"
            )
        try:
            with torch.device("meta"):
                heads = MtpModel(model, count)
        except (AttributeError, KeyError, ValueError) as error:
            raise CheckpointError(
                f"mtp_loss={weight}: Transformers makes no heads of this {kind}: {error!r}. Leave mtp_loss out: the "
                "heads are then saved as they were"
            ) from error
        # Inkling has a norm behind the embeddings, and scales and cuts the logits
        own_ways = ("logits_mup_width_multiplier", "unpadded_vocab_size")
        if hasattr(heads.embed_tokens, "embed_norm") or any(hasattr(heads.config, name) for name in own_ways):
            raise CheckpointError(
                f"mtp_loss={weight}: heads of {kind} embed tokens or scale logits in another way than this loss. "
                "Leave mtp_loss out: the heads are then saved as they were"
            )
        # Mellum's heads may have another kind of attention than every layer of the model
        if getattr(heads.config, "layer_types", None):
            raise CheckpointError(
                f"mtp_loss={weight}: layers of {kind} have several kinds of attention, which is not known of its "
                "heads. Leave mtp_loss out: the heads are then saved as they were"
            )
        del heads.embed_tokens, heads.shared_head  # parameters of the model: loss() takes them from it
        # Find which tensors of the files make each parameter of the heads: taken whole, or experts put together
        self.weight = weight
        self.shapes = {name: tuple(tensors[name].shape) for name in names}
        own = {name: tensors[name] for name in names if not name.endswith((_EMBEDDINGS, _OUTPUT))}
        files: Any = SimpleNamespace(folder=model.name_or_path, tensors=own)
        found = WeightNames(files, heads, own, heads.get_weight_conversions(model))
        self.whole = {parameter: name for name, parameter in found.renamed.items()}
        self.experts: dict[str, InFiles] = {}
        for path, module in experts_modules(heads).items():
            for parameter in (f"{path}.{up_of(module)}", f"{path}.down_proj"):
                if parameter not in self.whole and (in_files := found.experts(parameter)) is not None:
                    self.experts[parameter] = in_files
        known = {*self.whole.values(), *(n for of in self.experts.values() for one in of.names for n in one)}
        # dtypes as in the model's own block, where a routing bias may stay in float32
        dtypes = {name: value.dtype for name, value in model.get_decoder().layers[-1].state_dict().items()}
        state = {
            name: value.to(model.device, dtypes.get(name.partition(".mtp_block.")[2], model.dtype))
            for name, value in self.of_files(own).items()
        }
        # Load them; every tensor must be used and every parameter filled
        missing, unexpected = heads.load_state_dict(state, strict=False, assign=True)
        unknown = [*(own.keys() - known), *missing, *unexpected]
        unknown += [name for name, buffer in heads.named_buffers() if buffer.is_meta]
        unknown += [parameter for parameter, in_files in self.experts.items() if in_files.interleaved]
        if unknown:
            raise CheckpointError(
                f"mtp_loss={weight}: it is not known how the files make the heads of this {kind}: {min(unknown)}. "
                "Leave mtp_loss out: the heads are then saved as they were"
            )
        self.heads = (huggingface.use(heads) if self.experts else heads).train(model.training)

    def of_files(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert tensors in the files to {parameter or buffer of the heads: value}."""
        state = {parameter: tensors[name] for parameter, name in self.whole.items()}
        for parameter, in_files in self.experts.items():
            stacked = [torch.cat([tensors[name] for name in names], -2) for names in in_files.names]
            value = stacked[0] if in_files.is_stack else torch.stack(stacked)
            state[parameter] = value.mT.contiguous() if in_files.transposed else value
        return state

    def in_files(self, whole: Mapping[str, StoredTensor], model: Any) -> dict[str, StoredTensor]:
        """Convert the heads back to {name in the files: tensor}; whole: {name: tensor} of the model on one rank."""
        begin = f"{HEADS}.heads."
        out = {name: whole[begin + parameter] for parameter, name in self.whole.items()}
        for parameter, in_files in self.experts.items():
            # [E, *, *] -> the files' experts, or a stack; gate and up apart
            stored = whole[begin + parameter]
            for e, names in enumerate(in_files.names[:1] if in_files.is_stack else in_files.names):
                first = 0
                for name in names:
                    rows = self.shapes[name][-2]

                    def read(
                        e: int = e, first: int = first, rows: int = rows, parameter: str = parameter
                    ) -> Tensor:
                        stored, of = whole[begin + parameter], self.experts[parameter]
                        value = stored.read() if of.is_stack else stored.rows(e, e + 1)[0]
                        return (value.mT if of.transposed else value).narrow(-2, first, rows).contiguous()

                    out[name] = StoredTensor(self.shapes[name], stored.dtype, read)
                    first += rows
        # Some files repeat the model's embeddings and output layer in each head
        own = {id(parameter): name for name, parameter in model.named_parameters()}
        for end, layer in (
            (_EMBEDDINGS, model.get_input_embeddings()),
            (_OUTPUT, model.get_output_embeddings()),
        ):
            out |= {name: whole[own[id(layer.weight)]] for name in self.shapes if name.endswith(end)}
        return out

    def loss(self, model: Any, hidden: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
        """Compute the heads' loss, without its weight.

        hidden [B, L, D]: input of the model's output layer. kwargs of the model's forward: input_ids and labels [B, L];
        position_ids [B, L], which begin anew with each document; num_items_in_batch, by which the model divides its own
        loss, too.
        """
        # Heads embed the tokens that follow, so whole sequences of text are needed, with padding on the right
        ids, labels, positions = (kwargs.get(name) for name in ("input_ids", "labels", "position_ids"))
        mask = kwargs.get("attention_mask")
        is_text = all(
            value is None for name, value in kwargs.items() if name.startswith(("pixel_", "input_feat"))
        )
        if ids is None or labels is None or not is_text or kwargs.get("shift_labels") is not None:
            raise ValueError(
                "mtp_loss needs input_ids and labels of whole sequences of text, without shift_labels: heads embed the "
                "tokens that follow"
            )
        if mask is not None and (mask.dim() != 2 or bool((mask[:, 1:] > mask[:, :-1]).any())):
            raise ValueError(
                "mtp_loss takes padding on the right alone: set tokenizer.padding_side = 'right'"
            )
        B, L = ids.shape
        if positions is None:
            positions = torch.arange(L, device=ids.device)[None]
        heads, items = self.heads, kwargs.get("num_items_in_batch")
        embed, project = model.get_input_embeddings(), model.get_output_embeddings()
        total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        # Head k sees the first L - k - 1 positions: those that have a token k + 1 further on
        for k in range(1, len(heads.layers) + 1):
            n = L - k - 1  # positions with a token to predict
            if n < 1:  # too short: give the other heads gradients of zero, because DDP waits for all
                rest = heads.layers[k - 1 :].parameters()
                total = total + sum(p.flatten()[:0].sum() for p in rest if p.requires_grad)
                break
            # [B, n, D] of the positions i that have tokens i + k and i + k + 1
            hidden = heads.forward_layer(
                *(k - 1, hidden[:, :n], positions[:, :n] + k, None),
                inputs_embeds=embed(ids[:, k : k + n]).to(hidden.device),
            )
            logits = project(hidden)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            # a token of another document is no target: its position does not go on from this one's
            is_same = positions[:, k + 1 :] == positions[:, :n] + k + 1
            target = labels[:, k + 1 :].masked_fill(~is_same, _IGNORED_LABEL).to(logits.device)
            count = (
                target.ne(_IGNORED_LABEL).sum()
                if items is None
                else torch.as_tensor(items, device=logits.device)
            )
            loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")
            total = total + loss / count.clamp(min=1).to(loss.device)
        return total / len(heads.layers)


class WithHeads:
    """Forward hooks that add the heads' loss to what a model returns; an object, so that it can be pickled and copied.

    begin() clears, see() keeps the decoder's hidden states, add() computes the loss from them.
    """

    def __init__(self) -> None:
        # (hidden states, autocast) of the forward that runs: one for each thread of DataParallel, none for a copy
        self.kept = threading.local()

    def __reduce__(self) -> Any:
        return WithHeads, ()

    def register(self, model: Any) -> None:
        model.register_forward_pre_hook(self.begin)
        model.get_decoder().register_forward_hook(self.see)
        model.register_forward_hook(self.add, with_kwargs=True)

    def begin(self, model: nn.Module, args: Any) -> None:
        self.kept.last = None  # if the last forward failed, its graph still holds memory

    def see(self, decoder: nn.Module, args: Any, output: Any) -> None:
        self.kept.last = None
        if decoder.training and torch.is_grad_enabled():
            hidden = output[0]
            kind = hidden.device.type
            # note autocast now: Accelerate's ends with the model's forward, before add()
            is_on, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
            self.kept.last = hidden, torch.autocast(kind, dtype, is_on, torch.is_autocast_cache_enabled())

    def add(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        last = getattr(self.kept, "last", None)
        self.kept.last = None
        names = [*inspect.signature(type(model).forward).parameters][1:]
        kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
        if last is None or not model.training:
            return None
        if kwargs.get("labels") is None:
            warnings.warn(
                "mtp_loss: a forward in train() without labels trains no heads, as with label_smoothing_factor, "
                "compute_loss_func or TRL's DPO",
                stacklevel=2,
            )
            return None
        hidden, autocast = last
        heads: TrainedHeads = getattr(model, HEADS)
        with autocast:
            loss = heads.loss(model, hidden, kwargs)
        heads.last_loss = loss.detach()
        if isinstance(output, tuple):
            return (output[0] + heads.weight * loss, *output[1:])
        output["loss"] = output["loss"] + (heads.weight * loss).to(output["loss"].dtype)
        return output
