"""Refuses the words and patterns that make this project's text hard to read: `python docs/prose.py` (make lint).

It reads docstrings, comments and pages. LEFT counts the findings that each folder still has; it only gets smaller.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("fmoe_ext", "tests", "benchmarks", "examples", "docs")
HISTORY = ("docs/history", "docs/log.md", "docs/prose.py")
LONGEST_SENTENCE = 45  # words, in pages
LONGEST_TEST_NAME = 75

BEGINS = re.compile(r"(What|Whether|Where|Who|Whoever|How|Which|Those|That) ")
PERSONS = re.compile(r"\b(told|hears?|heard|whoever|somebody|anybody|whomever)\b", re.IGNORECASE)
STIFF = re.compile(r"\b(as there shall be|which see|where it must|of one's own|beside that)\b", re.IGNORECASE)
TEST = re.compile(r"test_(what|the|a|an|who|whoever|where|whether|nothing)_")

LEFT = {
    "benchmarks": 1,
    "docs": 10,
    "fmoe_ext": 26,
    "fmoe_ext/ep": 19,
    "fmoe_ext/gates": 21,
    "fmoe_ext/integrations": 11,
    "fmoe_ext/pipeline": 1,
    "fmoe_ext/remote": 11,
    "tests": 1,
}

Finding = tuple[str, int, str]  # path, line, what to change


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text


def comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def in_code(path: str, source: str) -> Iterator[Finding]:
    tree = ast.parse(source)
    for line, text in docstrings(tree):
        if BEGINS.match(text):
            yield path, line, f'begin with a verb or a noun, not with "{text.split()[0]}"'
        yield from ((path, line, problem) for problem in words(text))
    for line, text in comments(source):
        yield from ((path, line, problem) for problem in words(text))
    for node in ast.walk(tree):
        name = node.name if isinstance(node, ast.FunctionDef) else ""
        if TEST.match(name) or (name.startswith("test_") and len(name) > LONGEST_TEST_NAME):
            yield path, node.lineno, f"{name}: call it test_<thing>_<condition>_<result>"


def in_page(path: str, text: str) -> Iterator[Finding]:
    text = re.sub(r"^```.*?^```$", lambda m: "\n" * m[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL)
    number = 1
    for paragraph in re.split(r"\n(?=\s*\n|\s*[*|#>-] |\s*\d+\. )", text):
        for problem in words(paragraph):
            yield path, number, problem
        if not paragraph.lstrip().startswith("|"):
            for sentence in re.split(r"(?<=[.:;?!])\s+(?=[A-Z`*(\[])", paragraph):
                if len(sentence.split()) > LONGEST_SENTENCE:
                    yield (
                        path,
                        number,
                        f"split a sentence of {len(sentence.split())} words: {sentence.split()[0:6]}",
                    )
        number += paragraph.count("\n") + 1


def words(text: str) -> Iterator[str]:
    for pattern in (PERSONS, STIFF):
        for match in pattern.finditer(text):
            yield f'say it without "{match[0]}"'


def findings() -> Iterator[Finding]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            name = path.relative_to(ROOT).as_posix()
            if name.startswith(HISTORY) or path.suffix not in (".py", ".md"):
                continue
            read = in_code if path.suffix == ".py" else in_page
            yield from read(name, path.read_text())
    yield from in_page("README.md", (ROOT / "README.md").read_text())


def room(path: str) -> str:
    parts = path.split("/")
    return "/".join(parts[:2]) if parts[0] in ("fmoe_ext", "tests") and len(parts) > 2 else parts[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", help="show what is found below these, LEFT aside")
    paths = tuple(parser.parse_args().paths)
    found = list(findings())
    if paths:
        shown = [finding for finding in found if finding[0].startswith(paths)]
    else:
        counts = Counter(room(path) for path, _, _ in found)
        grown = {name for name, number in counts.items() if number > LEFT.get(name, 0)}
        shown = [finding for finding in found if room(finding[0]) in grown]
        for name in sorted(set(LEFT) | set(counts)):
            if counts[name] < LEFT.get(name, 0):
                print(f"{name}: {counts[name]} findings are left: write that number in docs/prose.py")
        for name in sorted(grown):
            print(f"{name}: {counts[name]} findings, {LEFT.get(name, 0)} are known")
    for path, line, problem in shown:
        print(f"{path}:{line}: {problem}")
    return 1 if shown else 0


if __name__ == "__main__":
    sys.exit(main())
