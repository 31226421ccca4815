# SPDX-License-Identifier: Apache-2.0
"""Overlap of the indexer with the path to attention (feature ``overlap``). Importing this loads no torch.

Shared by both lines: ``mode`` (what the switches ask for), ``auto`` with ``measured`` (what ``auto`` means on
a card), ``gates`` (when nothing may fork) and ``streams`` (one fork and its join). ``schedule`` is what the
patch of line 0.33.0 calls; ``compiled/`` belongs to line 0.28.0.
"""
