"""SGLang engines on a machine without GPUs, for the demo, tests and benchmarks.

Two modes: *real compute* (SGLang's torch_native attention and its own torch MoE) and *virtual GPU*
(no model compute; passes take the time of a `VirtualGpuCost`, everything around them is real).
Engines on GPUs never import it.
"""
