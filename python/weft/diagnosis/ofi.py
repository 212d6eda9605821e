"""libfabric: the library, what it offers through each provider, and what each offer demands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from weft import _native
from weft.diagnosis.finding import Finding

if TYPE_CHECKING:
    from weft._native import OfiOffer, OfiReport

__all__ = ["EFA_NEEDS", "findings", "library", "report", "version"]

#: libfabric providers that Weft can use, in order of preference.
PROVIDERS: Final = ("efa", "efa-direct", "tcp;ofi_rxm", "tcp", "shm", "verbs;ofi_rxm")
#: The oldest libfabric whose provider efa Weft uses.
EFA_NEEDS: Final = (1, 21)
#: Sources for a libfabric with a provider.
SOURCES: Final = {
    "efa": "install EFA's software (docs/efa.md), or name its library: WEFT_LIBFABRIC",
    "verbs": "install a libfabric that is built with verbs, or name one: WEFT_LIBFABRIC",
}
MOST_NAMES: Final = 8
#: Part limit in bytes that stands for none.
NO_LIMIT: Final = 2**63


def report() -> OfiReport:
    """Findings on libfabric. Loads the library; opens no NIC."""
    return _native.ofi_report(list(PROVIDERS))


def findings(found: OfiReport) -> list[Finding]:
    """The library; what it offers, if there is one."""
    if found["library"] is None:
        return [library(found)]
    return [library(found), *(provider(name, found) for name in PROVIDERS)]


def library(found: OfiReport) -> Finding:
    """The library that the provider ofi uses."""
    if found["library"] is None or found["version"] is None:
        reason, _, remedy = (found["error"] or "unknown").partition("; ")
        return Finding("libfabric", False, reason, remedy or "no EFA: tcp goes between hosts")
    detail = f"{version(found['version'])}, {found['library']}"
    return Finding("libfabric", True, detail, "the provider ofi can use what is offered below")


def provider(name: str, found: OfiReport) -> Finding:
    """One libfabric provider."""
    title = f"libfabric {name}"
    offers = found["providers"][name]["offers"]
    if offers:
        size = min(offer["max_part_bytes"] for offer in offers)
        length = f"at most {size:,} bytes" if size < NO_LIMIT else "any length"
        detail = f"{domains(offers)}: parts of {length}"
        follows = f"WEFT_OFI_PROVIDER={quoted(name)}; demands {demands(offers)}"
        return Finding(title, True, detail, follows)
    needed = [part.removesuffix("-direct") for part in name.split(";")]
    seldom = next((SOURCES[part] for part in needed if part in SOURCES), None)
    if absent := [part for part in needed if part not in found["built_in"]]:
        detail = f"this libfabric has no provider {' and no '.join(absent)}"
        return Finding(title, False, detail, seldom or "install a libfabric that has it")
    if "efa" in needed and found["version"] is not None and found["version"] < EFA_NEEDS:
        detail = f"libfabric {version(found['version'])}: Weft needs {version(EFA_NEEDS)} for it"
        return Finding(title, False, detail, SOURCES["efa"])
    if seldom is not None:
        return Finding(title, False, "no NIC that it drives", "tcp;ofi_rxm reaches other hosts")
    detail = "no reliable datagrams with remote writes in this version"
    return Finding(title, False, detail, "choose another provider of libfabric")


def domains(offers: list[OfiOffer]) -> str:
    """NIC names."""
    names = [offer["domain"] for offer in offers]
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def demands(offers: list[OfiOffer]) -> str:
    """Domain requirements that Weft meets by itself; and GPU memory."""
    asked = [
        ("registered sources", any(offer["registers_sources"] for offer in offers)),
        ("a receive for each arrival", any(offer["consumes_receives"] for offer in offers)),
        ("a progress thread", not all(offer["progresses_by_itself"] for offer in offers)),
    ]
    text = ", ".join(what for what, is_asked in asked if is_asked) or "nothing"
    reaches = all(offer["reaches_devices"] for offer in offers)
    return text + (", reaches GPU memory" if reaches else "")


def quoted(name: str) -> str:
    """A name as a shell takes it."""
    return f"'{name}'" if ";" in name else name


def version(parts: tuple[int, int]) -> str:
    """A libfabric version."""
    return f"{parts[0]}.{parts[1]}"
