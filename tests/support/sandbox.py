"""Takes a system call away from this process and its children, as sandboxes do; no rights are needed (seccomp)."""

from __future__ import annotations

import ctypes
import platform

_BIND = {"x86_64": 49, "aarch64": 200}
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _FILTER = 22, 38, 2
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.POINTER(_Instruction)))


def refuse_bind(error: int) -> None:
    """Let each bind() fail with an error number from here on."""
    steps = (_Instruction * 4)(
        _Instruction(_LOAD, 0, 0, 0),
        _Instruction(_JUMP_IF_EQUAL, 0, 1, _BIND[platform.machine()]),
        _Instruction(_RETURN, 0, 0, _ERRNO | error),
        _Instruction(_RETURN, 0, 0, _ALLOW),
    )
    program = _Program(len(steps), steps)
    libc = ctypes.CDLL(None, use_errno=True)
    for words in ((_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (_PR_SET_SECCOMP, _FILTER, ctypes.byref(program), 0, 0)):
        if libc.prctl(*words):
            raise OSError(ctypes.get_errno(), "the process cannot be sandboxed")
