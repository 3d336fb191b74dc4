"""Small patches for releases that have no other extension point: ``sglang-sbs patch``.

SGLang before 0.5.11 loads no plugins, and ``sglang_router`` 0.3.2 has a closed list of policies. A
patch adds the one call by which each of them loads this package. The patches are the files in
``patches/`` of a checkout; a wheel contains them in this package. Environments are read as files,
without importing SGLang."""
