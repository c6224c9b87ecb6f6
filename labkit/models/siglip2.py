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
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.configs import LAYER_NORM_EPS, Siglip2Config, check_known
from labkit.kernels.flash_attention import flash_attention
from labkit.kernels.flash_attention.qkv import flash_attention_qkv
from labkit.kernels.gelu_mlp import gelu_mlp
from labkit.kernels.linear import dropout_linear, norm_linear
from labkit.kernels.norms import layer_norm

IMPLS = ("eager", "cu_seqlens", "positions", "attention", "norm", "fused")
EAGER, CU_SEQLENS, POSITIONS, ATTENTION, NORM, FUSED = range(len(IMPLS))
MASK_BLOCK = 128  # FlexAttention's: the packed sequence is padded to a multiple of it
# torch.compile's options for what makes a mask: the sort of its blocks as a kernel of its own
# compiles for minutes.
MASK_OPTIONS = {"triton.persistent_reductions": False}


class Packing(NamedTuple):
    """What the steps past "eager" know of a batch's grids; made by `Siglip2Encoder.pack`.

    cu_seqlens: (I + 1,) int32, each image's first patch. positions: (M, P), the share that each
    position of the table has in a patch's, P 0 before "positions". longest: the patches of the
    largest image.
    """

    cu_seqlens: Tensor
    positions: Tensor
    longest: int


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
    grids_I2: Tensor, num_patches: int, side: int, dtype: torch.dtype, longest: int
) -> Packing:
    """Returns the packing of images by their grids, computed on their device without reading from
    it.
    """
    cu_seqlens = F.pad(grids_I2.prod(1).cumsum(0), (1, 0))
    patches_M = torch.arange(num_patches, device=grids_I2.device)
    images_M = torch.searchsorted(cu_seqlens[1:], patches_M, right=True)
    heights_M, widths_M = grids_I2[images_M].unbind(1)
    places_M = patches_M - cu_seqlens[images_M]
    rows_MS = interpolation_weights(heights_M, places_M // widths_M, side)
    cols_MS = interpolation_weights(widths_M, places_M % widths_M, side)
    positions_MP = (rows_MS[:, :, None] * cols_MS[:, None, :]).flatten(1)
    return Packing(cu_seqlens.int(), positions_MP.to(dtype), longest)


def interpolated_positions(table_PC: Tensor, grids_I2: Tensor, side: int) -> Tensor:
    """Returns the positions (M, C) of all patches, image by image."""
    table_1CSS = table_PC.view(1, side, side, -1).permute(0, 3, 1, 2)
    if table_PC.device.type == "cpu" and table_PC.element_size() == 2:
        table_1CSS = table_1CSS.float()  # antialiasing takes no 16 bits there
    images = []
    for grid in grids_I2.tolist():
        image_1CHW = F.interpolate(table_1CSS, grid, mode="bilinear", antialias=True)
        images.append(image_1CHW.flatten(2)[0].T)
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
    num_patches = len(q_MHD)
    device = q_MHD.device
    images_I = torch.arange(len(grids_I2), device=device)
    images_M = images_I.repeat_interleave(grids_I2.to(device).prod(1), output_size=num_patches)
    padding = -num_patches % MASK_BLOCK if device.type == "cuda" else 0
    images_M = F.pad(images_M, (0, padding), value=-1)
    heads = [
        F.pad(x_MHD, (0, 0, 0, 0, 0, padding)).transpose(0, 1).unsqueeze(0)
        for x_MHD in (q_MHD, k_MHD, v_MHD)
    ]
    if device.type != "cuda":
        mask = images_M[:, None] == images_M
        return F.scaled_dot_product_attention(*heads, attn_mask=mask)[0].transpose(0, 1)
    create_block_mask, flex_attention = _flex()

    def is_one_image(_batch, _head, query, key):
        return images_M[query] == images_M[key]

    length = len(images_M)
    mask = create_block_mask(is_one_image, None, None, length, length, device=device)
    return flex_attention(*heads, block_mask=mask)[0].transpose(0, 1)[:num_patches]


class Attention(nn.Module):
    """Attention within each image; from "attention" on q, k and v are one projection, in state
    dicts still three.

    `attend` then gets that, cumulative lengths and the longest, as `flash_attention_qkv` does.
    """

    def __init__(self, config: Siglip2Config, step: int, attend: Callable[..., Tensor]):
        super().__init__()
        width = config.d_model
        self.config = config
        self.step = step
        self.attend = attend
        if step >= ATTENTION:
            self.qkv_proj = nn.Linear(width, 3 * width)
            self.register_state_dict_post_hook(_split_projections)
            self.register_load_state_dict_pre_hook(_join_projections)
        else:
            self.q_proj = nn.Linear(width, width)
            self.k_proj = nn.Linear(width, width)
            self.v_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)

    def forward(
        self,
        x_MC: Tensor,
        norm: tuple | None,
        images: Tensor | Packing,
        seed: Tensor | None,
    ) -> Tensor:
        """Returns (M, C).

        Args:
            norm: what `norm_linear` computes x again from, None to keep x.
            images: their packing, for "eager" their grids.
            seed: of the dropout that is drawn again in backward, None for PyTorch's.
        """
        num_heads = self.config.num_heads
        if self.step >= ATTENTION:
            qkv = self.qkv_proj
            qkv_MF = norm_linear(x_MC, qkv.weight, qkv.bias, norm) if norm else qkv(x_MC)
            qkv_M3HD = qkv_MF.unflatten(1, (3, num_heads, -1))
            out_MHD = self.attend(qkv_M3HD, images.cu_seqlens, images.longest)
        else:
            projections = (self.q_proj, self.k_proj, self.v_proj)
            qkv_MHD = [project(x_MC).unflatten(1, (num_heads, -1)) for project in projections]
            if self.step == EAGER:
                out_MHD = masked_attention(*qkv_MHD, images)
            else:
                out_MHD = flash_attention(
                    *qkv_MHD,
                    cu_seqlens_q=images.cu_seqlens,
                    cu_seqlens_k=images.cu_seqlens,
                    max_seqlen_q=images.longest,
                    max_seqlen_k=images.longest,
                )
        out = self.out_proj
        out_MC = out_MHD.flatten(1)
        dropout = self.config.dropout
        if seed is not None:
            return dropout_linear(out_MC, out.weight, out.bias, dropout, seed)
        return out(F.dropout(out_MC, dropout, self.training))


