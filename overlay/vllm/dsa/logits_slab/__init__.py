# SPDX-License-Identifier: Apache-2.0
"""One reused buffer for the indexer's logits (feature ``logits_slab``). Importing it imports no torch."""
