"""Find a model's MoE layers by their structure, and watch their scores and choices while they run.

    experts   modules of one class and equal shapes in a list               separate
              parameters [E, a, b] of one module                            stacked
              a list of such stacks, as each rank of a job has one          shards
    router    a matrix with E rows or columns, with a usual name, in the module of the experts or at most two above it;
              where no layer of the model has one, any matrix between the experts' width and E
    scores    the result of a product with the router's weight, cast or transposed on its way
    choices   what topk, argmax or max return for a tensor with a dimension of E, or an int64 tensor [tokens, K] that a
              module of the layer returns

layers_of() finds the first two in any model; Watch, a torch function mode, sees the others in the calls of a forward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_ROUTER_NAMES = ("router", "gate", "wg", "classifier", "switch")  # beginnings of words in its name
_CHOOSE = frozenset(("topk", "argmax", "max", "sort", "argsort"))  # calls that rank scores
# calls that may compute scores. cdist: scores that are distances; wide_linear: our gates' product
_PRODUCTS = frozenset((
    "linear", "matmul", "__matmul__", "__rmatmul__", "mm", "addmm", "bmm", "baddbmm", "einsum", "cdist", "wide_linear",
))  # fmt: skip


@dataclass
class Layer:
    """A MoE layer: its module, its routers, and the experts' parameters in one or several of three forms."""

    name: str
    module: nn.Module
    num_experts: int
    num_scores: int = 0  # num_experts, or one more for a choice of no expert; 0 before its router is found
    stacked: dict[str, nn.Parameter] = field(default_factory=dict)  # [E, a, b], all experts
    separate: list[dict[str, nn.Parameter]] = field(default_factory=list)  # one dict an expert
    shards: list[dict[str, nn.Parameter]] = field(default_factory=list)  # stacks of a part, as a rank's
    order: list[int] = field(default_factory=list)  # place in the shards of each expert, once it was measured
    routers: dict[str, nn.Parameter] = field(default_factory=dict)
    named: bool = True  # False: the router was found by its shape alone

    def expert(self, number: int, of: Callable[[nn.Parameter], torch.Tensor | None]) -> list[torch.Tensor]:
        """Collect of(parameter), cut to this expert where the parameter holds several; what is None is left out."""
        whole = [of(p) for p in self.separate[number].values()] if self.separate else []
        if self.shards:
            shard, row = divmod(self.place(number), self.num_experts // len(self.shards))
            whole += [t[row] if (t := of(p)) is not None else None for p in self.shards[shard].values()]
        slices = [(t[number] if (t := of(p)) is not None else None) for p in self.stacked.values()]
        return [tensor for tensor in whole + slices if tensor is not None]

    @property
    def is_partly_empty(self) -> bool:
        """True if some experts have no parameters: they compute nothing, or return their input."""
        return any(not expert for expert in self.separate)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of all experts by name."""
        return self.stacked | {n: p for part in (*self.separate, *self.shards) for n, p in part.items()}

    def load(self, choices: torch.Tensor) -> torch.Tensor:
        """Count how often each expert was chosen [E]; choices of nobody are left out."""
        valid = choices[(choices >= 0) & (choices < self.num_experts)]
        return valid.bincount(minlength=self.num_experts)

    def place(self, number: int) -> int:
        """Return the row of an expert if all shards are put one behind the other."""
        return self.order[number] if self.order else number

    def state(self) -> dict[str, torch.Tensor]:
        """Return the floating-point tensors [E] that are no parameters, by name: biases of the choice, counters."""
        found = {}
        for prefix, module in self.module.named_modules():
            # some models keep their state in plain attributes
            attributes = {n: v for n, v in vars(module).items() if isinstance(v, torch.Tensor)}
            for name, value in [*module.named_buffers(recurse=False), *attributes.items()]:
                if value.shape == (self.num_experts,) and value.is_floating_point():
                    found[f"{self.name}.{prefix}.{name}".replace("..", ".").lstrip(".")] = value
        return found


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Collect Layer.state() of all layers of a model."""
    return {n: v for layer in layers_of(model) for n, v in layer.state().items()}


def layers_of(model: nn.Module) -> list[Layer]:
    """Find the MoE layers of a model: banks of experts with a router near them, known by its name or else its shape."""
    return _layers_of(model, named=True) or _layers_of(model, named=False)


def _layers_of(model: nn.Module, named: bool) -> list[Layer]:
    modules = dict(model.named_modules())
    found: dict[str, Layer] = {}
    for name, module in modules.items():
        if isinstance(module, nn.ModuleList | nn.ModuleDict) and (experts := _alike(name, module)):
            _attach(Layer(name, module, len(experts), separate=experts, named=named), found, modules)
            # the same list may be of shards: then the router has a score for each row of them
            if isinstance(module, nn.ModuleList) and (shards := _shards(name, module)):
                size = sum(len(next(iter(shard.values()))) for shard in shards)
                _attach(Layer(name, module, size, shards=shards, named=named), found, modules)
        # weights of these have three dimensions, too
        elif not isinstance(module, nn.modules.conv.Conv1d | nn.modules.conv.ConvTranspose1d):
            stacks: dict[int, dict[str, nn.Parameter]] = {}
            for key, p in module.named_parameters(recurse=False):
                if p.ndim == 3 and p.shape[0] > 1:
                    stacks.setdefault(p.shape[0], {})[f"{name}.{key}".lstrip(".")] = p
            for size, stacked in stacks.items():
                _attach(Layer(name, module, size, stacked=stacked, named=named), found, modules)
    # E + 1 scores are no second router of E + 1 experts: that bank is a list of other modules, one fewer
    taken = {
        name for layer in found.values() if layer.num_scores == layer.num_experts for name in layer.routers
    }
    for key in [key for key, layer in found.items() if layer.num_scores > layer.num_experts]:
        if taken & found[key].routers.keys():
            del found[key]
    # a list of blocks that contain MoE layers is no bank of experts itself
    inner = [layer.name for layer in found.values()]
    return [
        layer
        for layer in found.values()
        if not (layer.separate and any(_inside(other, layer) for other in inner if other != layer.name))
    ]


def unregistered(model: nn.Module) -> dict[str, int]:
    """Find plain lists of modules, whose parameters the model does not have -> {attribute: number of modules}."""
    known = {id(m) for m in model.modules()}
    return {
        f"{path}.{name}".lstrip("."): len(value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, list | tuple)
        and len(value) > 1
        and all(isinstance(m, nn.Module) and id(m) not in known for m in value)
        and any(True for m in value for _ in m.parameters())
    }


def repeated(model: nn.Module) -> dict[str, int]:
    """Find lists that hold one module several times, beside a router of their length -> {list: its length}."""
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) > 1 and len({id(m) for m in module}) == 1:
            owner = path.rpartition(".")[0]
            own = {id(p) for p in module.parameters()}
            if own and _routers(owner, model.get_submodule(owner), len(module), own):
                found[path] = len(module)
    return found


