"""Race the kernels in a process of their own, on a GPU that has only the proof of another model of its capability.

kernels.py calls race() at the first product on such a device. Races time each kernel against what there is without it.
"""

import logging
import os
import subprocess
import sys
import threading
import time

import torch

from fmoe_ext.gpu.proof import Key, cache_folder

_LOG = logging.getLogger(__name__)
_MEMORY = 12 << 30  # bytes of the GPU that must be free: the largest race takes half
_PATIENCE = 600.0  # seconds after which another process may try again, for races that were ended half-way


def race(device: int, key: Key) -> None:
    """Start `fmoe gpu prove --missing`; later processes use what it finds.

    It runs once for a model of GPU and cache folder; if it saves nothing, again at the earliest after _PATIENCE. This
    process goes on with the kernels that are right on the other model, and shares the GPU for about a minute.
    """
    if torch.cuda.mem_get_info(device)[0] < _MEMORY or not _is_first(key):
        return
    command = [sys.executable, "-m", "fmoe_ext.gpu", "prove", "--missing", "--device", str(device)]
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
    except OSError as error:  # no memory, no room for a process: no reason to end a forward
        _LOG.warning("the races of %s could not be started: %s", key.gpu, error)
        return
    _LOG.warning(
        "%s has no races of its own yet: `python %s` runs in the background for about a minute and decides for "
        "later processes",
        key.gpu,
        " ".join(command[1:]),
    )
    # without a wait() the ended process stays a zombie
    threading.Thread(target=process.wait, daemon=True).start()


def _is_first(key: Key) -> bool:
    """Return False if a process started the races less than _PATIENCE ago, or the folder cannot be written."""
    mark = cache_folder() / f"{key.name()}.racing"
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        if mark.exists() and time.time() - mark.stat().st_mtime > _PATIENCE:
            mark.unlink(missing_ok=True)
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY))  # O_EXCL: one of many processes wins
    except OSError:
        return False
    return True
