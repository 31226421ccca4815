"""Reads and writes zip archives byte-reproducibly; unchanged members are copied without recompression.

New members are stored, not deflated: the bytes that zlib makes differ between its versions and forks, the
bytes of a stored member do not. Dates are fixed, the order is the caller's; no extra
fields, no data descriptors.
"""

from __future__ import annotations

import errno
import os
import struct
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from vllm_series.errors import IntegrityError

FIXED_DATE = (1980, 1, 1, 0, 0, 0)  # the earliest that zip can hold
_CHUNK = 4 << 20
_LOCAL_HEADER = struct.Struct("<4s22xHH")


@dataclass(frozen=True)
class Copied:
    """A member of the source archive under a possibly new name."""

    name: str
    info: zipfile.ZipInfo


@dataclass(frozen=True)
class Stored:
    """A member with new bytes."""

    name: str
    data: bytes
    mode: int = 0o100644


Member = Copied | Stored


class Source:
    """An existing archive: its members, their bytes, and their compressed bytes."""

    def __init__(self, path: Path) -> None:
        """Open ``path``.

        Raises:
            IntegrityError: it is not a zip file, or a name comes twice.
        """
        self.path = path
        try:
            self._zip = zipfile.ZipFile(path)
        except zipfile.BadZipFile as error:
            raise IntegrityError(f"{path.name} is not a wheel: {error}") from error
        self.members = {info.filename: info for info in self._zip.infolist() if not info.is_dir()}
        if len(self.members) != sum(not info.is_dir() for info in self._zip.infolist()):
            self._zip.close()
            raise IntegrityError(f"{path.name} has a member twice")
        self._raw = path.open("rb")

    def __enter__(self) -> Source:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._zip.close()
        self._raw.close()

    def read(self, name: str) -> bytes:
        """The uncompressed bytes of a member.

        Raises:
            IntegrityError: there is no such member, or it is damaged.
        """
        try:
            return self._zip.read(name)
        except KeyError as error:
            raise IntegrityError(f"{self.path.name} has no {name}") from error
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise IntegrityError(f"{self.path.name}: {name} is damaged: {error}") from error

    def raw_span(self, info: zipfile.ZipInfo) -> tuple[int, int]:
        """Offset and length of a member's compressed bytes in the file."""
        header = os.pread(self._raw.fileno(), _LOCAL_HEADER.size, info.header_offset)
        if len(header) < _LOCAL_HEADER.size:
            raise IntegrityError(f"{self.path.name} ends inside {info.filename}")
        magic, name_length, extra_length = _LOCAL_HEADER.unpack(header)
        if magic != b"PK\x03\x04":
            raise IntegrityError(f"{self.path.name}: no local header for {info.filename}")
        return info.header_offset + _LOCAL_HEADER.size + name_length + extra_length, info.compress_size

    def raw(self, info: zipfile.ZipInfo) -> Iterable[bytes]:
        """Yield the compressed bytes of a member in pieces."""
        offset, left = self.raw_span(info)
        while left:
            piece = os.pread(self._raw.fileno(), min(left, _CHUNK), offset)
            if not piece:
                raise IntegrityError(f"{self.path.name} ends inside {info.filename}")
            yield piece
            offset += len(piece)
            left -= len(piece)


def write(target: Path, source: Source, members: Iterable[Member]) -> None:
    """Write ``members`` in the order given to ``target``, which must not be a file that anybody reads yet.

    Raises:
        OSError: the disk is full or not writable.
        IntegrityError: the source is damaged, or the result would need zip64.
    """
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED, allowZip64=False) as out:
        handle = out.fp
        assert handle is not None
        for member in members:
            info = zipfile.ZipInfo(member.name, FIXED_DATE)
            info.create_system = 3
            info.create_version = info.extract_version = 20
            info.header_offset = handle.tell()
            if isinstance(member, Copied):
                info.compress_type = member.info.compress_type
                info.CRC = member.info.CRC
                info.compress_size, info.file_size = member.info.compress_size, member.info.file_size
                executable = (member.info.external_attr >> 16) & 0o111
                info.external_attr = (0o100755 if executable else 0o100644) << 16
                pieces: Iterable[bytes] = source.raw(member.info)
            else:
                info.CRC = zlib.crc32(member.data)
                info.compress_size = info.file_size = len(member.data)
                info.external_attr = member.mode << 16
                pieces = (member.data,)
            if info.header_offset + info.compress_size > zipfile.ZIP64_LIMIT:
                raise IntegrityError(f"{target.name} would be larger than zip allows without zip64")
            handle.write(info.FileHeader(zip64=False))
            for piece in pieces:
                handle.write(piece)
            out.filelist.append(info)
            out.NameToInfo[info.filename] = info
            out.start_dir = handle.tell()
            out._didModify = True  # type: ignore[attr-defined]


def is_disk_full(error: OSError) -> bool:
    """Whether the file system has no room or no quota left."""
    return error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