def _inside(other: str, layer: Layer) -> bool:
    """Return True if the layer named `other` lies inside an expert of this layer, or inside the layer."""
    first = next(expert for expert in layer.separate if expert)
    return any(other.startswith(f"{name.rsplit('.', 1)[0]}.") for name in first) or (
        other.startswith(f"{layer.name}.") if layer.name else False
    )


def _alike(name: str, module: nn.Module) -> list[dict[str, nn.Parameter]]:
    """Return the parameters of each module of a list, if they are of one class and of the same shapes; else [].

    Modules without parameters may stand before or behind them: experts that return 0, a constant or their input.
    """
    children = [(k, c, dict(c.named_parameters())) for k, c in module.named_children()]
    full = [i for i, (_, _, own) in enumerate(children) if own]  # must be neighbours
    if len(full) < 2 or full != list(range(full[0], full[-1] + 1)):
        return []
    if len({type(children[i][1]) for i in full}) > 1:
        return []
    shapes = {tuple(tuple(p.shape) for p in children[i][2].values()) for i in full}
    experts = [{f"{name}.{k}.{n}".lstrip("."): p for n, p in own.items()} for k, _, own in children]
    return experts if len(shapes) == 1 else []


def _shards(name: str, module: nn.Module) -> list[dict[str, nn.Parameter]]:
    """Return the stacks [E / shards, a, b] of each module of a list, if all have the same shapes; else []."""
    shards = [
        {f"{name}.{k}.{n}".lstrip("."): p for n, p in child.named_parameters(recurse=False) if p.ndim == 3}
        for k, child in module.named_children()
    ]
    shapes = {tuple(tuple(p.shape) for p in shard.values()) for shard in shards}
    sizes = {shape[0] for shape in next(iter(shapes), ())}
    return shards if len(shards) > 1 and len(shapes) == len(sizes) == 1 else []


