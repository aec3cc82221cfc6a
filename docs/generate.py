"""Writes docs/operators.md from the table; `--check` fails if the file is not what the table says."""

from __future__ import annotations

import sys
from pathlib import Path

import te_ops
from te_ops._ops import OPERATORS, Operator

PAGE = Path(__file__).with_name("operators.md")
HEADER = """# Operators

Generated from `csrc/te_ops.def` by `make docs`. Types are the rows' own text: docs/architecture.md explains
them. An output with `if FLAG` is `None` when the flag is not set.
"""


def describe(op: Operator) -> str:
    spec = op.spec
    lines = [f"## `{spec['name']}`", "", spec["doc"] + ".", "", "```", spec["schema"], "```", ""]
    lines += ["| slot | type | |", "| --- | --- | --- |"]
    seen = set()
    for direction, entries in (("in", spec["inputs"]), ("out", spec["outputs"])):
        for entry in entries:
            if entry["slot"] in seen:  # a slot of several buffers is one line
                continue
            seen.add(entry["slot"])
            kind = "in, updated in place" if entry["mutable"] else direction
            text = entry["type"].replace("|", "\\|")
            lines.append(f"| {entry['slot']} | `{text}` | {kind} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    own = [op for name, op in OPERATORS.items() if name.startswith("te_ops::")]
    return "\n".join([HEADER, *(describe(op) for op in own)])


if __name__ == "__main__":
    text = page()
    if "--check" not in sys.argv:
        PAGE.write_text(text)
        print(f"{PAGE.name}: te_ops {te_ops.__version__}, {len(OPERATORS)} operators")
    elif not PAGE.exists() or PAGE.read_text() != text:
        sys.exit(f"{PAGE.name} is not what the table says: run `make docs`")
