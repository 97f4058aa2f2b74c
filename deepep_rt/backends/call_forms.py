"""Forms of calls: a call that repeats the form of an earlier one takes over what that one has found out.

The form of a call is all that its checks, the parameters of its kernel and the shapes of its results depend on: the options, and the
class, dtype, shape, layout and device of each array. Addresses, the handle, the stream, captures, hooks and reports of kernels are
another matter in each call. A call that has no form here is an ordinary one, with all of its checks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from operator import is_
from typing import Any

from ..arrays.frameworks import FRAMEWORK_OF_CLASS
from ..arrays.view import AddressOf
from .base import Backend, Call, CallForm
from .nvtx_ranges import Annotate

MOST_FORMS = 4
"""Forms that a Buffer keeps of each kind of call. Each has the parameters of a kernel, and no array."""
_MOST_SIZES = 64  # that are counted
_PLAIN = (type(None), bool, int, str)  # options; others may be arrays, which no form keeps


@dataclass(frozen=True)
class _Known:
    options: tuple[Any, ...]
    addresses: tuple[AddressOf, ...]
    form: CallForm
    text: str  # of the call's range for profilers


def _absent(array: Any) -> int | None:
    """Return what a kernel gets for an array that was not passed."""
    return 0 if array is None else None


def _unknown(array: Any) -> int | None:
    """Recognise no array."""
    return None


def _form_of_array(array: Any) -> AddressOf:
    framework = FRAMEWORK_OF_CLASS.get(type(array))  # not that of a list of arrays
    return (framework and framework.form(array)) or _unknown


class CallForms:
    """The forms of the last calls of one kind.

    Only options that are the same objects have the same form: an equal value of another type may be wrong.
    """

    def __init__(self, backend: Backend, annotate: Annotate | None, text_of: Callable[[Any], str]) -> None:
        self._info, self._begin, self._form_of = backend.info, backend.begin, backend.call_form
        self._annotate, self._text_of = annotate, text_of
        self._known: list[_Known] = []
        self._since = self._info.since
        self._counts: dict[Hashable, int] = {}  # of ordinary calls, by what usually makes a form

    def repeat(self, options: tuple[Any, ...], arrays: tuple[Any, ...], handle: Any = None) -> Any:
        """Make a call whose form is known, and return its result. None: this has done nothing, and the call has to be an ordinary one."""
        if self._since != self._info.since:  # other members
            self.forget()
        for known in self._known:
            if all(map(is_, known.options, options)):
                try:
                    addresses = [address_of(array) for address_of, array in zip(known.addresses, arrays, strict=True)]
                except Exception:  # what the array's library raises: an ordinary call says what is wrong
                    return None
                if None not in addresses and known.form.takes(handle):
                    call = self._begin(arrays[0], False, None, None)
                    if self._annotate is None:
                        return known.form(call, addresses, handle)
                    with self._annotate(known.text):
                        return known.form(call, addresses, handle)
        return None

    def note(self, size: Hashable, options: tuple[Any, ...], arrays: tuple[Any, ...], inputs: Any, call: Call) -> None:
        """Note an ordinary call before it is made, without a hook and on no stream of its own. If there was one of this size before, later
        calls may repeat its form.

        A form takes as long to make as it saves in two calls, so a program whose calls all differ makes few.
        """
        count = self._counts[size] = self._counts.get(size, 0) + 1
        if len(self._counts) > _MOST_SIZES:
            self._counts.clear()
        if count == 1 or count & (count - 1):  # again after 2, 4, 8... calls
            return
        if any(type(option) not in _PLAIN for option in options) or (form := self._form_of(inputs, call)) is None:
            return
        known = [_absent if array is None else _form_of_array(array) for array in arrays]
        if all(address_of(array) is not None for address_of, array in zip(known, arrays, strict=True)):
            kept = _Known(options, tuple(known), form, self._text_of(inputs))
            self._known = [kept, *self._known[: MOST_FORMS - 1]]

    def forget(self) -> None:
        """Forget all forms."""
        self._known, self._since = [], self._info.since
        self._counts.clear()