def _attach(bank: Layer, found: dict[str, Layer], modules: dict[str, nn.Module]) -> None:
    """Look for the router of a bank of experts, and add the bank to `found` under the name of the router's module."""
    experts, size = bank.parameters().values(), bank.num_experts
    own = {id(p) for p in experts}
    widths = None if bank.named else {width for p in experts for width in p.shape}
    owner = bank.name
    for _ in range(3):  # the module itself, the one above it and the next
        layer = found.get(owner)
        # a second bank of this router: gate, up and down may be three lists or three modules with a stack each
        if layer is not None and layer.num_experts == size:
            layer.stacked |= bank.stacked
            if bank.separate:
                before = layer.separate or [{}] * size
                layer.separate = [a | b for a, b in zip(before, bank.separate, strict=True)]
            if bank.shards and len(layer.shards) in (0, len(bank.shards)):
                before = layer.shards or [{}] * len(bank.shards)
                layer.shards = [a | b for a, b in zip(before, bank.shards, strict=True)]
            return
        # one score more than experts: that of choosing nobody
        for scores in (size, size + 1) if bank.named else (size,):
            if routers := _routers(owner, modules[owner], scores, own, widths):
                found[owner] = replace(
                    bank, name=owner, module=modules[owner], num_scores=scores, routers=routers
                )
                return
        if not owner:
            return
        owner = owner.rpartition(".")[0]


def _routers(
    owner: str, module: nn.Module, size: int, own: set[int], widths: set[int] | None = None
) -> dict[str, nn.Parameter]:
    """Find the matrices that may be the router of `size` experts below a module -> {name: parameter}.

    widths None: by a router's name and a dimension of `size`; else by their shape, size x one of widths, alone.
    own: ids of the experts' parameters, which are no routers.
    """
    found = {}
    for name, p in module.named_parameters():
        words = name.lower().replace(".", "_").split("_")
        if widths is None:
            fits = any(word.startswith(_ROUTER_NAMES) for word in words) and size in p.shape
        else:
            fits = any((size, width) == p.shape or (width, size) == p.shape for width in widths)
        bias = words[-1] == "bias"  # rows of an expert's "gate_up_proj_bias"
        if id(p) not in own and p.ndim == 2 and fits and "lora" not in name and not bias:
            found[f"{owner}.{name}".lstrip(".")] = p
    return found


