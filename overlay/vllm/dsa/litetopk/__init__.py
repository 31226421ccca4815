# SPDX-License-Identifier: Apache-2.0
"""LiteTopK: scores of the DSA indexer and their exact top-k in one kernel, without a [queries, keys] matrix.

`kernel` runs it (Hopper), `plan` decides on the host how, `reference` is the meaning in plain PyTorch,
`selfcheck` compares the two on the card at hand. docs/litetopk.md explains the algorithm.
"""
