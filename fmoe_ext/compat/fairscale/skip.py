"""Skip connections between the layers of an nn.Sequential: a layer stashes a tensor, a later one pops it.

    @skippable(stash=["1to3"])                      @skippable(pop=["1to3"])
    class First(nn.Module):                         class Third(nn.Module):
        def forward(self, x):                           def forward(self, x):
            yield stash("1to3", x)                          skip = yield pop("1to3")
            return self.layer(x)                            return self.layer(x) + skip

forward is a generator, and Skippable runs it: it answers each command that the layer yields. In Pipe the stash is a
dict that travels with the microbatch (keeping()), in a plain nn.Sequential one of the thread. The interface is
torchgpipe's (Kim et al. 2020) and FairScale's.
"""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from uuid import UUID, uuid4

from torch import Tensor, nn

from fmoe_ext.pipeline.microbatch import Values


@dataclass(frozen=True, order=True)
class Namespace:
    """Keeps equal names of different layers apart: layer.isolate(Namespace()). A copy is the same namespace."""

    id: UUID = field(default_factory=uuid4)


SkipKey: TypeAlias = tuple[Namespace | None, str]
Skips: TypeAlias = dict[SkipKey, Tensor | None]

# context variables, which each thread has for itself
_skips: ContextVar[Skips | None] = ContextVar("skips of the microbatch that is computed", default=None)
_outside_skips: ContextVar[Skips | None] = ContextVar("skips outside of Pipe", default=None)


@dataclass(frozen=True)
class stash:
    """`yield stash(name, tensor)` in a skippable layer's forward keeps tensor for the layer that pops it."""

    name: str
    tensor: Tensor | None


@dataclass(frozen=True)
class pop:
    """`tensor = yield pop(name)` in a skippable layer's forward takes what an earlier layer stashed."""

    name: str


@contextmanager
def keeping(skips: Skips) -> Iterator[None]:
    """Let layers inside the block stash to, and pop from, this dict."""
    token = _skips.set(skips)
    try:
        yield
    finally:
        _skips.reset(token)


class Skippable(nn.Module):
    """A layer that stashes or pops, made by the decorator skippable; self.module is the layer it was made of."""

    layer_class: type[nn.Module]
    stashes: frozenset[str]
    pops: frozenset[str]

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__()
        self.module = self.layer_class(*args, **kwargs)
        self._namespaces: dict[str, Namespace] = {}

    def isolate(self, namespace: Namespace, *, only: Iterable[str] | None = None) -> "Skippable":
        """Put this layer's names, or only those given, into a namespace -> itself."""
        for name in self.stashes | self.pops if only is None else only:
            self._namespaces[name] = namespace
        return self

    def key(self, name: str) -> SkipKey:
        """Return a name with the namespace that isolate() gave it."""
        return self._namespaces.get(name), name

    def stash_keys(self) -> list[SkipKey]:
        """Return the keys that this layer stashes, sorted by name."""
        return [self.key(name) for name in sorted(self.stashes)]

    def pop_keys(self) -> list[SkipKey]:
        """Return the keys that this layer pops, sorted by name."""
        return [self.key(name) for name in sorted(self.pops)]

    def forward(self, inp: Values) -> Values:
        """Run the layer's forward; RuntimeError for a name that is not declared, not stashed or not used."""
        skips = _skips.get()
        if skips is None:  # in a plain nn.Sequential: one dict a thread, which the pops empty
            skips = _outside_skips.get()
        if skips is None:
            skips = {}
            _outside_skips.set(skips)
        commands = self.module(inp)  # a generator, unless no command is in the forward
        if not isinstance(commands, Generator):
            _check_all_used(self, set())
            return commands
        # one command at a time; send() goes on with the answer, and StopIteration has what forward returned
        used: set[str] = set()
        answer: Tensor | None = None
        while True:
            try:
                command = commands.send(answer)
            except StopIteration as stop:
                _check_all_used(self, used)
                return stop.value
            if isinstance(command, stash):
                if command.name not in self.stashes:
                    raise RuntimeError(f"'{command.name}' has not been declared as stashable")
                skips[self.key(command.name)] = command.tensor
                answer = None
            elif isinstance(command, pop):
                if command.name not in self.pops:
                    raise RuntimeError(f"'{command.name}' has not been declared as poppable")
                if self.key(command.name) not in skips:
                    raise RuntimeError(f"'{command.name}' has not been stashed")
                answer = skips.pop(self.key(command.name))
            else:
                raise TypeError(f"a skippable layer yields stash(...) or pop(...), but yielded {command!r}")
            used.add(command.name)

    def extra_repr(self) -> str:
        return f"stash={sorted(self.stashes)}, pop={sorted(self.pops)}"


def skippable(
    stash: Iterable[str] = (), pop: Iterable[str] = ()
) -> Callable[[type[nn.Module]], type[Skippable]]:
    """Decorate a module class whose forward yields stash(name, tensor) or pop(name) for these names.

    @skippable(stash=["1to3"])
    class First(nn.Module):
        def forward(self, x):
            yield stash("1to3", x)
            return self.layer(x)
    """

    def decorate(layer_class: type[nn.Module]) -> type[Skippable]:
        # a subclass of Skippable with the name, module and docstring of the layer's class, as it prints and pickles
        names = {
            "layer_class": layer_class,
            "stashes": frozenset(stash),
            "pops": frozenset(pop),
            "__doc__": layer_class.__doc__,
            "__module__": layer_class.__module__,
        }
        return type(layer_class.__name__, (Skippable,), names)

    return decorate


def verify_skippables(module: nn.Sequential) -> None:
    """Raise TypeError unless every name is stashed by one layer and popped by one later layer."""
    stashed: set[SkipKey] = set()
    popped: set[SkipKey] = set()
    faults = []
    for layer_name, layer in module.named_children():
        if not isinstance(layer, Skippable):
            continue
        both = layer.stashes & layer.pops  # one fault for such a name, not three
        faults += [f"'{layer_name}' declared '{n}' both as stashable and as poppable" for n in sorted(both)]
        # pops first: what this layer stashes is for later ones
        for key in layer.pop_keys():
            if key[1] in both:
                continue
            if key in popped:
                faults.append(
                    f"'{layer_name}' redeclared '{key[1]}' as poppable but not isolated by namespace"
                )
            elif key not in stashed:
                faults.append(f"'{layer_name}' declared '{key[1]}' as poppable but it was not stashed")
            popped.add(key)
        for key in layer.stash_keys():
            if key[1] in both:
                continue
            if key in stashed:
                faults.append(
                    f"'{layer_name}' redeclared '{key[1]}' as stashable but not isolated by namespace"
                )
            stashed.add(key)
    # what no later layer takes
    unpopped = sorted(name for _, name in stashed - popped)
    faults += [f"no module declared '{name}' as poppable but stashed" for name in unpopped]
    if faults:
        lines = "\n".join(f"* {fault}" for fault in faults)
        raise TypeError(f"one or more pairs of stash and pop do not match:\n\n{lines}")


def _check_all_used(layer: Skippable, used: set[str]) -> None:
    for names, verb in ((layer.stashes, "stashed"), (layer.pops, "popped")):
        if left := sorted(names - used):
            quoted = ", ".join(f"'{name}'" for name in left)
            raise RuntimeError(f"{quoted} must be {verb} but have not")