class Watch(TorchFunctionMode):
    """Record, for each layer, the expert choices and the router's scores of its last forward, and change the scores.

    A torch function mode sees every call of torch in a `with watch.forward():` block. Hooks tell in which layer it is.
    """

    def __init__(
        self, layers: list[Layer], change: Callable[[Layer, torch.Tensor], torch.Tensor] | None = None
    ) -> None:
        super().__init__()
        self.layers = layers
        self.change = change  # (layer, scores) -> scores that the model gets instead
        self.choices: dict[str, torch.Tensor] = {}  # int64 [tokens, K]
        self.scores: dict[str, torch.Tensor] = {}  # [tokens, E] as the product returned them
        self.over_tokens: set[str] = set()  # layers whose experts choose tokens
        self.ranked: set[str] = set()  # layers whose choices are a rank of scores by experts
        self.multiplied: set[str] = set()  # names of routers that were a factor
        self._inside: list[Layer] = []  # layers whose forward runs, the innermost last
        self._chose: set[str] = set()  # layers that ranked scores in their present forward

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if self._inside and name in _CHOOSE:
            scores = args[0] if args else (kwargs or {}).get("input")
            if isinstance(scores, torch.Tensor):
                self._record(name, scores, args, kwargs or {}, result)
        if self._inside and name in _PRODUCTS and self._is_of_router(args, kwargs or {}, result):
            layer = self._inside[-1]
            rows = result.reshape(-1, result.shape[-1])
            self.scores[layer.name] = rows.detach().clone()
            if self.change is not None:  # the model goes on with the changed scores
                result = self.change(layer, rows).to(result.dtype).view_as(result)
        return result

    def _is_of_router(self, args: Any, kwargs: Any, result: Any) -> bool:
        """Return True if a factor of this product has the values of a router of the innermost layer.

        Values are compared, not identities: the weight may be cast, transposed or copied on its way.
        """
        layer = self._inside[-1]
        if not isinstance(result, torch.Tensor) or result.ndim < 2 or result.shape[-1] != layer.num_scores:
            return False
        factors = [v for a in (*args, *kwargs.values()) for v in (a if isinstance(a, list | tuple) else [a])]
        for name, weight in layer.routers.items():
            for v in factors:
                if not isinstance(v, torch.Tensor) or v.ndim != 2 or not v.is_floating_point():
                    continue
                for w in (v, v.t()):
                    if w.shape == weight.shape and torch.allclose(w.to(weight), weight, rtol=1e-2, atol=1e-6):
                        self.multiplied.add(name)
                        return True
        return False

    def _record(self, name: str, scores: torch.Tensor, args: Any, kwargs: Any, result: Any) -> None:
        """Keep what a call of _CHOOSE chose, if it ranked the innermost layer's scores over the experts."""
        layer = self._inside[-1]
        size = layer.num_scores
        # dim is the third argument of topk(input, k, dim), the second of the others; max() without it is no choice
        place = 2 if name == "topk" else 1
        dim = kwargs.get(
            "dim", args[place] if len(args) > place else (-1 if name in ("topk", "sort") else None)
        )
        if not isinstance(dim, int) or scores.ndim < 2:
            return
        if scores.shape[dim] != size:
            if size in scores.shape and name == "topk":  # along the tokens: each expert takes its best ones
                self.over_tokens.add(layer.name)
            return
        indices = result if isinstance(result, torch.Tensor) else result[1]
        self.ranked.add(layer.name)
        if name in ("sort", "argsort"):  # a cumulative sum may cut it later: how many are chosen is not known
            return
        if name in ("argmax", "max"):  # one choice a call; a layer may make several calls
            indices = indices.reshape(-1, 1)
            before = self.choices.get(layer.name)
            if before is not None and layer.name in self._chose and len(before) == len(indices):
                known = (before == indices).any(-1)
                if known.all():  # a maximum of what is chosen already, as for a count
                    indices = before
                elif not known.any():  # one more, as a top 2 of two argmax has it
                    indices = torch.cat([before, indices], 1)
        self._keep(layer, indices)
        self._chose.add(layer.name)

    def _keep(self, layer: Layer, indices: torch.Tensor) -> None:
        self.choices[layer.name] = indices.detach().reshape(-1, indices.shape[-1]).clone()

    @contextlib.contextmanager
    def forward(self) -> Iterator[Watch]:
        """Watch the forwards inside."""

        def entered(layer: Layer) -> None:
            self._inside.append(layer)
            self._chose.discard(layer.name)

        def returned(layer: Layer, output: Any) -> None:
            # a router that returns its choices: they may have been made by calls that are not in _CHOOSE
            for value in output if isinstance(output, tuple) else ():
                if (
                    isinstance(value, torch.Tensor)
                    and value.dtype == torch.int64
                    and value.ndim == 2
                    and value.shape[1] <= layer.num_experts
                    and value.numel()
                    and int(value.max()) < layer.num_experts
                ):
                    self._keep(layer, value)

        hooks = []
        for layer in self.layers:
            hooks.append(layer.module.register_forward_pre_hook(lambda *_, at=layer: entered(at)))
            # "and None": a hook that returns something would replace the output
            hooks.append(layer.module.register_forward_hook(lambda *_: self._inside.pop() and None))
            for module in layer.module.modules():
                hooks.append(module.register_forward_hook(lambda _m, _i, out, at=layer: returned(at, out)))
        try:
            with self:
                yield self
        finally:
            for hook in hooks:
                hook.remove()
