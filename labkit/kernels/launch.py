"""Launching a kernel once more without finding out again which one it is.

Triton describes every argument of every call in words and looks the compiled kernel up by them,
which takes the host several times as long as the launch itself.
"""

import copy
import functools
import inspect
from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

REMEMBERED = 1024
"""Shapes and layouts whose launches each kind of call keeps."""


@functools.cache
def num_multiprocessors(device_index: int | None) -> int:
    """Returns how many multiprocessors a CUDA device has; 1 for a CPU, whose index is None."""
    if device_index is None:
        return 1
    return torch.cuda.get_device_properties(device_index).multi_processor_count


@functools.cache
def l2_cache_bytes(device_index: int) -> int:
    """Returns the size of a CUDA device's L2 cache."""
    return torch.cuda.get_device_properties(device_index).L2_cache_size


class Launch:
    """A Triton or Gluon kernel with its grid, its numbers and its constants: called with the
    arguments before them.

    From the second call on, the kernel that the first one compiled runs at once, unseen by Triton's
    launch hooks: whoever makes a Launch answers for what that kernel depends on being the same in
    every call, i.e. the device and, of every argument, its dtype, whether it is None, and, unless
    the kernel takes it without specialising, whether it is 1 or a multiple of 16 (of a tensor: its
    address).
    """

    def __init__(self, kernel, grid: tuple[int, ...], constants: dict, numbers: tuple = ()):
        self.kernel = kernel
        self.grid = (*grid, 1, 1)[:3]
        self.constants = constants
        self.numbers = numbers
        # A compiled kernel takes its constants too, which are its last parameters.
        self.last = (*numbers, *(constants[name] for name in kernel.arg_names if name in constants))
        self.run = self.compiled = None

    def __call__(self, *arguments) -> None:
        if self.run is None:
            compiled = self.kernel[self.grid](*arguments, *self.numbers, **self.constants)
            # Not where kernels are interpreted, or Triton has to allocate memory for each launch.
            facts = getattr(compiled, "metadata", None)
            if facts and not facts.global_scratch_size and not facts.profile_scratch_size:
                self.compiled = compiled
                self.run = unhooked(compiled, self.grid)
            return
        self.run(*arguments, *self.last)


def current_stream() -> int:
    """Returns the handle of the current GPU's current stream."""
    return torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())


def unhooked(compiled, grid: tuple[int, ...]) -> Callable[..., None]:
    """Returns what launches a compiled kernel like `compiled[grid]`, but gathers nothing for hooks
    and calls none. Tiles are handed to it encoded. Triton 3.6 to 3.9 let it.
    """
    run = copy.copy(compiled.run)
    launcher = run.launch
    if inspect.isfunction(launcher):
        # It encodes tiles, and then calls what it holds by the name of `launcher`.
        launcher = inspect.getclosurevars(launcher).nonlocals["launcher"]
    recorded = []
    run.launch = lambda *handed: recorded.extend(handed)
    known = (compiled.function, compiled.packed_metadata)
    run(*grid, 0, *known, None, None, None, "the only argument")
    *facts, last = recorded[4:]  # behind the grid and the stream
    if isinstance(last, tuple):  # Triton 3.9 hands the arguments on as one
        return lambda *arguments: launcher(*grid, current_stream(), *facts, arguments)
    return lambda *arguments: launcher(*grid, current_stream(), *facts, *arguments)


class Launcher:
    """A kernel, called as `Launcher(kernel)[grid](*arguments, **constants)`: on its tensors'
    device, whichever is the current one. Fake tensors launch nothing.
    """

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]):
        return functools.partial(self.launch, grid)

    def launch(self, grid: tuple[int, ...], *arguments, **constants) -> None:
        first = arguments[0]
        if isinstance(first, FakeTensor):
            return
        # Triton tells apart a tensor's dtype and alignment, a number's size, a 1, and a None.
        kinds = [
            (x.dtype, x.data_ptr() % 16 == 0)
            if isinstance(x, Tensor)
            else (x == 1, x % 16 == 0, x.bit_length() // 32)
            if type(x) is int
            else type(x)
            for x in arguments
        ]
        with torch.cuda.device_of(first):
            _launch_of(self.kernel, grid, first.device, tuple(kinds), **constants)(*arguments)


@functools.lru_cache(maxsize=REMEMBERED)
def _launch_of(kernel, grid: tuple[int, ...], _device, _kinds: tuple, **constants) -> Launch:
    return Launch(kernel, grid, constants)
