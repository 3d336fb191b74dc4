"""Small patches for releases that have no other extension point: ``sglang-sbs patch``.

SGLang before 0.5.11 loads no plugins, and ``sglang_router`` 0.3.2 has a closed list of policies: a
patch adds the one call that lets this package in. The patches are the files in ``patches/``; a
wheel has them in here. Nothing here imports SGLang: an environment is read as files."""
