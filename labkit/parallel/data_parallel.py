"""Data parallel training: every rank holds the whole module, gradients are averaged over the ranks.

One class an idea, all used alike: `forward`, `backward` of the loss,
`finish_gradient_synchronization()`, optimizer.

Sources: Li et al. 2020, PyTorch Distributed (buckets, overlap); Stanford CS336 assignment
2 (the interface).
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from labkit.parallel.collectives import (
    PeerMemory,
    average_in,
    check_ranks_agree,
    group_of,
    start,
    start_on,
)

MB = 10**6

UNUSED = "a parameter has no gradient on this rank; accepted: all used, or frozen before wrapping"

SECOND_BACKWARD = "a second backward before finish_gradient_synchronization(); accepted: one"


def weakly(method: Callable, number: int) -> Callable:
    """Returns a function of a parameter that calls `method`, a bound one, with `number` and it
    while its object lives.

    For hooks of tensors: the garbage collector does not see them, so what they hold would live for
    ever.
    """
    reference = weakref.WeakMethod(method)

    def call(p: nn.Parameter) -> None:
        alive = reference()
        if alive:
            alive(number, p)

    return call


def only_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """Returns the dtype of what is copied through symmetric memory; ValueError for several."""
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        names = ", ".join(sorted(map(str, dtypes)))
        raise ValueError(f"transport 'copy' of tensors of {names}; accepted: one dtype")
    return dtypes.pop()


@dataclass
class _Bucket:
    """Parameters whose gradients travel together, and those that have none yet."""

    params: list[nn.Parameter]
    waiting_for: set[nn.Parameter]
    work: Any = None


class GradientBuckets:
    """Averages the gradients of parameters over the ranks, bucket by bucket, the last parameter's
    first.

    Buckets go out in one order on every rank, whatever the order in which gradients arrive.
    Parameters that are frozen at first stay out.

    Args:
        params: parameters of one device.
        bucket_bytes: a bucket is closed before it would grow beyond this; 0 for one parameter each.
        overlap: whether a bucket goes out during backward, as soon as its gradients are there.
        transport: "collective", or see `BucketedDataParallel`; symmetric memory is as large as the
            largest bucket.
        sent_as: a dtype in which gradients travel, see `average_in`; None for their own.

    Raises ValueError for another transport, and a dtype to send where it, or that of a parameter,
    is not a floating one.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        bucket_bytes: float,
        *,
        overlap: bool,
        transport: str = "collective",
        sent_as: torch.dtype | None = None,
    ):
        self._overlap = overlap
        # The gradients to come are of a forward pass of this wrapper, and of no other that has the
        # same parameters.
        self.is_due = False
        self._next = 0
        self._sent_as = sent_as
        self._group = group_of(transport, "collective", "copy")
        # Of copies, and of sums in another dtype.
        self._stream = torch.cuda.Stream() if dist.get_backend() == "nccl" else None
        self._peers: PeerMemory | None = None
        params = [p for p in params if p.requires_grad][::-1]
        is_complex = any(p.is_complex() for p in params)
        if sent_as and (is_complex or not sent_as.is_floating_point):
            raise ValueError(
                f"sent_as is {sent_as}; accepted: a floating dtype, where no parameter is complex"
            )
        groups = list(_grouped(params, bucket_bytes))
        self._buckets = [_Bucket(group, set(group)) for group in groups]
        for number, group in enumerate(groups):
            for p in group:
                p.register_post_accumulate_grad_hook(weakly(self._arrived, number))
        if transport == "copy" and params:
            sizes = [sum(p.numel() for p in group) for group in groups]
            self._peers = PeerMemory(max(sizes), only_dtype(params))

    def _arrived(self, number: int, p: nn.Parameter) -> None:
        if not self.is_due:
            return
        bucket = self._buckets[number]
        if p not in bucket.waiting_for:
            raise RuntimeError(SECOND_BACKWARD)
        bucket.waiting_for.remove(p)
        for ready in self._buckets[self._next :]:
            if ready.waiting_for or not self._overlap:
                break
            self._send(ready)
            self._next += 1

    def _send(self, bucket: _Bucket) -> None:
        gradients = [p.grad.contiguous() for p in bucket.params]
        average = dist.ReduceOp.AVG
        if self._sent_as:
            bucket.work = start_on(self._stream, average_in, self._sent_as, gradients)
        elif dist.get_backend() == "nccl" and not self._peers:
            # NCCL reduces several tensors in one launch. In one buffer they would first be copied:
            # on an H100 5.6 ms a step of xl-2025, and 8 GB.
            each = [(gradient,) for gradient in gradients]
            [bucket.work] = start(dist.all_reduce, each, average, group=self._group)
        else:
            # A single gradient is not copied.
            flat = _flatten_dense_tensors(gradients)
            gradients = _unflatten_dense_tensors(flat, gradients)
            if self._peers:
                bucket.work = start_on(self._stream, self._peers.all_reduce, flat)
            else:
                bucket.work = dist.all_reduce(flat, average, group=self._group, async_op=True)
        for p, gradient in zip(bucket.params, gradients, strict=True):
            p.grad = gradient

    def finish(self) -> None:
        """Sends what is left, without overlap each after the one before, and waits (on CUDA: has
        the current stream wait) until all gradients are averages.

        Raises RuntimeError where this rank has not used a parameter.
        """
        left = self._buckets[self._next :]
        try:
            if any(p.grad is None for bucket in left for p in bucket.params):
                raise RuntimeError(UNUSED)
            for bucket in left:
                self._send(bucket)
                if not self._overlap:
                    bucket.work.wait()
        finally:
            self.reset()

    def reset(self) -> None:
        """Waits for what is on its way; the next gradients are those of another backward pass."""
        for bucket in self._buckets:
            if bucket.work:
                bucket.work.wait()
            bucket.work = None
            bucket.waiting_for = set(bucket.params)
        self.is_due = False
        self._next = 0


