"""The garbage collector goes on after what paused it, in however many threads that was."""

from __future__ import annotations

import gc
import threading

from ckptsurgeon.files.collector import collector_paused


def test_it_goes_on_when_the_last_thread_is_out() -> None:
    """Or the last one to pause might be one that saw it paused, and nobody let it go on."""
    first, second = threading.Event(), threading.Event()

    def pause() -> None:
        with collector_paused():
            first.set()
            assert second.wait(10)

    assert gc.isenabled()
    thread = threading.Thread(target=pause)
    with collector_paused():
        thread.start()
        assert first.wait(10)
    assert not gc.isenabled()
    second.set()
    thread.join()
    assert gc.isenabled()


def test_it_stays_off_where_it_was_off() -> None:
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
