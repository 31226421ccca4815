"""Reads one project's page of a Python package index (PEP 691 JSON, PEP 503 HTML as the fallback)."""

from __future__ import annotations

import os
import re
import ssl
from dataclasses import dataclass
from html.parser import HTMLParser
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin, urlsplit, urlunsplit

import httpx

from vllm_series.errors import FetchFailed, UsageError

DEFAULT_INDEX = "https://pypi.org/simple"
_INDEX_VARIABLES = ("VLLM_SERIES_INDEX", "UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")
_ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.2"
TIMEOUT = httpx.Timeout(connect=20.0, read=60.0, write=60.0, pool=20.0)


@dataclass(frozen=True)
class IndexFile:
    """One file that an index offers; ``sha256`` is '' and ``size`` 0 where the index does not tell them."""

    filename: str
    url: str
    sha256: str
    size: int
    yanked: str  # reason, or "yes" without one; '' if not yanked


def index_url() -> str:
    """Return the package index that the environment names, else PyPI."""
    for name in _INDEX_VARIABLES:
        value = os.environ.get(name, "").strip()
        if value:
            return value.rstrip("/")
    return DEFAULT_INDEX


def shown(url: str) -> str:
    """Return ``url`` without user name, password and query, for messages."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    return urlunsplit((parts.scheme, host + (f":{parts.port}" if parts.port else ""), parts.path, "", ""))


def client() -> httpx.Client:
    """Return an HTTP client that honours proxy variables, SSL_CERT_FILE and netrc.

    It trusts the machine's certificates beside httpx's own: behind a proxy that re-signs, only those check.
    """
    agent = {"User-Agent": "vllm-series"}
    return httpx.Client(follow_redirects=True, timeout=TIMEOUT, headers=agent, verify=trusted())


def trusted() -> ssl.SSLContext:
    """Return the TLS settings of ``client``."""
    context = httpx.create_ssl_context()
    context.load_default_certs()
    return context


def offline() -> bool:
    return os.environ.get("VLLM_SERIES_OFFLINE", "").lower() in {"1", "true", "yes"}


def list_files(http: httpx.Client, project: str) -> list[IndexFile]:
    """Return all files of ``project``.

    Raises:
        FetchFailed: the index is not reachable or does not answer properly.
    """
    url = f"{index_url()}/{re.sub(r'[-_.]+', '-', project).lower()}/"
    try:
        answer = http.get(url, headers={"Accept": _ACCEPT})
        answer.raise_for_status()
    except httpx.HTTPStatusError as err:
        raise FetchFailed(
            f"{shown(url)} answered {err.response.status_code}",
            fix="check the index: VLLM_SERIES_INDEX=URL overrides it",
        ) from err
    except (httpx.HTTPError, OSError) as err:
        raise no_network(url, err) from err
    except httpx.InvalidURL as err:
        raise UsageError(
            f"{shown(url)} is not a usable URL: {err}", fix="set VLLM_SERIES_INDEX=https://.../simple"
        ) from err
    try:
        if "json" in answer.headers.get("content-type", ""):
            return [_from_json(row, str(answer.url)) for row in answer.json()["files"]]
        page = _Page(str(answer.url))
        page.feed(answer.text)
        return page.files
    except (KeyError, TypeError, ValueError) as err:
        raise FetchFailed(
            f"{shown(url)} did not answer with a package index page: {err!r}",
            fix="set VLLM_SERIES_INDEX to the simple index of your mirror",
        ) from err


def no_network(url: str, err: Exception) -> FetchFailed:
    """Return the error for an index that does not answer, or whose certificate does not check."""
    if "CERTIFICATE_VERIFY_FAILED" in str(err):
        return FetchFailed(
            f"the certificate of {urlsplit(url).hostname} cannot be checked: {err}",
            fix="apt-get install ca-certificates, or set SSL_CERT_FILE to your proxy's certificate",
        )
    return FetchFailed(
        f"cannot reach {shown(url)}: {err or type(err).__name__}",
        fix="check the network and HTTPS_PROXY, or hand the files in: series fetch --source DIR",
    )


def _from_json(row: dict[str, Any], base: str) -> IndexFile:
    yanked = row.get("yanked") or ""
    return IndexFile(
        filename=row["filename"],
        url=urljoin(base, row["url"]),
        sha256=row.get("hashes", {}).get("sha256", ""),
        size=int(row.get("size") or 0),
        yanked=yanked if isinstance(yanked, str) else "yes",
    )


class _Page(HTMLParser):
    def __init__(self, base: str) -> None:
        super().__init__()
        self.base, self.files = base, list[IndexFile]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        row = dict(attrs)
        href = row.get("href")
        if tag != "a" or not href:
            return
        url, fragment = urldefrag(urljoin(self.base, href))
        found = re.fullmatch(r"sha256=([0-9a-f]{64})", fragment)
        yanked = (row["data-yanked"] or "yes") if "data-yanked" in row else ""
        name = unquote(urlsplit(url).path.rsplit("/", 1)[-1])
        self.files.append(IndexFile(name, url, found[1] if found else "", 0, yanked))
