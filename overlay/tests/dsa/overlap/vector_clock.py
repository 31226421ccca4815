# SPDX-License-Identifier: Apache-2.0
"""Streams without a GPU: a double of torch.cuda's streams and events that proves the order of all accesses.

Every stream has a vector clock. An operation advances its stream's own entry; an event carries a copy of the
clock of the stream that it was recorded on, and waiting for it takes the maximum of both. Every aten
operation that runs under `Machine` is looked at: a read must come after the write it reads, a write after all
reads and writes of what it replaces, as the clocks say and not as the host happened to run them.

Lifetime: memory goes back to the stream that allocated it, which may use it again at once. So at each
operation of a stream, what another stream read of its memory must be before it, or still be referenced.

What breaks a rule is kept in `violations`, never raised, so that a test sees all of it.
"""

import contextlib
from collections import defaultdict

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ALLOCATIONS = ("aten::empty", "aten::new_empty")


class Stream:
    """One stream of the machine; only its name and its clock matter."""

    def __init__(self, machine: "Machine", name: str) -> None:
        self.machine, self.name = machine, name
        self.clock: dict[str, int] = defaultdict(int)

    def wait_event(self, event: "Event") -> None:
        event.wait(self)

    def wait_stream(self, stream: "Stream") -> None:
        event = Event()
        event.record(stream)
        event.wait(self)

    def __enter__(self) -> "Stream":
        self._before, self.machine.current = self.machine.current, self
        return self

    def __exit__(self, *exception) -> None:
        self.machine.current = self._before


class Event:
    """A recorded point of a stream. `machine` is set on the class by `Machine.patch`."""

    machine: "Machine"

    def __init__(self, *args, **kwargs) -> None:
        self.clock: dict[str, int] | None = None
        self.waits = 0

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.machine.current
        self.clock, self.waits = dict(stream.clock), 0
        self.machine.log.append((stream.name, "record", self))

    def wait(self, stream: Stream | None = None) -> None:
        stream = stream or self.machine.current
        if self.clock is None:
            self.machine.violations.append(f"{stream.name} waits for an event that was never recorded")
            return
        self.waits += 1
        for name, tick in self.clock.items():
            stream.clock[name] = max(stream.clock[name], tick)
        self.machine.log.append((stream.name, "wait", self))


class Machine(TorchDispatchMode):
    """Main stream, side streams, the memory that they touch, and what went wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.main = Stream(self, "main")
        self.aux = Stream(self, "aux")
        self.sides = [self.aux]
        self.current = self.main
        self.log: list[tuple] = []
        self.violations: list[str] = []
        # By storage: itself (held, so that no address comes twice), its owner, last write, reads since.
        self._held: dict[int, torch.UntypedStorage] = {}
        self._owner: dict[int, str] = {}
        self._written: dict[int, tuple[str, int]] = {}
        self._read: dict[int, dict[str, int]] = defaultdict(dict)
        self._foreign: dict[int, dict[str, int]] = {}  # reads by other streams than the owner

    # --- what the code under test calls instead of torch.cuda

    @contextlib.contextmanager
    def on(self, stream: Stream):
        with stream:
            yield

    def patch(self, monkeypatch) -> None:
        """Put the double in the place of torch.cuda's events and streams and of vLLM's auxiliary stream."""
        import vllm.utils.torch_utils as torch_utils

        monkeypatch.setattr(Event, "machine", self, raising=False)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch_utils, "aux_stream", lambda: self.aux)

    # --- accesses

    def note(self, name: str) -> None:
        """Log a step of the model by name, on the current stream."""
        self.log.append((self.current.name, "step", name))

    def steps(self, stream: str | None = None) -> list[str]:
        """Names of the steps in the order in which the host recorded them, of one stream or all."""
        return [what for where, kind, what in self.log if kind == "step" and stream in (None, where)]

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        schema = function._schema
        result = function(*args, **kwargs)
        outputs = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        if schema.name.startswith(ALLOCATIONS):
            for tensor in outputs:
                self._tick()
                self._own(tensor)
            return result
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        if is_view:
            return result
        self._tick()
        written = []
        for position, argument in enumerate(schema.arguments):
            value = kwargs.get(argument.name, args[position] if position < len(args) else None)
            tensors = [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
            if argument.alias_info is not None and argument.alias_info.is_write:
                written += tensors
            else:
                for tensor in tensors:
                    self._reads(tensor, schema.name)
        for tensor in (*written, *outputs):
            self._own(tensor)
            self._writes(tensor, schema.name)
        return result

    def _tick(self) -> None:
        now = self.current
        now.clock[now.name] += 1
        for key, reads in list(self._foreign.items()):
            if self._owner[key] != now.name:
                continue
            late = [stream for stream, tick in reads.items() if not self._after(stream, tick)]
            if not late:
                del self._foreign[key]
            elif torch._C._storage_Use_Count(key) <= 1:  # the reference in _held
                self.violations.append(f"memory of {now.name} may be used again while {late[0]} reads it")

    def _key(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._held.setdefault(key, storage)
        return key

    def _own(self, tensor: torch.Tensor) -> None:
        self._owner.setdefault(self._key(tensor), self.current.name)

    def _after(self, stream: str, tick: int) -> bool:
        return self.current.clock[stream] >= tick

    def _reads(self, tensor: torch.Tensor, operation: str) -> None:
        key, now = self._key(tensor), self.current
        if key in self._written and not self._after(*self._written[key]):
            writer = self._written[key][0]
            self.violations.append(f"{operation} on {now.name} reads before the write on {writer}")
        self._read[key][now.name] = now.clock[now.name]
        if self._owner.get(key, now.name) != now.name:
            self._foreign.setdefault(key, {})[now.name] = now.clock[now.name]

    def _writes(self, tensor: torch.Tensor, operation: str) -> None:
        key, now = self._key(tensor), self.current
        if key in self._written and not self._after(*self._written[key]):
            self.violations.append(f"{operation} on {now.name} overwrites unordered with a write")
        for stream, tick in self._read[key].items():
            if not self._after(stream, tick):
                self.violations.append(f"{operation} on {now.name} overwrites before a read on {stream}")
        self._written[key] = (now.name, now.clock[now.name])
        self._read[key] = {}

    def unjoined(self) -> list[str]:
        """Side streams with work that the main stream has not waited for."""
        return [s.name for s in self.sides if s.clock[s.name] > self.main.clock[s.name]]
