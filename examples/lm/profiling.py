"""Time of a step by part: attention, gate, dispatch, experts and so on, forward and backward (train.py --profile).

trainer.py calls StepProfile around steps FIRST to LAST. Hooks name a range of torch's profiler after each part of the
model; an operator's own time goes to the range around it, a backward's to that of its forward.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

FIRST, LAST = 3, 7  # steps of a start that are profiled
OF_MODULES = {
    "Attention": "attention",
    "BaseGate": "gate",
    "FusedExperts": "experts",
    "FMoETransformerMLP": "dispatch",  # what is left when gate and experts are taken out
    "DenseMLP": "dense MLP",
    "Embedding": "embedding, head",
    "head": "embedding, head",
}
REST = "norms, loss, rest"
PHASES = ("forward", "backward", "optimizer")
RUN, PART, BACKWARD = "run: ", "part: ", "autograd::engine::evaluate_function"


class Place(NamedTuple):
    run: str | None = None
    part: str = REST
    phase: str = "forward"


class StepProfile:
    """Profiles some steps of a training -> seconds and operators[run][part, phase], means over the steps."""

    def __init__(self, models: dict[str, nn.Module], device: torch.device) -> None:
        self.seconds: dict[str, dict[tuple[str, str], float]] = {name: defaultdict(float) for name in models}
        self.operators: dict[str, dict[tuple[str, str], float]] = {
            name: defaultdict(float) for name in models
        }
        self._models, self._step = models, 0
        on_gpu = device.type == "cuda"
        self._profile = profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu)
        self._time = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        self._hooks: list[Any] = []

    def step_begins(self) -> None:
        """Starts or ends the profiling, before a step."""
        self._step += 1
        if self._step == FIRST:
            self._hooks = [hook for model in self._models.values() for hook in name_ranges(model)]
            self._profile.start()
        elif self._step == LAST + 1:
            self._end()

    def close(self) -> None:
        """After the last step, which may come before the profiling has ended."""
        if self._hooks:
            self._step += 1
            self._end()

    def _end(self) -> None:
        self._profile.stop()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        num_steps = self._step - FIRST
        for event, place in placed(self._profile.events() or []):
            if place.run is not None:
                microseconds = getattr(event, self._time)
                self.seconds[place.run][place.part, place.phase] += microseconds / 1e6 / num_steps
                self.operators[place.run][place.part, place.phase] += 1 / num_steps

    def write(self, folder: Path) -> None:
        """profile.json and profile.png."""
        records = [
            {"run": run, "part": part, "phase": phase, "seconds": seconds, "operators": operators}
            for run, times in self.seconds.items()
            for (part, phase), seconds in sorted(times.items())
            for operators in [round(self.operators[run][part, phase], 1)]
        ]
        (folder / "profile.json").write_text(json.dumps(records, indent=1) + "\n")
        draw(self.seconds, folder / "profile.png")


@contextmanager
def run_range(name: str) -> Iterator[None]:
    """Around the step of one of the models that are trained together."""
    with record_function(RUN + name):
        yield


def name_ranges(model: nn.Module) -> list[Any]:
    """Makes the forward of every part of a model a range of the profiler -> hooks, to be removed."""
    ranges: list[record_function] = []

    def begin(part: str) -> None:
        ranges.append(record_function(PART + part))
        ranges[-1].__enter__()

    def end(*_: Any) -> None:
        ranges.pop().__exit__(None, None, None)

    hooks = []
    for name, module in model.named_modules():
        names = {name, *(kind.__name__ for kind in type(module).__mro__)}
        part = next((part for kind, part in OF_MODULES.items() if kind in names), None)
        if part is not None:
            hooks.append(module.register_forward_pre_hook(lambda *_, part=part: begin(part)))
            hooks.append(module.register_forward_hook(end))
    return hooks


def placed(events: Iterable[Any]) -> Iterator[tuple[Any, Place]]:
    """(event, where it belongs); a backward belongs where the forward of the same sequence number was."""
    events = sorted(events, key=lambda event: event.time_range.start)
    forward: dict[int, Place] = {}
    for event in events:
        place = place_of(event, {})
        if event.sequence_nr >= 0 and place.phase == "forward":
            forward[event.sequence_nr] = place
    for event in events:
        yield event, place_of(event, forward)


def place_of(event: Any, forward: dict[int, Place]) -> Place:
    place, part = Place(), None
    while event is not None:
        if event.name.startswith(RUN):
            place = place._replace(run=event.name.removeprefix(RUN))
        elif event.name.startswith(PART):
            part = part or event.name.removeprefix(PART)
        elif event.name.startswith("Optimizer."):
            part, place = "optimizer", place._replace(phase="optimizer")
        elif event.name.startswith(BACKWARD):
            origin = forward.get(event.sequence_nr, Place())
            part, place = origin.part, Place(origin.run, origin.part, "backward")
        event = event.cpu_parent
    return place._replace(part=part or REST)


def draw(seconds: dict[str, dict[tuple[str, str], float]], path: Path) -> None:
    """A bar a part: forward, backward and optimizer one after the other, for every run."""
    from matplotlib.figure import Figure

    parts = [*dict.fromkeys(OF_MODULES.values()), REST, "optimizer"]
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    panels = figure.subplots(1, len(seconds), squeeze=False, sharey=True, sharex=True)[0]
    for axis, (run, times) in zip(panels, seconds.items(), strict=True):
        left = [0.0] * len(parts)
        for phase, color in zip(PHASES, ("#1d4ed8", "#c2410c", "#57534e"), strict=True):
            widths = [1e3 * times.get((part, phase), 0.0) for part in parts]
            axis.barh(parts, widths, left=left, color=color, label=phase)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axis.set_title(f"{run}: {1e3 * sum(times.values()):.1f} ms a step", fontsize=11)
        axis.set_xlabel("ms")
        axis.spines[["top", "right"]].set_visible(False)
    panels[0].invert_yaxis()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=120)
