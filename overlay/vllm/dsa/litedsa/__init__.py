# SPDX-License-Identifier: Apache-2.0
"""LiteDSA: sparse MLA attention of a prefill, by groups of neighbouring queries over the union of their keys.

`plan` forms the groups and says on the host what is not supported, `reference` is the meaning in PyTorch.
"""
