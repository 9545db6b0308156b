"""Errors a user can cause. Their message says what is wrong, where, and what to do; a traceback is for our bugs."""


class PsamilError(Exception):
    """Base of every error that psamil raises on purpose."""


class ShapeError(PsamilError, ValueError):
    """Tensors whose shapes do not fit together."""


class OptionError(PsamilError, ValueError):
    """An option outside what the product offers."""


class DataError(PsamilError):
    """A file or folder that cannot be used as it is. The message names the file, the cause and the remedy."""

    def __init__(self, path: object, cause: str, remedy: str = "") -> None:
        self.path, self.cause, self.remedy = str(path), cause, remedy
        super().__init__(f"{path}: {cause}" + (f"; {remedy}" if remedy else ""))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.path, self.cause, self.remedy)


class BusyError(DataError):
    """A file or folder that another process works on."""


class MissingExtraError(PsamilError, ImportError):
    """An optional package is needed. The message names the extra that installs it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs the package {package}; install it with: pip install 'psamil[{extra}]'")


def one_of(what: str, value: object, allowed: object) -> OptionError:
    """The error for an unknown name, with the known ones listed: ``raise one_of("decay", "gauss", DECAYS)``."""
    names = ", ".join(repr(name) for name in sorted(allowed))  # type: ignore[call-overload]
    return OptionError(f"unknown {what} {value!r}; known: {names}")
