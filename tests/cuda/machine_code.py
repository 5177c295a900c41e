"""Read the machine code of the Hopper kernels: main loops, and loads that have lost their memory."""

import re
from dataclasses import dataclass

Instructions = list[tuple[int, str]]  # (address, text)


@dataclass(frozen=True)
class Loop:
    """A loop that multiplies, without others in it: one step of k, or two where the compiler unrolled it."""

    instructions: int
    hgmma: int
    gpu_fences: int  # MEMBAR of more than the block
    proxy_fences: int  # FENCE.VIEW.ASYNC
    r2ur: int  # moves to uniform registers


def functions(code: str) -> dict[tuple[str, str], Instructions]:
    """{(mangled name, architecture): its instructions} of cuobjdump -sass."""
    found = {}
    for part in re.split(r"^arch = sm_", code, flags=re.MULTILINE)[1:]:
        for function in re.split(r"^\s*Function : ", part, flags=re.MULTILINE)[1:]:
            name, body = function.split("\n", 1)
            lines = re.findall(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?);", body, flags=re.MULTILINE)
            found[name.strip(), part.split()[0]] = [
                (int(address, 16), text.strip()) for address, text in lines
            ]
    return found


def main_loops(instructions: Instructions) -> list[Loop]:
    texts = [text for _, text in instructions]
    place = {address: i for i, (address, _) in enumerate(instructions)}
    ranges = []
    for i, text in enumerate(texts):
        branch = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text)
        first = place.get(int(branch.group(1), 16)) if branch else None
        if first is None or first >= i:
            continue
        # A wait tries again, and a shuffle gathers its warp, out of line: the way back is no loop.
        if re.search(
            r"SYNCS\.PHASECHK|\bSHFL\b|WARPSYNC\.COLLECTIVE", "\n".join(texts[max(first, i - 6) : i])
        ):
            continue
        if any("HGMMA" in inside for inside in texts[first : i + 1]):
            ranges.append((first, i + 1))
    innermost = [
        (a, b) for a, b in ranges if not any((c, d) != (a, b) and a <= c and d <= b for c, d in ranges)
    ]
    return [summary(texts[a:b]) for a, b in innermost]


def summary(texts: list[str]) -> Loop:
    def count(pattern: str) -> int:
        return sum(bool(re.search(pattern, text)) for text in texts)

    return Loop(
        instructions=count(r"^(?!NOP)."),
        hgmma=count("HGMMA"),
        gpu_fences=count(r"MEMBAR\.\w+\.(GPU|SYS)"),
        proxy_fences=count(r"FENCE\.VIEW\.ASYNC"),
        r2ur=count(r"\bR2UR\b"),
    )


def generic_wide_loads(instructions: Instructions) -> int:
    """16-byte loads that go through neither global nor shared addresses."""
    return sum(bool(re.search(r"\bLD\.(E\.)?(\w+\.)*128\b", text)) for _, text in instructions)
