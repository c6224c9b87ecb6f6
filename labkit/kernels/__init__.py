"""The operations of the transformer, one to a file."""

KERNEL_CLASSES = {
    "column_sums_kernel": "reduction",
    "hopper_bwd_convert_kernel": "attention",
    "hopper_bwd_dkdv_kernel": "attention",
    "hopper_bwd_dq_kernel": "attention",
    "hopper_bwd_single_kernel": "attention",
    "hopper_fwd_kernel": "attention",
    "norm_bwd_kernel": "normalisation",
    "norm_fwd_kernel": "normalisation",
    "write_addresses_kernel": "optimizer",
}
"""Class, in a profile, of each kernel here that `measure.profiling` cannot tell by its name."""
