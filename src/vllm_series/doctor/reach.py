"""Which model reaches which feature: read from the table in docs/features.md, the one place for it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from vllm_series.errors import CheckFailed

DOCUMENT = "docs/features.md"


@dataclass(frozen=True)
class Model:
    """A row: the models' names, the lines that have their code, and what each feature does, in words."""

    name: str
    lines: str
    features: dict[str, str]

    def on(self, line: str, feature: str) -> str:
        """Return what ``feature`` does for the model on ``line``; unknown features give ''."""
        if self.lines not in ("both", line):
            return f"no: not on {line}"
        said = self.features.get(feature, "")
        return (
            said
            if not re.fullmatch(r"\d+\.\d+\.\d+", said)
            else "yes"
            if said == line
            else f"no: not on {line}"
        )


def models(root: Path) -> list[Model]:
    """Return the rows of "Which model reaches what".

    Raises:
        CheckFailed: the table is not there.
    """
    text = (root / DOCUMENT).read_text(encoding="utf-8").partition("## Which model reaches what")[2]
    rows = [
        [cell.strip() for cell in row.strip("|").split("|")]
        for row in text.partition("\n## ")[0].splitlines()
        if row.startswith("|")
    ]
    if len(rows) < 3 or rows[0][:2] != ["model code", "lines"]:
        raise CheckFailed(f"{DOCUMENT} has no table of models", fix=f"git checkout -- {DOCUMENT}")
    names = rows[0][2:]
    return [
        Model(re.sub(r" \(.*", "", row[0]), row[1], dict(zip(names, row[2:], strict=True)))
        for row in rows[2:]
    ]
