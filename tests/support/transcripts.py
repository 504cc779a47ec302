"""What a page shows of a terminal, held against what the commands print."""

from __future__ import annotations

import re

BLOCK = re.compile(r"<!-- transcript: (\w+) -->\n```console\n(.*?)```", re.DOTALL)
"""A transcript in a page: its name, and its lines."""


def matches(shown: list[str], printed: list[str], same_numbers: bool = True) -> bool:
    """Line by line; `…` alone stands for any lines, at the end of a line for any rest. Sizes of
    what was written are not compared; other numbers only with `same_numbers`."""
    pattern = ""
    for line in shown:
        if line == "…":
            pattern += r"(?:.*\n)*?"
            continue
        line, rest = (line[:-1], ".*") if line.endswith("…") else (line, "")
        text = re.escape(line)
        if not same_numbers or "written" in line:
            text = re.sub(r"(?:\\ )*\d(?:[\d.e+,]|\\\.|\\\+|\\-)*", r" *[-+.\\d,e]+", text)
        pattern += text + rest + r"\n"
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in printed)) is not None
