# SPDX-License-Identifier: Apache-2.0
"""``native`` of the compiled line: Inductor itself puts the indexer's kernels on the side stream.

The model marks the indexer's nodes (`layer`), the compiler turns marks into streams where `order` finds that
sound (`compiler`, called by the patch), and the stream that the generated code enters decides at each forward
pass whether it is one (`stream`). docs/overlap_compiled.md says why each part is there.
"""
