"""Our docstrings are plain text; this makes them reStructuredText without asking authors to write it.

A blank line ends a paragraph. Indented paragraphs are code. A line that begins with "name: ", "->", "Raises",
"Returns", "Equivalent to" or "*" begins a paragraph of its own; further lines belong to it. Arguments become a list
with the types of the signature. Names of the API become links.
"""

import ast
import collections
import functools
import importlib
import inspect
import re
import textwrap
from pathlib import Path

NAMES = re.compile(r"([a-z_]\w*(?:(?:, | and )[a-z_]\w*)*)((?: \[[^\]]*\])*(?:: | > ))")
FURTHER = re.compile(
    rf"(?<=[.);] ){NAMES.pattern}"
)  # "num_expert: experts of this rank. d_model: width of a token."
# `code`, and words with an underscore where reStructuredText allows a mark before and behind them
# or a point inside, or two capitals
CODE = re.compile(
    r"(`[^`]+`|(?:(?<=[\s(])|^)(?:[A-Za-z][\w.]*_[\w.]*\w|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+|[A-Z]\w*[a-z]\w*[A-Z]\w*"
    r"|FMoE)(?:\(\))?(?=[\s,.;:)]|$))"
)
STARTS = re.compile(rf"->|Raises |Returns |Equivalent|FastMoE: |\* |{NAMES.pattern}")
# the words, the code up to a sentence that follows it, that sentence
EQUIVALENT = re.compile(
    r"(Equivalent[^:]*): (.*?)\.?(?:(?<=\.) ([A-Z]\w* .*|FastMoE: .*))?$", re.DOTALL
)


def paragraphs(lines):
    """Lists of lines, split at blank lines."""
    current = []
    for line in [*lines, ""]:
        if line.strip():
            current.append(line)
        elif current:
            yield current
            current = []


def items(paragraph):
    """The lines of one paragraph, joined into what is shown as paragraphs of their own."""
    hanging = any(line.startswith(" ") for line in paragraph)
    joined = []
    for line in paragraph:
        begins = (
            not line.startswith(" ")
            if hanging
            else STARTS.match(line) and joined and joined[-1][-1] in ".:)]"
        )
        if begins or not joined:
            joined.append(line.strip())
        else:
            joined[-1] += " " + line.strip()
    return joined


def public_names(module):
    """As automodule finds them: __all__, or what the module itself defines."""
    own = (
        n
        for n, v in vars(module).items()
        if n[0] != "_" and getattr(v, "__module__", "") == module.__name__
    )
    return getattr(module, "__all__", None) or list(own)


@functools.cache
def places():
    """{name, or its last parts: where the API's pages describe it}; what two things are called is left out."""
    pages = "\n".join(
        path.read_text() for path in sorted(Path(__file__).parent.glob("api/*.md"))
    )
    full = re.findall(r"auto(?:class|function):: ([\w.]+)", pages)
    for module in re.findall(r"automodule:: (fmoe_ext\S*)", pages):
        full += [
            f"{module}.{name}" for name in public_names(importlib.import_module(module))
        ]
    found = collections.defaultdict(dict)  # {name: {id of the object: its place}}
    for place in sorted(full, key=len, reverse=True):
        module, _, last = place.rpartition(".")
        target = id(getattr(importlib.import_module(module), last))
        parts = place.split(".")
        shortest = (
            2 if ".compat" in module else 1
        )  # FMoE is ours, compat.FMoE FastMoE's
        for count in range(shortest, len(parts) + 1):
            found[".".join(parts[-count:])][target] = place
    unique = {
        name: next(iter(those.values()))
        for name, those in found.items()
        if len(those) == 1
    }
    return {f"fmoe_ext.{name}": place for name, place in unique.items()} | unique


def plain(text):
    return re.sub(r"([\\*_|`])", r"\\\1", text)


def code(word):
    """A link where the API has the word; else as code, if it has an underscore or was marked."""
    name = word.strip("`")
    place = places().get(name.removesuffix("()"))
    if place is not None:
        return f":py:obj:`{name} <{place}>`"
    return f"``{name}``" if "_" in name or name != word else plain(word)


def escape(text):
    """Text with `code` in it, as reStructuredText that shows the same; d_model is code too, names are links."""
    return "".join(
        code(part) if number % 2 else plain(part)
        for number, part in enumerate(CODE.split(text))
    )


