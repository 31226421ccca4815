# SPDX-License-Identifier: Apache-2.0
"""Streams and events for a machine without a GPU, and a race detector over everything that PyTorch runs.

Happens-before by vector clocks: a stream's clock counts its own operations and what it waited for. Two
accesses of the same storage from different streams must be ordered if one of them writes. The caching
allocator is part of the model: memory belongs to the stream that was current when it was allocated; that
stream may have used the same memory right before (so another stream's first access must come after the
allocation) and uses it again right after the last reference is gone (so another stream's accesses must come
before that).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Clock = dict[str, int]


def before(a: Clock, b: Clock) -> bool:
    """Whether all that clock ``a`` has seen is seen by ``b``."""
    return all(b.get(stream, 0) >= count for stream, count in a.items())


class Device:
    """The streams of one card."""

    def __init__(self) -> None:
        self.current = "main"
        self.clocks: dict[str, Clock] = {"main": {"main": 0}}
        self.log: list[tuple[str, str]] = []  # (stream, what), in the order in which the host enqueued it

    def enqueue(self, what: str) -> Clock:
        clock = self.clocks.setdefault(self.current, {})
        clock[self.current] = clock.get(self.current, 0) + 1
        self.log.append((self.current, what))
        return dict(clock)

    def install(self, patch: Callable[[object, str, object], None]) -> None:
        """Put the doubles in place of torch.cuda's.

        Args:
            patch: ``monkeypatch.setattr``, or ``setattr``.
        """
        device = self

        class Event:
            def __init__(self) -> None:
                self.clock: Clock | None = None

            def record(self) -> None:
                self.clock = device.enqueue("record")

            def wait(self) -> None:
                assert self.clock is not None, "waits for an event that nothing recorded"
                clock = device.clocks.setdefault(device.current, {})
                for stream, count in self.clock.items():
                    clock[stream] = max(clock.get(stream, 0), count)
                device.log.append((device.current, "wait"))

        @contextmanager
        def stream(name: str):
            before_, device.current = device.current, name
            try:
                yield
            finally:
                device.current = before_

        patch(torch.cuda, "Event", Event)
        patch(torch.cuda, "stream", stream)


class Race(AssertionError):
    pass


class _Memory:
    def __init__(self, owner: str, allocated: Clock) -> None:
        self.owner = owner
        self.allocated = allocated
        self.writes: list[tuple[str, str, Clock]] = []
        self.reads: list[tuple[str, str, Clock]] = []


class Detector(TorchDispatchMode):
    """Checks every ATen operation; custom ops in ``bodies`` are entered.

    Attributes:
        races: what was found, in words.
    """

    def __init__(self, device: Device, bodies: dict[object, Callable[..., object]]) -> None:
        super().__init__()
        self.device = device
        self.bodies = bodies
        self.races: list[str] = []
        self._memory: dict[int, _Memory] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in self.bodies:
            with self:
                return self.bodies[func](*args, **kwargs)
        out = func(*args, **kwargs)
        clock = self.device.enqueue(str(func))
        named = {a.name: a for a in func._schema.arguments}
        values = list(zip(func._schema.arguments, args, strict=False))
        values += [(named[name], value) for name, value in kwargs.items() if name in named]
        written = set()
        for argument, value in values:
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors(value):
                written.add(_key(tensor)) if writes else None
                self._access(tensor, str(func), clock, writes)
        for tensor in _tensors(out):
            if _key(tensor) not in self._memory:
                self._access(tensor, str(func), clock, True)
        return out

    def _access(self, tensor: torch.Tensor, what: str, clock: Clock, writes: bool) -> None:
        stream = self.device.current
        key = _key(tensor)
        memory = self._memory.get(key)
        if memory is None:
            memory = self._memory[key] = _Memory(stream, clock)
            weakref.finalize(tensor.untyped_storage(), self._free, key)
        if stream != memory.owner and not before(memory.allocated, clock):
            self.races.append(f"{what} on {stream} uses memory that {memory.owner} may still use otherwise")
        others = memory.writes + (memory.reads if writes else [])
        for other, other_what, other_clock in others:
            if other != stream and not before(other_clock, clock):
                self.races.append(f"{what} on {stream} against {other_what} on {other}")
        (memory.writes if writes else memory.reads).append((stream, what, clock))

    def _free(self, key: int) -> None:
        memory = self._memory.pop(key)
        now = self.device.clocks[memory.owner]
        for stream, what, clock in memory.writes + memory.reads:
            if stream != memory.owner and not before(clock, now):
                self.races.append(f"memory of {memory.owner} freed while {what} on {stream} may still run")


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
