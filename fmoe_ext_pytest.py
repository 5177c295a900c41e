"""pytest plugin: audits the parallel plans of a project, `audit_recipes` in its settings or the fixture `audit_plan`.

A module beside the package, as fmoe_ext_command: pytest imports it everywhere, and importing fmoe_ext takes a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Settings of pytest.ini or pyproject.toml."""
    parser.addini("audit_recipes", "patterns of recipe files, each of them a test of fmoe audit", "args", [])
    parser.addini("audit_worlds", "numbers of ranks that every recipe file is audited on", "args", [])


def pytest_configure(config: pytest.Config) -> None:
    """The marker of what audit_recipes collects."""
    config.addinivalue_line("markers", "audit: an audit of a recipe file (audit_recipes)")


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> RecipeFile | None:
    """Recipe files in the folders that pytest is asked to look at."""
    patterns = parent.config.getini("audit_recipes")
    if file_path.suffix == ".py" and any(file_path.match(pattern) for pattern in patterns):
        return RecipeFile.from_parent(parent, path=file_path)
    return None


class RecipeFile(pytest.File):
    """A file with model() and parallelize(model, rank, world)."""

    def collect(self) -> Iterator[RecipeItem]:
        """An audit for each number of ranks; the recipe's own if none is set."""
        for world in self.config.getini("audit_worlds") or [None]:
            name = "audit" if world is None else f"audit[{world} ranks]"
            yield RecipeItem.from_parent(self, name=name, world=world)


class RecipeItem(pytest.Item):
    """The audit of one recipe file on one number of ranks."""

    def __init__(self, world: str | None, **options: Any) -> None:
        super().__init__(**options)
        self.world = world
        self.add_marker("audit")

    def runtest(self) -> None:
        """Fails with the report if a tensor differs, or with the reason why nothing can be compared."""
        _audit(self.path, {} if self.world is None else {"world": int(self.world)})

    def reportinfo(self) -> tuple[Path, None, str]:
        """The file and the name of the audit."""
        return self.path, None, f"{self.path.name}: {self.name}"


@pytest.fixture
def audit_plan(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """fmoe_ext.audit.audit_plan(recipe, **changes) of a file beside the test; fails the test if something differs."""

    def audited(recipe: str | Path, **changes: Any) -> Any:
        return _audit(request.path.parent / recipe, changes)

    return audited


def _audit(recipe: Path, changes: dict[str, Any]) -> Any:
    from fmoe_ext import audit

    try:
        report = audit.audit_plan(str(recipe), **changes)
    except audit.AuditError as error:
        pytest.fail(f"{recipe.name} cannot be audited: {error}", pytrace=False)
    if not report.ok:
        pytest.fail(str(report), pytrace=False)
    return report
