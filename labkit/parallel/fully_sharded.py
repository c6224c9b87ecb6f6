"""Fully sharded data parallel training: every rank holds 1/world size of each matrix, its gradient
and optimizer state.

A layer's full weight exists only from a little before its use until just after it, in forward and
again in backward. The order in which layers were used in one iteration says in the next one which
gather to start ahead: layer i's when layer i−2 has finished and layer i−1 is about to run. Ranks
must run the same layers in the same order.

Layers compute with plain tensors in flat buffers. Outside of them a parameter is a DTensor of its
whole shape, so that optimizers, gradient clipping and scaling, parameter groups and checkpoints are
torch's own.

Sources: Rajbhandari et al. 2020, ZeRO stage 3; Zhao et al. 2023, PyTorch FSDP; Stanford CS336
assignment 2.
"""

import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves, tree_map_only

from labkit.parallel.collectives import (
    PeerMemory,
    all_gather,
    group_of,
    reduce_scatter,
    start,
    start_on,
)
from labkit.parallel.data_parallel import (
    MB,
    SECOND_BACKWARD,
    UNUSED,
    GradientBuckets,
    Wrapper,
    only_dtype,
    weakly,
)

FOREIGN_USE = (
    "a module computes with a parameter of another one, which is sharded there; accepted: units=("
    "the class of the module, or of one around both,)"
)

NUM_REDUCING = 2
"""Layers whose full gradients may be on their way at once. With one more, backward waits for the
oldest.
"""


class _Parameter:
    """A parameter: `full`, with which its layer computes, and `outer`, a DTensor, everywhere
    else.
    """

    def __init__(self, name: str, parameter: nn.Parameter, values: Tensor):
        self.full = parameter
        self.has_gradient = False  # of a weight, in this backward pass
        self.outer = nn.Parameter(values)
        self.outer.register_post_accumulate_grad_hook(functools.partial(_refuse_use_outside, name))
        self.outer.requires_grad_(parameter.requires_grad)

    @property
    def local(self) -> Tensor:
        """What this rank holds."""
        return self.outer._local_tensor

    def add_gradient(self, local: Tensor) -> None:
        # `from_local` takes ten times as long.
        gradient = type(self.outer)(local, self.outer._spec, requires_grad=False)
        self.outer.grad = gradient if self.outer.grad is None else self.outer.grad + gradient


def _refuse_use_outside(name: str, _: nn.Parameter) -> None:
    raise RuntimeError(
        f"{name} has a gradient of this rank alone, from outside of its module; accepted: use in "
        "its module's forward pass"
    )


def _count_write(optimizer: Optimizer, *_: Any) -> None:
    """To call after every optimizer's step: those that are fused, or over lists, do not count as
    writing a DTensor.
    """
    for group in optimizer.param_groups:
        torch.autograd.graph.increment_version(
            p for p in group["params"] if hasattr(p, "_local_tensor")
        )


register_optimizer_step_post_hook(_count_write)


