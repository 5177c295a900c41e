"""Alias: FastMoE's name for an attribute that this package calls otherwise, in FMoE, FMoELinear and gates."""

from typing import Any


class Alias:
    """A second name of an attribute, as num_expert = Alias("num_local_experts"), for programs written for FastMoE."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, owner: Any, _: type | None = None) -> Any:
        return self if owner is None else getattr(owner, self.name)

    def __set__(self, owner: Any, value: Any) -> None:
        setattr(owner, self.name, value)
