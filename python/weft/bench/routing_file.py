"""Routing traces from files: which experts real tokens named, and with which weights."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["SUFFIXES", "Layer", "read_routing"]

SUFFIXES: Final = (".npz", ".safetensors")
#: Array for one layer among several: `model.layers.3.ids`.
OF_A_LAYER: Final = re.compile(r"(.*?)(\d+)\.ids")


class Layer(NamedTuple):
    """Routing for one layer: expert ids and weights by token."""

    #: As the file calls it.
    name: str
    ids: NDArray[np.int64]  # [tokens, top_k]
    weights: NDArray[np.float32] | None  # [tokens, top_k]


def read_routing(path: Path, *, top_k: int, experts: int) -> list[Layer]:
    """Layers in a routing trace, in order.

    The file is an .npz or .safetensors file. It holds `ids`, whole numbers [tokens, top_k] or
    [layers, tokens, top_k], with negative ids for no expert; or an array `NAME.ids` [tokens, top_k]
    for each layer, where NAME ends in the layer number, for example `model.layers.3.ids`. Optional
    floating-point `weights` beside each `ids` have the same shape.

    Raises:
        ValueError: if the file cannot be read, or does not fit `top_k` and `experts`.
    """
    arrays = load(path)
    if "ids" in arrays:
        ids, weights = arrays["ids"], arrays.get("weights")
        if ids.ndim != 3:
            return [checked(path, "ids", ids, weights, top_k, experts)]
        if weights is not None and weights.shape != ids.shape:
            raise ValueError(f"{path}: weights has shape {weights.shape}; {ids.shape} is needed")
        return [
            checked(
                path,
                f"ids[{n}]",
                ids[n],
                weights if weights is None else weights[n],
                top_k,
                experts,
            )
            for n in range(len(ids))
        ]
    found = {name: match for name in arrays if (match := OF_A_LAYER.fullmatch(name))}
    if not found:
        raise ValueError(f"{path} has no array `ids`, and none like `layers.0.ids`")
    ordered = sorted(found, key=lambda name: (found[name][1], int(found[name][2])))
    return [
        checked(path, name, arrays[name], arrays.get(name[:-3] + "weights"), top_k, experts)
        for name in ordered
    ]


def load(path: Path) -> dict[str, NDArray[Any]]:
    """Arrays in a file that belong to a routing trace."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    if path.suffix == ".safetensors":
        try:
            from safetensors.numpy import load_file
        except ImportError as error:
            raise ValueError(
                f"{path} needs safetensors, which is not installed: pip install 'weft[bench]'"
            ) from error
        try:
            arrays = load_file(path)
        except Exception as error:  # its own error, and file errors
            raise ValueError(f"{path} cannot be read: {error}") from error
    else:
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
        except Exception as error:  # numpy and zipfile raise whatever a broken file leads them to
            raise ValueError(f"{path} cannot be read: {error}") from error
    wanted = re.compile(r"(.*\.)?(ids|weights)")
    return {name: array for name, array in arrays.items() if wanted.fullmatch(name)}


def checked(
    path: Path,
    name: str,
    ids: NDArray[Any],
    weights: NDArray[Any] | None,
    top_k: int,
    experts: int,
) -> Layer:
    """One layer, if it has a meaning."""
    if ids.ndim != 2 or ids.shape[1] != top_k or not len(ids):
        raise ValueError(f"{path}: {name} has shape {ids.shape}; (tokens, {top_k}) is needed")
    if not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"{path}: {name} is of dtype {ids.dtype}, not of whole numbers")
    if ids.max() >= experts:
        row = int(np.argmax(ids.max(axis=1)))
        raise ValueError(
            f"{path}: row {row} of {name} names expert {ids.max()}; there are {experts}"
        )
    ids = ids.astype(np.int64)
    ordered = np.sort(ids, axis=1)
    twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(axis=1)
    if twice.any():
        raise ValueError(f"{path}: row {int(np.argmax(twice))} of {name} names an expert twice")
    if weights is None:
        return Layer(name, ids, None)
    if weights.shape != ids.shape:
        raise ValueError(f"{path}: weights has shape {weights.shape}; {ids.shape} is needed")
    # bfloat16 is not among numpy's own floating-point types.
    fractions = weights.dtype.kind == "f" or weights.dtype.name == "bfloat16"
    if not fractions or not np.isfinite(weights.astype(np.float32)).all():
        raise ValueError(f"{path}: weights of {name} are not all finite floating-point numbers")
    return Layer(name, ids, weights.astype(np.float32))
