"""Machine code from Python functions, kept in numba's cache for as long as no source of it changes.

An entry point is called from Python with integers only (addresses, counts), past numba's dispatcher, which would look at
the type of every argument: that costs an eighth of a microsecond, through the dispatcher a quarter, arrays half of one. It
is compiled when its module is imported, from the cache if it is there. What it calls are plain
`njit` functions, which have no cache of their own: they are part of the entry's code.

numba takes cached code for good while the file of the function itself is unchanged, whatever happened to the functions
it calls and to the constants it uses. So our cache key has a digest of all sources that entries are made of: those of the
pool's kernels, and every file beside the one the entry is in.

Pause points. With KVATLAS_PAUSE_POINTS=1 in the environment of the first import, every named step of the kernels
(`kernels/pause.py`) can be told to stop there, so that tests can kill a process at that very instruction. Other builds do
not contain them: the flag is a constant for the compiler, and part of the cache key.

Limits: relies on four inner names of numba (`FunctionCache`, `CFunc`, their `_cache`, a compilation's `entry_point`); its
minor version is pinned.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, TypeVar

from numba import njit
from numba.core import sigutils
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc

PAUSE_POINTS: Final = os.environ.get("KVATLAS_PAUSE_POINTS") == "1"


def _sources_digest(files: Iterable[Path]) -> str:
    return hashlib.blake2b(b"".join(file.read_bytes() for file in files), digest_size=16).hexdigest()


@functools.cache
def _package_digest(folder: Path) -> str:
    """The digest of all sources in `folder`, where functions lie that entries of another package are made of."""
    return _sources_digest(sorted(folder.glob("*.py")))


_HERE: Final = Path(__file__).parent
_DIGEST: Final = _sources_digest(
    [_HERE / "compiled.py", _HERE / "layout.py", _HERE / "words.py", *sorted((_HERE / "kernels").glob("*.py"))]
)
dispatchers: Final[dict[str, Any]] = {}
"""numba's objects for the entries, by function name: what an entry calls lives as long as its dispatcher."""


class _SourceCache(FunctionCache):  # type: ignore[misc]
    """numba's cache of one function, with our digests, and whether there are pause points, in the key."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._beside = _package_digest(Path(function.__code__.co_filename).parent)

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return (*super()._index_key(sig, codegen), _DIGEST, self._beside, PAUSE_POINTS)


_ERRORS: Final = "numpy"
"""A division by zero gives an infinity or no number. An exception would be lost on a thread, and the rest of its work with it."""

Function = TypeVar("Function", bound=Callable[..., Any])


def inner(function: Function) -> Function:
    """Marks `function` as one that entries call: compiled with each of them, and not to be called from Python."""
    compiled: Function = njit(function, error_model=_ERRORS)
    return compiled


def entry(function: Callable[..., int]) -> Callable[..., int]:
    """Compiles `function`, whose arguments and result are 64-bit integers, and returns what calls it.

    The interpreter's lock is kept meanwhile, so no two entries of a process run at the same time.
    """
    return _compiled(function, nogil=False)


def long_entry(function: Callable[..., int]) -> Callable[..., int]:
    """Like `entry`, for what takes long: the interpreter's lock is free meanwhile, so anything else may run."""
    return _compiled(function, nogil=True)


def thread_entry(function: Callable[[int], None]) -> int:
    """Compiles `function`, which takes one 64-bit integer, and returns its address, for code that starts threads with it.

    What it raises is lost.
    """
    compiled: Any = CFunc(
        function, sigutils.normalize_signature("void(int64)"), {}, {"nopython": True, "error_model": _ERRORS}
    )
    compiled._cache = _SourceCache(function)
    compiled.compile()
    _kept.append(compiled)
    return int(compiled.address)


_kept: Final[list[Any]] = []
"""Machine code lives as long as its object."""


def _compiled(function: Callable[..., int], nogil: bool) -> Callable[..., int]:
    name = function.__name__
    taken = dispatchers.get(name)
    assert taken is None or taken.py_func.__module__ == function.__module__, f"two entries are called {name}"
    dispatcher: Any = njit(function, nogil=nogil, error_model=_ERRORS)
    dispatcher._cache = _SourceCache(function)
    arguments = ", ".join(["int64"] * function.__code__.co_argcount)
    dispatcher.compile(f"int64({arguments})")
    dispatcher.disable_compile()
    dispatchers[name] = dispatcher
    (compilation,) = dispatcher.overloads.values()
    compiled: Callable[..., int] = compilation.entry_point
    return compiled
