# SPDX-License-Identifier: Apache-2.0
"""What torch.compile is told of a piece with marked nodes; called by the patch for each piece."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch._functorch.config
from torch._inductor.custom_graph_pass import CustomSchedulerPass
from torch._inductor.virtualized import V
from vllm.dsa import features
from vllm.dsa.overlap.native import order
from vllm.dsa.overlap.native.stream import INDEX

if TYPE_CHECKING:
    from torch._inductor.scheduler import BaseSchedulerNode

#: What the model marks nodes with. Not ``stream``: marks mean nothing where this module is not asked.
MARK = "dsa_side"
#: Positions of outputs that a piece's side stream gives.
Marked = tuple[int, ...]


def prepare(graph: torch.fx.GraphModule, config: dict[str, Any]) -> AbstractContextManager[Any]:
    """Turn the marks of one piece into streams; a piece without marks is left alone.

    Args:
        graph: the piece, as vLLM's backend split it. The nodes' metadata changes.
        config: Inductor's options for this piece; changed.

    Returns:
        The context to compile the piece in.
    """
    nodes = [node for node in graph.graph.nodes if node.meta.get("custom", {}).get(MARK)]
    if not nodes:
        return nullcontext()
    for node in nodes:
        node.meta["custom"] = node.meta["custom"] | {"stream": INDEX}
    config["_pre_fusion_custom_pass"] = SidePass(marked_outputs(graph))
    # The block that tunes kernels while compiling knows no stream but the main one (torch 2.13 and 2.14).
    config["triton.autotune_at_compile_time"] = False
    # Kernels that combine several would have to be looked at again.
    config["combo_kernels"] = False
    # Equal subexpressions of both branches must stay two: one of them would be the other stream's.
    apart: AbstractContextManager[Any] = torch._functorch.config.patch(cse=False)
    return apart


def marked_outputs(graph: torch.fx.GraphModule) -> Marked:
    """Positions of the marked nodes among a piece's outputs."""
    (returned,) = graph.graph.output_node().args
    flat = returned if isinstance(returned, (tuple, list)) else (returned,)
    return tuple(
        index
        for index, node in enumerate(flat)
        if isinstance(node, torch.fx.Node) and node.meta.get("custom", {}).get(MARK)
    )


class SidePass(CustomSchedulerPass):  # type: ignore[misc]
    """Keeps the side stream of one piece if `order.plan` agrees, else takes it away; before fusion.

    Args:
        marked: see `marked_outputs`.
    """

    def __init__(self, marked: Marked) -> None:
        self.marked = marked

    def uuid(self) -> Any:
        """Part of Inductor's cache key."""
        return f"{_source_hash()} {self.marked}"

    def __call__(self, nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
        by_name = {node.get_name(): node for node in nodes}
        if not any(_marked(node) for node in nodes):
            return nodes
        scheduler = nodes[0].scheduler
        try:
            if any(node.is_foreach() for node in nodes):
                raise order.Unsound("a foreach kernel")
            plan = order.plan(
                _steps(nodes),
                V.graph.get_output_names(),
                self.marked,
                scheduler.mutation_real_name,
            )
        except order.Unsound as error:
            for node in nodes:
                _set_stream(node, None)
            features.report_declined("overlap", f"a piece of the model keeps one stream: {error}")
            return nodes
        for name, node in by_name.items():
            _set_stream(node, INDEX if name in plan.side else None)
        early, late, side = ([by_name[name] for name in part] for part in (plan.early, plan.late, plan.side))
        fork = by_name[plan.fork]
        _keep_order(early, fork, late, side)
        ordered = [*early, fork, *late, *side]
        scheduler.nodes = ordered
        scheduler.compute_ancestors()
        return ordered


def _keep_order(
    early: list[BaseSchedulerNode],
    fork: BaseSchedulerNode,
    late: list[BaseSchedulerNode],
    side: list[BaseSchedulerNode],
) -> None:
    """Add dependencies, for order alone, that later passes of the compiler keep."""
    from torch._inductor.dependencies import WeakDep

    def after(node: BaseSchedulerNode, names: Iterable[str]) -> None:
        for name in names:
            node.add_fake_dep(WeakDep(name, node.get_first_name(), is_fake=True))

    def made(nodes: list[BaseSchedulerNode]) -> set[str]:
        return {name for node in nodes for name in node.get_buffer_names()}

    for nodes, start in ((late, fork), (side[1:], side[0])):
        inside = made([start, *nodes])
        for node in nodes:
            if not any(dep.name in inside for dep in node.read_writes.reads):
                after(node, start.get_buffer_names())
    after(side[0], sorted(made([*early, fork, *late])))
    # A copy of a misaligned input is made before its first reader: let that be the fork.
    read = {dep.name for node in side for dep in node.read_writes.reads} & set(V.graph.graph_inputs)
    after(fork, sorted(read - {dep.name for dep in fork.read_writes.reads}))


def _steps(nodes: list[BaseSchedulerNode]) -> list[order.Step]:
    place = {node: index for index, node in enumerate(V.graph.graph.nodes)}

    def origin(node: BaseSchedulerNode) -> int:
        origins = node.node.get_origins() if node.node is not None else ()
        return max((place.get(one, -1) for one in origins), default=-1)

    fork = next((origin(node) for node in nodes if _is_fork(node)), len(place))
    return [_step(node, late=origin(node) > fork) for node in nodes]


def _step(node: BaseSchedulerNode, *, late: bool) -> order.Step:
    from torch._inductor.scheduler import NopKernelSchedulerNode

    return order.Step(
        node.get_name(),
        reads=frozenset(dep.name for dep in node.read_writes.reads),
        writes=frozenset(node.get_buffer_names()),
        changes=frozenset(name for buffer in node.get_outputs() for name in buffer.get_mutations()),
        marked=_marked(node),
        fork=_is_fork(node),
        late=late,
        empty=isinstance(node, NopKernelSchedulerNode),
    )


def _is_fork(node: BaseSchedulerNode) -> bool:
    return getattr(node.node, "op_overload", None) is torch.ops.vllm.dsa_native_start.default


def _marked(node: BaseSchedulerNode) -> bool:
    return node.node is not None and node.node.get_stream_idx() == INDEX


def _set_stream(node: BaseSchedulerNode, index: int | None) -> None:
    object.__setattr__(node.node, "stream_idx", index)


def _source_hash() -> str:
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
