"""What a test file needs, from evidence: the last recorded run, else the words of the file itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

CPU, SM90, SM100, GPU, MULTI, HUB, PACKAGE, OTHER = (
    "cpu",
    "sm90",
    "sm100",
    "gpu",
    "multi_gpu",
    "weights",
    "package",
    "other",
)
#: Sorted as the plan shows them.
ORDER = (CPU, SM90, SM100, GPU, MULTI, HUB, PACKAGE, OTHER)

#: What a skip or a failure says. The first match of a text counts, so the narrow ones stand first.
_REASONS: tuple[tuple[str, re.Pattern[str]], ...] = (
    (SM90, re.compile(r"(?i)(hopper|sm_?90)[^.]{0,20}\b(and|or)\b[^.]{0,20}(blackwell|sm_?100)")),
    (GPU, re.compile(r"(?i)\bcuda\b[^.]{0,12}\b(or|and)\b|\bor\b[^.]{0,12}\bcuda\b")),
    (OTHER, re.compile(r"(?i)rocm|aiter|\bxpu\b|\btpu\b|zentorch|\bamx\b|sm ?120|gfx\d")),
    (
        MULTI,
        re.compile(
            r"(?i)(need|require|at least|requires) [^.]*\b([2-9]|two|four|multiple) (gpus|devices)|multi-?gpu"
        ),
    ),
    (PACKAGE, re.compile(r"(?i)no module named|not installed|could not import|is required\b.*pip|install ")),
    (
        HUB,
        re.compile(
            r"(?i)hugging ?face|\bhub\b|offline|connect to|LocalEntryNotFound|snapshot|modelscope|"
            r"getaddrinfo|name resolution|connection (error|refused)|ConnectError|"
            r"couldn't find them in the cach"
        ),
    ),
    (
        SM100,
        re.compile(
            r"(?i)blackwell|sm_?100|capability \(?10[.,]|sm100|\bb200\b|nvfp4|mxfp4|mxfp8|cutlass mla"
        ),
    ),
    (SM90, re.compile(r"(?i)hopper|sm_?90|capability \(?9[.,]|\bh100\b|flashmla|deep_?gemm|FA3\b|fp8")),
    (
        GPU,
        re.compile(
            r"(?i)cuda|gpu|nvidia|triton|driver|no kernel|_C'|_moe_C|"
            r"not currently supported on cpu|graph pool"
        ),
    ),
)
#: What the text of a test file says, in the order in which it counts.
_WORDS: tuple[tuple[str, re.Pattern[str]], ...] = (
    (OTHER, re.compile(r"skipif\(\s*not current_platform\.is_(rocm|xpu|tpu|cpu)\(\)")),
    (
        MULTI,
        re.compile(
            r"multi_gpu_test|mark\.distributed\(|device_count\(\) *< *[2-9]|num_gpus_available *>= *[2-9]"
        ),
    ),
    (
        HUB,
        re.compile(
            r"\b(hf_runner|vllm_runner|snapshot_download|RemoteOpenAIServer)\b|from_pretrained\(|\bLLM\("
        ),
    ),
    (SM100, re.compile(r"capability(_family)?\(\(?10|(?i:blackwell|\bsm_?100)")),
    (
        SM90,
        re.compile(
            r"capability(_family)?\(\(?9|(?i:hopper|\bsm_?90|is_flashmla|deep_gemm_supported|has_deep_gemm)"
        ),
    ),
    (GPU, re.compile(r"is_cuda\(\)|is_cuda_alike\(\)|[\"']cuda[\"':]|torch\.cuda\.|DEVICE_TYPE")),
)


@dataclass(frozen=True)
class Need:
    """``kind`` is one of ORDER; ``evidence`` says where that comes from."""

    kind: str
    evidence: str


def of_reason(reason: str) -> str:
    """The kind of need that one skip or failure text names."""
    for kind, pattern in _REASONS:
        if pattern.search(reason):
            return kind
    return OTHER


def recorded(counts: Mapping[str, int], reasons: Mapping[str, int]) -> Need | None:
    """Judge a file by its last run: it runs on CPU if one test passed there, else what most tests missed."""
    held = counts.get("passed", 0) + counts.get("xfailed", 0)
    if held:
        return Need(
            CPU,
            f"last run: {held} of {sum(counts.values())} passed",
        )
    if not reasons:
        return None
    weight: dict[str, int] = {}
    for reason, number in reasons.items():
        kind = of_reason(reason)
        weight[kind] = weight.get(kind, 0) + number
    kind = max(weight, key=lambda one: (weight[one], -ORDER.index(one)))
    example = next(reason for reason in reasons if of_reason(reason) == kind)
    return Need(kind, f"last run: {example[:110]}")


_ELSEWHERE = re.compile(r"(?:^|[/_])(rocm|amd|xpu|tpu|gfx\d+\w*)(?=[/_.])")


def worded(text: str, path: str = "") -> Need:
    """Judge a file by its name and text: markers, capability checks, fixtures that load a model."""
    named = _ELSEWHERE.search(path)
    if named:
        return Need(OTHER, f"name: {named[1]}")
    for kind, pattern in _WORDS:
        found = pattern.search(text)
        if found:
            line = text.count("\n", 0, found.start()) + 1
            return Need(kind, f"text: {found.group(0)} (line {line})")
    if re.search(r"mark\.cpu_test", text):
        return Need(CPU, "text: marked cpu_test")
    return Need(CPU, "text: names no GPU, no model")
