"""DeepGEMM with MQA logits into a buffer of the caller: patches, extension, and the wheel's part of it."""

from vllm_series.deepgemm.bundle import Bundle, load
from vllm_series.deepgemm.patchfile import DeepGemmPatch, State, patch_of

__all__ = ["Bundle", "DeepGemmPatch", "State", "load", "patch_of"]
