"""SigLIP 2's vision encoder on packed images: pre-norm transformer blocks, attention within an
image, tanh-GELU.

The patches of all images are one sequence. `Siglip2Encoder(impl=...)` runs it as first written or
as fast as it can be, with the same parameters; the implementations between are the steps from one
to the other, each adding to the last:

| impl | adds |
|---|---|
| eager | nothing: every layer masks other images anew, positions are interpolated image by image |
| cu_seqlens | packed sequences by `flash_attention`, from cumulative lengths made once |
| positions | the positions of all images by one matmul with their interpolation weights |
| attention | one projection for q, k, v, read in place; dropout drawn again in backward |
| norm | residual addition and LayerNorm in one kernel, whose output is not kept for backward |
| fused | the MLP by `gelu_mlp` |

Shape suffixes: I images, M patches of all images, C d_model, H heads, D head dimension, P positions
of the table.

Sources: Tschannen et al. 2025, "SigLIP 2" (NaFlex: native aspect ratios); Dehghani et al. 2023,
"Patch n' Pack".
"""

import functools
import re
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.configs import LAYER_NORM_EPS, Siglip2Config
from labkit.kernels.flash_attention import flash_attention
from labkit.kernels.flash_attention.qkv import flash_attention_qkv
from labkit.kernels.gelu_mlp import gelu_mlp
from labkit.kernels.layer_norm import layer_norm
from labkit.kernels.linear import dropout_linear, norm_linear

IMPLS = ("eager", "cu_seqlens", "positions", "attention", "norm", "fused")
EAGER, CU_SEQLENS, POSITIONS, ATTENTION, NORM, FUSED = range(len(IMPLS))
MASK_BLOCK = 128  # FlexAttention's: the packed sequence is padded to a multiple of it
# torch.compile's options for what makes a mask: the sort of its blocks as a kernel of its own
# compiles for minutes.
MASK_OPTIONS = {"triton.persistent_reductions": False}


class Packing(NamedTuple):
    """What the steps past "eager" know of a batch's grids; made by `Siglip2Encoder.pack`.

    cu_seqlens: (I + 1,) int32, each image's first patch. positions: (M, P), the share that each
    position of the table has in a patch's, P 0 before "positions". longest: at least the patches of
    the largest image, None if unknown.
    """

    cu_seqlens: Tensor
    positions: Tensor
    longest: int | None


# ---- positions -----------------------------------------------------------------------------------


def interpolation_weights(sizes_M: Tensor, places_M: Tensor, side: int) -> Tensor:
    """Returns (M, side) fp64: the share of each of `side` values in each place of a line of so
    many.

    A triangle around the place, as wide as the stretch where the line is shorter: bilinear
    interpolation with antialias and without aligned corners.
    """
    scale_M1 = (side / sizes_M.double())[:, None]
    centre_M1 = (places_M[:, None] + 0.5) * scale_M1
    distance = torch.arange(side, device=sizes_M.device) + 0.5 - centre_M1
    weights = (1 - distance.abs() / scale_M1.clamp(min=1)).clamp(min=0)
    return weights / weights.sum(-1, keepdim=True)