def markup(item):
    """One item as a line of reStructuredText."""
    equivalent = EQUIVALENT.match(item)
    if equivalent:
        code = equivalent[2].replace("`", "")
        return f"{escape(equivalent[1])}: ``{code}``. {escape(equivalent[3] or '')}".rstrip()
    result, done = ("* ", 2) if item.startswith("* ") else ("", 0)
    first = NAMES.match(item, done)
    for names in [*([first] if first else []), *FURTHER.finditer(item)]:
        result += escape(item[done : names.start()]) + as_code(names[1])
        done = names.end(1)
    return result + escape(item[done:])


def as_code(names):
    """``a``, ``b`` and ``c``"""
    return re.sub(
        r"\w+", lambda word: word[0] if word[0] == "and" else f"``{word[0]}``", names
    )


def types_of(obj):
    """{argument: its type as text} of a function or class; empty for what has no signature."""
    try:
        parameters = inspect.signature(obj).parameters
    except (TypeError, ValueError):
        return {}
    types = {}
    for name, parameter in parameters.items():
        annotation = parameter.annotation
        if annotation is inspect.Parameter.empty:
            types[name] = ""
        else:
            text = (
                annotation
                if isinstance(annotation, str)
                else inspect.formatannotation(annotation)
            )
            types[name] = re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Za-z])", "", text)
    return types


def arguments(item, types):
    """[(names, text)] of an item that describes arguments, one for each "name: "; None for other items."""
    first = NAMES.match(item)
    starts = [first] if first else []
    starts += [match for match in FURTHER.finditer(item) if first]
    starts = [
        match for match in starts if all(name in types for name in names_in(match[1]))
    ]
    if not starts or starts[0].start() != 0:
        return None
    ends = [match.start() for match in starts[1:]] + [len(item)]
    return [
        (m[1], m[2].rstrip(), item[m.end() : end].strip())
        for m, end in zip(starts, ends, strict=True)
    ]


def names_in(names):
    return [name for name in re.findall(r"\w+", names) if name != "and"]


def as_list(described, types):
    """Bullets: ``name`` (type): text."""
    for names, mark, text in described:
        typed = [
            f"``{name}``" + (f" (``{types[name]}``)" if types[name] else "")
            for name in names_in(names)
        ]
        mark = mark if mark == ":" else f" {mark}"
        yield f"* {', '.join(typed)}{escape(mark)} {escape(text)}"


def code_block(paragraph):
    text = textwrap.dedent("\n".join(paragraph))
    if text.startswith(">>>"):
        return [
            ".. code-block:: pycon",
            "",
            *("    " + line for line in text.splitlines()),
            "",
        ]
    try:
        ast.parse(text)
        language = "python"
    except SyntaxError:
        language = "text"
    return [
        f".. code-block:: {language}",
        "",
        *("    " + line for line in text.splitlines()),
        "",
    ]


def convert(app, what, name, obj, options, lines):
    """Sphinx's event autodoc-process-docstring: changes lines in place."""
    result, types = [], types_of(obj)
    for paragraph in paragraphs(lines):
        if paragraph[0].startswith("    "):
            result += code_block(paragraph)
            continue
        for item in items(paragraph):
            item, others = re.fullmatch(
                r"(.*?)(?: (Other arguments: .*))?", item, re.DOTALL
            ).groups()
            described = arguments(item, types)
            for line in (
                [markup(item)] if described is None else as_list(described, types)
            ):
                result += [line, ""]
            if others:
                result += [markup(others), ""]
    lines[:] = result


def skip(app, what, name, obj, would_skip, options):
    """Sphinx's event autodoc-skip-member: the fields of a NamedTuple are in its signature; None leaves it to Sphinx."""
    return True if (obj.__doc__ or "").startswith("Alias for field number") else None


def plain_defaults(app, what, name, obj, options, signature, returned):
    """Sphinx's event autodoc-process-signature: a class or function that is a default is shown by its name."""
    if signature is None:
        return None
    return re.sub(
        r"<(?:class|function) '?(?:[\w.]*\.)?(\w+)'?(?: at 0x\w+)?>", r"\1", signature
    ), returned
