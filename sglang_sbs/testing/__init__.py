"""CPU engines, a virtual GPU and a tiny model: what lets a cluster run without GPUs."""
