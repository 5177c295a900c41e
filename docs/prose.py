"""Refuses the words and patterns that make this project's text hard to read: `python docs/prose.py` (make lint).

It reads docstrings, comments, names of tests, and pages.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("fmoe_ext", "tests", "benchmarks", "examples", "docs")
LEFT_OUT = ("docs/history", "docs/prose.py", "benchmarks/results")
LONGEST_SENTENCE = 45  # words, in pages
LONGEST_TEST_NAME = 75

BEGINS = re.compile(r"(What|Whether|Where|Who|Whoever|How|Which|Those|That) ")
PERSONS = re.compile(
    r"\b(told|hears?|heard|whoever|somebody|anybody|whomever)\b", re.IGNORECASE
)
STIFF = re.compile(
    r"\b(as there shall be|which see|where it must|of one's own|beside that)\b",
    re.IGNORECASE,
)
# of pages: say "instead of", "equals X's", "8 of them", "what is beside"
ACCENT = re.compile(r"\b(in the place of|so many|that of|what stands)\b", re.IGNORECASE)
TEST = re.compile(r"test_(what|the|a|an|who|whoever|where|whether|nothing)_")


Finding = tuple[str, int, str]  # path, line, what to change


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ):
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
            yield (
                path,
                line,
                f'begin with a verb or a noun, not with "{text.split()[0]}"',
            )
        yield from ((path, line, problem) for problem in words(text))
    for line, text in comments(source):
        yield from ((path, line, problem) for problem in words(text))
    for node in ast.walk(tree):
        name = node.name if isinstance(node, ast.FunctionDef) else ""
        if TEST.match(name) or (
            name.startswith("test_") and len(name) > LONGEST_TEST_NAME
        ):
            yield (
                path,
                node.lineno,
                f"{name}: call it test_<thing>_<condition>_<result>",
            )


def in_page(path: str, text: str) -> Iterator[Finding]:
    text = re.sub(
        r"^```.*?^```$",
        lambda m: "\n" * m[0].count("\n"),
        text,
        flags=re.MULTILINE | re.DOTALL,
    )
    number = 1
    for paragraph in re.split(r"\n(?=\s*\n|\s*[*|#>-] |\s*\d+\. )", text):
        for problem in words(paragraph):
            yield path, number, problem
        for match in ACCENT.finditer(paragraph if path != "docs/log.md" else ""):
            yield path, number, f'say it without "{match[0]}"'
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
            if name.startswith(LEFT_OUT) or path.suffix not in (".py", ".md"):
                continue
            read = in_code if path.suffix == ".py" else in_page
            yield from read(name, path.read_text())
    yield from in_page("README.md", (ROOT / "README.md").read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "paths", nargs="*", default=[""], help="only what is found below these"
    )
    paths = tuple(parser.parse_args().paths)
    found = [finding for finding in findings() if finding[0].startswith(paths)]
    for path, line, problem in found:
        print(f"{path}:{line}: {problem}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
