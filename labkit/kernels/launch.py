"""Launching a kernel once more without finding out again which one it is.

Triton describes every argument of every call in words and looks the compiled kernel up by them,
which takes the host several times as long as the launch itself.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from triton import JITFunction, knobs
from triton.runtime import driver

REMEMBERED = 1024
"""Shapes and layouts whose launches each kind of call keeps."""


@functools.cache
def num_multiprocessors(device_index: int | None) -> int:
    """Returns how many multiprocessors a CUDA device has; 1 for a CPU, whose index is None."""
    if device_index is None:
        return 1
    return torch.cuda.get_device_properties(device_index).multi_processor_count


class Launch:
    """A Triton or Gluon kernel with its grid, its numbers and its constants: called with the
    arguments before them.

    From the second call on, the kernel that the first one compiled runs at once: whoever makes a
    Launch answers for what that kernel depends on being the same in every call, i.e. the device
    and, of every argument, its dtype, whether it is None, and, unless the kernel takes it without
    specialising, whether it is 1 or a multiple of 16 (of a tensor: its address).
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
        if self.run is not None:
            run = self.compiled[self.grid] if is_hooked() else self.run
            run(*arguments, *self.last)
            return
        compiled = self.kernel[self.grid](*arguments, *self.numbers, **self.constants)
        if isinstance(self.kernel, JITFunction):  # not where kernels are interpreted
            self.compiled = compiled
            self.run = unhooked(compiled, self.grid, compiled.run)


def is_hooked() -> bool:
    """Returns whether someone, a profiler say, wants to be told of launches."""
    on_entry, on_exit = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    # A chain of hooks, which may be empty, or a hook.
    return bool(getattr(on_entry, "calls", on_entry) or getattr(on_exit, "calls", on_exit))


def unhooked(compiled, grid: tuple[int, ...], launch: Callable[..., None]) -> Callable[..., None]:
    """Returns what launches a compiled kernel like `compiled[grid]`, but gathers nothing for hooks
    and calls none.

    `launch` is `compiled.run`, or the same for arguments in another form.
    """
    function, metadata = compiled.function, compiled.packed_metadata
    device, stream = driver.active.get_current_device, driver.active.get_current_stream
    return lambda *arguments: launch(
        *grid, stream(device()), function, metadata, None, None, None, *arguments
    )


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
