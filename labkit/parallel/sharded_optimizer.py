"""An optimizer whose state is spread over the ranks: each keeps and applies the state of its share of the parameters.

Source: Rajbhandari et al. 2020, ZeRO (stage 1, but whole parameters are dealt out and gradients stay all-reduced).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class ShardedOptimizer(torch.optim.Optimizer):
    """Steps like `optimizer_cls(params, **kwargs)`; a rank holds the state of about 1/world size of the bytes.

    Every parameter has an owner, the rank with the fewest bytes when the larger parameters are dealt out first. A step
    updates the owned parameters and broadcasts them. Gradients must be averaged before. Learning-rate schedulers act
    on `param_groups` as ever. `param_groups` holds all parameters, `state` only those of this rank.

    Args:
        params: parameters or groups of them, the same on every rank; one given twice in a group counts once.
        optimizer_cls: class of a torch optimizer that treats each parameter by itself.
        kwargs: passed to it.

    Raises ValueError for an empty parameter list (as every torch optimizer).
    """

    def __init__(self, params, optimizer_cls: type[torch.optim.Optimizer], **kwargs: Any):
        # One empty group instead of the parameters, for the class's own defaults.
        self._local = optimizer_cls([{"params": []}], **kwargs)
        self._local.param_groups.clear()
        self._owners: dict[Tensor, int] = {}
        self._bytes = [0] * dist.get_world_size()
        super().__init__(params, self._local.defaults)
        self.state = self._local.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as torch's; its parameters are dealt out on top of what the ranks hold already."""
        params = param_group["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        # Tied parameters may be listed once for each module that uses them.
        super().add_param_group({**param_group, "params": list(dict.fromkeys(params))})
        group = self.param_groups[-1]
        for p in sorted(group["params"], key=lambda p: p.nbytes, reverse=True):
            owner = self._bytes.index(min(self._bytes))
            self._owners[p] = owner
            self._bytes[owner] += p.nbytes
        self._local.add_param_group({**group, "params": self._owned(group)})

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Updates the owned parameters, then broadcasts each from its owner; returns the closure's value."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._copy_settings(self.param_groups, self._local.param_groups)
        self._local.step(**kwargs)
        works = []
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    works.append(dist.broadcast(p.detach(), src=self._owners[p], async_op=True))
        for work in works:
            work.wait()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of all ranks on each of them, on the CPU and as the unsharded optimizer names it.

        Collective: every rank calls it. It loads into `optimizer_cls` and into any number of ranks.
        """
        positions = {p: i for i, p in enumerate(p for group in self.param_groups for p in group["params"])}
        state = {}
        for p, position in positions.items():
            own = self._local.state.get(p, {})
            shared = [{name: x.to("cpu", copy=True) if isinstance(x, Tensor) else x for name, x in own.items()}]
            dist.broadcast_object_list(shared, src=self._owners[p])
            if shared[0]:
                state[position] = shared[0]
        groups = []
        for group in self.param_groups:
            groups.append({**group, "params": [positions[p] for p in group["params"]]})
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes this rank's share out of a full state dict; the world size it was made with does not matter.

        Raises ValueError where the groups have other numbers of parameters.
        """
        given = state_dict["param_groups"]
        sizes, accepted = ([len(group["params"]) for group in groups] for groups in (given, self.param_groups))
        if sizes != accepted:
            raise ValueError(f"a state dict with groups of {sizes} parameters; accepted: {accepted}")
        state, groups, position = {}, [], 0
        for theirs, group in zip(given, self.param_groups, strict=True):
            local = {**theirs, "params": []}
            for number, p in zip(theirs["params"], group["params"], strict=True):
                if self._owners[p] == dist.get_rank():
                    local["params"].append(position)
                    if number in state_dict["state"]:
                        state[position] = state_dict["state"][number]
                    position += 1
            groups.append(local)
        # The local groups list their parameters in the outer groups' order, so the positions fit.
        self._local.load_state_dict({"state": state, "param_groups": groups})
        self._copy_settings(self._local.param_groups, self.param_groups)
        self.state = self._local.state

    def _owned(self, group: dict[str, Any]) -> list[Tensor]:
        return [p for p in group["params"] if self._owners[p] == dist.get_rank()]

    @staticmethod
    def _copy_settings(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
        for given, taken in zip(source, target, strict=True):
            taken.update({name: value for name, value in given.items() if name != "params"})
