"""What models are built from: attention, linear, norm, rotary, MoE, sampling, quantisation, parallel groups, kernels.

Nothing here imports from `models`, `scheduler`, `disagg` or `server`.
"""