def pack_images(
    grids_I2: Tensor, num_patches: int, side: int, dtype: torch.dtype, longest: int | None
) -> Packing:
    """Returns the packing of images by their grids, computed on their device without reading from
    it.
    """
    cu_seqlens = F.pad(grids_I2.prod(1).cumsum(0), (1, 0))
    patches_M = torch.arange(num_patches, device=grids_I2.device)
    images_M = torch.searchsorted(cu_seqlens[1:], patches_M, right=True).clamp(
        max=grids_I2.shape[0] - 1
    )
    heights_M, widths_M = grids_I2[images_M].unbind(1)
    places_M = patches_M - cu_seqlens[images_M]
    rows_MS = interpolation_weights(heights_M, places_M // widths_M, side)
    cols_MS = interpolation_weights(widths_M, places_M % widths_M, side)
    positions_MP = (rows_MS[:, :, None] * cols_MS[:, None, :]).flatten(1).to(dtype)
    return Packing(cu_seqlens.int(), positions_MP, longest)


def interpolated_positions(table_PC: Tensor, grids_I2: Tensor, side: int) -> Tensor:
    """Returns the positions (M, C) of all patches, image by image."""
    table_1CSS = table_PC.view(1, side, side, -1).permute(0, 3, 1, 2)
    if (
        table_PC.device.type == "cpu" and table_PC.element_size() == 2
    ):  # which antialiasing does not take there
        table_1CSS = table_1CSS.float()
    options = {"mode": "bilinear", "align_corners": False, "antialias": True}
    images = [
        F.interpolate(table_1CSS, size=grid, **options).flatten(2)[0].T
        for grid in grids_I2.tolist()
    ]
    return torch.cat(images).to(table_PC.dtype)


# ---- layers --------------------------------------------------------------------------------------


@functools.cache
def _flex():
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    return torch.compile(create_block_mask, options=MASK_OPTIONS), torch.compile(flex_attention)


def masked_attention(q_MHD: Tensor, k_MHD: Tensor, v_MHD: Tensor, grids_I2: Tensor) -> Tensor:
    """Returns attention within each image (M, H, D), by a mask of which patches are of one image,
    made here.
    """
    num_patches, device = q_MHD.shape[0], q_MHD.device
    images_I = torch.arange(grids_I2.shape[0], device=device)
    images_M = images_I.repeat_interleave(grids_I2.to(device).prod(1), output_size=num_patches)
    if device.type != "cuda":
        heads = (x_MHD.transpose(0, 1) for x_MHD in (q_MHD, k_MHD, v_MHD))
        return F.scaled_dot_product_attention(
            *heads, attn_mask=images_M[:, None] == images_M
        ).transpose(0, 1)
    create_block_mask, flex_attention = _flex()
    padding = -num_patches % MASK_BLOCK
    images_M = F.pad(images_M, (0, padding), value=-1)

    def of_one_image(_batch, _head, query, key):
        return images_M[query] == images_M[key]

    mask = create_block_mask(of_one_image, None, None, *2 * [num_patches + padding], device=device)
    heads = (
        F.pad(x, (0, 0, 0, 0, 0, padding)).transpose(0, 1).unsqueeze(0)
        for x in (q_MHD, k_MHD, v_MHD)
    )
    return flex_attention(*heads, block_mask=mask)[0].transpose(0, 1)[:num_patches]


class Attention(nn.Module):
    """Attention within each image; from "attention" on q, k and v are one projection, in state
    dicts still three.

    `attend` then gets that, cumulative lengths and the longest, like `flash_attention_qkv`; others
    may be set.
    """

    attend = staticmethod(flash_attention_qkv)

    def __init__(self, config: Siglip2Config, step: int, **factory):
        super().__init__()
        width = config.d_model
        self.num_heads, self.dropout, self.step = config.num_heads, config.dropout, step
        if step >= ATTENTION:
            self.qkv_proj = nn.Linear(width, 3 * width, **factory)
            self.register_state_dict_post_hook(_split_projections)
            self.register_load_state_dict_pre_hook(_join_projections)
        else:
            self.q_proj, self.k_proj, self.v_proj = (
                nn.Linear(width, width, **factory) for _ in range(3)
            )
        self.out_proj = nn.Linear(width, width, **factory)

    def forward(
        self, x_MC: Tensor, norm: tuple | None, grids_I2, cu_seqlens, longest, seed
    ) -> Tensor:
        if self.step >= ATTENTION:
            qkv = self.qkv_proj
            qkv_MF = norm_linear(x_MC, qkv.weight, qkv.bias, norm) if norm else qkv(x_MC)
            out_MHD = self.attend(qkv_MF.unflatten(1, (3, self.num_heads, -1)), cu_seqlens, longest)
        else:
            projections = (self.q_proj, self.k_proj, self.v_proj)
            qkv_MHD = [project(x_MC).unflatten(1, (self.num_heads, -1)) for project in projections]
            if self.step >= CU_SEQLENS:
                packing = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
                out_MHD = flash_attention(
                    *qkv_MHD, **packing, max_seqlen_q=longest, max_seqlen_k=longest
                )
            else:
                out_MHD = masked_attention(*qkv_MHD, grids_I2)
        out_MC = out_MHD.flatten(1)
        if seed is not None:
            return dropout_linear(
                out_MC, self.out_proj.weight, self.out_proj.bias, self.dropout, seed
            )
        return self.out_proj(F.dropout(out_MC, self.dropout, self.training))


def _split_projections(_module, state_dict, prefix, _metadata) -> None:
    for kind in ("weight", "bias"):
        joined = state_dict.pop(f"{prefix}qkv_proj.{kind}")
        for name, part in zip("qkv", joined.chunk(3), strict=True):
            state_dict[f"{prefix}{name}_proj.{kind}"] = part


def _join_projections(_module, state_dict, prefix, *_) -> None:
    for kind in ("weight", "bias"):
        names = [f"{prefix}{name}_proj.{kind}" for name in "qkv"]
        if all(name in state_dict for name in names):
            state_dict[f"{prefix}qkv_proj.{kind}"] = torch.cat(
                [state_dict.pop(name) for name in names]
            )


class MLP(nn.Module):
    """fc2(gelu(fc1(x))) with tanh-GELU; `options` are `gelu_mlp`'s."""

    def __init__(self, config: Siglip2Config, step: int, options: dict, **factory):
        super().__init__()
        self.fc1 = nn.Linear(config.d_model, config.d_ff, **factory)
        self.fc2 = nn.Linear(config.d_ff, config.d_model, **factory)
        self.step, self.options = step, options

    def forward(self, x_MC: Tensor, norm: tuple | None) -> Tensor:
        if self.step < FUSED:
            return self.fc2(F.gelu(self.fc1(x_MC), approximate="tanh"))
        parameters = (self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias)
        return gelu_mlp(x_MC, *parameters, norm=norm, **self.options)


def add_and_norm(norm: nn.LayerNorm, x_MC: Tensor, residual_MC: Tensor | None, step: int):
    """Returns (the norm of x + residual, x + residual, what gives the norm again in backward)."""
    if step < NORM:
        total_MC = x_MC if residual_MC is None else residual_MC + x_MC
        return norm(total_MC), total_MC, None
    parameters = (norm.weight, norm.bias, norm.eps)
    if residual_MC is None:
        normed_MC, total_MC = layer_norm(x_MC, *parameters), x_MC
    else:
        normed_MC, total_MC = layer_norm(x_MC, *parameters, residual=residual_MC)
    return normed_MC, total_MC, (total_MC, *parameters)


class Layer(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x)); the last addition is left to the norm of what
    follows.
    """

    def __init__(self, config: Siglip2Config, step: int, mlp_options: dict, **factory):
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(config.d_model, eps=LAYER_NORM_EPS, **factory)
        self.self_attn = Attention(config, step, **factory)
        self.layer_norm2 = nn.LayerNorm(config.d_model, eps=LAYER_NORM_EPS, **factory)
        self.mlp = MLP(config, step, mlp_options, **factory)
        self.step = step

    def forward(self, x_MC: Tensor, residual_MC: Tensor | None, *packed) -> tuple[Tensor, Tensor]:
        normed_MC, residual_MC, norm = add_and_norm(self.layer_norm1, x_MC, residual_MC, self.step)
        x_MC = self.self_attn(normed_MC, norm, *packed)
        normed_MC, residual_MC, norm = add_and_norm(self.layer_norm2, x_MC, residual_MC, self.step)
        return self.mlp(normed_MC, norm), residual_MC


# ---- encoder -------------------------------------------------------------------------------------


class Siglip2Encoder(nn.Module):
    """The encoder of `config`; maps the patches of all images (M, patch_dim) to as many rows (M,
    C).

    Args:
        impl: one of IMPLS.
        recomputed: of how many layers backward computes the MLP's hidden layer again, "fused" only:
            one matmul more for M · d_ff elements less of memory, each.
        factory: device and dtype of the parameters.

    Raises:
        ValueError: an unknown impl; d_model no multiple of num_heads; `recomputed` for an impl that
            keeps all, or not from 0 to num_layers.
    """

    def __init__(
        self,
        config: Siglip2Config,
        impl="eager",
        *,
        recomputed: int = 0,
        **factory,
    ):
        super().__init__()
        if impl not in IMPLS:
            raise ValueError(f"unknown impl {impl!r}; accepted: {', '.join(IMPLS)}")
        if config.num_heads < 1 or config.d_model % config.num_heads:
            raise ValueError(
                f"d_model must be a multiple of num_heads, {config.num_heads}; got {config.d_model}"
            )
        most = config.num_layers if impl == "fused" else 0
        if not 0 <= recomputed <= most:
            raise ValueError(
                f"recomputed must be from 0 to {most} with impl={impl!r}; got {recomputed}"
            )
        self.config, self.impl, self.step = config, impl, IMPLS.index(impl)
        self.patch_embedding = nn.Linear(config.patch_dim, config.d_model, **factory)
        self.position_embedding = nn.Embedding(config.position_side**2, config.d_model, **factory)
        options = [{"keep": layer >= recomputed} for layer in range(config.num_layers)]
        self.layers = nn.ModuleList(
            Layer(config, self.step, of_mlp, **factory) for of_mlp in options
        )
        self.post_layernorm = nn.LayerNorm(config.d_model, eps=LAYER_NORM_EPS, **factory)
        # As transformers does it; of three projections in one, each is drawn as if alone.
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                for part in module.weight.detach().chunk(3 if name.endswith("qkv_proj") else 1):
                    nn.init.xavier_uniform_(part)
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.position_embedding.weight, std=config.d_model**-0.5)

    def forward(self, patches_MK: Tensor, grids: Tensor | Packing) -> Tensor:
        """Returns one row per patch (M, C), after the final LayerNorm.

        Its dtype is that of the parameters; under autocast, from "norm" on, that of autocast, in
        which `layer_norm` returns it. What goes from layer to layer is of the parameters' dtype in
        either case.

        Args:
            patches_MK: the patches of all images, one image after the other, row by row, (M,
                patch_dim), dtype and device of the parameters.
            grids: each image's height and width in patches, (I, 2) int32 or int64, on the CPU or
                the device of the patches, on which reading the values waits; or from "positions" on
                a packing of `pack`, which is not made anew and of which nothing is read, as the
                capture of a CUDA graph wants it.

        Raises:
            ValueError, TypeError: arguments that do not fit, by name. Values of grids are not
                checked where it is compiled or on the meta device.
        """
        packing = self._packing(patches_MK, grids)
        x_MC = self.embed(patches_MK, grids, packing)
        seeds = [None] * len(self.layers)
        if self.training and self.config.dropout and self.step >= ATTENTION:
            seeds = torch.randint(2**63 - 1, (len(self.layers),), device=x_MC.device).unbind()
        packed = (
            (grids, None, None) if packing is None else (None, packing.cu_seqlens, packing.longest)
        )
        residual_MC = None
        for layer, seed in zip(self.layers, seeds, strict=True):
            x_MC, residual_MC = layer(x_MC, residual_MC, *packed, seed)
        return add_and_norm(self.post_layernorm, x_MC, residual_MC, self.step)[0]

    def embed(self, patches_MK: Tensor, grids_I2: Tensor | None, packing: Packing | None) -> Tensor:
        """Returns the embedded patches plus their positions (M, C), from "positions" on by the
        packing's weights.
        """
        x_MC, table_PC = self.patch_embedding(patches_MK), self.position_embedding.weight
        if self.step >= POSITIONS:
            # Under autocast patches come in 16 bits and leave in those of the table, as the other
            # implementations' do.
            return x_MC.to(table_PC.dtype).addmm_(packing.positions, table_PC)
        return x_MC + interpolated_positions(table_PC, grids_I2, self.config.position_side)

    def pack(self, grids_I2: Tensor) -> Packing:
        """Returns the packing of images by their grids (I, 2), whose values it reads.

        Raises ValueError and TypeError for grids that forward does not take.
        """
        sizes = _read_sizes(grids_I2, self.position_embedding.weight.device)
        return self._pack(grids_I2, sum(sizes), max(sizes))

    def _pack(self, grids_I2: Tensor, num_patches: int, longest: int) -> Packing:
        table_PC = self.position_embedding.weight
        side = self.config.position_side if self.step >= POSITIONS else 0
        grids_I2 = grids_I2.to(table_PC.device, non_blocking=table_PC.is_cuda)
        return pack_images(grids_I2, num_patches, side, table_PC.dtype, longest)

    def _packing(self, patches_MK: Tensor, grids: Tensor | Packing) -> Packing | None:
        """Returns the packing of a batch, None for "eager", which takes grids as they are; raises
        for a bad batch.
        """
        weight, num_patches = self.patch_embedding.weight, patches_MK.shape[0]
        if patches_MK.dim() != 2 or patches_MK.shape[1] != weight.shape[1] or not num_patches:
            got = tuple(patches_MK.shape)
            raise ValueError(
                f"patches must be (patches of all images, {weight.shape[1]}), at least one; got "
                f"{got}"
            )
        got, wanted = (f"{x.dtype} on {x.device}" for x in (patches_MK, weight))
        if got != wanted:
            raise ValueError(f"patches must be as the parameters are, {wanted}; got {got}")
        is_packed = isinstance(grids, Packing)
        if is_packed and self.step < POSITIONS:
            raise TypeError(f"grids must be a tensor with impl={self.impl!r}; got a packing")
        if is_packed:
            sizes = [grids.positions.shape[0]]
        elif torch.compiler.is_compiling() or weight.is_meta:  # there are no values to read
            _check_grids(grids, weight.device)
            sizes = [num_patches]
        else:
            sizes = _read_sizes(grids, weight.device)
        if sum(sizes) != num_patches:
            sums = f"{sum(sizes)}, and there are {num_patches}"
            raise ValueError(
                f"the products of the grids must sum to the number of patches; they sum to {sums}"
            )
        if is_packed or self.step == EAGER:
            return grids if is_packed else None
        return self._pack(grids, num_patches, max(sizes))

    def load_from_transformers(self, model: nn.Module) -> None:
        """Copies the weights of transformers' `Siglip2VisionModel`, whose pooling head has no
        counterpart here.

        Raises RuntimeError where sizes differ, naming the parameters.
        """
        prefixes = re.compile(r"^(vision_model\.)?(embeddings\.|encoder\.)?")
        state = {prefixes.sub("", name): tensor for name, tensor in model.state_dict().items()}
        self.load_state_dict(
            {name: tensor for name, tensor in state.items() if not name.startswith("head.")}
        )


def _read_sizes(grids, device: torch.device) -> list[int]:
    """Returns how many patches each image has, once the grids are checked; reading them may wait
    for the device.
    """
    _check_grids(grids, device)
    sides = grids.tolist()
    for image, (height, width) in enumerate(sides):
        if height < 1 or width < 1:
            raise ValueError(
                f"grids must be of sides of at least 1; image {image} has {height} x {width}"
            )
    return [height * width for height, width in sides]


def _check_grids(grids, device: torch.device) -> None:
    if not isinstance(grids, Tensor) or grids.dtype not in (torch.int32, torch.int64):
        got = grids.dtype if isinstance(grids, Tensor) else type(grids).__name__
        raise TypeError(f"grids must be an int32 or int64 tensor or a packing; got {got}")
    if grids.dim() != 2 or grids.shape[1] != 2 or not grids.shape[0]:
        raise ValueError(f"grids must be (images, 2), at least one; got shape {tuple(grids.shape)}")
    if grids.device.type != "cpu" and grids.device != device:
        raise ValueError(
            f"grids must be on the CPU or on {device} as the parameters are; got {grids.device}"
        )
