"""Small MoE models of every architecture of the installed Transformers."""

import functools
import inspect
import sys

import torch
import transformers

from fmoe_ext.audit.shrink import shrunk_config
from fmoe_ext.doctor.finding import layers_of
from fmoe_ext.doctor.subject import from_transformers
from tests.integrations.tiny_architectures import LARGEST, architectures, tiny_config

MORE_SIZES = {
    "moe_num_experts": 4,
    "num_local_experts": 4,
    "num_routed_experts": 4,
    "moe_k": 2,
    "moe_topk": 2,
}


def moe_architectures():
    """Names of the classes whose source speaks of experts."""
    for name in architectures():
        found = getattr(transformers, name, None)
        module = sys.modules.get(getattr(found, "__module__", ""))
        if module is not None and "expert" in inspect.getsource(module).lower():
            yield name


def smaller(config):
    """The configuration and those inside it with few, small experts."""
    config = shrunk_config(config)
    for name, size in MORE_SIZES.items():
        if isinstance(getattr(config, name, None), int) and getattr(config, name) > size:
            setattr(config, name, size)
    for name in getattr(config, "sub_configs", None) or ():
        if getattr(config, name, None) is not None:
            setattr(config, name, smaller(getattr(config, name)))
    return config


def configs(config_class):
    yield lambda: smaller(tiny_config(config_class))
    yield lambda: smaller(config_class())
    yield lambda: tiny_config(config_class)


def subject_of(name):
    """A doctor.Subject of an architecture, or the reason why none is built."""
    model_class, reason = getattr(transformers, name), ""
    for config in configs(model_class.config_class):
        try:
            with torch.device("meta"):
                small = model_class(config())
            if sum(p.numel() for p in small.parameters()) > LARGEST:
                reason = "too large"
                continue
            subject = from_transformers(functools.partial(lambda c: model_class(c()), config))
            subject.task(subject.model, subject.batch)
            if layers_of(subject.model):
                return subject
            reason = "no MoE layer is found"
        except Exception as error:  # an architecture may raise anything for sizes that it does not expect
            reason = f"{type(error).__name__}: {str(error)[:100]}".replace("\n", " ")
    return reason
