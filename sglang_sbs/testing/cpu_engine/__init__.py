"""SGLang engines on a machine without GPUs.

Owns: the environment of such an engine process, the plugin SGLang loads in it, and the nursery
that forks engines from one preloaded process. Two modes: *real compute* (SGLang's torch_native
attention and its own torch MoE) and *virtual GPU* (no model compute; passes take the time of a
`VirtualGpuCost`, everything around them is real). Production engines never import it.
"""