class _Weight(_Parameter):
    """A matrix sharded by rows; `full` is mostly empty. A rank sends `chunk` elements, the last
    one's padded.
    """

    def __init__(
        self, name: str, parameter: nn.Parameter, values: Tensor, compute_dtype: torch.dtype | None
    ):
        super().__init__(name, parameter, values)
        world_size = dist.get_world_size()
        self.chunk = -(-len(parameter) // world_size) * parameter[0].numel()
        self.flat = self.local.new_empty(self.chunk * world_size, dtype=compute_dtype)
        # `.data`: another version counter, so that refilling the memory is no change of what
        # autograd has saved. The parameter stays the object that modules (nn.LSTM) and compiled
        # code may remember.
        parameter.grad = None
        parameter.data = self.flat[: parameter.numel()].view(parameter.shape)
        self.layer: _Layer | None = None
        self.works: list[Any] = []
        self.sources: Sequence[Tensor] = ()  # each rank's chunk, where they are copied
        self.free()

    def unpadded(self, chunk: Tensor) -> Tensor:
        return chunk[: self.local.numel()].view(self.local.shape)

    def take_gradient(self) -> tuple[Tensor, Tensor]:
        """Returns room for this rank's chunk of the gradient, and the whole of it, flat and padded,
        which is forgotten here.
        """
        gradient = self.full.grad.flatten()
        self.full.grad = None
        padding = self.flat.numel() - gradient.numel()
        whole = F.pad(gradient, (0, padding)) if padding else gradient
        return whole.new_empty(self.chunk), whole

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works = []

    def free(self) -> None:
        """Gives the memory back; its next user on the current stream comes after this weight's last
        one.
        """
        self.wait()
        self.flat.untyped_storage().resize_(0)


class _PeerShards(PeerMemory):
    """The shards of all ranks in symmetric memory, from which each copies what it lacks.

    Copy engines move the data while the multiprocessors compute. A barrier before and after
    `refresh` keeps a shard as it is while another rank reads it.
    """

    def __init__(self, weights: Sequence[_Weight]):
        sizes = [weight.chunk for weight in weights]
        super().__init__(sum(sizes), only_dtype(weight.flat for weight in weights))
        self.stream = torch.cuda.Stream()
        self.weights = weights
        chunks = [buffer[: sum(sizes)].split(sizes) for buffer in self.buffers]
        for weight, *sources in zip(weights, *chunks, strict=True):
            weight.sources = sources

    @torch.no_grad()
    def refresh(self) -> None:
        """Publishes this rank's shards as they are now."""
        self.memory.barrier()
        own = [weight.unpadded(weight.sources[self.rank]) for weight in self.weights]
        torch._foreach_copy_(own, [weight.local for weight in self.weights])
        self.memory.barrier()

    def copy(self, weights: Sequence[_Weight]) -> None:
        """Fills the weights from all ranks' shards."""
        for weight in weights:
            for target, source in zip(weight.flat.split(weight.chunk), weight.sources, strict=True):
                target.copy_(source)


class _Layer:
    """What is gathered together: a module's own weights, or all weights inside a compiled module or
    a unit.

    Attributes:
        uses: (module, the name under which it uses a parameter, this).
    """

    def __init__(self, uses: list[tuple], is_lookup: bool = False):
        self.uses = uses
        weights = [parameter for _, _, parameter in uses if isinstance(parameter, _Weight)]
        self.weights = list(dict.fromkeys(weights))
        # The gradient of a lookup does not read the table.
        self.backward_reads = bool(weights) and not is_lookup
        for weight in self.weights:
            weight.layer = self

    def versions(self) -> list[int]:
        """Returns how often each parameter has been written."""
        return [parameter.outer._version for _, _, parameter in self.uses]

    def owned(self, x: Tensor) -> Tensor:
        """Returns a tensor as it is, or a copy where it lies in the memory of a weight."""
        is_lent = any(torch._C._is_alias_of(x, weight.full) for weight in self.weights)
        return x.clone() if is_lent else x

    def show_outer(self) -> None:
        """Puts the DTensors into their places."""
        for owner, key, parameter in self.uses:
            owner._parameters[key] = parameter.outer


class FullyShardedDataParallel(Wrapper):
    """Trains `module` with each floating parameter of two and more dimensions sharded by rows over
    the ranks.

    `parameters()` are DTensors with rank 0's values: sharded, or replicated where they are vectors,
    empty or of fewer rows than there are ranks. Make the optimizer afterwards, but register hooks
    of parameters before, which see this rank's whole gradient: later ones are not called. To
    accumulate, call `finish_gradient_synchronization()` after each backward. Compile blocks before
    wrapping them: the weights inside a compiled module are gathered together, outside of it.

    Args:
        module: on this rank's device, the same on every rank but for the values.
        compute_dtype: a floating dtype that weights are cast to before they are gathered and in
            which gradients are reduced; layers cast their inputs and vectors to it, as under
            torch's fully_shard. None leaves everything as it is.
        units: classes of modules, blocks for example, whose weights are gathered together: fewer
            and larger transfers, more memory. What is inside a unit or a compiled module is
            otherwise a layer by itself. A unit is recomputed (torch.utils.checkpoint) as a whole.
        transport: "collective", or "copy": copy engines gather weights from the peers' symmetric
            memory, which holds every shard once more in the dtype that is gathered, and bring a
            gradient's pieces to the ranks that add them, through memory as large as the largest
            layer; weights of one dtype only. "ctas_N": NCCL with at most N thread blocks. Both on
            NCCL's GPUs only.

    What a layer returns is searched for tensors in tuples, lists, dicts and one dataclass around
    them. Backward from tensors in other objects, classes derived from dict too, and from a gradient
    (`create_graph`) ends in torch's "storage of size 0".

    Attributes:
        symmetric_bytes: of memory that copies are read from; torch's allocator does not count it.

    Raises ValueError for another transport, and complex parameters that are not frozen;
    RuntimeError for a second backward pass before `finish_gradient_synchronization()`, a backward
    pass through parameters written since, a parameter that this rank has not used or that another
    module than its own uses outside of a unit, and as `Wrapper`.
    """

    # Layers without a matrix compute in `compute_dtype` too.
    _casts_vectors = True

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        *,
        units: tuple[type[nn.Module], ...] = (),
        transport: str = "collective",
    ):
        super().__init__(module)
        self._group = group_of(transport, "collective", "copy")
        self.compute_dtype = compute_dtype
        self._units = units
        # Layers in the order of the iteration before, and of this one; the place in the former.
        self._plan: list[_Layer] = []
        self._uses: list[_Layer] = []
        self._position = 0
        self._running: _Layer | None = None  # whose backward pass has begun last
        # Of layers whose gradients are on their way: weights, (shard, what is sent) of each, what
        # to wait for.
        self._reducing = deque()
        self._weights: list[_Weight] = []
        self._vectors: list[_Parameter] = []
        parameters = self._sharded(module)
        self._peers = _PeerShards(self._weights) if transport == "copy" and self._weights else None
        self._hook(module, parameters)
        self.symmetric_bytes = 0
        if self._peers:
            most = max(
                sum(weight.flat.numel() for weight in layer.weights)
                for layer in {weight.layer for weight in self._weights}
            )
            self._staging = PeerMemory(most, self._peers.buffer.dtype)
            self._reducing_stream = torch.cuda.Stream()
            self.symmetric_bytes = self._peers.buffer.nbytes + self._staging.buffer.nbytes
        self._buckets = GradientBuckets(
            [vector.full for vector in self._vectors],
            25 * MB,
            overlap=True,
            transport="collective" if transport == "copy" else transport,
        )
        self._wrapped = self._parameters_now()

    def _sharded(self, module: nn.Module) -> dict[nn.Parameter, _Parameter]:
        """Returns the module's floating parameters, to be put into their places, and sorts them by
        kind.
        """
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor  # takes seconds

        mesh = DeviceMesh.from_group(
            dist.group.WORLD, next(module.parameters(), torch.empty(0)).device.type
        )
        made: dict[nn.Parameter, _Parameter] = {}
        for name, p in module.named_parameters():
            if not p.is_floating_point():
                if p.requires_grad:
                    raise ValueError(f"{name} is {p.dtype}; accepted: real, or frozen")
                continue
            is_sharded = p.ndim > 1 and len(p) >= dist.get_world_size() and p.numel() > 0
            values = distribute_tensor(
                p.detach(),
                mesh,
                [Shard(0) if is_sharded else Replicate()],
                src_data_rank=None,
            )
            if is_sharded:
                made[p] = _Weight(name, p, values, self.compute_dtype)
                if p.requires_grad:
                    p.register_post_accumulate_grad_hook(weakly(self._arrived, len(self._weights)))
                self._weights.append(made[p])
            else:
                made[p] = _Parameter(name, p, values)
                self._vectors.append(made[p])
        return made

    def _hook(self, module: nn.Module, parameters: dict[nn.Parameter, _Parameter]) -> None:
        """Puts DTensors in the places of the module's parameters, and wraps calls of what computes
        with these: the outermost module that has one, or what is compiled or a unit.
        """
        for inside in module.modules():
            call = inside._compiled_call_impl or inside._call_impl
            is_compiled = inside._compiled_call_impl or hasattr(inside, "_orig_mod")
            own = set(inside.parameters(recurse=is_compiled or isinstance(inside, self._units)))
            uses = [
                (owner, key, parameters[p])
                for owner in inside.modules()
                for key, p in owner._parameters.items()
                if p in own and p in parameters
            ]
            if uses:
                # A unit, or a class of its own, may compute with the table too.
                layer = _Layer(uses, type(inside) is nn.Embedding)
                layer.show_outer()
                # Around what is compiled, where hooks of the module would be inside.
                inside._compiled_call_impl = functools.partial(self._run, layer, call)

    def forward(self, *args, **kwargs):
        """Returns what `module` returns."""
        self._begin()
        # A forward pass alone, for validation, follows the same plan and leaves it as it is.
        if self._uses != self._plan[: len(self._uses)]:
            self._plan = self._uses
        self._uses = []
        self._position = 0
        # What a forward pass has left that failed, or had no backward pass, may be old by now.
        self._free_all()
        if self._peers:
            self._peers.refresh()
        try:
            output = self.module(*args, **kwargs)
        except RuntimeError as error:
            if "DTensor" in str(error) or "sharding" in str(error):
                error.add_note(FOREIGN_USE)
            raise
        if not torch.is_grad_enabled():
            self._free_all()
        return output

    def finish_gradient_synchronization(self) -> None:
        """To call after backward and before the optimizer: from then on every `grad` is the ranks'
        average.
        """
        try:
            # Another rank's gradients would be added to those of another weight.
            if any(w.full.requires_grad and not w.has_gradient for w in self._weights):
                raise RuntimeError(UNUSED)
            for weight in self._weights:
                self._reduce(weight.layer)
            self._buckets.finish()
            for vector in self._vectors:
                if vector.full.grad is not None:
                    vector.add_gradient(vector.full.grad)
        finally:
            while self._reducing:
                self._finish_oldest()
            self._buckets.reset()
            for parameter in (*self._weights, *self._vectors):
                parameter.has_gradient = False
                parameter.full.grad = None
            self._free_all()

    @torch.no_grad()
    def _gather(self, layer: _Layer) -> None:
        """Sends for all of the layer's weights that are not here in one operation; `_Weight.wait`
        waits for it.
        """
        missing = [weight for weight in layer.weights if not weight.flat.untyped_storage().size()]
        if not missing:
            return
        for weight in missing:
            weight.flat.untyped_storage().resize_(weight.flat.nbytes)
        if self._peers:
            works = [start_on(self._peers.stream, self._peers.copy, missing)]
        else:
            pairs = []
            for weight in missing:
                own = weight.flat.split(weight.chunk)[dist.get_rank()]
                weight.unpadded(own).copy_(weight.local)
                pairs.append((weight.flat, own))
            works = start(all_gather, pairs, group=self._group)
        for weight in missing:
            weight.works = works

    def _expected(self) -> list[_Layer]:
        """Returns the layer that came next in the iteration before, or none."""
        return self._plan[self._position : self._position + 1]

    def _use(self, layer: _Layer) -> None:
        """Makes the layer's weights whole, and starts to gather those that came next in the
        iteration before.
        """
        self._gather(layer)
        self._uses.append(layer)
        if self._expected() == [layer]:
            self._position += 1
        else:
            self._position = len(self._plan)
        for following in self._expected():
            self._gather(following)
        for weight in layer.weights:
            weight.wait()

    def _run(self, layer: _Layer, call: Callable, /, *args, **kwargs):
        """Returns what a module's call returns, which computes with full parameters."""
        if layer.weights:
            self._use(layer)
        is_cast = layer.weights or self._casts_vectors
        dtype = self.compute_dtype if is_cast else None
        for owner, key, parameter in layer.uses:
            # A gathered weight has the dtype already, and stays itself.
            owner._parameters[key] = parameter.full.to(dtype=dtype)
        if dtype:
            args, kwargs = tree_map_only(
                Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, (args, kwargs)
            )
        try:
            output = call(*args, **kwargs)
            # What lies in a weight's memory would be freed with it.
            output = tree_map_only(Tensor, layer.owned, output)
        finally:
            layer.show_outer()
            # Recomputed in backward: its own backward comes next. Used again at once: it stays.
            if self._running is None and self._expected() != [layer]:
                for weight in layer.weights:
                    weight.free()
        if layer.backward_reads:
            # To PyTorch a dataclass is a leaf.
            values = tree_leaves([output, vars(output) if is_dataclass(output) else None])
            leaves = [x for x in values if isinstance(x, Tensor) and x.requires_grad]
            versions = layer.versions()
            is_outer = self._uses[-1:] != [layer]
            torch.autograd.graph.register_multi_grad_hook(
                leaves, lambda _: self._before_backward(layer, versions, is_outer), mode="any"
            )
        return output

    def _before_backward(self, layer: _Layer, versions: list[int], is_outer: bool) -> None:
        """Gathers a layer; sends the gradients of the one whose turn is then over, and frees it.

        A call that ran other layers inside is outer: backward reads its weights before and after
        theirs. Where its turn begins, none is over; its own is when all gradients are finished.
        """
        if versions != layer.versions():
            raise RuntimeError("parameters written after forward; accepted: after backward")
        before = self._running or _Layer([])
        self._running = before if is_outer else layer
        if not is_outer:
            self._reduce(before)
            for weight in before.weights:
                if weight not in layer.weights:
                    weight.free()
        self._use(layer)

    def _arrived(self, number: int, _: nn.Parameter) -> None:
        weight = self._weights[number]
        if weight.has_gradient:
            raise RuntimeError(SECOND_BACKWARD)
        weight.has_gradient = True

    def _reduce(self, layer: _Layer) -> None:
        weights = [weight for weight in layer.weights if weight.full.grad is not None]
        if not weights:
            return
        pairs = [weight.take_gradient() for weight in weights]
        if self._peers:
            tensors = zip(*pairs, strict=True)
            works = [start_on(self._reducing_stream, self._staging.average_scatter, *tensors)]
        else:
            works = start(reduce_scatter, pairs, dist.ReduceOp.AVG, group=self._group)
        self._reducing.append((weights, pairs, works))
        if len(self._reducing) > NUM_REDUCING:
            self._finish_oldest()

    @torch.no_grad()
    def _finish_oldest(self) -> None:
        weights, pairs, works = self._reducing.popleft()
        for work in works:
            work.wait()
        for weight, (shard, _) in zip(weights, pairs, strict=True):
            weight.add_gradient(weight.unpadded(shard).to(weight.local.dtype))

    def _free_all(self) -> None:
        self._running = None
        for weight in self._weights:
            weight.free()
