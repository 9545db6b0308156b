"""Results that are kept as long as there is room for them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class ByteCache(Generic[Value]):
    """The values used last, up to a number of bytes. The newest is kept whatever its size. Safe among threads."""

    def __init__(self, limit_bytes: int, size_bytes: Callable[[Value], int]) -> None:
        self._limit, self._size_of = limit_bytes, size_bytes
        self._lock = threading.Lock()
        self._values: OrderedDict[Hashable, Value] = OrderedDict()
        self._making: dict[Hashable, threading.Lock] = {}
        self.bytes = 0

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value of a key. Who asks while another makes it waits; after an error, the next one tries again."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
            making = self._making.setdefault(key, threading.Lock())
        with making:
            with self._lock:
                if key in self._values:
                    return self._values[key]
            value = make()
            with self._lock:
                self._values[key] = value
                self.bytes += self._size_of(value)
                self._making.pop(key, None)
                while self.bytes > self._limit and len(self._values) > 1:
                    self.bytes -= self._size_of(self._values.popitem(last=False)[1])
        return value
