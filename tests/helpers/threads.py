"""What runs in a thread of its own."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any


def in_thread(name: str, work: Callable[[], Any]) -> Any:
    """What `work` returns, or raises, in a thread of this name."""
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name).start()
    return future.result(60)
