"""NICs of ranks with GPUs: the choice by GPU, for the providers verbs and ofi, and the reason."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from weft import _native
from weft.diagnosis.finding import Finding

if TYPE_CHECKING:
    from weft._native import NicReport, ProviderNics

__all__ = ["findings", "report"]

#: Providers that use NICs, with the variables that name these.
PROVIDERS: Final = {"verbs": "WEFT_VERBS_DEVICES", "ofi": "WEFT_OFI_DOMAINS"}


def report() -> NicReport:
    """NICs by GPU. Loads libibverbs, libfabric and the CUDA driver; creates no CUDA context."""
    return _native.nic_report()


def findings(found: NicReport) -> list[Finding]:
    """A finding for each provider and GPU, and one for this process's GPU; none without NICs."""
    of_providers = [
        finding
        for provider, nics in (("verbs", found["verbs"]), ("ofi", found["ofi"]))
        for finding in of_provider(provider, nics)
    ]
    return [*of_providers, rank_gpu(found)] if of_providers else []


def of_provider(provider: str, nics: ProviderNics) -> list[Finding]:
    """A finding for each GPU; none if no GPU has NICs of its own and no variable names any."""
    variable = PROVIDERS[provider]
    if nics["named"] is not None:
        detail, follows = nics["named"], f"every rank uses these; unset {variable} to choose by GPU"
        return [Finding(f"{provider} NICs", True, detail, follows)]
    if nics["error"] is not None or not any(chosen for _, _, chosen, _ in nics["gpus"]):
        return []
    return [of_gpu(provider, *each) for each in nics["gpus"]]


def of_gpu(provider: str, gpu: str, address: str, chosen: list[str], reason: str) -> Finding:
    """NICs for a rank with this GPU."""
    name = f"{provider} NICs of {gpu}"
    if not chosen:
        return Finding(name, False, f"{address}: {reason}", f"ranks with {gpu} use all NICs")
    follows = f"a rank with {gpu} uses them; {PROVIDERS[provider]}=all: all NICs"
    return Finding(name, True, f"{', '.join(chosen)}: {reason}", follows)


def rank_gpu(found: NicReport) -> Finding:
    """The GPU by which a rank with this process's environment would choose NICs."""
    address, reason = found["rank_gpu"]
    if address is None:
        follows = (
            "a rank with this environment uses all NICs: start one rank for each GPU, set"
            " CUDA_VISIBLE_DEVICES, or make a GPU current before weft.init"
        )
        return Finding("GPU of a rank", False, reason, follows)
    follows = "a rank with this environment uses the NICs in the row for this GPU"
    return Finding("GPU of a rank", True, f"{address}: {reason}", follows)
