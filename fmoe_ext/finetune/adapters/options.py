"""Sort the options of PEFT's LoraConfig: read, without effect on the change of a weight, or refused.

reading.py asks refusals() and is_quick() about adapter_config.json. A new option of PEFT may change what the factors
mean, so an unknown one in the file is refused unless it is empty. The patterns of rank_pattern and alpha_pattern are
regular expressions of a file that may be a stranger's, and some patterns take forever: only those are evaluated whose
search ends soon, whatever they are tried on (is_quick).
"""

import math
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

READ = frozenset((
    "peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "init_lora_weights",
    "target_modules", "target_parameters", "auto_mapping", "base_model_name_or_path", "peft_version",
))  # fmt: skip
# they say how to train, note something, or repeat what the tensors show; the *_config belong to an init_lora_weights
NO_EFFECT = frozenset((
    "task_type", "revision", "inference_mode", "lora_dropout", "exclude_modules", "layers_to_transform",
    "layers_pattern", "modules_to_save", "megatron_config", "megatron_core", "runtime_config",
    "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size", "velora_config",
))  # fmt: skip
_DEFAULTS: Mapping[str, Any] = MappingProxyType({"bias": "none"})  # where the default is not empty
# values of init_lora_weights that leave the base's weights as they are; others subtract their first product
_KEEP_BASE = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
# letters, groups, alternatives, \. and \d, and as the only repetitions \d+, .* and .+: no group can repeat
_PATTERN = re.compile(r"(?:[\w^$|()-]|\\\.|\\d\+?|\.[*+]?)*")
_MOST_WAYS = 2.0**24  # in which a pattern may be tried on the name of a module
_NAME = 64  # places where a repetition may end: the characters of such a name


def is_quick(pattern: str) -> bool:
    """Return True if a pattern's search ends soon: alternatives and repetitions allow few ways through a name."""
    if len(pattern) > 500 or not _PATTERN.fullmatch(pattern):
        return False
    # the product of the alternatives of each group, and of _NAME for each repetition
    ways, alternatives = 1.0, [1]  # of the groups that are open
    for c in pattern:
        if c == "(":
            alternatives.append(1)
        elif c == "|":
            alternatives[-1] += 1
        elif c == ")" and len(alternatives) > 1:
            ways *= alternatives.pop()
        elif c in "*+":
            ways *= _NAME
    return ways * math.prod(alternatives) <= _MOST_WAYS


def refusals(config: Mapping[str, Any]) -> Iterator[str]:
    """Say in a sentence each option with which the file's factors are not the change of the base's weights."""
    first = config.get("init_lora_weights")
    if first not in _KEEP_BASE:
        yield (
            f"init_lora_weights={first!r} changed the base's weights before the training, so that this adapter does "
            "not fit the base: save it again with path_initial_model_for_weight_conversion"
        )
    for name, value in config.items():
        if name not in READ | NO_EFFECT and value not in (None, False, [], {}, _DEFAULTS.get(name)):
            yield f"{name}={value!r} is not supported"
