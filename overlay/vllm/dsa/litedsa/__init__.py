# SPDX-License-Identifier: Apache-2.0
"""LiteDSA: sparse MLA attention of a prefill, for groups of neighbouring queries over the union of their keys.

`kernel` runs it (Hopper), `plan` forms the groups and says on the host what is not supported, `reference` is the
meaning in plain PyTorch, `selfcheck` compares the two on the card at hand. docs/litedsa.md explains the algorithm.
"""
