"""A GPU that this machine does not have: tensors lie on the processor and say that they lie on `cuda`.

Guarantees: an operation whose tensors lie in both places raises what PyTorch raises with a card; so do `.numpy()` of a
tensor on the card, a draw there from the processor's generator, and an index on the card into a tensor that is not.
Values are true, so whole runs go on as they would. What a card alone can tell, kernels and speed, is not seen here.

PyTorch's own `FakeTensorMode` refuses products over two places, too. But a PyTorch that is built for CUDA cannot make a
backward pass over such tensors without a card (`hasPrimaryContext expects a valid device index`), switches autocast
off, and refuses no wrong index or generator.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

CARD = torch.device("cuda", 0)
CPU = torch.device("cpu")
OPS = torch.ops.aten
COPIES = {OPS.copy_.default, OPS._foreach_copy_.default}
INDEXED = {OPS.index.Tensor, OPS.index_put.default, OPS.index_put_.default, OPS._unsafe_index.Tensor}
INDEXED |= {OPS._index_put_impl_.default}
AS_THEIR_OWN = {torch.Tensor.__deepcopy__, torch.Tensor.new_tensor}  # what they make without an operation on it
TO = {torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.cpu}


class Places:
    """Which storages lie on the card."""

    def __init__(self) -> None:
        self._on_card = WeakIdKeyDictionary()
        self.inside = False  # of one of PyTorch's functions with a tensor on the card

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage() in self._on_card

    def put(self, found: object) -> Any:
        """Say of all tensors in there that they lie on the card."""
        for one in tensors_in(found):
            self._on_card[one.untyped_storage()] = True
        return found


def tensors_in(found: Any) -> list[torch.Tensor]:
    """All in there, in order. PyTorch's own walk, which is slow, is for what is no plain container."""
    if isinstance(found, torch.Tensor):
        return [found]
    kind = type(found)
    if kind is tuple or kind is list or kind is dict:
        parts = found.values() if kind is dict else found
        return [one for part in parts for one in tensors_in(part)]
    return [one for one in tree_leaves(found) if isinstance(one, torch.Tensor)]


class OneDeviceAnOperation(TorchDispatchMode):
    """Refuse what mixes the two places; what is made of a tensor on the card lies there."""

    def __init__(self, places: Places) -> None:
        super().__init__()
        self.places = places

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        given = tensors_in((args, kwargs))
        there = [self.places.holds(one) for one in given]
        if any(there):
            self._check(func, args, given, there)
            if isinstance(kwargs.get("generator"), torch.Generator):
                raise RuntimeError(f"{func}: Expected a 'cuda' device type for generator but found 'cpu'")
        found = func(*args, **kwargs)
        onto_card = there[0] if func in COPIES and there else any(there) or (not given and self.places.inside)
        return self.places.put(found) if onto_card else found

    def _check(self, func: Any, args: Any, given: list[torch.Tensor], there: list[bool]) -> None:
        if func in COPIES:
            return
        if func in INDEXED:
            if not there[0]:
                raise RuntimeError(f"{func}: indices should be on the device of the indexed tensor, which is cpu")
            indices = {id(one) for one in tensors_in(args[1])}
            pairs = [pair for pair in zip(given, there, strict=True) if id(pair[0]) not in indices]
        else:
            pairs = list(zip(given, there, strict=True))
        if any(not on_card and one.ndim > 0 for one, on_card in pairs):
            shapes = [(tuple(one.shape), "cuda:0" if on_card else "cpu") for one, on_card in pairs]
            raise RuntimeError(f"{func}: Expected all tensors to be on the same device, but found {shapes}")


class SaysCuda(TorchFunctionMode):
    """Take the device that is asked for, and tell the one that a tensor is said to lie on."""

    def __init__(self, places: Places) -> None:
        super().__init__()
        self.places = places

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func == torch.Tensor.device.__get__:  # type: ignore[attr-defined]
            return CARD if self.places.holds(args[0]) else CPU
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return self.places.holds(args[0])
        if func is torch.Tensor.numpy and self.places.holds(args[0]):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
        if func in TO:
            return self._moved(func, list(args), kwargs)
        wanted = kwargs.get("device")
        if wanted is not None and torch.device(wanted).type == "cuda":
            return self.places.put(func(*args, **{**kwargs, "device": CPU}))
        before, self.places.inside = self.places.inside, any(map(self.places.holds, tensors_in((args, kwargs))))
        try:
            found = func(*args, **kwargs)
        finally:
            self.places.inside = before
        as_its_own = func in AS_THEIR_OWN and wanted is None and self.places.holds(args[0])
        return self.places.put(found) if as_its_own else found

    def _moved(self, func: Any, args: list[Any], kwargs: dict[str, Any]) -> torch.Tensor:
        """`to`, `cuda` and `cpu`: a copy in the other place, or the tensor itself where it lies there already."""
        one, here = args[0], self.places.holds(args[0])
        wanted, rest = here, []
        for value in args[1:]:
            if isinstance(value, torch.Tensor):
                wanted, rest = self.places.holds(value), [*rest, value.dtype]
            elif isinstance(value, str | torch.device):
                wanted = torch.device(value).type == "cuda"
            elif value is not None:
                rest.append(value)
        if kwargs.get("device") is not None:
            wanted = torch.device(kwargs["device"]).type == "cuda"
        if func is not torch.Tensor.to:
            wanted, rest = func is torch.Tensor.cuda, []
        dtype = kwargs.get("dtype") or next((value for value in rest if isinstance(value, torch.dtype)), one.dtype)
        moved = one if one.dtype == dtype else one.to(dtype)
        if wanted is here:
            return moved
        with torch._C._DisableTorchDispatch():  # the one operation that may cross
            copied = moved.clone()
        return self.places.put(copied) if wanted else copied


@contextmanager
def pretended_card() -> Iterator[Places]:
    """Let `cuda` be a device for a while."""
    places, real_autocast, real_fork = Places(), torch.autocast, torch.random.fork_rng

    def autocast(device_type: str, *args: Any, **kwargs: Any) -> torch.autocast:
        return real_autocast("cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    @wraps(real_fork)
    def fork_rng(devices: object = None, *args: Any, **kwargs: Any) -> Any:
        return real_fork([], *args, **kwargs)

    there: list[tuple[object, str, Callable[..., Any]]] = [
        (torch, "autocast", autocast),
        (torch.random, "fork_rng", fork_rng),
        (torch.cuda, "is_available", lambda: True),
        (torch.accelerator, "current_accelerator", lambda *given, **asked: None),  # optimisers ask it for its graphs
        (torch.cuda, "manual_seed", lambda seed: None),
        (torch.cuda, "device", lambda device: nullcontext()),
        (torch.cuda, "get_device_name", lambda *device: "a pretended card"),
        (torch.Tensor, "pin_memory", lambda tensor: tensor),
    ]
    patches = [mock.patch.object(owner, name, value) for owner, name, value in there]
    for patch in patches:
        patch.start()
    try:
        with SaysCuda(places), OneDeviceAnOperation(places):
            yield places
    finally:
        for patch in reversed(patches):
            patch.stop()
