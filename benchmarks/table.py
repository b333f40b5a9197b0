"""What measurements of attention have in common: the problems, and a table that grows row by row."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

CHANNELS = 64
# (keys, queries, cutoff in radians, heads)
ROWS = (
    ((180, 360), (180, 360), 0.017, 1),
    ((180, 360), (180, 360), 0.03, 1),
    ((181, 360), (181, 360), 0.053, 4),
    ((361, 720), (361, 720), 0.03, 1),
    ((360, 720), (180, 360), 0.03, 1),
    ((180, 360), (360, 720), 0.03, 1),
    ((721, 1440), (721, 1440), 0.0132, 1),
)


def problem(number: int) -> dict[str, object]:
    keys, queries, cutoff, heads = ROWS[number - 1]
    shapes = {"keys": "x".join(map(str, keys)), "queries": "x".join(map(str, queries))}
    return {"row": number, **shapes, "cutoff": cutoff, "heads": heads}


PROBLEM_COLUMNS = (("keys", "keys", "s"), ("queries", "queries", "s"), ("cutoff", "cutoff", "g"), ("N", "heads", "d"))


class Table:
    """Prints ``columns`` (title, key, format) in Markdown and writes all numbers to ``path``, each row as it comes."""

    def __init__(self, columns: Sequence[tuple[str, str, str]], path: Path | None) -> None:
        self.columns, self.path = columns, path
        print("| " + " | ".join(title for title, _, _ in columns) + " |\n|" + "---|" * len(columns))
        if path:
            path.unlink(missing_ok=True)

    def add(self, result: dict[str, object]) -> None:
        print("| " + " | ".join(format(result[key], form) for _, key, form in self.columns) + " |", flush=True)
        if self.path:
            first = not self.path.exists()
            with self.path.open("a", newline="") as file:
                writer = csv.DictWriter(file, fieldnames=list(result))
                if first:
                    writer.writeheader()
                writer.writerow(result)