def _split_projections(_module, state_dict, prefix, _metadata) -> None:
    for kind in ("weight", "bias"):
        parts = state_dict.pop(f"{prefix}qkv_proj.{kind}").chunk(3)
        for name, part in zip("qkv", parts, strict=True):
            state_dict[f"{prefix}{name}_proj.{kind}"] = part


def _join_projections(_module, state_dict, prefix, *_) -> None:
    for kind in ("weight", "bias"):
        names = [f"{prefix}{name}_proj.{kind}" for name in "qkv"]
        if all(name in state_dict for name in names):
            parts = [state_dict.pop(name) for name in names]
            state_dict[f"{prefix}qkv_proj.{kind}"] = torch.cat(parts)


class MLP(nn.Module):
    """fc2(gelu(fc1(x))) with tanh-GELU; `keep` as `gelu_mlp` takes it."""

    def __init__(self, config: Siglip2Config, step: int, keep: bool):
        super().__init__()
        self.fc1 = nn.Linear(config.d_model, config.d_ff)
        self.fc2 = nn.Linear(config.d_ff, config.d_model)
        self.step = step
        self.keep = keep

    def forward(self, x_MC: Tensor, norm: tuple | None) -> Tensor:
        if self.step < FUSED:
            hidden_MF = F.gelu(self.fc1(x_MC), approximate="tanh")
            return self.fc2(hidden_MF)
        parameters = (self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias)
        return gelu_mlp(x_MC, *parameters, keep=self.keep, norm=norm)


def add_and_norm(norm: nn.LayerNorm, x_MC: Tensor, residual_MC: Tensor | None, step: int):
    """Returns (the norm of x + residual, x + residual, what gives the norm again in backward)."""
    if step < NORM:
        total_MC = x_MC if residual_MC is None else residual_MC + x_MC
        return norm(total_MC), total_MC, None
    parameters = (norm.weight, norm.bias, norm.eps)
    normed_MC = layer_norm(x_MC, *parameters, residual=residual_MC)
    total_MC = x_MC
    if residual_MC is not None:
        normed_MC, total_MC = normed_MC
    return normed_MC, total_MC, (total_MC, *parameters)


