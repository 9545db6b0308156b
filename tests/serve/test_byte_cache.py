import threading

import pytest

from psamil.serve.byte_cache import ByteCache


def test_what_was_used_last_is_kept():
    made = []

    def value_of(key):
        return cache.get(key, lambda: made.append(key) or bytes(4))

    cache = ByteCache(10, len)
    for key in "abacab":  # c drives out b, and then b drives out c
        value_of(key)
    assert made == ["a", "b", "c", "b"]
    assert cache.bytes == 8


def test_the_newest_is_kept_whatever_its_size():
    cache = ByteCache(10, len)
    cache.get("small", lambda: bytes(4))
    assert len(cache.get("large", lambda: bytes(100))) == 100
    assert cache.bytes == 100
    assert cache.get("large", lambda: pytest.fail("made twice"))


def test_several_threads_make_a_value_once():
    cache, made, started = ByteCache(100, len), [], threading.Event()

    def make():
        made.append(1)
        started.wait(5)
        return b"value"

    results = []
    threads = [threading.Thread(target=lambda: results.append(cache.get("key", make))) for _ in range(4)]
    for thread in threads:
        thread.start()
    started.set()
    for thread in threads:
        thread.join()
    assert results == [b"value"] * 4
    assert made == [1]


def test_after_an_error_the_next_one_tries_again():
    cache = ByteCache(100, len)
    with pytest.raises(ZeroDivisionError):
        cache.get("key", lambda: bytes(1 // 0))
    assert cache.get("key", lambda: b"value") == b"value"
