"""FastMoE's names for attributes that this package calls otherwise."""

from typing import Any


class Alias:
    """An attribute's name in FastMoE, whose programs read and set it; no code of this package does."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, owner: Any, _: type | None = None) -> Any:
        return self if owner is None else getattr(owner, self.name)

    def __set__(self, owner: Any, value: Any) -> None:
        setattr(owner, self.name, value)
