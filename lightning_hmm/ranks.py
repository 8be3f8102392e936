"""The end of a run on several ranks.

A collective of the gloo backend runs on a thread of torch, which releases the tensors after the caller has continued.
Releasing the last reference to a Python tensor acquires the lock of the interpreter. If the interpreter is already
shutting down, Python before 3.14 ends such a thread inside a C++ function that must not be unwound. The process then
aborts with "terminate called without an active exception", although its work is done. Lightning destroys the process
group at exit for the NCCL backend only.
"""

from __future__ import annotations

import atexit

import torch


def destroy_process_group_at_exit() -> None:
    """Destroys the process group before the interpreter shuts down, so that the threads of the backend are joined.

    Until then the process group can be used: a script may train, test and train again. Call this function after a
    successful run only. After an error, other ranks may be waiting in a collective, and joining the threads would wait
    for them.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        atexit.unregister(_destroy_process_group)  # Several runs register it once.
        atexit.register(_destroy_process_group)


def _destroy_process_group() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