def _grouped(params: Iterable[nn.Parameter], bucket_bytes: float) -> Iterator[list[nn.Parameter]]:
    """Yields the parameters in order, cut where a bucket would grow beyond `bucket_bytes` or the
    dtype changes.
    """
    bucket: list[nn.Parameter] = []
    for p in params:
        num_bytes = sum(q.nbytes for q in bucket) + p.nbytes
        if bucket and (num_bytes > bucket_bytes or p.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(p)
    if bucket:
        yield bucket


class Wrapper(nn.Module):
    """Holds `module` with rank 0's parameters and buffers, made contiguous, and refuses what would
    make it another one.

    Every rank runs each forward pass. Buffers that it changes are from then on the rank's own. To
    accumulate gradients, call `finish_gradient_synchronization()` after each backward.

    After a backward pass that failed, `finish_gradient_synchronization()` raises, and the next
    backward pass is as after any other.

    Raises ValueError for a module that makes sparse gradients, has a norm with running statistics
    or an embedding with max_norm, is or holds a wrapper, or has two parameters in one memory and,
    on every rank alike, parameters or buffers whose names, shapes, dtypes or requires_grad differ
    from rank 0's; RuntimeError where a parameter is added, replaced, moved, removed, frozen or
    unfrozen after wrapping; TypeError for a copy.
    """

    def __init__(self, module: nn.Module):
        super().__init__()
        for name, inside in module.named_modules():
            refusal = ""
            is_table = isinstance(inside, nn.Embedding | nn.EmbeddingBag)
            if is_table and inside.sparse:
                refusal = "makes sparse gradients; accepted: sparse=False"
            if is_table and inside.max_norm:
                refusal = "would scale the rows that this rank looks up; accepted: max_norm=None"
            has_statistics = getattr(inside, "running_mean", None) is not None
            if has_statistics and not isinstance(inside, nn.SyncBatchNorm):
                refusal = (
                    "would keep statistics of this rank's batches alone; "
                    "accepted: SyncBatchNorm, or a norm without running statistics"
                )
            if isinstance(inside, Wrapper):
                refusal = "is a wrapper; accepted: its module"
            if refusal:
                raise ValueError(f"{name or 'the module'} {refusal}")
        names: dict[int, str] = {}
        for name, p in module.named_parameters():
            first = names.setdefault(p.data_ptr(), name)
            if p.numel() and first != name:
                raise ValueError(
                    f"{name} has the memory of {first}; accepted: one parameter under both names"
                )
        tensors = dict([*module.named_parameters(), *module.named_buffers()])
        check_ranks_agree(
            [(name, tuple(t.shape), str(t.dtype), t.requires_grad) for name, t in tensors.items()]
        )
        for tensor in tensors.values():
            # Buckets make gradients contiguous, and fused optimizers read both in one order.
            tensor.data = tensor.detach().contiguous()
            # As bytes: gloo does not know every dtype.
            dist.broadcast(tensor.detach().reshape(-1).view(torch.uint8), src=0)
        self.module = module

    def _parameters_now(self) -> dict[str, tuple]:
        """Returns what a parameter must stay; subclasses keep it as `_wrapped`."""
        return {
            name: (id(p), p.dtype, p.device, p.stride(), p.requires_grad)
            for name, p in self.module.named_parameters()
        }

    def _begin(self) -> None:
        """To call before each forward pass; subclasses average gradients by `_buckets`."""
        self._buckets.is_due |= torch.is_grad_enabled()
        # What only one of the two has: names that are new or gone, and those of another value.
        changed = dict(self._parameters_now().items() ^ self._wrapped.items())
        if changed:
            names = ", ".join(sorted(changed))
            raise RuntimeError(
                f"after wrapping, {names} was added, replaced, moved, removed, frozen or unfrozen; "
                "accepted: before it"
            )

    def __getstate__(self) -> None:
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled; accepted: its module before "
            "wrapping"
        )


