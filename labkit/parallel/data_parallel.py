"""Data parallel training: every rank holds the whole module, gradients are averaged over the ranks.

One class an idea, all used alike: `forward`, `backward` of the loss, `finish_gradient_synchronization()`, optimizer.

Sources: Li et al. 2020, PyTorch Distributed (buckets, overlap, no_sync); Stanford CS336 assignment 2 (the interface).
"""

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.parallel.collectives import CopyWork, PeerCopy

MB = 10**6


def weakly(method: Callable) -> Callable:
    """Returns a function that calls `method`, a bound one, as long as its object lives, and does nothing afterwards.

    For hooks of tensors: the garbage collector does not see them, so what they hold would live for ever.
    """
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        if (alive := reference()) is not None:
            alive(*args)

    return call


def check_transport(transport: str) -> None:
    """Raises ValueError unless `transport` is "collective" or, with NCCL, "copy"."""
    accepted = ("collective", "copy") if dist.get_backend() == "nccl" else ("collective",)
    if transport not in accepted:
        raise ValueError(f"transport is {transport!r}; accepted with {dist.get_backend()}: {', '.join(accepted)}")


class _Bucket:
    """Parameters whose gradients travel together: in a flat buffer, or in place where there is only one."""

    def __init__(self, params: list[nn.Parameter], *, copied: bool):
        self.params = params
        self.waiting_for = {id(p) for p in params}
        self.work: dist.Work | None = None
        self.buffer: Tensor | None = None
        self.views: list[Tensor] = []
        self.peers: PeerCopy | None = None
        num_elements, world_size = sum(p.numel() for p in params), dist.get_world_size()
        if copied:
            self.peers = PeerCopy(-(-num_elements // world_size) * world_size, params[0].dtype)
            self.buffer = self.peers.buffer.zero_()
        elif len(params) > 1:
            self.buffer = torch.zeros(num_elements, dtype=params[0].dtype, device=params[0].device)
        if self.buffer is not None:
            pieces = self.buffer[:num_elements].split([p.numel() for p in params])
            self.views = [piece.view(p.shape) for piece, p in zip(pieces, params, strict=True)]

    def tensor(self) -> Tensor:
        """Returns the gradients as one tensor; with a buffer, the gradients become views of it."""
        if self.buffer is None:
            self.params[0].grad = self.params[0].grad.contiguous()
            return self.params[0].grad
        moved = [(p, view) for p, view in zip(self.params, self.views, strict=True) if p.grad is not view]
        if moved:
            torch._foreach_copy_([view for _, view in moved], [p.grad for p, _ in moved])
            for p, view in moved:
                p.grad = view
        return self.buffer


class GradientBuckets:
    """Averages the gradients of `params` over the ranks, bucket by bucket, the last parameter's first.

    Buckets go out in one order on every rank, whatever the order in which gradients arrive: a rank that leaves a
    parameter unused sends zeros for it when it finishes. A parameter that no rank used keeps no gradient.

    Args:
        params: parameters of one device; those without requires_grad are left out.
        bucket_bytes: a bucket is closed before it would grow beyond this; 0 for one parameter each.
        overlap: whether a bucket goes out during backward, as soon as its gradients are there.
        copied: whether gradients are copied between the GPUs' symmetric memories by copy engines, on a stream of
            their own, and added, instead of being all-reduced by NCCL.
    """

    def __init__(self, params: Iterable[nn.Parameter], bucket_bytes: float, *, overlap: bool, copied: bool = False):
        self._params = [p for p in params if p.requires_grad][::-1]
        self.num_params, self.enabled, self._next = len(self._params), True, 0
        self._average = dist.ReduceOp.AVG if dist.get_backend() == "nccl" else dist.ReduceOp.SUM
        self._buckets = [_Bucket(group, copied=copied) for group in _grouped(self._params, bucket_bytes)]
        self._staging: dict[torch.dtype, PeerCopy] = {}
        if copied:
            self._stream = torch.cuda.Stream()
            for dtype in dict.fromkeys(p.dtype for p in self._params):
                largest = max(len(bucket.buffer) for bucket in self._buckets if bucket.buffer.dtype == dtype)
                self._staging[dtype] = PeerCopy(largest, dtype)
        if overlap:
            for number, bucket in enumerate(self._buckets):
                for p in bucket.params:
                    hook = weakly(self._arrived)
                    p.register_post_accumulate_grad_hook(lambda p, hook=hook, number=number: hook(p, number))

    def _arrived(self, p: nn.Parameter, number: int) -> None:
        if not self.enabled:
            return
        bucket = self._buckets[number]
        if id(p) not in bucket.waiting_for:
            how = "to accumulate, run all but the last backward inside no_sync()"
            raise RuntimeError(f"a second backward before finish_gradient_synchronization(); {how}")
        bucket.waiting_for.discard(id(p))
        while self._next < len(self._buckets) and not self._buckets[self._next].waiting_for:
            self._send(self._buckets[self._next])
            self._next += 1

    def _send(self, bucket: _Bucket) -> None:
        if bucket.peers is None:
            bucket.work = dist.all_reduce(bucket.tensor(), self._average, async_op=True)
            return
        gradients = bucket.tensor()
        bucket.work = CopyWork(self._stream, bucket.peers.all_reduce, self._staging[gradients.dtype])

    def finish(self, *, one_by_one: bool = False) -> None:
        """Sends what is left and waits (on CUDA: has the current stream wait) until all gradients are averages.

        Args:
            one_by_one: whether each all-reduce ends before the next one starts.
        """
        if not self.num_params or not self.enabled:
            return
        unused = [position for position, p in enumerate(self._params) if p.grad is None]
        for position in unused:
            self._params[position].grad = torch.zeros_like(self._params[position])
        for bucket in self._buckets[self._next :]:
            self._send(bucket)
            if one_by_one:
                bucket.work.wait()
        # Every rank takes part, but only one that lacks gradients has to wait for what the others used.
        used = torch.ones(self.num_params, dtype=torch.uint8, device=self._params[0].device)
        if unused:
            used[unused] = 0
        work = dist.all_reduce(used, dist.ReduceOp.MAX, async_op=True)
        for bucket in self._buckets:
            bucket.work.wait()
        if self._average == dist.ReduceOp.SUM:
            torch._foreach_div_([bucket.tensor() for bucket in self._buckets], dist.get_world_size())
        work.wait()
        if unused:
            for p, is_used in zip(self._params, used.tolist(), strict=True):
                p.grad = p.grad if is_used else None
        self._next = 0
        for bucket in self._buckets:
            bucket.waiting_for = {id(p) for p in bucket.params}


def _grouped(params: Iterable[nn.Parameter], bucket_bytes: float) -> Iterator[list[nn.Parameter]]:
    """Yields the parameters in order, cut where a bucket would grow beyond `bucket_bytes` or the dtype changes."""
    bucket: list[nn.Parameter] = []
    for p in params:
        num_bytes = sum(q.nbytes for q in bucket) + p.nbytes
        if bucket and (num_bytes > bucket_bytes or p.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(p)
    if bucket:
        yield bucket


def check_and_broadcast(module: nn.Module) -> None:
    """Gives every rank rank 0's parameters and buffers.

    Raises ValueError, on every rank alike, for a module without parameters, tensors on more than one device, and
    parameters or buffers whose names, shapes, dtypes or requires_grad differ from rank 0's.
    """
    tensors = [*module.named_parameters(), *module.named_buffers()]
    devices = sorted({str(tensor.device) for _, tensor in tensors})
    mine = [(name, tuple(t.shape), str(t.dtype), t.requires_grad) for name, t in tensors]
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (mine, devices, sum(1 for _ in module.parameters())))
    for rank, (theirs, their_devices, num_params) in enumerate(everyone):
        if num_params == 0:
            raise ValueError(f"{type(module).__name__} has no parameters on rank {rank}; accepted: 1 and more")
        if len(their_devices) > 1:
            raise ValueError(f"rank {rank} has tensors on {', '.join(their_devices)}; accepted: one device")
        for first, other in itertools.zip_longest(everyone[0][0], theirs):
            if first != other:
                raise ValueError(f"rank {rank} has {other}; accepted: what rank 0 has, {first}")
    for _, tensor in tensors:
        # As bytes: gloo does not know every dtype.
        dense = tensor.detach().contiguous()
        dist.broadcast(dense.reshape(-1).view(torch.uint8), src=0)
        if dense.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(dense)


class _DataParallel(nn.Module):
    """Holds `module`; subclasses say how large the buckets are and when they go out.

    Parameters and buffers are rank 0's from construction on. Tied parameters are averaged once, frozen ones not at
    all; one that no rank used keeps `grad` None, one that some ranks used has their sum over the world size.

    Args:
        module: on this rank's device, the same on every rank but for the values.

    Raises ValueError as `check_and_broadcast`.
    """

    _bucket_bytes: float = 0
    _overlap = False
    _copied = False
    _one_by_one = False

    def __init__(self, module: nn.Module):
        super().__init__()
        check_and_broadcast(module)
        self.module = module
        options = {"overlap": self._overlap, "copied": self._copied}
        self._buckets = GradientBuckets(module.parameters(), self._bucket_bytes, **options)

    def forward(self, *args, **kwargs):
        """Returns what `module` returns."""
        return self.module(*args, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        """To call after backward and before the optimizer: from then on every `grad` is the ranks' average."""
        self._buckets.finish(one_by_one=self._one_by_one)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in this context only add to the local gradients; the next one outside sends the sum."""
        self._buckets.enabled, before = False, self._buckets.enabled
        try:
            yield
        finally:
            self._buckets.enabled = before


class NaiveDataParallel(_DataParallel):
    """One all-reduce a parameter after backward, each waiting for the one before."""

    _one_by_one = True


class FlatDataParallel(_DataParallel):
    """One all-reduce of all gradients in one buffer (one a dtype), after backward."""

    _bucket_bytes = float("inf")


class OverlappedDataParallel(_DataParallel):
    """One all-reduce a parameter, during backward, as soon as its gradient and those due before it are there."""

    _overlap = True


class BucketedDataParallel(_DataParallel):
    """One all-reduce a bucket of about `bucket_size_mb` MB (10⁶ bytes), during backward, from the last parameter on.

    A parameter larger than that has a bucket of its own. With `transport` "copy" no multiprocessor but for the
    additions communicates: copy engines move buckets that lie in symmetric memory (NCCL's GPUs only).

    Raises ValueError for a size of 0 and below, or another transport.
    """

    _overlap = True

    def __init__(self, module: nn.Module, bucket_size_mb: float, transport: str = "collective"):
        if not bucket_size_mb > 0:
            raise ValueError(f"bucket_size_mb is {bucket_size_mb}; accepted: above 0")
        check_transport(transport)
        self._copied = transport == "copy"
        self._bucket_bytes = bucket_size_mb * MB
        super().__init__(module)