class Layer(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x)); the last addition is left to the norm of what
    follows.
    """

    def __init__(self, config: Siglip2Config, step: int, attend, keep: bool):
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(config.d_model, eps=LAYER_NORM_EPS)
        self.self_attn = Attention(config, step, attend)
        self.layer_norm2 = nn.LayerNorm(config.d_model, eps=LAYER_NORM_EPS)
        self.mlp = MLP(config, step, keep)
        self.step = step

    def forward(
        self,
        x_MC: Tensor,
        residual_MC: Tensor | None,
        images: Tensor | Packing,
        seed: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        step = self.step
        normed_MC, residual_MC, norm = add_and_norm(self.layer_norm1, x_MC, residual_MC, step)
        x_MC = self.self_attn(normed_MC, norm, images, seed)
        normed_MC, residual_MC, norm = add_and_norm(self.layer_norm2, x_MC, residual_MC, step)
        return self.mlp(normed_MC, norm), residual_MC


# ---- encoder -------------------------------------------------------------------------------------


class Siglip2Encoder(nn.Module):
    """The encoder of `config`; maps the patches of all images (M, patch_dim) to as many rows (M,
    C).

    Its parameters are named and shaped as those of transformers' `Siglip2VisionModel`, without the
    latter's prefixes `vision_model.`, `embeddings.` and `encoder.` and its pooling head.

    Args:
        impl: one of IMPLS.
        attend: attention within each image from "attention" on, of what `flash_attention_qkv`
            takes.
        recomputed: of how many layers backward computes the MLP's hidden layer again, "fused" only:
            one matmul more for M · d_ff elements less of memory, each.
        device, dtype: of the parameters.

    Raises:
        ValueError: an unknown impl; `recomputed` for an impl that keeps all, or not from 0 to
            num_layers; `attend` for one that does not take it.
    """

    def __init__(
        self,
        config: Siglip2Config,
        impl: str = "eager",
        *,
        attend: Callable[..., Tensor] = flash_attention_qkv,
        recomputed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        check_known("impl", impl, IMPLS)
        most = config.num_layers if impl == "fused" else 0
        if not 0 <= recomputed <= most:
            raise ValueError(
                f"recomputed must be from 0 to {most} with impl={impl!r}; got {recomputed}"
            )
        self.config = config
        self.step = IMPLS.index(impl)
        if attend is not flash_attention_qkv and self.step < ATTENTION:
            raise ValueError(f"attend with impl={impl!r}; accepted: from 'attention' on")
        with torch.device(device or torch.get_default_device()):
            self.patch_embedding = nn.Linear(config.patch_dim, config.d_model)
            self.position_embedding = nn.Embedding(config.position_side**2, config.d_model)
            self.layers = nn.ModuleList(
                Layer(config, self.step, attend, number >= recomputed)
                for number in range(config.num_layers)
            )
            self.post_layernorm = nn.LayerNorm(config.d_model, eps=LAYER_NORM_EPS)
        # As transformers does it, q, k and v apart, which a state is whatever the impl.
        for name, value in sorted(self.state_dict().items()):
            if name.endswith("bias"):
                nn.init.zeros_(value)
            elif value.dim() == 2:
                nn.init.xavier_uniform_(value)
        nn.init.normal_(self.position_embedding.weight, std=config.d_model**-0.5)
        self.to(dtype=dtype)

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
                a packing of `pack`, which is not made anew and of which nothing is read, as a
                compiled whole and the capture of a CUDA graph want it.

        Raises:
            ValueError: grids that do not fit; "eager" checks only their sum.
        """
        images = grids
        if self.step > EAGER and not isinstance(grids, Packing):
            images = self.pack(grids)
        x_MC = self.patch_embedding(patches_MK)
        table_PC = self.position_embedding.weight
        if self.step < POSITIONS:
            positions = interpolated_positions(table_PC, grids, self.config.position_side)
        else:
            positions = images.positions
        if len(positions) != len(x_MC):
            raise ValueError(
                f"grids of {len(positions)} patches; accepted: of as many as there are, {len(x_MC)}"
            )
        if self.step < POSITIONS:
            x_MC = x_MC + positions
        else:
            # Under autocast patches come in 16 bits and leave in those of the table, as the other
            # implementations' do.
            x_MC = x_MC.to(table_PC.dtype).addmm_(positions, table_PC)
        seeds = [None] * len(self.layers)
        if self.training and self.config.dropout and self.step >= ATTENTION:
            seeds = torch.randint(2**63 - 1, (len(self.layers),), device=x_MC.device).unbind()
        residual_MC = None
        for layer, seed in zip(self.layers, seeds, strict=True):
            x_MC, residual_MC = layer(x_MC, residual_MC, images, seed)
        return add_and_norm(self.post_layernorm, x_MC, residual_MC, self.step)[0]

    def pack(self, grids_I2: Tensor) -> Packing:
        """Returns the packing of images by their grids (I, 2); reads the grids' values, which may
        wait for the device.

        Raises ValueError for grids that forward does not take.
        """
        is_whole = isinstance(grids_I2, Tensor) and grids_I2.dtype in (torch.int32, torch.int64)
        is_fine = is_whole and grids_I2.shape[1:] == (2,) and len(grids_I2)
        sides = grids_I2.tolist() if is_fine else [[0]]
        if min(map(min, sides)) < 1:
            accepted = "an int32 or int64 tensor (images, 2), of sides of at least 1"
            raise ValueError(f"grids must be {accepted}; got {grids_I2}")
        sizes = [height * width for height, width in sides]
        side = self.config.position_side if self.step >= POSITIONS else 0
        table_PC = self.position_embedding.weight
        grids_I2 = grids_I2.to(table_PC.device, non_blocking=True)
        return pack_images(grids_I2, sum(sizes), side, table_PC.dtype, max(sizes))
