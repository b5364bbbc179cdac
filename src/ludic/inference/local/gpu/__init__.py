"""The in-process engine on a GPU: captured graphs, fused kernels, steps that run ahead."""
