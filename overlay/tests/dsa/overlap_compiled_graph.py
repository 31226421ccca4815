# SPDX-License-Identifier: Apache-2.0
"""Prints the graph that torch.compile takes from the small model; runs in a pristine tree too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import overlap_compiled_cases as cases

if __name__ == "__main__":
    cases.patch_kernels()
    print("GRAPH")
    print(cases.text(cases.trace(cases.Model(layers=3))))
