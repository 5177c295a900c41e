"""Sort the options of PEFT's LoraConfig: read, without effect on how the factors change a weight, or refused.

reading.py asks refusals() and num_ways() about adapter_config.json. A new option of PEFT may change what the factors
mean, so an unknown one in the file is refused unless it is empty. The patterns of rank_pattern and alpha_pattern are
regular expressions of a file that may be a stranger's, and some patterns take forever: only those are evaluated that
have few ways through the longest name in the file (num_ways).
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
# they say how to train, note something, or repeat what the tensors show; loftq_config, eva_config, corda_config and
# lora_ga_config belong to an init_lora_weights
NO_EFFECT = frozenset((
    "task_type", "revision", "inference_mode", "lora_dropout", "exclude_modules", "layers_to_transform",
    "layers_pattern", "modules_to_save", "megatron_config", "megatron_core", "runtime_config",
    "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size", "velora_config",
))  # fmt: skip
_DEFAULTS: Mapping[str, Any] = MappingProxyType({"bias": "none"})  # where the default is not empty
# values of init_lora_weights that leave the base's weights as they are; the others subtract the product of the
# initial factors from them
_KEEP_BASE = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
# of the others, those that PEFT's path_initial_model_for_weight_conversion converts, as "pissa_niter_4"
_CONVERTED = ("pissa", "corda", "olora", "lora_ga")
_MERGE_IN_PEFT = "merge it by PEFT's merge_and_unload() into the model that was trained"
# letters, groups, alternatives, \. and \d, and as the only repetitions \d+, .* and .+: no group can repeat
_PATTERN = re.compile(r"(?:[\w^$|()-]|\\\.|\\d\+?|\.[*+]?)*")
MOST_WAYS = 2**22  # of one pattern through one name: a tenth of a second or so


def num_ways(pattern: str, length: int) -> float:
    """Return a bound on the ways in which re may try a pattern on a name of `length` characters; inf if it knows none.

    They are the product of the alternatives of each group, and of the places where the repetitions may end. These
    places ascend, so that there are comb(length + n, n) for n repetitions.
    """
    if len(pattern) > 500 or not _PATTERN.fullmatch(pattern):
        return math.inf
    ways = 1
    repetitions = 1  # (.*\.)? before each pattern, which PEFT tries on the end of a name
    alternatives = [1]  # of each group that is open
    for c in pattern:
        if c == "(":
            alternatives.append(1)
        elif c == "|":
            alternatives[-1] += 1
        elif c == ")" and len(alternatives) > 1:
            ways *= alternatives.pop()
        elif c in "*+":
            repetitions += 1
    return ways * math.prod(alternatives) * math.comb(length + repetitions, repetitions)


def refusals(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each option under which the factors in the file are not the change of the base's weights."""
    first = config.get("init_lora_weights")
    if first not in _KEEP_BASE:
        converts = str(first).startswith(_CONVERTED)
        yield (
            f"init_lora_weights={first!r} changed the base's weights before the training, so that this adapter does "
            "not fit the base: "
            + ("save it again with path_initial_model_for_weight_conversion" if converts else _MERGE_IN_PEFT)
        )
    for name, value in config.items():
        if name not in READ | NO_EFFECT and value not in (None, False, [], {}, _DEFAULTS.get(name)):
            yield f"{name}={value!r} is not supported"