class _DataParallel(Wrapper):
    """Subclasses say how large the buckets are and when they go out.

    Parameters are rank 0's from construction on. Tied parameters are averaged once, frozen ones not
    at all; every rank uses all others.

    Args:
        module: on this rank's device, the same on every rank but for the values.
        sending: how gradients travel, as GradientBuckets takes it.

    Raises RuntimeError for a second backward pass before `finish_gradient_synchronization()`, a
    parameter that this rank has not used, and as `Wrapper`.
    """

    _bucket_bytes: float = 0
    _overlap = False

    def __init__(self, module: nn.Module, **sending: Any):
        super().__init__(module)
        self._buckets = GradientBuckets(
            module.parameters(), self._bucket_bytes, overlap=self._overlap, **sending
        )
        self._wrapped = self._parameters_now()

    def forward(self, *args, **kwargs):
        """Returns what `module` returns."""
        self._begin()
        return self.module(*args, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        """To call after backward and before the optimizer: from then on every `grad` is the ranks'
        average.
        """
        self._buckets.finish()


class NaiveDataParallel(_DataParallel):
    """One all-reduce a parameter after backward, each waiting for the one before."""


class FlatDataParallel(_DataParallel):
    """One all-reduce of all gradients together (one a dtype), after backward."""

    _bucket_bytes = float("inf")


class OverlappedDataParallel(_DataParallel):
    """One all-reduce a parameter, during backward, as soon as its gradient and those due before it
    are there.
    """

    _overlap = True


class BucketedDataParallel(_DataParallel):
    """One all-reduce a bucket of about `bucket_size_mb` MB (10⁶ bytes), during backward, from the
    last parameter on.

    A parameter larger than that has a bucket of its own. With `transport` "copy" no multiprocessor
    but for the additions communicates: copy engines move buckets that lie in symmetric memory; with
    "ctas_N" NCCL takes at most N thread blocks (both on NCCL's GPUs only). With `sent_as`
    torch.bfloat16 half the bytes travel and sums stay in fp32: a gradient is off by at most 2⁻⁷ of
    the ranks' largest.

    Raises ValueError for a size of 0 and below, another transport, a copy in another dtype, or one
    that is not a floating one, or for complex parameters.
    """

    _overlap = True

    def __init__(
        self,
        module: nn.Module,
        bucket_size_mb: float,
        transport: str = "collective",
        *,
        sent_as: torch.dtype | None = None,
    ):
        if not bucket_size_mb > 0:
            raise ValueError(f"bucket_size_mb is {bucket_size_mb}; accepted: above 0")
        if sent_as and transport != "collective":
            raise ValueError(f"transport {transport!r} with sent_as; accepted: 'collective'")
        self._bucket_bytes = bucket_size_mb * MB
        super().__init__(module, transport=transport, sent_as=sent_as)


def finish_gradients(model: nn.Module) -> None:
    """Waits for the gradients after a backward pass, where the model's wrapper has them on their
    way.
    """
    finish = getattr(model, "finish_gradient_synchronization", None)
    if finish:
        finish()
