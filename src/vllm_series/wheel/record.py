"""RECORD: a wheel's files with their hashes. vLLM has file names with commas, so csv it must be."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
from dataclasses import dataclass

from vllm_series.errors import IntegrityError


@dataclass(frozen=True)
class Row:
    """Hash (``sha256=...``, urlsafe base64 without padding) and size in bytes."""

    digest: str
    size: int


def row_of(data: bytes) -> Row:
    """The entry of a file with these bytes."""
    raw = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
    return Row("sha256=" + raw.decode(), len(data))


def parse(data: bytes) -> dict[str, Row]:
    """Read RECORD; the entry of RECORD itself (without hash) is left out.

    Raises:
        IntegrityError: a line is malformed, a name comes twice, or a hash is not sha256.
    """
    rows: dict[str, Row] = {}
    for number, fields in enumerate(csv.reader(io.StringIO(data.decode("utf-8"))), 1):
        if len(fields) != 3:
            raise IntegrityError(f"RECORD line {number} has {len(fields)} fields, not 3")
        name, digest, size = fields
        if name.endswith(".dist-info/RECORD"):
            continue
        if name in rows:
            raise IntegrityError(f"RECORD names {name} twice")
        if not digest.startswith("sha256=") or not size.isdigit():
            raise IntegrityError(f"RECORD line {number} ({name}) has no sha256 and size")
        rows[name] = Row(digest, int(size))
    return rows


def render(rows: dict[str, Row], record_name: str) -> bytes:
    """Write RECORD with its files in sorted order and itself as the last line."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for name in sorted(rows):
        writer.writerow((name, rows[name].digest, rows[name].size))
    writer.writerow((record_name, "", ""))
    return out.getvalue().encode("utf-8")
