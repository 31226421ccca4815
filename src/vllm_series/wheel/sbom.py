"""CycloneDX bill of materials of a wheel: upstream as ancestor, each patch as pedigree (PEP 770)."""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Mapping
from typing import Any, cast

from cyclonedx.model import (
    AttachedText,
    ExternalReference,
    ExternalReferenceType,
    HashAlgorithm,
    HashType,
    Property,
    XsUri,
)
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import (
    Component,
    ComponentScope,
    ComponentType,
    Diff,
    Patch,
    PatchClassification,
    Pedigree,
)
from cyclonedx.model.issue import IssueClassification, IssueType, IssueTypeSource
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

from vllm_series.pins import Artifact
from vllm_series.wheel.recipe import PatchEntry, Recipe

FILENAME = "vllm-series.cdx.json"


def _patch(entry: PatchEntry) -> Patch:
    status = " ".join(entry.trailers.get("Upstream-Status", []))
    kind = PatchClassification.BACKPORT if status.startswith("Backport") else PatchClassification.UNOFFICIAL
    issues = [
        IssueType(
            type=IssueClassification.ENHANCEMENT,
            name=entry.subject,
            source=IssueTypeSource(name="upstream", url=XsUri(origin)),
        )
        for origin in entry.trailers.get("Origin", [])
        if origin.startswith("https://")
    ]
    text = AttachedText(content=entry.text.decode("utf-8"), content_type="text/x-diff")
    return Patch(type=kind, diff=Diff(text=text), resolves=issues)


def _ancestor(name: str, version: str, artifact: Artifact) -> Component:
    return Component(
        name=name,
        version=version,
        type=ComponentType.LIBRARY,
        bom_ref=f"{name}@{version}:{artifact.filename}",
        purl=PackageURL("pypi", None, name, version, {"file_name": artifact.filename}),
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=artifact.sha256)],
        external_references=[
            ExternalReference(
                type=ExternalReferenceType.DISTRIBUTION,
                url=XsUri(f"https://pypi.org/project/{name}/{version}/"),
            )
        ],
    )


def _compilers(recipe: Recipe) -> list[Component]:
    """What compiled vllm/_dsa_C.so, as components that are not part of what is delivered."""
    compiler = recipe.kernels.record.get("nvcc") if recipe.kernels else None
    if not isinstance(compiler, Mapping):
        return []
    role = Property(name="vllm-series:role", value="compiled vllm/_dsa_C.so")
    if compiler.get("source") == "system":
        programs = sorted(compiler.get("programs", {}).items())
        return [
            Component(
                name="nvcc",
                version=str(compiler["nvcc"]),
                type=ComponentType.APPLICATION,
                scope=ComponentScope.EXCLUDED,
                bom_ref=f"nvcc@{compiler['nvcc']}:system",
                purl=PackageURL("generic", None, "nvcc", str(compiler["nvcc"])),
                properties=[
                    role,
                    *(Property(name=f"vllm-series:sha256:{name}", value=sha) for name, sha in programs),
                ],
            )
        ]
    return [
        Component(
            name=row["name"],
            version=row["version"],
            type=ComponentType.APPLICATION,
            scope=ComponentScope.EXCLUDED,
            bom_ref=f"{row['name']}@{row['version']}:{row['filename']}",
            purl=PackageURL("pypi", None, row["name"], row["version"], {"file_name": row["filename"]}),
            hashes=[HashType(alg=HashAlgorithm.SHA_256, content=row["sha256"])],
            properties=[role],
        )
        for row in compiler["packages"]
    ]


def render(recipe: Recipe) -> bytes:
    """The SBOM as JSON: same recipe, same bytes (no time stamp; serial number from the content)."""
    pin = recipe.pin
    properties = {
        "vllm-series:line": pin.line,
        "vllm-series:upstream-commit": pin.source.commit,
        "vllm-series:applied-tree": recipe.applied_tree,
        "vllm-series:kernels": "yes" if recipe.kernels else "none",
    }
    properties |= {f"vllm-series:patch:{entry.name}": f"sha256:{entry.sha256}" for entry in recipe.patches}
    component = Component(
        name="vllm",
        version=pin.wheel_version,
        type=ComponentType.LIBRARY,
        bom_ref=f"vllm@{pin.wheel_version}",
        purl=PackageURL("pypi", None, "vllm", pin.wheel_version),
        pedigree=Pedigree(
            ancestors=[
                _ancestor("vllm", pin.version, recipe.artifact),
                _ancestor("vllm", pin.version, pin.source.sdist),
            ],
            patches=[_patch(entry) for entry in recipe.patches],
            notes="Repacked from upstream's wheel: only Python files and vllm/_dsa_C.so differ.",
        ),
        properties=[Property(name=name, value=value) for name, value in properties.items()],
    )
    identity = "\n".join(f"{name}={value}" for name, value in sorted(properties.items()))
    metadata = BomMetaData(component=component)
    metadata.timestamp = cast(Any, None)  # optional in the schema; the library would put the present time
    compilers = _compilers(recipe)
    identity += "".join(f"\n{one.bom_ref.value}" for one in compilers)
    bom = Bom(
        metadata=metadata,
        components=compilers,
        serial_number=uuid.uuid5(uuid.NAMESPACE_URL, f"{component.purl}\n{identity}"),
    )
    with warnings.catch_warnings():  # it misses dependencies; on the compilers nothing depends
        warnings.simplefilter("ignore", UserWarning)
        text: str = JsonV1Dot6(bom).output_as_string(indent=2)
    return (text + "\n").encode("utf-8")
